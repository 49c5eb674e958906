//! Tests what happens to requests when the cluster hangs or dies: they wait, or end with an error if
//! configured. No acknowledged data is lost, other disks continue, and so does the daemon's shutdown.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::cluster::Ceph;
use crate::common::nbd::{Client, Command};
use crate::common::pattern::{BLOCK, block};
use crate::common::{Daemon, Scratch};

#[test]
fn while_the_osd_is_stopped_requests_wait_and_other_disks_of_the_same_thread_do_not() {
    let Some(ceph) = Ceph::find() else { return };
    let scratch = Scratch::new();
    let image = ceph.image("stopped", "64M");
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let disk = ceph.disk("x", image.name, "");
    let daemon = Daemon::start(&[
        "--reactors",
        "1",
        "--disk",
        &disk,
        "--disk",
        "name=ram,ram=8M",
        "--nbd",
        &nbd,
    ]);
    let socket = scratch.path("nbd.sock");
    let mut stuck = Client::connect(&socket, "x").expect("it is served");
    let mut other = Client::connect(&socket, "ram").expect("it is served");
    let stopped = ceph.stop_osd();
    // More than the queue issues at once.
    for number in 0..REQUESTS {
        let data = block(number, 1);
        stuck
            .send(Command::Write, 0, number * BLOCK as u64, BLOCK as u32, &data)
            .expect("it is sent");
    }
    let mut longest = Duration::ZERO;
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        let start = Instant::now();
        other.read(0, BLOCK).expect("a read of the other disk");
        longest = longest.max(start.elapsed());
    }
    // A thread that waited for the OSD would wait until it is continued.
    assert!(
        longest < Duration::from_secs(1),
        "a read of another disk took {longest:?}"
    );
    drop(stopped);
    for _ in 0..REQUESTS {
        stuck.reply().expect("it ends well");
    }
    for number in 0..REQUESTS {
        let found = stuck.read(number * BLOCK as u64, BLOCK).expect("a read");
        assert!(found == block(number, 1), "block {number}");
    }
    daemon.stop();
}

#[test]
fn with_a_timeout_requests_fail_while_the_osd_is_stopped_and_succeed_again() {
    let Some(ceph) = Ceph::find() else { return };
    let scratch = Scratch::new();
    let image = ceph.image("late", "8M");
    let daemon = Daemon::serve(&scratch, &[&ceph.disk("x", image.name, ",timeout=2")]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "x").expect("it is served");
    client.write(0, &block(0, 1)).expect("a write");
    let stopped = ceph.stop_osd();
    // NBD has no ETIMEDOUT.
    let failed = client.read(0, BLOCK).expect_err("no answer can come");
    assert_eq!(failed.raw_os_error(), Some(5), "{failed}");
    assert!(client.write(4096, &block(1, 1)).is_err());
    assert!(daemon.says("Connection timed out"), "{}", daemon.said());
    drop(stopped);
    let end = Instant::now() + LONG;
    while client.write(4096, &block(1, 2)).is_err() {
        assert!(Instant::now() < end, "it does not recover:\n{}", daemon.said());
    }
    assert!(client.read(0, BLOCK).expect("a read") == block(0, 1));
    assert!(client.read(4096, BLOCK).expect("a read") == block(1, 2));
    daemon.stop();
}

#[test]
fn osd_that_is_killed_under_load_loses_nothing_that_was_acknowledged() {
    let Some(ceph) = Ceph::find() else { return };
    if !ceph.outlives_its_osd() {
        // The other cluster of `cargo xtask ceph --test` runs this test.
        eprintln!("what this OSD has is gone with it: nothing to test here");
        return;
    }
    let scratch = Scratch::new();
    let image = ceph.image("killed", "16M");
    let daemon = Daemon::serve(&scratch, &[&ceph.disk("x", image.name, "")]);
    let socket = scratch.path("nbd.sock");
    let is_over = AtomicBool::new(false);
    let write = &|writer| write_until(&is_over, &socket, writer);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| scope.spawn(move || write(writer)))
            .collect();
        for _ in 0..2 {
            std::thread::sleep(Duration::from_millis(700));
            ceph.kill_and_start_osd(Duration::from_millis(500));
        }
        std::thread::sleep(Duration::from_secs(1));
        is_over.store(true, Ordering::Relaxed);
        let mut client = Client::connect(&socket, "x").expect("it is served");
        for (writer, thread) in (0..).zip(writers) {
            let generations = thread.join().expect("no write fails");
            for (index, generation) in (0..).zip(generations) {
                let number = writer * BLOCKS + index;
                let found = client.read(number * BLOCK as u64, BLOCK).expect("a read");
                assert!(
                    found == block(number, generation),
                    "block {number} of generation {generation}"
                );
            }
        }
    });
    daemon.stop();
}

/// Writes the blocks of one writer, one at a time. Returns the last generation of each.
fn write_until(is_over: &AtomicBool, socket: &std::path::Path, writer: u64) -> Vec<u64> {
    let mut client = Client::connect(socket, "x").expect("it is served");
    let mut generations = vec![0; BLOCKS as usize];
    for round in 1.. {
        for index in 0..BLOCKS {
            if is_over.load(Ordering::Relaxed) {
                return generations;
            }
            let number = writer * BLOCKS + index;
            client
                .write(number * BLOCK as u64, &block(number, round))
                .expect("a write waits for the OSD");
            generations[index as usize] = round;
        }
    }
    generations
}

#[test]
fn end_of_the_daemon_does_not_wait_for_a_cluster_that_hangs() {
    let Some(ceph) = Ceph::find() else { return };
    let scratch = Scratch::new();
    let image = ceph.image("hangs", "8M");
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let disk = ceph.disk("x", image.name, "");
    let mut daemon = Daemon::start(&["--disk", &disk, "--nbd", &nbd]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "x").expect("it is served");
    let stopped = ceph.stop_osd();
    // A read of data that was never written would not need an answer of the cluster.
    let data = block(0, 1);
    client
        .send(Command::Write, 0, 0, BLOCK as u32, &data)
        .expect("it is sent");
    std::thread::sleep(Duration::from_millis(200));
    daemon.signal(Signal::TERM);
    let status = daemon.ended_within(Duration::from_secs(25));
    assert_eq!(status.code(), Some(1), "{status}; it said:\n{}", daemon.said());
    drop(stopped);
    wait_for_no_watchers(&ceph, image.name);
}

/// Waits until the cluster has forgotten a daemon that was killed.
pub(super) fn wait_for_no_watchers(ceph: &Ceph, image: &str) {
    let end = Instant::now() + LONG;
    while !ceph.rbd(&["status", image]).stdout.contains("Watchers: none") {
        assert!(Instant::now() < end, "somebody still watches {image}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

const REQUESTS: u64 = 300;
const WRITERS: u64 = 4;
const BLOCKS: u64 = 32;
const LONG: Duration = Duration::from_secs(60);
