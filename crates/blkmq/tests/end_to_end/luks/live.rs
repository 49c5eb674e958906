//! Encrypted disks that come and go in a running daemon, beside clients of others: completely or not at all, without a key
//! that stays behind, and without anybody who waits for a slow key slot.

use std::io::{Read, Write};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::MIB;
use super::crypt::{Crypt, KEY, has_tools};
use super::keys::{Searched, ctl, searched_memory, start, state};
use crate::common::nbd::{Client, go_payload, greeted, option, read_option_reply};
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::Said;
use crate::common::{Daemon, Scratch};
use crate::upgrade::load::Load;

/// Runs `blkmq ctl`, which must succeed.
pub(super) fn done(scratch: &Scratch, words: &[&str]) -> String {
    let said = ctl(scratch, words);
    assert!(said.success, "{words:?}: {}", said.stderr);
    assert!(!said.stdout.contains(KEY.trim_end()), "{}", said.stdout);
    said.stdout
}

/// Runs `blkmq ctl`, which must be refused for this reason.
fn refused(scratch: &Scratch, words: &[&str], why: &str) {
    let said = ctl(scratch, words);
    assert!(
        !said.success && said.stderr.contains(why),
        "{words:?}: {why}: {}",
        said.stderr
    );
    assert!(!said.stderr.contains(KEY.trim_end()), "{}", said.stderr);
}

/// The names of the disks, in their order, and whether NBD clients can have them.
fn disks(scratch: &Scratch) -> Vec<(String, bool)> {
    let listed = done(scratch, &["list", "disks"]);
    let names = listed.lines().skip(1);
    let names = names.filter_map(|line| line.split_whitespace().next());
    let is_served = |name: &str| Client::connect(&scratch.path("nbd.sock"), name).is_ok();
    names.map(|name| (name.to_owned(), is_served(name))).collect()
}

fn served(names: &[(&str, bool)]) -> Vec<(String, bool)> {
    names.iter().map(|(name, is)| ((*name).to_owned(), *is)).collect()
}

pub(super) fn client(scratch: &Scratch, disk: &str) -> Client {
    Client::connect(&scratch.path("nbd.sock"), disk).expect("it is served")
}

#[test]
fn encrypted_disk_is_added_beside_clients_and_removed_without_a_trace_of_its_key() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let secrets = [
        scratch.word("nbd.sock").into_bytes(),
        KEY.into(),
        crypt.volume_key(&image),
    ];
    let all = ["name=other,ram=4M".to_owned(), format!("name=raw,file={image}")];
    let daemon = start(&scratch, &all, &["--reactors", "2"]);
    let load = Load::start(&scratch.path("nbd.sock"), "other", 2);
    // One that has not selected a disk yet, and knows both.
    let mut early = greeted(&scratch.path("nbd.sock")).expect("it greets");
    let key = format!("key={}", crypt.key_file());
    let add = ["add", "disk", "vm1", "luks=raw", &key, "group=/customers/a"];
    done(&scratch, &["add", "group", "/customers", "weight=300"]);
    for generation in 1..4 {
        done(&scratch, &add);
        assert_eq!(
            disks(&scratch),
            served(&[("other", true), ("raw", false), ("vm1", true)])
        );
        refused(
            &scratch,
            &["remove", "disk", "raw"],
            "there is no disk raw for it to lie on",
        );
        refused(&scratch, &["resize", "raw"], "disk vm1 lies on it");
        let groups = done(&scratch, &["list", "groups"]);
        assert!(groups.contains("/customers/a"), "{groups}");
        let mut vm1 = client(&scratch, "vm1");
        if generation > 1 {
            assert!(vm1.read(0, BLOCK).expect("a read") == block(1, generation - 1));
        }
        vm1.write(0, &block(1, generation)).expect("a write");
        vm1.flush().expect("a flush");
        // Its client is disconnected.
        done(&scratch, &["remove", "disk", "vm1"]);
        assert!(vm1.read(0, BLOCK).is_err(), "it is removed");
        assert_eq!(disks(&scratch), served(&[("other", true), ("raw", true)]));
        let groups = done(&scratch, &["list", "groups"]);
        assert!(!groups.contains("/customers/a"), "{groups}");
    }
    // By the list of its greeting, before the disk was another's.
    let mut payload = 3_u32.to_be_bytes().to_vec();
    payload.extend(b"raw\0\0");
    early.write_all(&option(7, &payload)).expect("it listens");
    let mut answer = [0; 256];
    let len = early.read(&mut answer).unwrap_or(0);
    let is_info = len > 20 && answer[12..16] == 3_u32.to_be_bytes();
    let is_usable =
        is_info && early.write_all(&[0; 28]).is_ok() && early.read(&mut answer).is_ok_and(|len| len > 200);
    assert!(!is_usable, "an old list serves the disk below");
    assert!(load.stop() > 0);
    match searched_memory(daemon.id(), &secrets, Searched::Everything) {
        Ok(found) => {
            assert!(
                found.iter().any(|(which, _)| *which == 0),
                "the search finds nothing"
            );
            assert!(found.iter().all(|(which, _)| *which == 0), "{found:?}");
        }
        Err(error) => blkmq_testkit::skip(&format!("the memory of others needs root: {error}")),
    }
    assert!(!daemon.said().contains(KEY.trim_end()), "{}", daemon.said());
    daemon.stop();
    let plain = std::fs::read(crypt.decrypt(&image)).expect("it is a file");
    assert!(plain[..BLOCK] == block(1, 3), "cryptsetup reads what was written");
}

