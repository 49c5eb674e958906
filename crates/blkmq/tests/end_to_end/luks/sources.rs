//! Where passphrases come from: descriptors, systemd's credentials, commands. And what passes to the disk below
//! with `discard=on`.

use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};

use super::crypt::{Crypt, KEY, has_tools};
use super::keys::{ctl, state};
use super::{MIB, serve};
use crate::common::daemon::{program, serve_command};
use crate::common::nbd::{Client, Command as Request};
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::run;
use crate::common::{Daemon, Scratch};

/// The words that serve an image whose key is said to be somewhere.
fn words(scratch: &Scratch, image: &str, key: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for (flag, word) in [
        ("--nbd", format!("unix:{}", scratch.word("nbd.sock"))),
        ("--control", format!("unix:{}", scratch.word("control.sock"))),
        ("--disk", format!("name=vm1,luks=vm1-raw,key={key}")),
        ("--disk", format!("name=vm1-raw,file={image}")),
    ] {
        words.extend([flag.to_owned(), word]);
    }
    words
}

/// Asserts that a disk is open and that its daemon is confined.
fn is_open(scratch: &Scratch, daemon: Daemon) {
    assert_eq!(state(scratch, "vm1"), "ok", "{}", daemon.said());
    assert!(daemon.says("sandbox on: "), "{}", daemon.said());
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it serves");
    client.write(0, &block(1, 1)).expect("a write");
    assert!(client.read(0, BLOCK).expect("a read") == block(1, 1));
    drop(client);
    daemon.stop();
}

/// Asserts that a disk is locked, and why.
fn is_locked(scratch: &Scratch, daemon: Daemon, why: &str) {
    assert_eq!(state(scratch, "vm1"), "locked");
    assert!(daemon.says(why), "{}", daemon.said());
    assert!(!daemon.said().contains(KEY.trim_end()), "{}", daemon.said());
    daemon.stop();
}

#[test]
fn key_is_read_from_a_descriptor_of_a_file_or_a_pipe() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let mut of_file = Command::new("sh");
    of_file
        .args(["-c", "exec \"$@\" 7<\"$KEY\"", "sh"])
        .arg(program())
        .arg("serve");
    of_file
        .args(words(&scratch, &image, "fd:7"))
        .env("KEY", crypt.key_file());
    is_open(&scratch, Daemon::spawn(of_file));
    let (pipe, mut end) = std::io::pipe().expect("a pipe");
    end.write_all(KEY.as_bytes()).expect("it has room");
    drop(end);
    let words = words(&scratch, &image, "fd:0");
    let mut of_pipe = serve_command(&words.iter().map(String::as_str).collect::<Vec<_>>());
    of_pipe.stdin(Stdio::from(pipe));
    is_open(&scratch, Daemon::spawn(of_pipe));
}

#[test]
fn descriptor_that_is_not_there_leaves_its_disk_locked() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let words = words(&scratch, &image, "fd:77");
    let daemon = Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>());
    is_locked(
        &scratch,
        daemon,
        "disk vm1: stays locked: key fd:77: No such file",
    );
}

#[test]
fn key_or_header_that_is_a_pipe_leaves_its_disk_locked_and_nobody_waits() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let pipe = scratch.word("pipe");
    run("mkfifo", &[&pipe]);
    let keys = crypt.key_file();
    for (key, why) in [
        (
            pipe.clone(),
            format!("disk vm1: stays locked: key {pipe}: it is a pipe, and must be a regular file"),
        ),
        (
            format!("{keys},header={pipe}"),
            format!("header {pipe}: it is a pipe, and must be a regular file or a block device"),
        ),
    ] {
        let words = words(&scratch, &image, &key);
        let daemon = Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>());
        is_locked(&scratch, daemon, &why);
    }
}

