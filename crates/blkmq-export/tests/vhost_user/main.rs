//! Decides that drivers find their data where they left it, over the front door for virtual machines: a client that others have
//! written (`blkio`), and a small one of our own for what no good client does.

mod blk_cases;
mod client;
mod server;
mod sys;

use std::os::fd::{AsFd, BorrowedFd};

use blkio::{Blkio, Blkioq, MemoryRegion, ReqFlags};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};

use client::{AVAIL, Client, DATA, MEMORY_BYTES, NEXT, USED, WRITE, words};
use server::{DISK_BYTES, Server};

/// A client of `blkio` with as many queues as are asked for, and one region of memory.
struct Attached {
    client: Blkio,
    queues: Vec<Blkioq>,
    region: MemoryRegion,
}

impl Attached {
    fn new(server: &Server, queues: i32) -> Self {
        let mut client = Blkio::new("virtio-blk-vhost-user").unwrap();
        client.set_str("path", &server.path.to_string_lossy()).unwrap();
        client.connect().unwrap();
        client.set_i32("num-queues", queues).unwrap();
        let queues = client.start().unwrap().queues;
        let region = client.alloc_mem_region(REGION_BYTES).unwrap();
        client.map_mem_region(&region).unwrap();
        Self {
            client,
            queues,
            region,
        }
    }

    fn put(&self, at: usize, bytes: &[u8]) {
        let written = pwrite(self.file(), bytes, self.region.fd_offset as u64 + at as u64);
        assert_eq!(written, Ok(bytes.len()));
    }

    fn get(&self, at: usize, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        let count = pread(self.file(), &mut read, self.region.fd_offset as u64 + at as u64);
        assert_eq!(count, Ok(bytes));
        read
    }

    fn file(&self) -> BorrowedFd<'_> {
        sys::borrow(&self.region)
    }

    fn at(&self, at: usize) -> *mut u8 {
        (self.region.addr + at) as *mut u8
    }

    fn wait(&mut self, queue: usize, count: usize) {
        let mut done = sys::completions(&mut self.queues[queue], count);
        done.sort_unstable();
        let expected: Vec<(usize, i32)> = (0..count).map(|number| (number, 0)).collect();
        assert_eq!(done, expected);
    }
}

#[test]
fn a_client_of_others_finds_its_data_with_one_queue_and_with_two() {
    let server = Server::start();
    for queues in [1, 2] {
        let mut attached = Attached::new(&server, queues);
        assert_eq!(attached.client.get_u64("capacity").unwrap(), DISK_BYTES);
        let none = ReqFlags::empty();
        let content: Vec<u8> = (0..REGION_BYTES / 2)
            .map(|at| (at / 512 + at + queues as usize) as u8)
            .collect();
        attached.put(0, &content);
        for queue in 0..queues as usize {
            for number in 0..PIECES {
                let (at, start) = (number * PIECE, (queue * REGION_BYTES + number * PIECE) as u64);
                let from = attached.at(at);
                attached.queues[queue].write(start, from, PIECE, number, none);
            }
            attached.wait(queue, PIECES);
            attached.queues[queue].flush(0, none);
            attached.wait(queue, 1);
        }
        // Each reads what another has written, in pieces that lie elsewhere.
        for queue in 0..queues as usize {
            let other = queues as usize - 1 - queue;
            attached.put(REGION_BYTES / 2, &vec![0; REGION_BYTES / 2]);
            for number in 0..PIECES {
                let start = (other * REGION_BYTES + number * PIECE) as u64;
                let into = attached.at(REGION_BYTES / 2 + number * PIECE);
                attached.queues[queue].read(start, into, PIECE, number, none);
            }
            attached.wait(queue, PIECES);
            assert!(attached.get(REGION_BYTES / 2, REGION_BYTES / 2) == content);
        }
        zeroes_and_discards(&mut attached, &content);
    }
    server.end();
}

