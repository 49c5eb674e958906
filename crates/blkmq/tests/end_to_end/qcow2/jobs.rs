//! What is made flat: what the image takes afterwards.

use std::os::unix::fs::{FileExt, MetadataExt};

use super::flatten::overlay;
use super::snapshots::ctl;
use crate::common::daemon::serve_command;
use crate::common::tools::{installed, run};
use crate::common::{Daemon, Scratch};

fn holes_of_bases_take_no_space_in_an_image_that_is_made_flat() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    // Its end is inside a block.
    let base = scratch.image("base.raw", (3 << 30) + 700);
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&base)
        .expect("the base");
    for at in [700 << 20, (2u64 << 30) - (512 << 10)] {
        file.write_all_at(&[5; 1 << 20], at).expect("there is room");
    }
    file.write_all_at(&[6; 700], 3 << 30).expect("there is room");
    overlay(&scratch, &base, "raw", "middle.qcow2");
    overlay(&scratch, &scratch.word("middle.qcow2"), "qcow2", "vm1.qcow2");
    let daemon = serve(&scratch, &[]);
    assert_eq!(ctl(&scratch, &["flatten", "vm1"]), "");
    daemon.stop();
    let image = scratch.word("vm1.qcow2");
    let taken = std::fs::metadata(&image).expect("it is there").blocks() * 512;
    assert!((2 << 20..4 << 20).contains(&taken), "{taken} bytes");
    run("qemu-img", &["check", "-f", "qcow2", &image]);
    run(
        "qemu-img",
        &["compare", "-f", "raw", "-F", "qcow2", &base, &image],
    );
    let info = run("qemu-img", &["info", "-f", "qcow2", &image]);
    assert!(!info.stdout.contains("backing"), "{}", info.stdout);
}

fn serve(scratch: &Scratch, more: &[&str]) -> Daemon {
    let disk = format!("name=vm1,qcow2={},group=/blkmq/jobs", scratch.word("vm1.qcow2"));
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let control = format!("unix:{}", scratch.word("control.sock"));
    let words = ["--disk", &disk, "--nbd", &nbd, "--control", &control];
    let log = std::fs::File::create(scratch.path("log")).expect("there is room");
    Daemon::spawn_with_log(serve_command(&[&words, more].concat()), log.into())
}

