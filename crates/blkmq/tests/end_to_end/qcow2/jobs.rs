//! Disks that are changed while their images are made flat: what would change the chain is refused, the rest goes on or
//! gives the work up, and nothing is lost.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::{Duration, Instant};

use blkmq::control::client::Client as Control;
use serde_json::json;

use super::flatten::overlay;
use super::snapshots::ctl;
use crate::common::daemon::serve_command;
use crate::common::nbd::Client;
use crate::common::tools::{installed, run};
use crate::common::{Daemon, Scratch};

#[test]
fn disk_that_is_made_flat_refuses_what_would_change_its_chain_until_it_is_given_up() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let base = scratch.noisy_image("base.raw", 48 << 20, 3);
    overlay(&scratch, &base, "raw", "vm1.qcow2");
    let daemon = serve_slowly(&scratch);
    assert_eq!(
        ctl(&scratch, &["flatten", "vm1", "--no-wait", "--weight", "50"]),
        ""
    );
    let snapshot = format!("vm1={}", scratch.word("kept.qcow2"));
    for words in [
        &["snapshot", &snapshot][..],
        &["reset", "vm1"],
        &["flatten", "vm1", "--no-wait", "--weight", "7"],
    ] {
        let said = ctl(&scratch, words);
        assert!(
            said.contains("is being made flat") && said.contains("ctl cancel vm1"),
            "{words:?}: {said}"
        );
    }
    let mut control = control(&scratch);
    let groups = control.call("group.list", &json!({})).expect("the groups");
    let mut all = groups.as_array().into_iter().flatten();
    let group = all.find(|group| group["path"] == "/blkmq/jobs");
    assert_eq!(group.expect("it is there")["weight"], 50);
    // Nobody else reads what is written.
    let clone = ctl(
        &scratch,
        &[
            "clone",
            &scratch.word("vm1.qcow2"),
            "vm2",
            &scratch.word("vm2.qcow2"),
        ],
    );
    assert!(
        clone.contains("vm1.qcow2") && !scratch.path("vm2.qcow2").exists(),
        "{clone}"
    );
    let grown = ctl(&scratch, &["resize", "vm1", "64M"]);
    assert!(grown.contains("64"), "{grown}");
    assert!(jobs(&scratch).contains("running"));
    assert_eq!(ctl(&scratch, &["cancel", "vm1"]), "");
    assert!(wait_for_end(&scratch).contains("given up"));
    assert_eq!(ctl(&scratch, &["snapshot", &snapshot]), "");
    assert_eq!(ctl(&scratch, &["reset", "vm1"]), "");
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    assert!(client.read(0, 1 << 20).expect("a read") == std::fs::read(&base).expect("the base")[..1 << 20]);
    drop(client);
    daemon.stop();
    for image in ["vm1.qcow2", "kept.qcow2"] {
        run("qemu-img", &["check", "-f", "qcow2", &scratch.word(image)]);
    }
}

#[test]
fn disk_is_removed_while_it_is_made_flat_which_is_given_up() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let base = scratch.noisy_image("base.raw", 48 << 20, 4);
    overlay(&scratch, &base, "raw", "vm1.qcow2");
    let daemon = serve_slowly(&scratch);
    assert_eq!(ctl(&scratch, &["flatten", "vm1", "--no-wait"]), "");
    let said = ctl(&scratch, &["remove", "disk", "vm1"]);
    assert!(said.contains("vm1") && !said.contains("error"), "{said}");
    let listed = jobs(&scratch);
    assert!(listed.contains("given up"), "{listed}");
    let image = scratch.word("vm1.qcow2");
    run("qemu-img", &["check", "-f", "qcow2", &image]);
    run(
        "qemu-img",
        &["compare", "-f", "raw", "-F", "qcow2", &base, &image],
    );
    daemon.stop();
}

