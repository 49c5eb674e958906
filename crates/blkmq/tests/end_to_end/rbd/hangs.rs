//! Tests whether disks outside of a cluster notice that it hangs: neither their requests nor requests for
//! their block status may be delayed, however many of these its own clients send.

use std::io::Write;
use std::time::{Duration, Instant};

use super::cluster::{Ceph, Image};
use crate::block_status::{answer, asks, question};
use crate::common::nbd::{Client, Command};
use crate::common::pattern::{BLOCK, block};
use crate::common::{Daemon, Scratch};

#[test]
fn questions_about_allocation_are_answered_beside_a_cluster_that_hangs() {
    let Some(ceph) = Ceph::find() else { return };
    let scratch = Scratch::new();
    let images = ["asked-a", "asked-b", "asked-c"].map(|name| ceph.image(name, "8M"));
    let local = scratch.image("local.raw", 8 << 20);
    let mut disks = vec![format!("name=local,file={local}")];
    for image in &images {
        disks.push(ceph.disk(image.name, image.name, ",open_timeout=10"));
    }
    let disks: Vec<&str> = disks.iter().map(String::as_str).collect();
    let daemon = Daemon::serve(&scratch, &disks);
    let socket = scratch.path("nbd.sock");
    let connect = |image: &Image<'_>| Client::connect(&socket, image.name).expect("it is served");
    let mut writers: Vec<_> = images.iter().map(connect).collect();
    let mut hanging: Vec<_> = images.iter().map(|image| asks(&socket, image.name)).collect();
    let mut other = asks(&socket, "local");
    let stopped = ceph.stop_osd();
    // Block status is looked up after these writes have ended. The read that a lookup causes is of
    // another object, which is known not to exist.
    for writer in &mut writers {
        let data = block(0, 1);
        let sent = writer.send(Command::Write, 0, 4 << 20, BLOCK as u32, &data);
        sent.expect("it is sent");
    }
    std::thread::sleep(Duration::from_millis(200));
    for client in &mut hanging {
        for cookie in 0..QUESTIONS {
            client.write_all(&question(cookie, 8 << 20)).expect("it is sent");
        }
    }
    // By now they have been sent to the cluster.
    std::thread::sleep(Duration::from_millis(500));
    let start = Instant::now();
    for cookie in 0..QUESTIONS {
        other.write_all(&question(cookie, 8 << 20)).expect("it is sent");
        answer(&mut other);
        let taken = start.elapsed();
        assert!(taken < Duration::from_secs(2), "the local disk's took {taken:?}");
    }
    let threads = threads(&daemon);
    drop(stopped);
    println!(
        "{threads:?} threads for lookups and for calls, {:?}",
        start.elapsed()
    );
    assert!(threads.1 > 0, "nobody waits for the cluster: no test");
    // One for the pool, one for each image, and those that are not involved.
    assert!(
        threads.0 <= 3 && threads.1 <= images.len(),
        "{threads:?} threads for lookups and for calls"
    );
    for writer in &mut writers {
        writer.reply().expect("it ends well");
    }
    for client in &mut hanging {
        (0..QUESTIONS).for_each(|_| answer(client));
    }
    daemon.stop();
}

/// How many threads look up block status, and how many make calls that may block.
fn threads(daemon: &Daemon) -> (usize, usize) {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.id())).expect("our own child");
    let names: Vec<String> = tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .collect();
    let count = |wanted: &str| names.iter().filter(|name| name.trim() == wanted).count();
    (count("lookup"), count("blkmq-rbd"))
}

const QUESTIONS: u64 = 20;
