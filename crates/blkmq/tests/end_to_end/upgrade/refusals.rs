//! Tests that the running daemon continues if another one cannot take over, or ends during the take-over.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use blkmq::control::client::Client as Control;
use blkmq_export::handover::channel::Channel;
use blkmq_export::handover::codec::{Disk, Message, VERSION};
use rustix::process::Signal;
use serde_json::json;

use super::load::Load;
use super::{CLIENTS, DISK_BYTES, Stage, read_back, upgrades};
use crate::common::daemon::serve_command;
use crate::common::nbd::{Client, Command};
use crate::common::pattern::{BLOCK, block};
use crate::common::{Daemon, Scratch};

#[test]
fn truncated_image_with_clients_is_not_taken_over() {
    let stage = Stage::new();
    let daemon = stage.start();
    let mut client = Client::connect(&stage.socket(), "vm1").expect("it is served");
    let image = std::fs::OpenOptions::new()
        .write(true)
        .open(stage.scratch.path("vm1.raw"));
    let image = image.expect("the image");
    image.set_len(DISK_BYTES / 2).expect("it is cut off");
    assert!(client.read(DISK_BYTES / 2, BLOCK).is_err());
    image.set_len(DISK_BYTES).expect("it is longer again");
    let said = stage.fail_to_upgrade(&stage.words("--take-over"));
    assert!(said.contains("it was truncated"), "{said}");
    assert!(client.read(DISK_BYTES / 2, BLOCK).is_err(), "still refused");
    assert!(client.read(0, BLOCK).is_ok(), "what is left");
    daemon.stop();
}

#[test]
fn daemon_with_another_configuration_does_not_take_over_and_says_why() {
    let stage = Stage::new();
    let daemon = stage.start();
    let mut client = Client::connect(&stage.socket(), "vm1").expect("it is served");
    let image = stage.scratch.word("vm1.raw");
    let missing = stage.scratch.word("missing.raw");
    let other = stage.scratch.image("other.raw", DISK_BYTES / 2);
    let cases = [
        (format!("name=vm1,file={missing}"), "missing.raw"),
        (format!("name=vm2,file={image}"), "not in the new configuration"),
        (format!("name=vm1,file={other}"), "a size of"),
        (
            format!("name=vm1,file={image},ro=on"),
            "read-only in the new configuration",
        ),
        (format!("name=vm1,file={image},block_size=8192"), "blocks of"),
        (format!("name=vm1,file={image},sched=nonsense"), "nonsense"),
    ];
    for (generation, (disk, reason)) in (1..).zip(&cases) {
        let mut words = stage.words("--take-over");
        words[1].clone_from(disk);
        // What clients were told is compared of a disk that was moved, too.
        words.extend(["--same-data", "vm1"].map(str::to_owned));
        let said = stage.fail_to_upgrade(&words);
        assert!(said.contains(reason), "{disk}: {said}");
        client
            .write(0, &block(0, generation))
            .expect("the running daemon goes on");
        read_back(&stage.socket(), 0, generation);
    }
    // The new daemon lacks an address that clients use.
    let mut words = stage.words("--take-over");
    words[3] = format!("unix:{}", stage.scratch.word("elsewhere.sock"));
    let said = stage.fail_to_upgrade(&words);
    assert!(said.contains("nobody serves nbd at"), "{said}");
    client
        .write(0, &block(0, 99))
        .expect("the running daemon goes on");
    read_back(&stage.socket(), 0, 99);
    stage.upgrade(daemon).stop();
}

#[test]
fn disk_in_memory_is_not_handed_over_while_it_has_clients() {
    let stage = Stage::of(Scratch::new(), &["name=vm1,ram=1M"]);
    let daemon = stage.start();
    let mut client = Client::connect(&stage.socket(), "vm1").expect("it is served");
    let said = stage.fail_to_upgrade(&stage.words("--take-over"));
    assert!(said.contains("memory of this process"), "{said}");
    client.write(0, &block(0, 1)).expect("the running daemon goes on");
    drop(client);
    std::thread::sleep(Duration::from_millis(200));
    stage.upgrade(daemon).stop();
}

