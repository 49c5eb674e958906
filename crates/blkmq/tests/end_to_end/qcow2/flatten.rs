//! Images that are made flat under load: clients notice nothing, the base is not needed any more, and a kill in the
//! middle leaves a sound image from which the next one goes on.

use std::time::{Duration, Instant};

use super::snapshots::ctl;
use crate::common::nbd::Client;
use crate::common::tools::{installed, run};
use crate::common::{Daemon, Scratch};
use crate::upgrade::load::Load;

#[test]
fn image_that_is_made_flat_under_load_reads_as_before_and_needs_no_base() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let raw = scratch.noisy_image("base.raw", LOADED + (24 << 20), 5);
    zero_start(&raw);
    overlay(&scratch, &raw, "raw", "middle.qcow2");
    overlay(&scratch, &scratch.word("middle.qcow2"), "qcow2", "vm1.qcow2");
    let daemon = serve(&scratch, &[]);
    let socket = scratch.path("nbd.sock");
    let load = Load::start(&socket, "vm1", 2);
    let said = ctl(&scratch, &["flatten", "vm1", "--weight", "50"]);
    assert_eq!(said, "", "flatten");
    let listed = ctl(&scratch, &["jobs"]);
    assert!(listed.contains("vm1") && listed.contains("done"), "{listed}");
    assert!(ctl(&scratch, &["flatten", "vm1"]).contains("lies on nothing"));
    assert!(ctl(&scratch, &["cancel", "vm1"]).contains("nothing is done"));
    // Nobody has the bases any more, and nobody misses them.
    let content = std::fs::read(&raw).expect("the base");
    for name in ["base.raw", "middle.qcow2"] {
        run(
            "qemu-img",
            &[
                "info",
                "-f",
                if name.ends_with("raw") { "raw" } else { "qcow2" },
                &scratch.word(name),
            ],
        );
        std::fs::remove_file(scratch.path(name)).expect("it is there");
    }
    std::thread::sleep(Duration::from_millis(300));
    let image = scratch.word("vm1.qcow2");
    load.stop_and_verify_what(|| {
        daemon.stop();
        flat_content(&scratch, &image)
    });
    let found = flat_content(&scratch, &image);
    let start = LOADED as usize;
    assert!(found[start..] == content[start..], "what no client wrote");
    run("qemu-img", &["check", "-f", "qcow2", &image]);
    let info = run("qemu-img", &["info", "-f", "qcow2", &image]);
    assert!(!info.stdout.contains("backing"), "{}", info.stdout);
}

#[test]
fn flattening_that_is_given_up_or_killed_leaves_a_sound_image_and_goes_on() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let raw = scratch.noisy_image("base.raw", 48 << 20, 9);
    overlay(&scratch, &raw, "raw", "vm1.qcow2");
    let image = scratch.word("vm1.qcow2");
    for round in 0..4 {
        // So slow that none ends by itself: half a second.
        let daemon = serve(&scratch, &["--group", "/blkmq/jobs,bps=200M"]);
        assert_eq!(ctl(&scratch, &["flatten", "vm1", "--no-wait"]), "");
        std::thread::sleep(Duration::from_millis(20 * round));
        match round {
            0 => {
                let said = ctl(&scratch, &["cancel", "vm1"]);
                let end = Instant::now() + Duration::from_secs(10);
                while ctl(&scratch, &["jobs"]).contains("running") && Instant::now() < end {}
                let listed = ctl(&scratch, &["jobs"]);
                assert!(said.is_empty() && listed.contains("given up"), "{said}{listed}");
                daemon.stop();
            }
            _ => daemon.kill(),
        }
        super::is_not_corrupt(&image, round);
        run("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &raw, &image]);
    }
    let daemon = serve(&scratch, &[]);
    assert_eq!(ctl(&scratch, &["flatten", "vm1"]), "");
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    assert!(client.read(0, 1 << 20).expect("a read") == std::fs::read(&raw).expect("the base")[..1 << 20]);
    drop(client);
    daemon.stop();
    run("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &raw, &image]);
    let info = run("qemu-img", &["info", "-f", "qcow2", &image]);
    assert!(!info.stdout.contains("backing"), "{}", info.stdout);
}

/// The load begins with a disk of zeroes.
fn zero_start(raw: &str) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(raw)
        .expect("the base");
    file.write_all_at(&vec![0; LOADED as usize], 0)
        .expect("there is room");
}

pub(super) fn overlay(scratch: &Scratch, base: &str, format: &str, name: &str) {
    let words = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=16384",
        "-F",
        format,
        "-b",
        base,
    ];
    run("qemu-img", &[&words[..], &[&scratch.word(name)]].concat());
}

fn serve(scratch: &Scratch, more: &[&str]) -> Daemon {
    let disk = format!("name=vm1,qcow2={}", scratch.word("vm1.qcow2"));
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let control = format!("unix:{}", scratch.word("control.sock"));
    let words = ["--disk", &disk, "--nbd", &nbd, "--control", &control];
    Daemon::start(&[&words[..], more].concat())
}

fn flat_content(scratch: &Scratch, image: &str) -> Vec<u8> {
    super::snapshots::content(scratch, image)
}

/// Bytes in which the load writes.
const LOADED: u64 = 64 << 20;
