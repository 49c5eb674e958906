//! Tests how the daemon ends: drained and with success at the first SIGTERM, or when `ctl drain` asks for it;
//! at once at the second SIGTERM.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use blkmq::control::client::Client as Control;
use rustix::process::Signal;
use serde_json::json;

use crate::common::daemon::program;
use crate::common::nbd::{Client, Command};
use crate::common::pattern::{BLOCK, block};
use crate::common::{Daemon, Scratch};

#[test]
fn sigterm_ends_with_success_and_every_acknowledged_write_in_the_file() {
    let scratch = Scratch::new();
    let image = scratch.image("vm1.raw", 4 << 20);
    let mut daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={image}")]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("the daemon serves it");
    for number in 0..256 {
        client
            .write(number * BLOCK as u64, &block(number, 1))
            .expect("a write");
    }
    // The client stays connected: it must not keep the daemon from ending.
    daemon.signal(Signal::TERM);
    let status = daemon.ended_within(Duration::from_secs(10));
    assert_eq!(status.code(), Some(0), "{status}; it said:\n{}", daemon.said());
    let file = std::fs::read(&image).expect("the image is there");
    for number in 0..256 {
        let at = number * BLOCK;
        assert!(
            file[at..at + BLOCK] == block(number as u64, 1),
            "block {number} is not in the file"
        );
    }
    assert!(!scratch.path("nbd.sock").exists(), "the socket was left behind");
}

#[test]
fn requests_in_flight_at_sigterm_are_answered() {
    let scratch = Scratch::new();
    let image = scratch.image("vm1.raw", 4 << 20);
    let mut daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={image}")]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("the daemon serves it");
    for number in 0..64 {
        let data = block(number, 1);
        client
            .send(Command::Write, 0, number * BLOCK as u64, BLOCK as u32, &data)
            .expect("a write is sent");
    }
    // The first reply shows that the daemon has begun to receive the writes.
    client.reply().expect("a reply before the end");
    daemon.signal(Signal::TERM);
    let answered = 1 + (1..64).take_while(|_| client.reply().is_ok()).count();
    let status = daemon.ended_within(Duration::from_secs(10));
    assert_eq!(status.code(), Some(0), "{status}; it said:\n{}", daemon.said());
    // Unanswered writes were never received; answered ones must be in the file, whichever they are.
    let file = std::fs::read(&image).expect("the image is there");
    let present = (0..64)
        .filter(|number| file[number * BLOCK..][..BLOCK] == block(*number as u64, 1))
        .count();
    assert!(
        present >= answered,
        "{answered} writes were answered, {present} are in the file"
    );
}

/// A daemon with a control socket and a disk.
fn asked(scratch: &Scratch, disk: &str) -> Daemon {
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let control = format!("unix:{}", scratch.word("control.sock"));
    Daemon::start(&["--disk", disk, "--nbd", &nbd, "--control", &control])
}

#[test]
fn ctl_drain_is_answered_at_once_takes_no_more_and_ends_what_is_under_way() {
    let scratch = Scratch::new();
    let mut daemon = asked(&scratch, "name=slow,null=1M,latency=4s");
    let mut again = Control::connect(&scratch.path("control.sock")).expect("it is served");
    let mut client = Client::connect(&scratch.path("nbd.sock"), "slow").expect("the daemon serves it");
    client
        .send(Command::Read, 0, 0, BLOCK as u32, &[])
        .expect("a read is sent");
    std::thread::sleep(Duration::from_millis(300));
    // The daemon removes its path at once; here its socket stays within reach.
    let other = scratch.path("other.sock");
    std::fs::hard_link(scratch.path("nbd.sock"), &other).expect("a second name");
    let control = format!("unix:{}", scratch.word("control.sock"));
    let output = std::process::Command::new(program())
        .args(["ctl", "--socket", &control, "drain"])
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{output:?}");
    assert!(daemon.is_running(), "a read is under way");
    // A repeated request does not end it at once, unlike a second signal.
    for _ in 0..2 {
        let answer = again.call("daemon.drain", &json!({})).expect("an answer");
        assert_eq!(answer, json!({}));
    }
    let start = Instant::now();
    while Client::connect(&other, "slow").is_ok() {}
    assert!(
        start.elapsed() < Duration::from_secs(2),
        "clients are let in, or wait for nobody: {:?}",
        start.elapsed()
    );
    let refused = again.call("config.remove", &json!({"kind": "disk", "name": "slow"}));
    let refused = refused.expect_err("it shuts down").to_string();
    assert!(refused.contains("the daemon shuts down"), "{refused}");
    client.reply().expect("what was under way is answered");
    let status = daemon.ended_within(Duration::from_secs(10));
    assert_eq!(status.code(), Some(0), "{status}; it said:\n{}", daemon.said());
    assert!(
        !scratch.path("control.sock").exists(),
        "the socket was left behind"
    );
}

