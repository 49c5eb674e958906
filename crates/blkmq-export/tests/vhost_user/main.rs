//! Tests that drivers find their data where they wrote it, over the front door for virtual
//! machines: with a client from another project (`blkio`), and with a small one of our own for what
//! no correct client does.

mod attached;
mod blk_cases;
mod server;
mod sys;

use std::os::fd::AsFd;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};

use blkmq_testkit::vhost_user::{AVAIL, DATA, FEATURES, FrontEnd, MEMORY_BYTES, NEXT, USED, WRITE, words};
use server::{DISK_BYTES, Server};

#[test]
fn client_of_others_finds_its_data_with_one_queue_and_with_two() {
    let server = Server::start();
    attached::find_data(&server.path, DISK_BYTES);
    server.end();
}

#[test]
fn discards_and_zeroing_with_wrong_flags_lengths_or_ranges_are_errors_of_their_own() {
    let server = Server::start();
    blk_cases::discards_and_zeroing(&server.path, DISK_BYTES);
    server.end();
}

#[test]
fn request_in_a_table_of_its_own_is_served_like_any_other() {
    let server = Server::start();
    blk_cases::table_of_its_own(&server.path);
    server.end();
}

#[test]
fn device_that_is_plugged_and_unplugged_again_and_again_finds_its_data() {
    let server = Server::start();
    blk_cases::plug_and_unplug(&server.path);
    server.end();
}

#[test]
fn requests_of_a_small_ring_without_tables_of_descriptors_have_room_in_it() {
    let server = Server::start();
    for (features, size, wanted) in [
        (FEATURES & !INDIRECT, 32, 30),
        (FEATURES & !INDIRECT, 64, 62),
        (FEATURES, 32, 62),
    ] {
        let mut client = FrontEnd::connect_with(&server.path, features);
        client.send(SET_VRING_NUM, &words(&[size << 32]), &[]);
        let segments = client.segments_max();
        assert_eq!(segments, wanted, "ring of {size}, features {features:#x}");
    }
    server.end();
}

#[test]
fn ring_is_stopped_where_it_is_and_goes_on_from_there() {
    let server = Server::start();
    let mut client = FrontEnd::connect(&server.path);
    client.start();
    client.request(0, 1, 8);
    client.write(DATA + 512, &[0x5a; 512]);
    client.offer(&[0]);
    assert_eq!(client.used(1), [0]);
    assert_eq!(client.status(0), 0);
    // The next ring begins at the base of the one that has stopped.
    client.request(3, 0, 8);
    assert_eq!(client.ask(11, &words(&[0])), 1 << 32);
    client.offer(&[0, 3]);
    client.start_at(1);
    assert_eq!(client.used(2), [0, 3]);
    assert_eq!(client.status(3), 0);
    assert_eq!(client.read::<512>(DATA + 3 * 4096 + 512), [0x5a; 512]);
    drop(client);
    server.end();
}

#[test]
fn errors_are_the_requests_own() {
    let server = Server::start();
    let client = FrontEnd::connect(&server.path);
    client.start();
    // A request beyond the end, one of an unknown type, and one with too short a buffer for the
    // name.
    client.request(0, 0, DISK_BYTES / 512);
    client.request(3, 99, 0);
    client.request(6, 8, 0);
    client.offer(&[0, 3, 6]);
    client.used(3);
    let told = [client.status(0), client.status(3), client.status(6)];
    assert_eq!(told, [1, 2, 1]);
    drop(client);
    server.end();
}

#[test]
fn serial_number_is_what_a_driver_gets_as_the_id() {
    let server = Server::start();
    let client = FrontEnd::connect(&server.path);
    client.start();
    client.request(0, 8, 0);
    client.descriptor(1, DATA + 512, 20, NEXT | WRITE, 2);
    client.offer(&[0]);
    client.used(1);
    assert_eq!(client.status(0), 0);
    assert_eq!(&client.read::<20>(DATA + 512), b"disk-serial-20-bytes");
    drop(client);
    server.end();
}

