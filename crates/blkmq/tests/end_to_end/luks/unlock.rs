//! Disks that are unlocked while another daemon takes over: no key is lost on the way, and no disk is handed to
//! a daemon that cannot open it.

use std::process::Stdio;
use std::time::Duration;

use blkmq_export::handover::codec::Message;

use super::MIB;
use super::crypt::{Crypt, has_tools};
use super::keys::{ctl, start, state};
use crate::common::daemon::{serve_command, wait_within};
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::{Daemon, Scratch};
use crate::upgrade::refusals::greeted;

/// A locked disk, its daemon with an upgrade socket, and that socket's address.
fn locked(scratch: &Scratch, crypt: &Crypt<'_>) -> (Vec<String>, Daemon, String) {
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let all = vec![
        "name=vm1,luks=vm1-raw".to_owned(),
        format!("name=vm1-raw,file={image}"),
    ];
    let upgrade = format!("unix:{}", scratch.word("up.sock"));
    let daemon = start(scratch, &all, &["--upgrade-socket", &upgrade]);
    (all, daemon, upgrade)
}

#[test]
fn disk_that_is_unlocked_during_a_take_over_is_open_in_the_daemon_that_goes_on() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let (all, mut daemon, upgrade) = locked(&scratch, &crypt);
    let unlock = || ctl(&scratch, &["unlock", "vm1", "--key-file", &crypt.key_file()]);
    // It has got no key, and would have the disk locked.
    let mut early = greeted(&scratch.path("up.sock"));
    let done = unlock();
    assert!(done.success, "{}", done.stderr);
    early.send(&Message::Take, &[], LIMIT).expect("it listens");
    let refused = early.receive(LIMIT).expect_err("it was changed").to_string();
    assert!(refused.contains("changed meanwhile"), "{refused}");
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it serves");
    client.write(0, &block(1, 1)).expect("a write");
    let next = start(&scratch, &all, &["--take-over", &upgrade]);
    assert!(daemon.ended_within(LIMIT).success(), "{}", daemon.said());
    assert_eq!(state(&scratch, "vm1"), "ok");
    assert!(client.read(0, BLOCK).expect("a read") == block(1, 1));
    let again = unlock();
    assert!(
        again.stderr.contains("disk vm1: is not locked"),
        "{}",
        again.stderr
    );
    next.stop();
}

#[test]
fn unlock_is_refused_while_a_take_over_can_still_fail() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let (_, daemon, _) = locked(&scratch, &crypt);
    let unlock = || ctl(&scratch, &["unlock", "vm1", "--key-file", &crypt.key_file()]);
    let mut other = greeted(&scratch.path("up.sock"));
    other.send(&Message::Take, &[], LIMIT).expect("it listens");
    while !matches!(other.receive(LIMIT).expect("clients").0, Message::End { .. }) {}
    let refused = unlock();
    assert!(
        !refused.success && refused.stderr.contains("another daemon takes over: try again"),
        "{}",
        refused.stderr
    );
    drop(other);
    std::thread::sleep(Duration::from_millis(100));
    let done = unlock();
    assert!(done.success, "{}", done.stderr);
    assert_eq!(state(&scratch, "vm1"), "ok");
    daemon.stop();
}

