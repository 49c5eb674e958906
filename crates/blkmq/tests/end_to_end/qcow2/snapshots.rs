//! Snapshots of images that are written are of one moment, clients go on above them, and a disk that was reset is as
//! new.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blkmq::control::client::Client as Control;
use serde_json::json;

use crate::common::daemon::program;
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::{installed, output_within, run};
use crate::common::{Daemon, Scratch};
use crate::upgrade::load::Load;

#[test]
fn clients_of_images_go_on_over_snapshots_which_are_sound_and_of_one_moment() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let daemon = serve(&scratch, &["vm1", "vm2"]);
    let socket = scratch.path("nbd.sock");
    let load = Load::start(&socket, "vm1", 2);
    let mut client = Client::connect(&socket, "vm2").expect("it is served");
    let mut pauses = Vec::new();
    for number in 0..SNAPSHOTS {
        client.write(0, &block(0, number + 1)).expect("a write");
        std::thread::sleep(Duration::from_millis(100));
        let (one, two) = (
            format!("vm1={}", scratch.word(&format!("one{number}"))),
            format!("vm2={}", scratch.word(&format!("two{number}"))),
        );
        load.forget_slowest();
        let start = Instant::now();
        let said = ctl(&scratch, &["snapshot", &one, &two]);
        assert_eq!(said, "", "snapshot {number}");
        pauses.push((start.elapsed(), load.slowest()));
    }
    eprintln!("snapshots, and the slowest batch of requests beside each: {pauses:?}");
    // The configuration is what it was, and another daemon can serve the chains.
    let dumped = ctl(&scratch, &["dump"]);
    assert!(
        dumped.contains("vm1.qcow2") && !dumped.contains("one0"),
        "{dumped}"
    );
    let image = scratch.word("vm1.qcow2");
    load.stop_and_verify_what(|| {
        daemon.stop();
        content(&scratch, &image)
    });
    for number in 0..SNAPSHOTS {
        for name in ["one", "two"] {
            run(
                "qemu-img",
                &["check", "-f", "qcow2", &scratch.word(&format!("{name}{number}"))],
            );
        }
        let found = content(&scratch, &scratch.word(&format!("two{number}")));
        assert!(
            found[..BLOCK] == block(0, number + 1),
            "snapshot {number} is of another moment"
        );
    }
}

#[test]
fn reset_is_refused_while_a_client_has_the_disk_and_then_shows_its_base() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let daemon = serve(&scratch, &["vm1"]);
    let socket = scratch.path("nbd.sock");
    let mut client = Client::connect(&socket, "vm1").expect("it is served");
    client.write(0, &block(0, 1)).expect("a write");
    assert!(ctl(&scratch, &["reset", "vm1"]).contains("has clients"));
    assert!(client.read(0, BLOCK).expect("a read") == block(0, 1));
    drop(client);
    let end = Instant::now() + Duration::from_secs(10);
    let said = loop {
        let said = ctl(&scratch, &["reset", "vm1"]);
        if said.is_empty() || Instant::now() > end {
            break said;
        }
    };
    assert_eq!(said, "");
    let mut client = Client::connect(&socket, "vm1").expect("it is served");
    assert!(
        client
            .read(0, BLOCK)
            .expect("a read")
            .iter()
            .all(|byte| *byte == 0)
    );
    assert!(ctl(&scratch, &["snapshot", "raw=/x"]).contains("no such disk"));
    daemon.stop();
}

#[test]
fn image_that_the_daemon_replaces_is_at_its_path_and_a_removed_one_is_missing() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let daemon = serve(&scratch, &["vm1"]);
    let is_over = AtomicBool::new(false);
    let looks = std::thread::scope(|threads| {
        let looks = threads.spawn(|| {
            let mut control = Control::connect(&scratch.path("control.sock")).expect("it is served");
            let mut looks = 0;
            while !is_over.load(Ordering::Relaxed) {
                assert_eq!(states(&mut control), ["ok"]);
                looks += 1;
            }
            looks
        });
        let mut refusals = Vec::new();
        for number in 0..3 {
            let wanted = format!("vm1={}", scratch.word(&format!("before{number}")));
            refusals.push(ctl(&scratch, &["snapshot", &wanted]));
            refusals.push(ctl(&scratch, &["reset", "vm1"]));
        }
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(refusals, [""; 6]);
        looks.join().expect("each look finds it well")
    });
    assert!(looks > 0);
    let said = daemon.said();
    assert!(!said.contains("at its path"), "{said}");
    std::fs::remove_file(scratch.path("vm1.qcow2")).expect("it is there");
    let mut control = Control::connect(&scratch.path("control.sock")).expect("it is served");
    assert_eq!(states(&mut control), ["missing"]);
    daemon.stop();
}

