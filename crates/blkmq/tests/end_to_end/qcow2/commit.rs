//! Images that are committed into their bases under load: clients notice nothing, the base has all of it then, and a kill
//! in the middle leaves a disk that reads as before.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::time::{Duration, Instant};

use super::flatten::overlay;
use super::snapshots::{content, ctl, is_closed};
use crate::common::daemon::serve_command;
use crate::common::nbd::Client;
use crate::common::tools::{installed, run};
use crate::common::{Daemon, Scratch};
use crate::upgrade::load::Load;

#[test]
fn image_that_is_committed_under_load_is_empty_and_its_base_has_all() {
    if !installed(&["qemu-img"]) {
        return;
    }
    for format in ["raw", "qcow2"] {
        let scratch = Scratch::new();
        let base = zeroes(&scratch, format);
        overlay(&scratch, &base, format, "vm1.qcow2");
        let daemon = serve(&scratch, &["vm1"], &[]);
        let load = Load::start(&scratch.path("nbd.sock"), "vm1", 2);
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(300));
            assert_eq!(
                ctl(&scratch, &["commit", "vm1", "--weight", "50"]),
                "",
                "{format}"
            );
        }
        let listed = ctl(&scratch, &["jobs"]);
        assert!(listed.contains("commit") && listed.contains("done"), "{listed}");
        let image = scratch.word("vm1.qcow2");
        load.stop_and_verify_what(|| {
            let read = |client: &mut Client| client.read(0, 32 << 20).expect("a read");
            let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
            let before = read(&mut client);
            assert_eq!(ctl(&scratch, &["commit", "vm1"]), "", "{format}");
            assert!(read(&mut client) == before, "{format}: what is read changes");
            drop(client);
            let taken = std::fs::metadata(&image).expect("it is there").blocks() * 512;
            assert!(taken <= 128 << 10, "{format}: {taken} bytes");
            is_closed(&daemon);
            daemon.stop();
            run(
                "qemu-img",
                &["compare", "-f", format, "-F", "qcow2", &base, &image],
            );
            match format {
                "raw" => std::fs::read(&base).expect("the base"),
                _ => content(&scratch, &base),
            }
        });
        run("qemu-img", &["check", "-f", "qcow2", &image]);
        if format == "qcow2" {
            run("qemu-img", &["check", "-f", "qcow2", &base]);
        }
    }
}

#[test]
fn commit_that_is_given_up_or_killed_leaves_the_disk_as_it_was_and_begins_again() {
    if !installed(&["qemu-img"]) {
        return;
    }
    for format in ["raw", "qcow2"] {
        let scratch = Scratch::new();
        let base = zeroes(&scratch, format);
        overlay(&scratch, &base, format, "vm1.qcow2");
        let image = scratch.word("vm1.qcow2");
        let noise = std::fs::read(scratch.noisy_image("noise", 32 << 20, 5)).expect("noise");
        let written = |daemon: &Daemon, count: usize| {
            let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
            for at in (0..count).map(|number| number * (1 << 20)) {
                client
                    .write(at as u64, &noise[at..at + (1 << 20)])
                    .expect("a write");
            }
            client.flush().expect("a flush");
            let _ = daemon;
        };
        for round in 0..5 {
            // So slow that none ends by itself: a third of a second and more.
            let daemon = serve(&scratch, &["vm1"], &["--group", "/blkmq/jobs,bps=100M"]);
            written(&daemon, 16 + round);
            assert_eq!(ctl(&scratch, &["commit", "vm1", "--no-wait"]), "");
            std::thread::sleep(Duration::from_millis(40 * round as u64));
            match round {
                0 => {
                    assert_eq!(ctl(&scratch, &["cancel", "vm1"]), "");
                    let listed = wait_for_end(&scratch);
                    assert!(listed.contains("given up"), "{listed}");
                    daemon.stop();
                }
                1 => {
                    daemon.stop();
                    let log = std::fs::read_to_string(scratch.path("log")).expect("the log");
                    assert!(log.contains("its image is as before"), "{log}");
                }
                _ => daemon.kill(),
            }
            super::is_not_corrupt(&image, round as u64);
            if format == "qcow2" {
                super::is_not_corrupt(&base, round as u64);
            }
            let found = content(&scratch, &image);
            let len = (16 + round) << 20;
            assert!(found[..len] == noise[..len], "{format}: round {round}");
            assert!(
                found[len..].iter().all(|byte| *byte == 0),
                "{format}: round {round}"
            );
        }
        let daemon = serve(&scratch, &["vm1"], &[]);
        assert_eq!(ctl(&scratch, &["commit", "vm1"]), "");
        daemon.stop();
        let taken = std::fs::metadata(&image).expect("it is there").blocks() * 512;
        assert!(taken <= 128 << 10, "{taken} bytes");
        run(
            "qemu-img",
            &["compare", "-f", format, "-F", "qcow2", &base, &image],
        );
        let found = content(&scratch, &image);
        assert!(found[..20 << 20] == noise[..20 << 20], "{format}");
    }
}

