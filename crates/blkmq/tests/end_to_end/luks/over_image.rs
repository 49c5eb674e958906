//! An encrypted disk over an image: a successor opens it before its predecessor has written the image's tables.

use std::time::Duration;

use super::crypt::{Crypt, has_tools};
use super::{MIB, keys};
use crate::common::Scratch;
use crate::common::tools::{installed, run};
use crate::upgrade::load::Load;
use crate::upgrade::upgrades;

#[test]
fn clients_of_an_encrypted_disk_over_an_image_find_what_they_wrote_after_upgrades() {
    if !has_tools(&["cryptsetup"]) || !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let raw = crypt.format("raw", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let image = scratch.word("below.qcow2");
    let words = [
        "convert",
        "-f",
        "raw",
        "-O",
        "qcow2",
        "-o",
        "cluster_size=4096",
        &raw,
        &image,
    ];
    run("qemu-img", &words);
    let all = [
        format!("name=below,qcow2={image}"),
        format!("name=vm1,luks=below,key={}", crypt.key_file()),
    ];
    let upgrade = format!("unix:{}", scratch.word("up.sock"));
    let mut daemon = keys::start(&scratch, &all, &["--upgrade-socket", &upgrade]);
    // Each block is allocated by its first write, and read again after it.
    let load = Load::start(&scratch.path("nbd.sock"), "vm1", 3);
    for _ in 0..upgrades() {
        std::thread::sleep(Duration::from_millis(50));
        let next = keys::start(&scratch, &all, &["--take-over", &upgrade]);
        let status = daemon.ended_within(Duration::from_secs(20));
        assert!(status.success(), "{}", daemon.said());
        daemon = next;
    }
    assert!(load.stop() > 0);
    daemon.stop();
    run("qemu-img", &["check", "-f", "qcow2", &image]);
}