/// Zeroes the second piece, discards the third, and reads all three as a request of many pieces of memory.
fn zeroes_and_discards(attached: &mut Attached, content: &[u8]) {
    let none = ReqFlags::empty();
    attached.queues[0].write_zeroes(PIECE as u64, PIECE as u64, 0, none);
    attached.queues[0].discard(2 * PIECE as u64, PIECE as u64, 1, none);
    attached.wait(0, 2);
    let half = REGION_BYTES / 2;
    let parts: Vec<libc::iovec> = (0..3 * PIECE / 1024)
        .map(|part| libc::iovec {
            iov_base: attached.at(half + 1024 * part).cast(),
            iov_len: 1024,
        })
        .collect();
    attached.queues[0].readv(0, parts.as_ptr(), parts.len() as u32, 0, none);
    attached.wait(0, 1);
    assert!(attached.get(half, PIECE) == content[..PIECE]);
    assert!(attached.get(half + PIECE, PIECE).iter().all(|byte| *byte == 0));
    // Beyond the end: an error for that request alone.
    let into = attached.at(0);
    attached.queues[0].read(DISK_BYTES, into, 512, 7, none);
    let ended = sys::completions(&mut attached.queues[0], 1);
    assert!(ended[0].0 == 7 && ended[0].1 < 0, "{ended:?}");
}

#[test]
fn a_ring_is_stopped_where_it_is_and_goes_on_from_there() {
    let server = Server::start();
    let mut client = Client::connect(&server.path);
    client.start();
    client.request(0, 1, 8);
    client.write(DATA + 512, &[0x5a; 512]);
    client.offer(&[0]);
    assert_eq!(client.used(1), [0]);
    assert_eq!(client.status(0), 0);
    // The base of a ring that has ended is where the next one begins.
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
    let client = Client::connect(&server.path);
    client.start();
    // Beyond the end, not known, a name in too short a buffer.
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
fn a_hostile_driver_loses_its_device_and_no_other_notices() {
    let server = Server::start();
    let good = Client::connect(&server.path);
    good.start();
    for trick in 0..5 {
        let mut bad = Client::connect(&server.path);
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
fn a_front_end_that_breaks_the_rules_is_hung_up_on() {
    let server = Server::start();
    // More memory than its file has, a pipe for an event, a message that nobody knows.
    let mut client = Client::connect(&server.path);
    client.share(MEMORY_BYTES + 4096);
    assert!(client.is_hung_up());
    let mut client = Client::connect(&server.path);
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    client.send(12, &words(&[0]), &[pipe.as_fd()]);
    assert!(client.is_hung_up());
    let mut client = Client::connect(&server.path);
    client.send(999, &[], &[]);
    assert!(client.is_hung_up());
    server.end();
}

#[test]
fn what_a_killed_daemon_had_taken_is_done_again_in_order_and_once() {
    let server = Server::start();
    let client = Client::connect(&server.path);
    let record = memfd_create("record", MemfdFlags::CLOEXEC).unwrap();
    let bytes = 16 + 16 * 16 + 48;
    ftruncate(&record, bytes).unwrap();
    // Taken in the order 6, 0, 3; each writes its number to the same block, so that the last one's stays.
    let put = |at: u64, bytes: &[u8]| assert_eq!(pwrite(&record, bytes, at), Ok(bytes.len()));
    put(8, &1_u16.to_ne_bytes());
    put(10, &16_u16.to_ne_bytes());
    for (counter, head) in [(7_u64, 6_u16), (8, 0), (9, 3)] {
        client.request(head, 1, 4);
        client.write(DATA + 4096 * u64::from(head) + 512, &[head as u8; 512]);
        put(16 + 16 * u64::from(head), &[1]);
        put(16 + 16 * u64::from(head) + 8, &counter.to_ne_bytes());
    }
    // One more is available, which it had not taken: it reads the block.
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

const REGION_BYTES: usize = 2 << 20;
const PIECE: usize = 64 << 10;
const PIECES: usize = REGION_BYTES / 2 / PIECE;
const NEEDS_RESET: u64 = 0x40;