#[test]
fn commit_into_a_base_that_others_use_or_nobody_may_write_is_refused() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let base = zeroes(&scratch, "raw");
    for name in ["vm1.qcow2", "vm2.qcow2"] {
        overlay(&scratch, &base, "raw", name);
    }
    let alone = scratch.word("alone.qcow2");
    run("qemu-img", &["create", "-q", "-f", "qcow2", &alone, "1M"]);
    let daemon = serve(&scratch, &["vm1", "vm2", "alone"], &[]);
    let refused = |disk: &str, part: &str| {
        let said = ctl(&scratch, &["commit", disk]);
        assert!(said.contains(part), "{disk}: {said}");
    };
    refused("vm1", "disk vm2 uses its base, too");
    refused("alone", "lies on nothing");
    refused("vm3", "there is no such disk");
    assert!(ctl(&scratch, &["remove", "disk", "vm2"]).contains("vm2"));
    let mode = |mode| {
        let set = std::fs::set_permissions(&base, PermissionsExt::from_mode(mode));
        set.expect("it is ours");
    };
    mode(0o444);
    refused("vm1", "chmod u+w");
    mode(0o644);
    // Another program reads it.
    let other = scratch.word("vm2.qcow2");
    let command = "read 0 512\nsleep 600000\nquit";
    let mut reader = std::process::Command::new("qemu-io")
        .args(["-r", "-f", "qcow2", &other])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("qemu-io is there");
    std::io::Write::write_all(reader.stdin.as_mut().expect("a pipe"), command.as_bytes()).expect("it reads");
    let mut first = [0; 1];
    std::io::Read::read_exact(reader.stdout.as_mut().expect("a pipe"), &mut first)
        .expect("it has the image open");
    refused("vm1", "in use by");
    reader.kill().expect("it is ours");
    reader.wait().expect("it is ours");
    assert_eq!(ctl(&scratch, &["commit", "vm1"]), "");
    daemon.stop();
}

#[test]
fn disk_that_is_committed_refuses_what_would_change_its_chain_and_can_be_removed() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let base = zeroes(&scratch, "raw");
    overlay(&scratch, &base, "raw", "vm1.qcow2");
    let daemon = serve(&scratch, &["vm1"], &["--group", "/blkmq/jobs,bps=1M"]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    for at in 0..8 {
        client.write(at << 20, &[at as u8 + 1; 1 << 20]).expect("a write");
    }
    client.flush().expect("a flush");
    assert_eq!(ctl(&scratch, &["commit", "vm1", "--no-wait"]), "");
    let snapshot = format!("vm1={}", scratch.word("kept.qcow2"));
    for words in [
        &["snapshot", &snapshot][..],
        &["reset", "vm1"],
        &["flatten", "vm1"],
        &["commit", "vm1"],
    ] {
        let said = ctl(&scratch, words);
        assert!(
            said.contains("being committed into its base"),
            "{words:?}: {said}"
        );
    }
    // Nobody else begins to use what is written.
    for words in [
        ["clone", "--raw", &base, "vm2", &scratch.word("vm2.qcow2")],
        ["add", "disk", "vm2", &format!("file={base}"), "ro=on"],
    ] {
        let said = ctl(&scratch, &words);
        assert!(said.contains("in use by"), "{words:?}: {said}");
    }
    assert!(!scratch.path("vm2.qcow2").exists());
    let listed = ctl(&scratch, &["jobs"]);
    assert!(
        listed.contains("commit") && listed.contains("running"),
        "{listed}"
    );
    drop(client);
    let said = ctl(&scratch, &["remove", "disk", "vm1"]);
    assert!(said.contains("vm1") && !said.contains("error"), "{said}");
    let listed = ctl(&scratch, &["jobs"]);
    assert!(listed.contains("given up"), "{listed}");
    // Others may use it again.
    let said = ctl(
        &scratch,
        &["add", "disk", "vm2", &format!("file={base}"), "ro=on"],
    );
    assert!(said.contains("vm2") && !said.contains("error"), "{said}");
    daemon.stop();
    let image = scratch.word("vm1.qcow2");
    run("qemu-img", &["check", "-f", "qcow2", &image]);
    let found = content(&scratch, &image);
    for at in 0..8 {
        assert!(
            found[at << 20..(at + 1) << 20]
                .iter()
                .all(|byte| *byte == at as u8 + 1)
        );
    }
}