#[test]
fn encrypted_disk_comes_and_goes_with_the_one_below_by_apply_and_by_sighup() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let file = scratch.word("blkmq.toml");
    let without = format!(
        "[daemon]\nsandbox = \"off\"\n[control]\nsocket = \"unix:{}\"\n[[export]]\nnbd = \"unix:{}\"\n[[export]]\nvhost-user = \"unix:{}\"\n[disk.other]\nram = \"4M\"\n",
        scratch.word("control.sock"),
        scratch.word("nbd.sock"),
        scratch.word("{disk}.vsock")
    );
    let key = crypt.key_file();
    // The upper one first.
    let with = format!("{without}[disk.vm1]\nluks = \"raw\"\nkey = {key:?}\n[disk.raw]\nfile = {image:?}\n");
    std::fs::write(&file, &without).expect("a configuration");
    let daemon = Daemon::start(&["-c", &file]);
    let load = Load::start(&scratch.path("nbd.sock"), "other", 1);
    let there = served(&[("other", true), ("raw", false), ("vm1", true)]);
    let sockets = |name: &str| scratch.path(&format!("{name}.vsock")).exists();
    for by_signal in [false, true] {
        for (text, wanted) in [(&with, &there), (&without, &served(&[("other", true)]))] {
            std::fs::write(&file, text).expect("a configuration");
            match by_signal {
                true => daemon.signal(Signal::HUP),
                false => drop(done(&scratch, &["apply", &file, "--remove"])),
            }
            let until = Instant::now() + LIMIT;
            while disks(&scratch).len() != wanted.len() {
                assert!(Instant::now() < until, "{}", daemon.said());
            }
            // The steps are done one after the other.
            while &disks(&scratch) != wanted {
                assert!(Instant::now() < until, "{:?}", disks(&scratch));
            }
            assert_eq!((sockets("vm1"), sockets("raw")), (wanted.len() == 3, false));
        }
    }
    // Another name on the same disk, in one change.
    std::fs::write(&file, &with).expect("a configuration");
    done(&scratch, &["apply", &file]);
    std::fs::write(&file, with.replace("vm1", "vm2")).expect("a configuration");
    done(&scratch, &["apply", &file, "--remove"]);
    let found = disks(&scratch);
    assert_eq!(found, served(&[("other", true), ("raw", false), ("vm2", true)]));
    assert!(load.stop() > 0);
    daemon.stop();
}

