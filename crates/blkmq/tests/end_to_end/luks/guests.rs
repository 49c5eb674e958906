//! A guest that changes the memory of its requests while they are under way: it spoils its own data, and nobody
//! else's. The daemon encrypts what it has copied, and decrypts a read where the guest sees it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blkmq_testkit::vhost_user::{FrontEnd, WRITE};
use rustix::io::{pread, pwrite};

use super::crypt::{Crypt, has_tools};
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::{Daemon, Scratch};
use crate::vhost_user::Ring;

#[test]
fn guest_that_changes_memory_of_requests_under_way_harms_itself_alone() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let vhost_user = format!("unix:{}", scratch.word("{disk}.vsock"));
    // One reactor, so that all use the same memory for encryption.
    let mut words = vec!["--reactors", "1", "--nbd", &nbd, "--vhost-user", &vhost_user];
    let disks: Vec<String> = ["guest", "neighbour"]
        .iter()
        .flat_map(|name| {
            let options = "--type luks2 --pbkdf pbkdf2 --sector-size 4096";
            let header = crypt.detached_as(&format!("{name}.header"), options);
            let key = crypt.key_file();
            [
                format!("name={name}-raw,ram=8M"),
                format!("name={name},luks={name}-raw,header={header},key={key},block_size=512"),
            ]
        })
        .collect();
    disks.iter().for_each(|disk| words.extend(["--disk", disk]));
    let daemon = Daemon::start(&words);
    let [mut own, mut neighbour] = ["guest", "neighbour"]
        .map(|disk| Client::connect(&scratch.path("nbd.sock"), disk).expect("it is served"));
    own.write(0, &vec![EDGE; AREA]).expect("a write");
    let fixed: Vec<u8> = (0..AREA / BLOCK)
        .flat_map(|number| block(number as u64, 1))
        .collect();
    own.write(FIXED, &fixed).expect("a write");

    let front_end = FrontEnd::connect(&scratch.path("guest.vsock"));
    front_end.start();
    front_end.write(WRITTEN, &vec![ONE; AREA]);
    let memory = front_end.memory.try_clone().expect("a copy of the descriptor");
    let (is_over, mut seen) = (AtomicBool::new(false), Seen::default());
    std::thread::scope(|scope| {
        // Also if an assertion fails.
        let _over = Over(&is_over);
        scope.spawn(|| change(&memory, &is_over));
        let mut guest = Guest {
            front_end,
            ring: Ring::SPLIT,
        };
        let begin = Instant::now();
        while seen.rounds <= 2 * BLOCKS || !seen.is_enough() {
            assert!(
                begin.elapsed() < RUN_MAX,
                "nothing is changed under way: {seen:?}"
            );
            let (round, number) = (seen.rounds, seen.rounds % BLOCKS);
            let (place, generation) = (OTHERS + number * BLOCK as u64, round / BLOCKS + 1);
            guest.front_end.write(HONEST, &block(number, generation));
            // The changed write begins and ends inside a sector.
            guest.offer(0, Kind::Write, 512, WRITTEN, AREA - 1024);
            guest.offer(3, Kind::Read, FIXED, READ, AREA);
            guest.offer(6, Kind::Write, place, HONEST, BLOCK);
            let of_neighbour = block(number, generation + 7);
            neighbour.write(place, &of_neighbour).expect("a write");
            guest.wait_for(3);
            seen.read(&guest.memory(READ), &fixed);
            guest.offer(6, Kind::Read, place, HONEST, BLOCK);
            guest.wait_for(1);
            assert!(
                guest.memory(HONEST)[..BLOCK] == block(number, generation),
                "round {round}"
            );
            guest.offer(6, Kind::Read, 0, HONEST, AREA);
            guest.wait_for(1);
            seen.written(&guest.memory(HONEST));
            assert!(
                neighbour.read(place, BLOCK).expect("a read") == of_neighbour,
                "round {round}"
            );
            seen.rounds += 1;
        }
    });
    assert!(
        own.read(FIXED, AREA).expect("a read") == fixed,
        "what was read only"
    );
    for number in 0..BLOCKS {
        let generation = (seen.rounds - 1 - number) / BLOCKS + 1;
        let place = OTHERS + number * BLOCK as u64;
        assert!(own.read(place, BLOCK).expect("a read") == block(number, generation));
        assert!(neighbour.read(place, BLOCK).expect("a read") == block(number, generation + 7));
    }
    drop((own, neighbour));
    daemon.stop();
}

