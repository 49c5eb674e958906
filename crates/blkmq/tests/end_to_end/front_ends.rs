//! Tests what a monitor can rely on if it stops a ring, connects again, or truncates the memory that it has
//! shared.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::common::{Daemon, Scratch};
use crate::vhost_user::{HEADS, RECORD_BYTES, send_record};
use blkmq_testkit::vhost_user::{self, AVAIL, DATA, FrontEnd, USED, words};

#[test]
fn stop_waits_for_what_is_done_again_after_a_kill() {
    let scratch = Scratch::new();
    let disk = format!(
        "name=vm,file={},size=1M,create=on,group=/vm",
        scratch.word("vm.raw")
    );
    let address = format!("unix:{}", scratch.word("{disk}.sock"));
    let words_of_serve = [
        "--disk",
        &disk,
        "--group",
        "/vm,iops=20",
        "--vhost-user",
        &address,
    ];
    let mut daemon = Daemon::start(&words_of_serve);
    let record = memfd_create("record", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&record, RECORD_BYTES).unwrap();
    let mut client = FrontEnd::connect(&scratch.path("vm.sock"));
    send_record(&client, &record);
    client.start();
    for head in HEADS {
        client.request(head, 0, head.into());
    }
    client.offer(&HEADS);
    client.used(1);
    daemon.kill();
    daemon = Daemon::start(&words_of_serve);
    client.connect_again(&scratch.path("vm.sock"));
    send_record(&client, &record);
    client.start_at(0);
    client.send(GET_VRING_BASE, &words(&[0]), &[]);
    let state = client.reply();
    let used = u16::from_le_bytes(client.read(USED + 2));
    assert_eq!((&state[4..], used), (&5_u32.to_ne_bytes()[..], 5));
    daemon.stop();
}

#[test]
fn front_end_that_comes_again_waits_for_what_it_had_begun_before() {
    let scratch = Scratch::new();
    let address = format!("unix:{}", scratch.word("{disk}.sock"));
    let mut words = vec!["--disk", "name=vm,ram=1M,block_size=512,group=/vm"];
    words.extend(["--group", "/vm,iops=20", "--vhost-user", &address]);
    let mut daemon = Daemon::start(&words);
    let record = memfd_create("record", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&record, RECORD_BYTES).unwrap();
    let mut client = FrontEnd::connect(&scratch.path("vm.sock"));
    send_record(&client, &record);
    client.start();
    for head in [0, 3, 6, 9, 12] {
        client.request(head, 1, head.into());
    }
    client.offer(&[0, 3, 6, 9, 12]);
    // The cap lets one request pass at once, and the others one after the other.
    client.used(1);
    for _ in 0..2 {
        client.connect_again(&scratch.path("vm.sock"));
        send_record(&client, &record);
        client.start_at(0);
        assert_eq!(client.ask(GET_STATUS, &[]), 0);
    }
    // Three times as long as all of them take.
    let (start, mut used) = (Instant::now(), 0);
    while start.elapsed() < Duration::from_millis(750) {
        let now = u16::from_le_bytes(client.read(USED + 2));
        assert!(now >= used, "given back {used} chains, and then {now}");
        used = now;
    }
    let mut heads = client.used(5);
    heads.sort_unstable();
    assert_eq!(heads, [0, 3, 6, 9, 12], "each is given back once");
    assert!(daemon.is_running());
    drop(client);
    daemon.stop();
}

#[test]
fn memory_that_a_front_end_takes_away_costs_its_own_device_alone() {
    let scratch = Scratch::new();
    let ram = "name=ram,ram=1M,block_size=512";
    let file = format!(
        "name=file,file={},size=1M,create=on,block_size=512",
        scratch.word("file.raw")
    );
    let address = format!("unix:{}", scratch.word("{disk}.sock"));
    let mut daemon = Daemon::start(&["--disk", ram, "--disk", &file, "--vhost-user", &address]);
    let good = FrontEnd::connect(&scratch.path("ram.sock"));
    good.start();
    // Without any memory the ring is gone. Without the data of a write, which is copied for memory
    // and read by the kernel for a file, only that write can fail.
    for (disk, left, ends_with) in [
        ("ram", 0, None),
        ("file", 0, None),
        ("ram", DATA + 4096, None),
        ("file", DATA + 4096, Some(IO_ERROR)),
    ] {
        let what = format!("{disk}, {left} bytes left");
        let mut bad = FrontEnd::connect(&scratch.path(&format!("{disk}.sock")));
        bad.start();
        // Answered once all earlier messages are processed.
        assert_eq!(bad.ask(GET_STATUS, &[]), 0);
        bad.request(0, 1, 0);
        bad.descriptor(1, DATA + 8192, 512, vhost_user::NEXT, 2);
        bad.write(AVAIL + 2, &1_u16.to_le_bytes());
        ftruncate(&bad.memory, left).unwrap();
        bad.kick();
        let start = Instant::now();
        loop {
            assert!(daemon.is_running(), "the daemon died: {what}");
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "goes unnoticed: {what}"
            );
            match ends_with {
                Some(status) if bad.status(0) == status => break,
                None if bad.ask(GET_STATUS, &[]) & NEEDS_RESET != 0 => break,
                _ => {}
            }
        }
        assert_eq!(
            bad.ask(GET_STATUS, &[]) & NEEDS_RESET == 0,
            ends_with.is_some(),
            "{what}"
        );
        // Once the memory is there again, it is served again.
        ftruncate(&bad.memory, vhost_user::MEMORY_BYTES).unwrap();
        bad.send(RESET_DEVICE, &[], &[]);
        bad.share(vhost_user::MEMORY_BYTES);
        bad.write(0, &[0; DATA as usize]);
        bad.request(0, 0, 0);
        bad.start();
        bad.offer(&[0]);
        assert_eq!((bad.used(1), bad.status(0)), (vec![0], 0), "{what}");
    }
    good.request(0, 0, 0);
    good.offer(&[0]);
    assert_eq!((good.used(1), good.status(0)), (vec![0], 0));
    drop(good);
    daemon.stop();
}