#[test]
fn encrypted_disk_that_cannot_be_added_leaves_everything_as_it_was() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    std::fs::write(scratch.path("wrong"), "another passphrase").expect("a file");
    let plain = scratch.image("plain", 32 * MIB);
    let all = [
        "name=other,ram=4M".to_owned(),
        format!("name=raw,file={image}"),
        format!("name=plain,file={plain}"),
        format!(
            "name=used,luks=used-raw,header={},key={}",
            crypt.detached(),
            crypt.key_file()
        ),
        "name=used-raw,ram=4M".to_owned(),
    ];
    let daemon = start(&scratch, &all, &["--sandbox", "off"]);
    let load = Load::start(&scratch.path("nbd.sock"), "other", 1);
    let (before, dump) = (disks(&scratch), done(&scratch, &["dump"]));
    let groups = done(&scratch, &["list", "groups"]);
    let unchanged = || {
        assert_eq!(disks(&scratch), before);
        assert_eq!(done(&scratch, &["dump"]), dump);
        assert_eq!(done(&scratch, &["list", "groups"]), groups);
    };
    let (right, wrong) = (
        format!("key={}", crypt.key_file()),
        format!("key={}", scratch.word("wrong")),
    );
    let missing = format!("key={}", scratch.word("missing"));
    for (keys, why) in [
        (
            ["luks=nobody", &right],
            "disk vm1: there is no disk nobody for it to lie on",
        ),
        (["luks=used-raw", &right], "another disk lies on used-raw, too"),
        (
            ["luks=used", &right],
            "disk used is encrypted, and cannot be below another",
        ),
        (["luks=raw", &wrong], "disk vm1: no key slot opens with this key"),
        (["luks=raw", &missing], "No such file"),
        (
            ["luks=raw", "key=cmd:cat"],
            "disk vm1: key cmd:cat: a command is run when the daemon starts, and not later",
        ),
        (["luks=plain", &right], "disk vm1: there is no LUKS header"),
        (["luks=raw", "block_size=4M"], "block_size"),
        (["luks=raw", "key=fd:77"], "key fd:77"),
    ] {
        refused(&scratch, &[&["add", "disk", "vm1"][..], &keys].concat(), why);
        unchanged();
    }
    // Before and after the steps that could be done.
    let client_below = client(&scratch, "raw");
    refused(
        &scratch,
        &["add", "disk", "vm1", "luks=raw", &right],
        "disk vm1: disk raw has clients, which would",
    );
    drop(client_below);
    let two = crypt.format("two", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let file = scratch.word("new.toml");
    let both = |key: &str| {
        let more = format!(
            "[disk.vm2]\nluks = \"raw2\"\n{}\n[disk.raw2]\nfile = {two:?}\n",
            key.replace('=', " = \"") + "\""
        );
        std::fs::write(&file, format!("{dump}{more}")).expect("a configuration");
    };
    both(&wrong);
    refused(
        &scratch,
        &["apply", &file],
        "add disk vm2: disk vm2: no key slot opens with this key",
    );
    unchanged();
    both(&right);
    done(&scratch, &["apply", &file, "--dry-run"]);
    unchanged();
    refused(
        &scratch,
        &["add", "disk", "vm1", "luks=raw", &missing, "--dry-run"],
        "disk vm1: key",
    );
    done(&scratch, &["apply", &file]);
    drop(client(&scratch, "vm2"));
    assert!(load.stop() > 0);
    daemon.stop();
}

#[test]
fn encrypted_disk_whose_removal_is_taken_back_is_open_as_before() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    // No file has its key.
    let all = ["name=vm1,luks=raw".to_owned(), format!("name=raw,file={image}")];
    let daemon = start(&scratch, &all, &["--sandbox", "off"]);
    done(&scratch, &["unlock", "vm1", "--key-file", &crypt.key_file()]);
    let mut vm1 = client(&scratch, "vm1");
    vm1.write(0, &block(1, 1)).expect("a write");
    drop(vm1);
    // The first step removes both, the second finds the file locked by another process.
    let dump = done(&scratch, &["dump"]);
    let file = scratch.word("new.toml");
    let rest: String = dump
        .split("[disk.")
        .filter(|part| !part.contains("luks") && !part.contains("file = "))
        .collect();
    let other = Daemon::start(&[
        "--nbd",
        &format!("unix:{}", scratch.word("x.sock")),
        "--disk",
        &format!("name=x,file={}", scratch.image("x", MIB)),
    ]);
    let fails = format!(
        "{rest}[disk.new]\nfile = {image:?}\n[disk.x]\nfile = {:?}\n",
        scratch.word("x")
    );
    std::fs::write(&file, fails).expect("a configuration");
    refused(&scratch, &["apply", &file, "--remove"], "add disk x");
    assert_eq!(disks(&scratch), served(&[("raw", false), ("vm1", true)]));
    assert_eq!(state(&scratch, "vm1"), "ok");
    assert!(client(&scratch, "vm1").read(0, BLOCK).expect("a read") == block(1, 1));
    assert!(!daemon.said().contains("taking it back"), "{}", daemon.said());
    other.stop();
    refused(
        &scratch,
        &["set", "disk", "vm1", "discard=on"],
        "disk vm1: discard: cannot be changed while it is served",
    );
    let key = format!("key={}", crypt.key_file());
    done(&scratch, &["set", "disk", "vm1", &key]);
    assert!(done(&scratch, &["dump"]).contains("key = "));
    daemon.stop();
}