#[test]
fn daemon_that_nobody_can_take_over_from_is_named() {
    let stage = Stage::new();
    let said = stage.fail_to_upgrade(&stage.words("--take-over"));
    assert!(said.contains("no daemon can be reached"), "{said}");
}

#[test]
fn garbage_at_the_upgrade_socket_costs_nobody_anything() {
    let stage = Stage::new();
    let daemon = stage.start();
    let load = Load::start(&stage.socket(), "vm1", 1);
    let mut long = Vec::new();
    Message::Hello { version: 0 }.write(&mut long);
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 64], &[0; 6], &long] {
        let mut stream = UnixStream::connect(stage.upgrade_path()).expect("it listens");
        stream.write_all(garbage).expect("it takes some bytes");
        let mut answer = Vec::new();
        // It states the reason and closes; because of data that it has not read, that is a reset.
        let _ = stream.read_to_end(&mut answer);
        assert!(!answer.is_empty(), "it says why");
    }
    load.stop();
    stage.upgrade(daemon).stop();
}

#[test]
fn daemon_that_ends_at_any_step_leaves_the_clients_to_the_running_one() {
    let stage = Stage::new();
    let daemon = stage.start();
    let load = Load::start(&stage.socket(), "vm1", CLIENTS);
    // Alternately with and without a pause: clients may not have noticed that they continue before
    // they must stop again.
    for round in 0..3 * (STEPS + 1) {
        drop(pretend(&stage.upgrade_path(), round % (STEPS + 1)));
        if round % 2 == 0 {
            read_back(&stage.socket(), 4000, 0);
        }
    }
    let said = daemon.said();
    assert!(said.contains("ended before it served anybody"), "{said}");
    assert!(load.stop() > 0);
    stage.upgrade(daemon).stop();
}

#[test]
fn daemon_that_is_killed_at_random_moments_leaves_the_clients_to_the_running_one() {
    // The duration of an upgrade here: some daemons are killed a little later, too.
    let first = Stage::new();
    let daemon = first.start();
    let start = Instant::now();
    first.upgrade(daemon).stop();
    let range = 2 * start.elapsed().as_micros() as u64;
    let (mut stage, mut taken, mut left) = (None, 0, 0);
    for round in 0..2 * upgrades() as u64 {
        let (of_round, mut daemon, load) = stage.take().unwrap_or_else(|| {
            let stage = Stage::new();
            let daemon = stage.start();
            let load = Load::start(&stage.socket(), "vm1", CLIENTS);
            (stage, daemon, load)
        });
        let words = of_round.words("--take-over");
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut command = serve_command(&words);
        let started = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut newcomer = started.expect("the command runs");
        std::thread::sleep(Duration::from_micros(round * 7_919_003 % range));
        newcomer.kill().expect("our own child can be killed");
        newcomer.wait().expect("our own child can be waited for");
        std::thread::sleep(Duration::from_millis(50));
        if daemon.is_running() {
            left += 1;
            stage = Some((of_round, daemon, load));
        } else {
            // It had taken over before it was killed, so its clients have lost their daemon.
            taken += 1;
            load.give_up();
        }
    }
    eprintln!("{left} killed before they took over, {taken} after");
    assert!(left > 0, "all had taken over: no test");
    if let Some((stage, daemon, load)) = stage {
        assert!(load.stop() > 0);
        stage.upgrade(daemon).stop();
    }
}