#[test]
fn daemon_that_cannot_open_a_disk_that_is_open_does_not_take_over() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let header = crypt.detached();
    let all = [
        format!("name=vm1,luks=below,header={header},key={}", crypt.key_file()),
        format!("name=below,file={}", scratch.image("below", 32 * MIB)),
    ];
    let upgrade = format!("unix:{}", scratch.word("up.sock"));
    let daemon = start(&scratch, &all, &["--upgrade-socket", &upgrade]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it serves");
    client.write(0, &block(1, 1)).expect("a write");
    let whole = std::fs::read(&header).expect("the header");
    // Without it, and with that of another disk.
    crypt.format("another", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let another =
        std::fs::read(scratch.path("another")).expect("the image")[..whole.len().min(16 << 20)].to_vec();
    for (bytes, wanted) in [
        (&b"nothing"[..], "there is no LUKS header"),
        (&another, "it is open in the running daemon"),
    ] {
        std::fs::write(&header, bytes).expect("it is replaced");
        std::fs::write(scratch.path("key"), "wrong").expect("the key is, too");
        let said = refused_take_over(&scratch, &all, &upgrade);
        assert!(
            said.contains("disk vm1: it is open in the running daemon") && said.contains(wanted),
            "{said}"
        );
        assert!(client.read(0, BLOCK).expect("it goes on") == block(1, 1));
    }
    drop(client);
    daemon.stop();
}

#[test]
fn another_header_with_the_same_passphrase_is_refused_at_a_take_over_with_clients() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    // Another volume's, which its passphrase opens.
    let another = scratch.path("another");
    std::fs::rename(crypt.detached(), &another).expect("a header");
    let header = crypt.detached();
    let all = [
        format!("name=vm1,luks=below,header={header},key={}", crypt.key_file()),
        format!("name=below,file={}", scratch.image("below", 32 * MIB)),
    ];
    let upgrade = format!("unix:{}", scratch.word("up.sock"));
    let daemon = start(&scratch, &all, &["--upgrade-socket", &upgrade]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it serves");
    client.write(0, &block(1, 1)).expect("a write");
    let kept = scratch.path("kept");
    std::fs::rename(&header, &kept).expect("it is kept");
    let mut is_refused = |wanted: &str| {
        let said = refused_take_over(&scratch, &all, &upgrade);
        assert!(
            said.contains("disk vm1: it has clients") && said.contains(wanted),
            "{said}"
        );
        assert!(client.read(0, BLOCK).expect("it goes on") == block(1, 1));
    };
    std::fs::copy(&another, &header).expect("another file");
    is_refused("another file at the same path");
    // The same file, with the other header.
    std::fs::rename(&kept, &header).expect("it is put back");
    std::fs::write(&header, std::fs::read(&another).expect("a header")).expect("it is written");
    is_refused("another key: its LUKS header is another one");
    drop(client);
    daemon.stop();
}

#[test]
fn disk_is_not_unlocked_by_a_header_that_was_put_in_the_place_of_its_own() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let header = crypt.detached();
    let all = [
        format!("name=vm1,luks=below,header={header}"),
        format!("name=below,file={}", scratch.image("below", 32 * MIB)),
    ];
    let daemon = start(&scratch, &all, &["--sandbox", "off"]);
    let unlock = || ctl(&scratch, &["unlock", "vm1", "--key-file", &crypt.key_file()]);
    let kept = scratch.path("kept");
    std::fs::rename(&header, &kept).expect("it is kept");
    std::fs::copy(&kept, &header).expect("a copy");
    let refused = unlock();
    assert!(
        !refused.success && refused.stderr.contains("its header= is another file"),
        "{}",
        refused.stderr
    );
    assert_eq!(state(&scratch, "vm1"), "locked");
    std::fs::rename(&kept, &header).expect("it is put back");
    let done = unlock();
    assert!(done.success, "{}", done.stderr);
    assert_eq!(state(&scratch, "vm1"), "ok");
    daemon.stop();
}

/// Runs a daemon that must not take over. Returns what it says.
fn refused_take_over(scratch: &Scratch, disks: &[String], upgrade: &str) -> String {
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let mut words = vec!["--nbd", &nbd, "--take-over", upgrade];
    disks.iter().for_each(|disk| words.extend(["--disk", disk]));
    let log = std::fs::File::create(scratch.path("refused.log")).expect("a log");
    let mut command = serve_command(&words);
    let mut child = command
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("the command runs");
    let Some(status) = wait_within(&mut child, LIMIT) else {
        let _ = child.kill();
        panic!("it serves");
    };
    assert!(!status.success(), "it has taken over");
    std::fs::read_to_string(scratch.path("refused.log")).expect("the log")
}

const LIMIT: Duration = Duration::from_secs(20);