#[test]
fn key_is_a_credential_of_systemds() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    std::fs::create_dir(scratch.path("credentials")).expect("a directory");
    std::fs::write(scratch.path("credentials").join("vm1.key"), KEY).expect("a credential");
    let with = |name: &str, directory: Option<&str>| {
        let words = words(&scratch, &image, &format!("cred:{name}"));
        let mut command = serve_command(&words.iter().map(String::as_str).collect::<Vec<_>>());
        command.env_remove("CREDENTIALS_DIRECTORY");
        let directory = directory.map(|directory| scratch.path(directory));
        directory.into_iter().for_each(|directory| {
            command.env("CREDENTIALS_DIRECTORY", directory);
        });
        Daemon::spawn(command)
    };
    is_open(&scratch, with("vm1.key", Some("credentials")));
    let missing = with("vm2.key", Some("credentials"));
    is_locked(&scratch, missing, "key cred:vm2.key: No such file");
    let none = with("vm1.key", None);
    is_locked(
        &scratch,
        none,
        "key cred:vm1.key: there are no credentials of systemd's here",
    );
}

#[test]
fn key_is_what_a_command_prints_before_the_daemon_is_confined() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let with = |command: &str| {
        let words = words(&scratch, &image, &format!("cmd:{command}"));
        Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>())
    };
    is_open(&scratch, with(&format!("cat {}", crypt.key_file())));
    let failed = with("false");
    is_locked(&scratch, failed, "key cmd:false: what it prints: it is empty");
    let daemon = with("/no/such/program");
    assert!(
        daemon.says("key cmd:/no/such/program: it cannot be run"),
        "{}",
        daemon.said()
    );
    // The same by a pipe, later.
    let socket = format!("unix:{}", scratch.word("control.sock"));
    let mut unlock = Command::new("sh");
    unlock.args(["-c", "cat \"$KEY\" | \"$@\"", "sh"]).arg(program());
    unlock
        .args(["ctl", "--socket", &socket, "unlock", "vm1"])
        .env("KEY", crypt.key_file());
    assert!(unlock.status().expect("it runs").success());
    is_open(&scratch, daemon);
}

#[test]
fn discards_pass_to_the_disk_below_if_that_is_wanted() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 48 * MIB, "--type luks2 --pbkdf pbkdf2 --sector-size 4096");
    let blocks = || std::fs::metadata(&image).expect("the image").blocks() * 512;
    for is_passed in [false, true] {
        let discard = if is_passed { "on" } else { "off" };
        let key = format!("{},discard={discard}", crypt.key_file());
        let daemon = serve(
            &scratch,
            &[
                format!("name=vm1,luks=vm1-raw,key={key}"),
                format!("name=vm1-raw,file={image}"),
            ],
        );
        let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it serves");
        for number in 0..2048 {
            client
                .write(number * BLOCK as u64, &block(number, 1))
                .expect("a write");
        }
        client.flush().expect("a flush");
        let before = blocks();
        let sent = client.send(Request::Trim, 0, 4 * MIB, 2 << 20, &[]);
        sent.expect("it is sent");
        assert_eq!(client.reply().is_ok(), is_passed, "discard={discard}");
        client.flush().expect("a flush");
        let freed = before.saturating_sub(blocks());
        // The filesystem may take a block of its own to note what is free.
        assert_eq!(
            freed >= 2 * MIB - 16 * BLOCK as u64,
            is_passed,
            "discard={discard}: {freed} bytes are free"
        );
        for number in (0..1024).chain(1536..2048) {
            let found = client.read(number * BLOCK as u64, BLOCK).expect("a read");
            assert!(found == block(number, 1), "discard={discard}: block {number}");
        }
        // What is there now is decrypted from zeroes, and is no fault.
        client.read(4 * MIB, 2 << 20).expect("a read");
        drop(client);
        daemon.stop();
    }
}

#[test]
fn key_over_the_control_socket_may_be_as_long_as_one_in_a_file() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let key: Vec<u8> = (0..64 << 10).map(|at: u32| (at * 7 % 251) as u8).collect();
    std::fs::write(scratch.path("key"), key).expect("a key");
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let words = words(&scratch, &image, "/no/such/key");
    let daemon = Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let done = ctl(&scratch, &["unlock", "vm1", "--key-file", &crypt.key_file()]);
    assert!(done.success, "{}", done.stderr);
    is_open(&scratch, daemon);
}