#[test]
fn daemon_ends_while_a_disk_is_made_flat_and_the_next_one_goes_on() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let base = scratch.noisy_image("base.raw", 48 << 20, 6);
    overlay(&scratch, &base, "raw", "vm1.qcow2");
    let image = scratch.word("vm1.qcow2");
    let daemon = serve_slowly(&scratch);
    assert_eq!(ctl(&scratch, &["flatten", "vm1", "--no-wait"]), "");
    daemon.stop();
    let log = std::fs::read_to_string(scratch.path("log")).expect("the log");
    assert!(log.contains("lies on its base as before"), "{log}");
    run("qemu-img", &["check", "-f", "qcow2", &image]);
    run(
        "qemu-img",
        &["compare", "-f", "raw", "-F", "qcow2", &base, &image],
    );
}

#[test]
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

/// A daemon that takes over has opened the image as it was before.
#[test]
fn replaced_image_is_a_change_of_the_daemon() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let base = scratch.noisy_image("base.raw", 1 << 20, 7);
    overlay(&scratch, &base, "raw", "vm1.qcow2");
    let daemon = serve(&scratch, &[]);
    let mut control = control(&scratch);
    let mut changes = || {
        let all = control.call("statistics.get", &json!({})).expect("statistics");
        all["changes"].as_u64().expect("a number")
    };
    let snapshot = format!("vm1={}", scratch.word("kept.qcow2"));
    for words in [
        &["flatten", "vm1"][..],
        &["snapshot", &snapshot],
        &["reset", "vm1"],
    ] {
        let before = changes();
        assert_eq!(ctl(&scratch, words), "", "{words:?}");
        assert_eq!(changes(), before + 1, "{words:?}");
    }
    daemon.stop();
}

#[test]
fn image_with_snapshots_inside_is_not_made_flat() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let base = scratch.noisy_image("base.raw", 1 << 20, 8);
    overlay(&scratch, &base, "raw", "vm1.qcow2");
    let image = scratch.word("vm1.qcow2");
    run("qemu-img", &["snapshot", "-c", "first", &image]);
    let daemon = serve(&scratch, &[]);
    let said = ctl(&scratch, &["flatten", "vm1"]);
    assert!(said.contains("snapshots inside"), "{said}");
    daemon.stop();
    run("qemu-img", &["snapshot", "-a", "first", &image]);
    run(
        "qemu-img",
        &["compare", "-f", "raw", "-F", "qcow2", &base, &image],
    );
}

#[test]
fn image_on_a_base_that_was_cut_off_is_not_made_flat_until_the_base_is_whole() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let base = scratch.noisy_image("base.raw", 1 << 20, 8);
    let content = std::fs::read(&base).expect("the base");
    overlay(&scratch, &base, "raw", "vm1.qcow2");
    let daemon = serve(&scratch, &[]);
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&base)
        .expect("the base");
    file.set_len(1 << 18).expect("it becomes shorter");
    let said = ctl(&scratch, &["flatten", "vm1"]);
    assert!(said.contains("restore it first"), "{said}");
    std::fs::write(&base, content).expect("there is room");
    assert_eq!(ctl(&scratch, &["flatten", "vm1"]), "");
    daemon.stop();
    let image = scratch.word("vm1.qcow2");
    let words = ["compare", "-f", "raw", "-F", "qcow2", &base, &image];
    run("qemu-img", &words);
}

fn serve(scratch: &Scratch, more: &[&str]) -> Daemon {
    let disk = format!("name=vm1,qcow2={},group=/blkmq/jobs", scratch.word("vm1.qcow2"));
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let control = format!("unix:{}", scratch.word("control.sock"));
    let words = ["--disk", &disk, "--nbd", &nbd, "--control", &control];
    let log = std::fs::File::create(scratch.path("log")).expect("there is room");
    Daemon::spawn_with_log(serve_command(&[&words, more].concat()), log.into())
}

/// The work takes longer than any of these tests.
fn serve_slowly(scratch: &Scratch) -> Daemon {
    serve(scratch, &["--group", "/blkmq/jobs,bps=1M"])
}

fn control(scratch: &Scratch) -> Control {
    Control::connect(&scratch.path("control.sock")).expect("it is served")
}

fn jobs(scratch: &Scratch) -> String {
    ctl(scratch, &["jobs"])
}

fn wait_for_end(scratch: &Scratch) -> String {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let listed = jobs(scratch);
        if !listed.contains("running") || Instant::now() > end {
            return listed;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