#[test]
fn silent_peer_of_the_upgrade_socket_holds_up_no_change() {
    let (_stage, daemon, mut control, path) = changeable("name=vm1,ram=1M");
    let mut change = |name: &str| {
        let start = Instant::now();
        let keys = json!({"kind": "disk", "name": name, "keys": {"ram": "1M"}});
        control.call("config.add", &keys).expect("it is changed");
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    };
    let silent = UnixStream::connect(&path).expect("it listens");
    std::thread::sleep(Duration::from_millis(100));
    change("a");
    drop(silent);
    let mut slow = greeted(&path);
    change("b");
    // It has opened disks and addresses of a daemon that is another one now.
    slow.send(&Message::Take, &[], LIMIT).expect("it listens");
    let refused = slow.receive(LIMIT).expect_err("it was changed").to_string();
    assert!(refused.contains("changed meanwhile"), "{refused}");
    let mut late = greeted(&path);
    late.send(&Message::Take, &[], LIMIT).expect("it listens");
    while !matches!(late.receive(LIMIT).expect("clients").0, Message::End { .. }) {}
    let keys = json!({"kind": "disk", "name": "c", "keys": {"ram": "1M"}});
    let refused = control
        .call("config.add", &keys)
        .expect_err("it hands over")
        .to_string();
    assert!(refused.contains("another daemon takes over"), "{refused}");
    drop(late);
    std::thread::sleep(Duration::from_millis(100));
    control.call("config.add", &keys).expect("it goes on");
    daemon.stop();
}

#[test]
fn takeover_that_fails_at_the_end_of_a_daemon_permits_no_change_again() {
    let (stage, mut daemon, mut control, path) = changeable("name=vm1,null=1M,latency=3s");
    let mut client = Client::connect(&stage.socket(), "vm1").expect("it is served");
    let read = client.send(Command::Read, 0, 0, BLOCK as u32, &[]);
    read.expect("a read is sent");
    let peer = UnixStream::connect(&path).expect("it listens");
    std::thread::sleep(Duration::from_millis(200));
    daemon.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(200));
    drop(peer);
    std::thread::sleep(Duration::from_millis(200));
    let keys = json!({"kind": "disk", "name": "a", "keys": {"ram": "1M"}});
    let refused = control
        .call("config.add", &keys)
        .expect_err("it ends")
        .to_string();
    assert!(refused.contains("shuts down"), "{refused}");
    let status = daemon.ended_within(super::END_TIME);
    assert!(status.success(), "{status}");
}

/// A daemon with one disk that can be upgraded and changed, and its upgrade socket.
fn changeable(disk: &str) -> (Stage, Daemon, Control, PathBuf) {
    let stage = Stage::of(Scratch::new(), &[disk]);
    let mut words = stage.words("--upgrade-socket");
    words.extend([
        "--control".to_owned(),
        format!("unix:{}", stage.scratch.word("control.sock")),
    ]);
    let daemon = Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let control = Control::connect(&stage.scratch.path("control.sock")).expect("it is served");
    let path = stage.upgrade_path();
    (stage, daemon, control, path)
}

/// Acts as a daemon that takes over, up to a step.
pub(crate) fn pretend(path: &Path, step: usize) -> Channel {
    let mut channel = greeted(path);
    if step == 0 {
        return channel;
    }
    let disk = Disk {
        name: "vm1".to_owned(),
        size: DISK_BYTES,
        block_size: 512,
        read_only: false,
    };
    channel
        .send(&Message::Disk(disk), &[], LIMIT)
        .expect("it listens");
    if step == 1 {
        return channel;
    }
    channel.send(&Message::Take, &[], LIMIT).expect("it listens");
    if step == 2 {
        return channel;
    }
    channel.receive(LIMIT).expect("it hands over");
    if step == 3 {
        return channel;
    }
    while !matches!(channel.receive(LIMIT).expect("clients").0, Message::End { .. }) {}
    if step == 4 {
        return channel;
    }
    channel.send(&Message::Ready, &[], LIMIT).expect("it listens");
    if step == STEPS {
        assert_eq!(channel.receive(LIMIT).expect("it lets go").0, Message::Go);
    }
    channel
}

/// A connection to the upgrade socket that has received the locks and sockets.
pub(crate) fn greeted(path: &Path) -> Channel {
    let mut channel = Channel::new(UnixStream::connect(path).expect("it listens")).expect("our own user");
    channel
        .send(&Message::Hello { version: VERSION }, &[], LIMIT)
        .expect("it listens");
    while !matches!(
        channel.receive(LIMIT).expect("locks and sockets").0,
        Message::End { .. }
    ) {}
    channel
}

const LIMIT: Duration = Duration::from_secs(10);
/// The last step: the other daemon was told to end.
pub(crate) const STEPS: usize = 6;
