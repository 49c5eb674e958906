//! A take-over of a disk in an image: all of its files have to be what they were.

use std::time::Duration;

use crate::common::daemon::serve_command;
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::{installed, output_within, run};
use crate::common::{Daemon, Scratch};

#[test]
fn image_whose_base_is_another_file_by_now_is_not_taken_over_from_its_clients() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let base = scratch.noisy_image("base.raw", 1 << 20, 7);
    let image = scratch.word("vm1.qcow2");
    run(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &image],
    );
    let disk = format!("name=vm1,qcow2={image}");
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let upgrade = format!("unix:{}", scratch.word("up.sock"));
    let words = ["--disk", &disk, "--nbd", &nbd];
    let daemon = Daemon::start(&[&words[..], &["--upgrade-socket", &upgrade]].concat());
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    client.write(0, &block(0, 1)).expect("a write");
    std::fs::rename(&base, scratch.path("moved.raw")).expect("our own file");
    scratch.noisy_image("base.raw", 1 << 20, 8);
    let words = [&words[..], &["--take-over", &upgrade]].concat();
    let said = output_within(&mut serve_command(&words), Duration::from_secs(20));
    let text = String::from_utf8_lossy(&said.stderr);
    assert!(
        !said.status.success() && text.contains("another file") && text.contains("--same-data"),
        "{text}"
    );
    assert!(client.read(0, BLOCK).expect("the running daemon goes on") == block(0, 1));
    std::fs::rename(scratch.path("moved.raw"), &base).expect("our own file");
    drop(client);
    daemon.stop();
}
