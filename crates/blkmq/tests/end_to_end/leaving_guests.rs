//! Tests whether others are served while the memory of a guest that has ended is freed, which takes long.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};

use crate::common::{Daemon, Scratch};
use blkmq_testkit::vhost_user::{AVAIL, FrontEnd};

/// Reads a block repeatedly for a time. Returns the longest time that a read took.
fn longest_read(client: &FrontEnd, read: &mut u16, for_how_long: Duration) -> Duration {
    let (start, mut longest) = (Instant::now(), Duration::ZERO);
    while start.elapsed() < for_how_long {
        *read = read.wrapping_add(1);
        client.write(AVAIL + 2, &read.to_le_bytes());
        let begun = Instant::now();
        client.kick();
        client.used_up_to(*read);
        longest = longest.max(begun.elapsed());
    }
    longest
}

/// A front end whose memory is all allocated, with a ring that is served.
fn large_guest(path: &Path) -> FrontEnd {
    let guest = FrontEnd::connect(path);
    fallocate(&guest.memory, FallocateFlags::empty(), 0, GUEST_BYTES).expect("memory");
    guest.share(GUEST_BYTES);
    guest.start();
    guest.request(0, 0, 0);
    guest.offer(&[0]);
    assert_eq!((guest.used(1), guest.status(0)), (vec![0], 0));
    guest
}

#[test]
fn guest_of_a_gigabyte_that_ends_holds_nobody_up() {
    let scratch = Scratch::new();
    let address = format!("unix:{}", scratch.word("{disk}.sock"));
    let disks = ["--disk", "name=a,ram=1M", "--disk", "name=b,ram=1M"];
    // One reactor for both.
    let more = ["--vhost-user", &address, "--reactors", "1"];
    let daemon = Daemon::start(&[&disks, &more[..]].concat());
    let client = FrontEnd::connect(&scratch.path("a.sock"));
    client.start();
    client.request(0, 0, 0);
    let mut read = 0;
    let mut rounds = Vec::new();
    for _ in 0..3 {
        let mut guest = large_guest(&scratch.path("b.sock"));
        // The daemon now has the last reference to the memory.
        guest.memory = memfd_create("none", MemfdFlags::CLOEXEC).expect("a file");
        drop(guest);
        rounds.push(longest_read(&client, &mut read, Duration::from_millis(600)));
    }
    println!("longest reads beside a guest that ends: {rounds:?}");
    let best = rounds.iter().min().expect("three");
    assert!(*best < LIMIT, "{rounds:?}");
    drop(client);
    daemon.stop();
}

const GUEST_BYTES: u64 = 1 << 30;
/// A third of the time that freeing this much takes.
const LIMIT: Duration = Duration::from_millis(40);