/// Changes the memory of a write and of a read all the time.
fn change(memory: &OwnedFd, is_over: &AtomicBool) {
    let (one, other) = ([ONE; STEP], [OTHER; STEP]);
    // Relaxed: a flag.
    while !is_over.load(Ordering::Relaxed) {
        for bytes in [&other, &one] {
            for at in (0..AREA).step_by(STEP) {
                for area in [WRITTEN, READ] {
                    assert_eq!(pwrite(memory.as_fd(), bytes, area + at as u64), Ok(STEP));
                }
            }
        }
    }
}

/// Ends the changes when it is dropped.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What came of the changes.
#[derive(Debug, Default)]
struct Seen {
    rounds: u64,
    /// Rounds whose write has more steps between the two kinds of bytes than its memory has at any moment.
    mixed: u64,
    /// Rounds whose read has bytes that nobody wrote: those that were changed before they were decrypted.
    spoilt: u64,
}

impl Seen {
    fn is_enough(&self) -> bool {
        self.mixed > 0 && self.spoilt > 0
    }

    /// Takes what the disk has where the guest wrote: bytes that were in its memory, between its own edges.
    fn written(&mut self, found: &[u8]) {
        let (inner, len) = (512..AREA - 512, AREA);
        assert!(
            found[..inner.start].iter().all(|byte| *byte == EDGE),
            "the first sector"
        );
        assert!(
            found[inner.end..len].iter().all(|byte| *byte == EDGE),
            "the last sector"
        );
        let inner = &found[inner];
        let is_known = inner.iter().all(|byte| [ONE, OTHER].contains(byte));
        assert!(
            is_known,
            "the disk has bytes that were never in the guest's memory"
        );
        let steps = inner.windows(2).filter(|pair| pair[0] != pair[1]).count();
        self.mixed += u64::from(steps > 1);
    }

    fn read(&mut self, found: &[u8], fixed: &[u8]) {
        let is_foreign = |(found, fixed): (&u8, &u8)| ![*fixed, ONE, OTHER].contains(found);
        self.spoilt += u64::from(found.iter().zip(fixed).any(is_foreign));
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Read = 0,
    Write = 1,
}

struct Guest {
    front_end: FrontEnd,
    ring: Ring,
}

impl Guest {
    fn offer(&mut self, head: u16, kind: Kind, offset: u64, memory: u64, bytes: usize) {
        let base = self.front_end.fill(head, kind as u32, offset / 512);
        let flags = match kind {
            Kind::Read => WRITE,
            Kind::Write => 0,
        };
        let chain = [
            (base, 16, 0),
            (memory, bytes as u32, flags),
            (base + 1024, 1, WRITE),
        ];
        self.ring.offer(&self.front_end, head, chain);
        self.front_end.kick();
    }

    /// Waits until so many requests have ended, which must have been done.
    fn wait_for(&mut self, requests: usize) {
        let begin = Instant::now();
        for _ in 0..requests {
            let head = loop {
                if let Some(head) = self.ring.take(&self.front_end) {
                    break head;
                }
                assert!(
                    begin.elapsed() < Duration::from_secs(10),
                    "a request does not end"
                );
                std::thread::yield_now();
            };
            assert_eq!(self.front_end.status(head), 0, "head {head}");
        }
    }

    /// An area of the guest's memory.
    fn memory(&self, at: u64) -> Vec<u8> {
        let mut bytes = vec![0; AREA];
        assert_eq!(pread(&self.front_end.memory, &mut bytes[..], at), Ok(AREA));
        bytes
    }
}

/// Bytes of an area of memory: they are encrypted in several slices.
const AREA: usize = 256 << 10;
const STEP: usize = 4096;
/// Where in the guest's memory what is changed is written from and read to, and what is not changed.
const WRITTEN: u64 = 0x4_0000;
const READ: u64 = 0x8_0000;
const HONEST: u64 = 0xc_0000;
/// Where on the disks: what is read only, and blocks that are written as usual. The changed write is at the start.
const FIXED: u64 = 1 << 20;
const OTHERS: u64 = 2 << 20;
const BLOCKS: u64 = 16;
/// What is in the changed memory, and what is around the changed write on the disk.
const ONE: u8 = 0x41;
const OTHER: u8 = 0x42;
const EDGE: u8 = 0x55;
const RUN_MAX: Duration = Duration::from_secs(60);