/// Nobody else can open the base meanwhile.
#[test]
fn commit_is_given_up_for_a_daemon_that_takes_over() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let base = zeroes(&scratch, "raw");
    overlay(&scratch, &base, "raw", "vm1.qcow2");
    let upgrade = format!("unix:{}", scratch.word("up.sock"));
    let more = ["--group", "/blkmq/jobs,bps=1M", "--upgrade-socket", &upgrade];
    let mut old = serve(&scratch, &["vm1"], &more);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    for at in 0..8 {
        client.write(at << 20, &[at as u8 + 1; 1 << 20]).expect("a write");
    }
    client.flush().expect("a flush");
    assert_eq!(ctl(&scratch, &["commit", "vm1", "--no-wait"]), "");
    std::thread::sleep(Duration::from_millis(500));
    let listed = ctl(&scratch, &["jobs"]);
    assert!(listed.contains("running"), "{listed}");
    let daemon = serve(&scratch, &["vm1"], &["--take-over", &upgrade]);
    let status = old.ended_within(Duration::from_secs(20));
    assert!(status.success(), "{status}");
    for at in 0..8 {
        assert!(client.read(at << 20, 4096).expect("a read") == [at as u8 + 1; 4096]);
    }
    client.write(0, &[77; 4096]).expect("a write over the take-over");
    assert_eq!(ctl(&scratch, &["commit", "vm1"]), "");
    drop(client);
    daemon.stop();
    let image = scratch.word("vm1.qcow2");
    run("qemu-img", &["check", "-f", "qcow2", &image]);
    run(
        "qemu-img",
        &["compare", "-f", "raw", "-F", "qcow2", &base, &image],
    );
    let found = std::fs::read(&base).expect("the base");
    assert_eq!([0, 4096, 7 << 20].map(|at: usize| found[at]), [77, 1, 8]);
}

/// A base of 64 MiB of zeroes, of which the image's file has none.
fn zeroes(scratch: &Scratch, format: &str) -> String {
    let name = format!("base.{format}");
    run(
        "qemu-img",
        &["create", "-q", "-f", format, &scratch.word(&name), "64M"],
    );
    scratch.word(&name)
}

fn serve(scratch: &Scratch, names: &[&str], more: &[&str]) -> Daemon {
    let mut words = Vec::new();
    for name in names {
        let image = scratch.word(&format!("{name}.qcow2"));
        words.extend(["--disk".to_owned(), format!("name={name},qcow2={image}")]);
    }
    words.extend(["--nbd".to_owned(), format!("unix:{}", scratch.word("nbd.sock"))]);
    words.extend([
        "--control".to_owned(),
        format!("unix:{}", scratch.word("control.sock")),
    ]);
    words.extend(more.iter().map(|word| (*word).to_owned()));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let log = std::fs::File::create(scratch.path("log")).expect("there is room");
    Daemon::spawn_with_log(serve_command(&words), log.into())
}

fn wait_for_end(scratch: &Scratch) -> String {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let listed = ctl(scratch, &["jobs"]);
        if !listed.contains("running") || Instant::now() > end {
            return listed;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
