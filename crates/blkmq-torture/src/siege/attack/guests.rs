//! Hostile virtual machines: invalid messages of their monitors, rings and descriptors of any content
//! that change while they are served, shared memory that is truncated, endless notifications, event
//! counters that are full.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;
use blkmq_testkit::Random;
use blkmq_testkit::vhost_user::{AVAIL, DATA, FEATURES, MEMORY_BYTES, USED, USER, send, words};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::{ioctl_fionbio, pwrite, write};

use super::{Site, Tally};

/// Attaches to the large disk repeatedly, and does wrong things in a random order.
pub(super) fn guests(site: &Site<'_>, random: &mut Random, end: Instant) -> Tally {
    let mut tally = Tally::default();
    while Instant::now() < end {
        match Guest::attach(&site.vhost_user, random).and_then(|guest| guest.attack(random)) {
            Ok(done) => tally.done += done,
            Err(_) => tally.failed += 1,
        }
        sleep(Duration::from_micros(random.below(2000)));
    }
    tally
}

/// A monitor and its guest: one ring in a file of shared memory.
struct Guest {
    stream: UnixStream,
    memory: OwnedFd,
    kick: OwnedFd,
    call: OwnedFd,
}

impl Guest {
    /// Connects, shares the memory, and has the ring served, split or packed.
    fn attach(socket: &Path, random: &mut Random) -> Result<Self> {
        let memory = memfd_create("guest", MemfdFlags::CLOEXEC)?;
        ftruncate(&memory, MEMORY_BYTES)?;
        let mut guest = Self {
            stream: UnixStream::connect(socket)?,
            memory,
            kick: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            call: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        };
        guest.stream.set_write_timeout(Some(PATIENCE))?;
        guest.stream.set_read_timeout(Some(PATIENCE))?;
        let features = random.one_of(&[FEATURES, FEATURES | 1 << 34]);
        guest.send(3, &[], &[])?;
        // The server accepts descriptors once it has answered the first message.
        guest.send(1, &[], &[])?;
        guest.stream.read_exact(&mut [0; 20])?;
        guest.send(2, &[features], &[])?;
        guest.send(16, &[PROTOCOL], &[])?;
        guest.send(5, &[1, 0, MEMORY_BYTES, USER, 0], &[guest.memory.as_fd()])?;
        guest.scribble(random, 0..USED + 0x1000)?;
        guest.send(8, &[RING << 32], &[])?;
        guest.send(10, &[0], &[])?;
        guest.send(9, &[0, USER, USER + USED, USER + AVAIL, 0], &[])?;
        guest.send(12, &[0], &[guest.kick.as_fd()])?;
        guest.send(13, &[0], &[guest.call.as_fd()])?;
        guest.send(14, &[0], &[guest.call.as_fd()])?;
        guest.send(18, &[1 << 32], &[])?;
        Ok(guest)
    }

    /// Does up to 20 wrong things, returns how many, and disconnects.
    fn attack(self, random: &mut Random) -> Result<u64> {
        let count = 1 + random.below(20);
        for _ in 0..count {
            match random.below(7) {
                0 => self.scribble(random, 0..USED + 0x1000)?,
                1 => self.offer(random)?,
                2 => (0..1000).for_each(|_| self.notify()),
                5 => self.fill_call(random)?,
                3 => ftruncate(&self.memory, random.below(MEMORY_BYTES))?,
                4 => {
                    let words: Vec<u64> = (0..random.below(40)).map(|_| random.below(u64::MAX)).collect();
                    self.send(random.below(50) as u32, &words, &[])?;
                }
                _ => self.send(
                    5,
                    &[1, random.below(1 << 40), MEMORY_BYTES, USER, 0],
                    &[self.memory.as_fd()],
                )?,
            }
            self.notify();
        }
        Ok(count)
    }

    /// Fills the ring's descriptors with reads and writes, one of them with a random length.
    fn offer(&self, random: &mut Random) -> Result<()> {
        let wrong = random.below(RING);
        for index in 0..RING {
            let bytes = if index == wrong {
                random.below(u64::MAX)
            } else {
                512
            };
            let flags = if index % 3 == 2 {
                2
            } else {
                1 | (2 * random.below(2))
            };
            let word = (bytes & 0xffff_ffff) | (flags << 32) | (((index + 1) % RING) << 48);
            self.put(16 * index, &[DATA + 4096 * index, word])?;
            self.put(DATA + 4096 * index, &[random.below(3), random.below(1 << 20)])?;
        }
        self.put(AVAIL, &[random.below(u64::MAX)])
    }

    /// Writes random values at random places of a range.
    fn scribble(&self, random: &mut Random, places: std::ops::Range<u64>) -> Result<()> {
        for _ in 0..64 {
            let at = places.start + random.below(places.end - places.start);
            self.put(at, &[random.below(u64::MAX)])?;
        }
        Ok(())
    }

    fn put(&self, at: u64, content: &[u64]) -> Result<()> {
        pwrite(&self.memory, &words(content), at)?;
        Ok(())
    }

    /// Fills the event's counter, so that the next write to it blocks, or one time in four fails.
    fn fill_call(&self, random: &mut Random) -> Result<()> {
        ioctl_fionbio(&self.call, true)?;
        let _ = write(&self.call, &(u64::MAX - 1).to_ne_bytes());
        ioctl_fionbio(&self.call, random.below(4) == 0)?;
        Ok(())
    }

    fn notify(&self) {
        // Fails if the counter is at its limit: then it announces work already.
        let _ = write(&self.kick, &1_u64.to_ne_bytes());
    }

    fn send(&self, request: u32, body: &[u64], fds: &[BorrowedFd<'_>]) -> Result<()> {
        Ok(send(&self.stream, request, &words(body), fds)?)
    }
}

const PATIENCE: Duration = Duration::from_secs(2);
/// Entries of the ring.
const RING: u64 = 16;
/// CONFIG, STATUS, RESET_DEVICE.
const PROTOCOL: u64 = 1 << 9 | 1 << 13 | 1 << 16;