#[test]
fn disk_that_is_added_locked_is_unlocked_and_taken_over_with_its_client() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let upgrade = format!("unix:{}", scratch.word("up.sock"));
    let all = [
        format!("name=a,file={},queue=a", scratch.image("a", 4 * MIB)),
        format!("name=b,file={},queue=b", scratch.image("b", 4 * MIB)),
        "name=striped,striped=a+b".to_owned(),
    ];
    let mut daemon = start(
        &scratch,
        &all,
        &["--upgrade-socket", &upgrade, "--sandbox", "off"],
    );
    let file = format!("file={image}");
    done(&scratch, &["add", "disk", "raw", &file]);
    done(&scratch, &["add", "disk", "vm1", "luks=raw"]);
    // On one that lies on several queues.
    let (header, key) = (
        format!("header={}", crypt.detached()),
        format!("key={}", crypt.key_file()),
    );
    done(&scratch, &["add", "disk", "vm2", "luks=striped", &header, &key]);
    assert_eq!(
        (state(&scratch, "vm1"), state(&scratch, "vm2")),
        ("locked".into(), "ok".into())
    );
    assert!(
        Client::connect(&scratch.path("nbd.sock"), "vm1").is_err(),
        "it is locked"
    );
    done(&scratch, &["unlock", "vm1", "--key-file", &crypt.key_file()]);
    let load = Load::start(&scratch.path("nbd.sock"), "vm1", 2);
    std::fs::remove_file(scratch.path("key")).expect("the key's file");
    let file = scratch.word("dump.toml");
    std::fs::write(&file, done(&scratch, &["dump"])).expect("a file");
    for _ in 0..2 {
        let next = Daemon::start(&["-c", &file, "--take-over", &upgrade]);
        let status = daemon.ended_within(LIMIT);
        assert!(status.success(), "{}", daemon.said());
        daemon = next;
        assert_eq!(
            (state(&scratch, "vm1"), state(&scratch, "vm2")),
            ("ok".into(), "ok".into())
        );
    }
    assert!(load.stop() > 0);
    // The successor can let them go, and their groups.
    for disk in ["vm1", "vm2"] {
        done(&scratch, &["remove", "disk", disk]);
        assert!(!done(&scratch, &["list", "groups"]).contains(&format!("/{disk}")));
    }
    drop(client(&scratch, "striped"));
    daemon.stop();
}

#[test]
fn locked_disk_is_refused_with_the_reason_and_another_one_may_be_selected() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let other = scratch.image("other", 4 * MIB);
    let daemon = start(
        &scratch,
        &[
            "name=vm1,luks=raw".to_owned(),
            format!("name=raw,file={image}"),
            format!("name=other,file={other}"),
        ],
        &[],
    );
    let mut client = greeted(&scratch.path("nbd.sock")).expect("a greeting");
    let mut go = |disk: &str| {
        client
            .write_all(&option(7, &go_payload(disk)))
            .expect("it listens");
        loop {
            // What is told of a disk comes before the answer.
            let (kind, data) = read_option_reply(&mut client).expect("an answer");
            if kind != 3 {
                return (kind, String::from_utf8_lossy(&data).into_owned());
            }
        }
    };
    let policy = (1 << 31) + 2;
    for _ in 0..3 {
        let (kind, text) = go("vm1");
        assert_eq!(
            (kind, &*text),
            (policy, "the disk is locked: blkmq ctl unlock opens it")
        );
    }
    assert_eq!(go("other"), (1, String::new()));
    daemon.stop();
}

#[test]
fn place_of_a_key_is_checked_and_told_when_it_is_changed() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let all = ["name=vm1,luks=raw".to_owned(), format!("name=raw,file={image}")];
    let daemon = start(&scratch, &all, &["--sandbox", "off"]);
    let missing = format!("key={}", scratch.word("none"));
    refused(&scratch, &["set", "disk", "vm1", &missing], "No such file");
    refused(
        &scratch,
        &["set", "disk", "vm1", &missing, "--dry-run"],
        "No such file",
    );
    let key = format!("key={}", crypt.key_file());
    let said = ctl(&scratch, &["set", "disk", "vm1", &key]);
    let step = format!("set key of disk vm1: default -> {:?}\n", crypt.key_file());
    assert_eq!((said.stdout, said.success), (step, true));
    assert!(
        said.stderr
            .contains("disk vm1 is still locked: blkmq ctl unlock vm1"),
        "{}",
        said.stderr
    );
    assert_eq!(state(&scratch, "vm1"), "locked");
    let same = done(&scratch, &["set", "disk", "vm1", &key]);
    assert_eq!(same, "nothing differs\n");
    // The next daemon opens it.
    let file = scratch.word("dump.toml");
    std::fs::write(&file, done(&scratch, &["dump"])).expect("a file");
    daemon.stop();
    let next = Daemon::start(&["-c", &file]);
    assert_eq!(state(&scratch, "vm1"), "ok");
    next.stop();
}

