//! An image goes over to another daemon under load: there is never more than one writer of its tables, or
//! QEMU finds what the second one did to those of the first.

use std::time::Duration;

use super::load::Load;
use super::{CLIENTS, Stage, upgrades};
use crate::common::Scratch;
use crate::common::tools::{installed, run};

#[test]
fn clients_of_an_image_go_on_over_upgrades_while_they_allocate() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.word("vm1.qcow2");
    let size = super::DISK_BYTES.to_string();
    run(
        "qemu-img",
        &[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            "cluster_size=4096",
            &image,
            &size,
        ],
    );
    let stage = Stage::of(scratch, &[&format!("name=vm1,qcow2={image}")]);
    let mut daemon = stage.start();
    let load = Load::start(&stage.socket(), "vm1", CLIENTS);
    std::thread::sleep(Duration::from_millis(200));
    for _ in 0..upgrades() {
        daemon = stage.upgrade(daemon);
        std::thread::sleep(Duration::from_millis(100));
    }
    let raw = stage.scratch.path("raw");
    let done = load.stop_and_verify_what(|| {
        daemon.stop();
        run("qemu-img", &["check", "-f", "qcow2", &image]);
        let raw = raw.to_str().expect("it is text");
        run("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", &image, raw]);
        std::fs::read(raw).expect("the content")
    });
    assert!(done > 0, "nothing was done");
}