#[test]
fn ring_outside_of_the_memory_is_spoken_of_once_and_served_when_the_memory_is_there() {
    let scratch = Scratch::new();
    let address = format!("unix:{}", scratch.word("{disk}.sock"));
    let mut daemon = Daemon::start(&["--disk", "name=vm,ram=1M", "--vhost-user", &address]);
    let mut client = FrontEnd::connect(&scratch.path("vm.sock"));
    // The first page of it contains the rings.
    client.share_at(vhost_user::MEMORY_BYTES, 1 << 40);
    client.start();
    client.request(0, 0, 0);
    client.offer(&[0]);
    let is_told = |line: &str| line.contains("ring 0 is not served");
    assert!(daemon.wait_for(Duration::from_secs(10), is_told));
    assert_eq!(client.ask(GET_STATUS, &[]), 0);
    client.share(vhost_user::MEMORY_BYTES);
    client.kick();
    assert_eq!((client.used(1), client.status(0)), (vec![0], 0));
    assert_eq!(daemon.said().matches("is not served").count(), 1);
    daemon.stop();
}

#[test]
fn ring_of_64_without_indirect_descriptors_writes_512_kib() {
    let scratch = Scratch::new();
    let file = scratch.word("vm.raw");
    let socket = scratch.word("vm.sock");
    let config = format!(
        "[disk.vm]\nfile = {file:?}\nsize = \"1M\"\ncreate = true\n[[export]]\nvhost-user = \"unix:{socket}\"\n"
    );
    std::fs::write(scratch.path("blkmq.toml"), config).unwrap();
    let daemon = Daemon::start(&["-c", &scratch.word("blkmq.toml")]);
    let (mut client, segments_max) = small_ring(&scratch.path("vm.sock"), 64);
    assert_eq!(segments_max, 62);
    // In another order, so that no two pieces are one.
    let pages: Vec<u64> = (0..128).rev().map(|page| PAGES + 4096 * page).collect();
    for (number, page) in (0..).zip(&pages) {
        client.write(*page, &[number; 4096]);
    }
    assert_eq!(client.write_pages(&pages, segments_max, 64), Ok(()));
    assert_eq!(client.ask(GET_STATUS, &[]), 0);
    let image = std::fs::read(&file).unwrap();
    for (number, page) in (0..).zip(image.chunks(4096).take(128)) {
        assert!(page.iter().all(|byte| *byte == number), "page {number}");
    }
    assert!(!daemon.said().contains("seg_max"), "{}", daemon.said());
    daemon.stop();
}

#[test]
fn ring_too_small_for_what_its_driver_was_told_is_named_with_the_key_that_helps() {
    let scratch = Scratch::new();
    let address = format!("unix:{}", scratch.word("{disk}.sock"));
    let mut daemon = Daemon::start(&["--disk", "name=vm,ram=1M", "--vhost-user", &address]);
    let (client, segments_max) = small_ring(&scratch.path("vm.sock"), 32);
    let pages: Vec<u64> = (0..128).map(|page| PAGES + 4096 * page).collect();
    assert_eq!(client.write_pages(&pages, segments_max, 32), Err(64));
    let is_told = |line: &str| line.contains("a ring has 32 descriptors") && line.contains("set seg_max=30");
    assert!(daemon.wait_for(Duration::from_secs(10), is_told));
    daemon.stop();
}

/// A front end like QEMU's with `queue-size=SIZE,indirect_desc=off`: it asks how many pieces a request may have, and then sets
/// up its ring. Returns the answer beside it.
fn small_ring(socket: &Path, size: u64) -> (FrontEnd, u32) {
    let mut client = FrontEnd::connect_with(socket, vhost_user::FEATURES & !INDIRECT);
    let segments_max = client.segments_max();
    client.start_with(size, 0);
    (client, segments_max)
}

/// Where pages of data begin in the memory.
const PAGES: u64 = 0x2_0000;
const INDIRECT: u64 = 1 << 28;
const GET_VRING_BASE: u32 = 11;
const GET_STATUS: u32 = 40;
const RESET_DEVICE: u32 = 34;
const NEEDS_RESET: u64 = 0x40;
const IO_ERROR: u8 = 1;