#[test]
fn caller_of_shutdown_need_not_wait_for_the_answer() {
    let scratch = Scratch::new();
    let image = scratch.image("vm1.raw", 1 << 20);
    let mut daemon = asked(&scratch, &format!("name=vm1,file={image}"));
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("the daemon serves it");
    client.write(0, &block(0, 1)).expect("a write");
    let mut rude = UnixStream::connect(scratch.path("control.sock")).expect("it listens");
    rude.write_all(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"daemon.drain\"}\n")
        .expect("it takes it");
    drop(rude);
    let status = daemon.ended_within(Duration::from_secs(10));
    assert_eq!(status.code(), Some(0), "{status}; it said:\n{}", daemon.said());
    let file = std::fs::read(&image).expect("the image is there");
    assert!(file[..BLOCK] == block(0, 1), "the write is not in the file");
}

#[test]
fn hangup_without_a_difference_is_spoken_of() {
    let scratch = Scratch::new();
    let mut daemon = Daemon::serve(&scratch, &["name=vm1,ram=1M"]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("the daemon serves it");
    client.write(0, &block(0, 1)).expect("a write");
    for _ in 0..2 {
        daemon.signal(Signal::HUP);
    }
    assert!(
        daemon.wait_for(Duration::from_secs(10), |line| line
            .contains("SIGHUP: nothing differs")),
        "nothing tells of it:\n{}",
        daemon.said()
    );
    assert!(client.read(0, BLOCK).expect("a read") == block(0, 1));
    daemon.signal(Signal::TERM);
    let status = daemon.ended_within(Duration::from_secs(10));
    assert_eq!(status.code(), Some(0), "{status}; it said:\n{}", daemon.said());
}

/// A daemon, and a client whose read takes that long and is under way.
fn at_work(scratch: &Scratch, latency: &str) -> (Daemon, Client) {
    let daemon = Daemon::serve(scratch, &[&format!("name=slow,null=1M,latency={latency}")]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "slow").expect("the daemon serves it");
    client
        .send(Command::Read, 0, 0, BLOCK as u32, &[])
        .expect("a read is sent");
    std::thread::sleep(Duration::from_millis(300));
    (daemon, client)
}

#[test]
fn signal_that_arrives_twice_at_once_is_one() {
    let scratch = Scratch::new();
    let (mut daemon, mut client) = at_work(&scratch, "1s");
    // As `timeout` does: to the process, and to its group.
    daemon.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(20));
    daemon.signal(Signal::TERM);
    client.reply().expect("what was under way is answered");
    let status = daemon.ended_within(Duration::from_secs(10));
    assert_eq!(status.code(), Some(0), "{status}; it said:\n{}", daemon.said());
    assert!(!scratch.path("nbd.sock").exists(), "the socket was left behind");
}

#[test]
fn second_sigterm_ends_at_once_what_the_first_one_waits_for() {
    let scratch = Scratch::new();
    // A request that stays in flight for longer than any limit.
    let (mut daemon, _client) = at_work(&scratch, "3600s");
    daemon.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(700));
    assert!(
        daemon.is_running(),
        "it did not wait for the request in flight; it said:\n{}",
        daemon.said()
    );
    daemon.signal(Signal::TERM);
    let status = daemon.ended_within(Duration::from_secs(2));
    assert!(
        !status.success(),
        "it left a request unanswered and claims success"
    );
}

#[test]
fn same_image_can_be_served_again_at_once() {
    let scratch = Scratch::new();
    let image = scratch.image("vm1.raw", 1 << 20);
    for generation in 1..4 {
        let daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={image}")]);
        let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("the daemon serves it");
        let found = client.read(0, BLOCK).expect("a read");
        assert!(
            found == block(0, generation - 1),
            "generation {} is not there",
            generation - 1
        );
        client.write(0, &block(0, generation)).expect("a write");
        daemon.stop();
    }
}