/// A key slot that takes some seconds.
const SLOW: &str =
    "--type luks2 --pbkdf argon2id --pbkdf-force-iterations 60 --pbkdf-memory 65536 --pbkdf-parallel 1";

fn aside(scratch: &Scratch, words: &[&str]) -> JoinHandle<Said> {
    let socket = format!("unix:{}", scratch.word("control.sock"));
    let mut command = std::process::Command::new(crate::common::daemon::program());
    command.args(["ctl", "--socket", &socket]).args(words);
    std::thread::spawn(move || {
        let output = command.output().expect("it runs");
        Said {
            success: output.status.success(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    })
}

#[test]
fn slow_key_slot_holds_up_neither_queries_nor_changes_nor_the_end() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format_as("slow", 32 * MIB, SLOW);
    let upgrade = format!("unix:{}", scratch.word("up.sock"));
    let all = ["name=other,ram=4M".to_owned(), format!("name=raw,file={image}")];
    let key = format!("key={}", crypt.key_file());
    let start_one =
        |all: &[String]| start(&scratch, all, &["--upgrade-socket", &upgrade, "--sandbox", "off"]);
    // The disk below is there: other changes go on, many of them, and it is found all the same.
    let mut daemon = start_one(&all);
    let adding = aside(&scratch, &["add", "disk", "vm1", "luks=raw", &key]);
    std::thread::sleep(Duration::from_millis(200));
    let mut changes = 0;
    while !adding.is_finished() {
        let weight = format!("weight={}", 100 + changes % 10);
        done(&scratch, &["set", "group", "/other", &weight]);
        changes += 1;
    }
    let said = adding.join().expect("it ends");
    assert!(said.success && changes > 1, "{changes} changes: {}", said.stderr);
    assert_eq!(state(&scratch, "vm1"), "ok");
    done(&scratch, &["remove", "disk", "vm1"]);
    is_not_waited_for(&scratch, &mut daemon, &["add", "disk", "vm1", "luks=raw", &key]);
    // It comes with the same change.
    let mut daemon = start_one(&all[..1]);
    let file = scratch.word("new.toml");
    let more = format!(
        "[disk.vm1]\nluks = \"raw\"\nkey = {:?}\n[disk.raw]\nfile = {image:?}\n",
        crypt.key_file()
    );
    let dump = done(&scratch, &["dump"]);
    std::fs::write(&file, format!("{dump}{more}")).expect("a configuration");
    let adding = aside(&scratch, &["apply", &file]);
    std::thread::sleep(Duration::from_millis(200));
    // Another daemon takes over meanwhile.
    let next = Daemon::start(&[
        "-c",
        &write(&scratch, "same.toml", &dump),
        "--take-over",
        &upgrade,
    ]);
    assert!(daemon.ended_within(LIMIT).success(), "{}", daemon.said());
    let said = adding.join().expect("it ends");
    // The daemon says so, if it has not ended before.
    assert!(!said.success, "{}", said.stdout);
    daemon = next;
    // It has its control socket a moment later.
    assert_eq!(state(&scratch, "other"), "ok");
    assert_eq!(disks(&scratch), served(&[("other", true)]));
    is_not_waited_for(&scratch, &mut daemon, &["apply", &file]);
}

fn write(scratch: &Scratch, name: &str, text: &str) -> String {
    std::fs::write(scratch.path(name), text).expect("a file");
    scratch.word(name)
}

/// Asserts that a daemon answers, and ends, while a change of it waits for a key slot.
fn is_not_waited_for(scratch: &Scratch, daemon: &mut Daemon, words: &[&str]) {
    let adding = aside(scratch, words);
    std::thread::sleep(Duration::from_millis(200));
    done(scratch, &["list", "disks"]);
    assert!(!adding.is_finished(), "the slot is too quick for this test");
    daemon.signal(Signal::TERM);
    assert!(daemon.ended_within(LIMIT).success(), "{}", daemon.said());
    assert!(!daemon.said().contains("has not ended"), "{}", daemon.said());
    assert!(!adding.join().expect("it ends").success);
}

const LIMIT: Duration = Duration::from_secs(20);