#[test]
fn hostile_driver_loses_its_device_and_no_other_notices() {
    let server = Server::start();
    let good = FrontEnd::connect(&server.path);
    good.start();
    for trick in 0..5 {
        let mut bad = FrontEnd::connect(&server.path);
        bad.start();
        bad.request(0, 0, 0);
        match trick {
            0 => bad.descriptor(1, DATA, 512, NEXT, 0),
            1 => bad.descriptor(1, MEMORY_BYTES - 1, 2, WRITE, 0),
            2 => bad.descriptor(0, DATA, 16, 4 | NEXT, 0),
            3 => bad.write(AVAIL + 2, &1000_u16.to_le_bytes()),
            _ => bad.descriptor(0, DATA, 16, WRITE, 0),
        }
        match trick {
            3 => bad.kick(),
            _ => bad.offer(&[0]),
        }
        let start = std::time::Instant::now();
        while bad.ask(40, &[]) & NEEDS_RESET == 0 {
            assert!(start.elapsed().as_secs() < 10, "trick {trick} goes unnoticed");
        }
        assert_eq!(bad.read::<2>(USED + 2), [0, 0], "trick {trick}");
        // After a reset it is served again.
        bad.send(34, &[], &[]);
        assert_eq!(bad.ask(40, &[]), 0);
        bad.write(AVAIL, &[0; 64]);
        bad.request(0, 0, 0);
        bad.start();
        bad.offer(&[0]);
        assert_eq!(bad.used(1), [0]);
    }
    good.request(0, 0, 0);
    good.offer(&[0]);
    assert_eq!((good.used(1), good.status(0)), (vec![0], 0));
    drop(good);
    server.end();
}

#[test]
fn front_end_that_breaks_the_rules_is_hung_up_on() {
    let server = Server::start();
    // More memory than the file has, a pipe instead of an event, an unknown message.
    let mut client = FrontEnd::connect(&server.path);
    client.share(MEMORY_BYTES + 4096);
    assert!(client.is_hung_up());
    let mut client = FrontEnd::connect(&server.path);
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    client.send(12, &words(&[0]), &[pipe.as_fd()]);
    assert!(client.is_hung_up());
    let mut client = FrontEnd::connect(&server.path);
    client.send(999, &[], &[]);
    assert!(client.is_hung_up());
    server.end();
}

#[test]
fn requests_that_a_killed_daemon_took_are_repeated_in_order_and_once() {
    let server = Server::start();
    let client = FrontEnd::connect(&server.path);
    let record = memfd_create("record", MemfdFlags::CLOEXEC).unwrap();
    let bytes = 16 + 16 * 16 + 48;
    ftruncate(&record, bytes).unwrap();
    // Submitted in the order 6, 0, 3. Each writes its number to the same block, so the last number
    // remains.
    let put = |at: u64, bytes: &[u8]| assert_eq!(pwrite(&record, bytes, at), Ok(bytes.len()));
    put(8, &1_u16.to_ne_bytes());
    put(10, &16_u16.to_ne_bytes());
    for (counter, head) in [(7_u64, 6_u16), (8, 0), (9, 3)] {
        client.request(head, 1, 4);
        client.write(DATA + 4096 * u64::from(head) + 512, &[head as u8; 512]);
        put(16 + 16 * u64::from(head), &[1]);
        put(16 + 16 * u64::from(head) + 8, &counter.to_ne_bytes());
    }
    // One more is available, which the device had not taken yet: it reads the block.
    client.request(9, 0, 4);
    for (place, head) in (0..).zip([6_u16, 0, 3, 9]) {
        client.write(AVAIL + 4 + 2 * place, &head.to_le_bytes());
    }
    client.write(AVAIL + 2, &4_u16.to_le_bytes());
    let mut spec = words(&[bytes, 0]);
    spec.extend([1_u16, 16].iter().flat_map(|half| half.to_ne_bytes()));
    client.send(32, &spec, &[record.as_fd()]);
    client.start();
    assert_eq!(client.used(4), [6, 0, 3, 9]);
    assert_eq!(client.read::<512>(DATA + 4096 * 9 + 512), [3; 512]);
    let marks: Vec<u8> = (0..16)
        .map(|head| {
            let mut mark = [0xff];
            pread(&record, &mut mark, 16 + 16 * head).unwrap();
            mark[0]
        })
        .collect();
    assert_eq!(marks, [0; 16], "nothing is in flight any more");
    drop(client);
    server.end();
}

const NEEDS_RESET: u64 = 0x40;

const INDIRECT: u64 = 1 << 28;
const SET_VRING_NUM: u32 = 8;