/// The states of all disks.
fn states(control: &mut Control) -> Vec<String> {
    let disks = control.call("disk.list", &json!({})).expect("an answer");
    let disks = disks.as_array().expect("a list").iter();
    disks
        .map(|disk| disk["state"].as_str().expect("a text").to_owned())
        .collect()
}

#[test]
fn image_that_was_thrown_away_is_closed() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let daemon = serve(&scratch, &["vm1"]);
    assert_eq!(ctl(&scratch, &["reset", "vm1"]), "");
    is_closed(&daemon);
    daemon.stop();
}

/// The daemon has no deleted image open, whose space would stay in use.
pub(super) fn is_closed(daemon: &Daemon) {
    let deleted = || {
        let open = std::fs::read_dir(format!("/proc/{}/fd", daemon.id())).expect("it runs");
        let links = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        let names = links.map(|link| link.to_string_lossy().into_owned());
        names
            .filter(|name| name.contains(".qcow2") && name.contains("deleted"))
            .count()
    };
    // The kernel may need a moment to dismantle what rings have.
    let end = Instant::now() + Duration::from_secs(10);
    while deleted() > 0 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(deleted(), 0, "deleted images are open");
}

#[test]
fn clone_is_served_at_once_and_nothing_is_left_of_one_that_is_refused() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let daemon = serve(&scratch, &["vm1"]);
    let base = scratch.noisy_image("base.raw", 1 << 20, 3);
    let path = scratch.word("vm2.qcow2");
    let mut times = Vec::new();
    for name in ["vm2", "vm3", "vm4"] {
        let path = scratch.word(&format!("{name}.qcow2"));
        let start = Instant::now();
        let said = ctl(
            &scratch,
            &["clone", "--raw", &base, name, &path, "group=/sandboxes"],
        );
        times.push(start.elapsed());
        assert!(said.contains(name), "{said}");
    }
    eprintln!("clones: {times:?}");
    let content = std::fs::read(&base).expect("the base");
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm2").expect("it is served");
    assert!(client.read(0, 1 << 20).expect("a read") == content);
    let again = ctl(&scratch, &["clone", "--raw", &base, "vm5", &path]);
    assert!(again.contains("File exists"), "{again}");
    let unknown = ctl(
        &scratch,
        &[
            "clone",
            "--raw",
            &base,
            "vm5",
            &scratch.word("vm5.qcow2"),
            "colour=red",
        ],
    );
    assert!(
        unknown.contains("colour") && !scratch.path("vm5.qcow2").exists(),
        "{unknown}"
    );
    drop(client);
    daemon.stop();
}

/// Serves empty images of these names.
fn serve(scratch: &Scratch, names: &[&str]) -> Daemon {
    let mut words = Vec::new();
    for name in names {
        let image = scratch.word(&format!("{name}.qcow2"));
        run(
            "qemu-img",
            &[
                "create",
                "-q",
                "-f",
                "qcow2",
                "-o",
                "cluster_size=16384",
                &image,
                "64M",
            ],
        );
        words.extend(["--disk".to_owned(), format!("name={name},qcow2={image}")]);
    }
    words.extend(["--nbd".to_owned(), format!("unix:{}", scratch.word("nbd.sock"))]);
    words.extend([
        "--control".to_owned(),
        format!("unix:{}", scratch.word("control.sock")),
    ]);
    Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Runs `blkmq ctl`, and returns what it says.
pub(super) fn ctl(scratch: &Scratch, words: &[&str]) -> String {
    let mut command = Command::new(program());
    command.args([
        "ctl",
        "--socket",
        &format!("unix:{}", scratch.word("control.sock")),
    ]);
    let output = output_within(command.args(words), Duration::from_secs(20));
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

/// What QEMU reads of an image.
pub(super) fn content(scratch: &Scratch, image: &str) -> Vec<u8> {
    let raw = scratch.word("raw");
    run("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", image, &raw]);
    std::fs::read(raw).expect("the content")
}

const SNAPSHOTS: u64 = 5;
