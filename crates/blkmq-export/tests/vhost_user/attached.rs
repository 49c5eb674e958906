//! Tests that a client from another project (`blkio`) finds its data where it wrote it. Other tests
//! use this, too.

use std::os::fd::BorrowedFd;
use std::path::Path;

use blkio::{Blkio, Blkioq, MemoryRegion, ReqFlags};
use rustix::io::{pread, pwrite};

use super::sys;

/// A client of `blkio` with the requested number of queues and one region of memory.
struct Attached {
    client: Blkio,
    queues: Vec<Blkioq>,
    region: MemoryRegion,
}

impl Attached {
    fn new(path: &Path, queues: i32) -> Self {
        let mut client = Blkio::new("virtio-blk-vhost-user").unwrap();
        client.set_str("path", &path.to_string_lossy()).unwrap();
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

/// Writes with one queue and with two, reads with the other, zeroes and discards, on a disk of
/// `disk_bytes`.
pub(crate) fn find_data(path: &Path, disk_bytes: u64) {
    for queues in [1, 2] {
        let mut attached = Attached::new(path, queues);
        assert_eq!(attached.client.get_u64("capacity").unwrap(), disk_bytes);
        let none = ReqFlags::empty();
        let content: Vec<u8> = (0..CONTENT_BYTES)
            .map(|at| (at / 512 + at + queues as usize) as u8)
            .collect();
        attached.put(0, &content);
        for queue in 0..queues as usize {
            for number in 0..PIECES {
                let (at, start) = (number * PIECE, (queue * APART + number * PIECE) as u64);
                let from = attached.at(at);
                attached.queues[queue].write(start, from, PIECE, number, none);
            }
            attached.wait(queue, PIECES);
            attached.queues[queue].flush(0, none);
            attached.wait(queue, 1);
        }
        // Each reads what another has written, in differently placed pieces.
        for queue in 0..queues as usize {
            let other = queues as usize - 1 - queue;
            let place = place_of_reads(queue);
            for number in 0..PIECES {
                let start = (other * APART + number * PIECE) as u64;
                let into = attached.at(place + number * PIECE);
                attached.queues[queue].read(start, into, PIECE, number, none);
            }
            attached.wait(queue, PIECES);
            assert!(attached.get(place, CONTENT_BYTES) == content);
        }
        zeroes_and_discards(&mut attached, &content, disk_bytes);
    }
}

/// Zeroes the second piece, discards the third, and reads all three in a request with many pieces
/// of memory.
fn zeroes_and_discards(attached: &mut Attached, content: &[u8], disk_bytes: u64) {
    let none = ReqFlags::empty();
    attached.queues[0].write_zeroes(PIECE as u64, PIECE as u64, 0, none);
    attached.queues[0].discard(2 * PIECE as u64, PIECE as u64, 1, none);
    attached.wait(0, 2);
    let place = place_of_reads(0);
    let parts: Vec<libc::iovec> = (0..3 * PIECE / 1024)
        .map(|part| libc::iovec {
            iov_base: attached.at(place + 1024 * part).cast(),
            iov_len: 1024,
        })
        .collect();
    attached.queues[0].readv(0, parts.as_ptr(), parts.len() as u32, 0, none);
    attached.wait(0, 1);
    assert!(attached.get(place, PIECE) == content[..PIECE]);
    assert!(attached.get(place + PIECE, PIECE).iter().all(|byte| *byte == 0));
    // Beyond the end: only that request fails.
    let into = attached.at(0);
    attached.queues[0].read(disk_bytes, into, 512, 7, none);
    let ended = sys::completions(&mut attached.queues[0], 1);
    assert!(ended[0].0 == 7 && ended[0].1 < 0, "{ended:?}");
}

/// The part of the region into which a queue reads. Each queue has its own: what orders the requests
/// of two queues is in the guest's memory, which ThreadSanitizer sees at one address for us and at
/// another for the client.
fn place_of_reads(queue: usize) -> usize {
    (1 + queue) * CONTENT_BYTES
}

/// The content that is written, and what each of two queues reads.
const REGION_BYTES: usize = 3 * CONTENT_BYTES;
const CONTENT_BYTES: usize = 1 << 20;
/// Between the starts of what the queues write.
const APART: usize = 2 * CONTENT_BYTES;
const PIECE: usize = 64 << 10;
const PIECES: usize = CONTENT_BYTES / PIECE;
