//! Bios that begin or end inside a sector. A read of one gets an area, and is decrypted from there. A write of one reads the
//! sectors, changes them and writes them, while nobody else writes to them: `block_locks` says in what order.
//!
//! ```text
//!  small write ─► wait for the sectors ─► read them into its area ─► decrypt the first and last ─► encrypt what is new ─► write
//!  other write ─► announce ─► (wait, if a small one has its sectors) ─► encrypt ─► write
//! ```
//!
//! What waits is looked at again when a write of the same thread has returned its sectors, and after a pause, since
//! other threads end theirs without notice. It has its area already, and needs nothing of those behind it.

use std::collections::VecDeque;

use blkmq_core::bio::{Bio, Op};
use blkmq_core::ids::DiskId;
use blkmq_core::time::{Instant, Nanos};

use super::{Below, CryptBio, Encrypter, LEAST_BYTES, Stage};
use crate::block_locks::Ticket;
use crate::engine::encrypted::Encrypted;

/// Which sectors a write keeps from others, from its first piece to its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Hold {
    #[default]
    None,
    /// Those that it writes, from who would change a part of one.
    Announced,
    /// Its place among those that change a part of a sector, or that have met one.
    Listed(Ticket),
}

/// Writes that wait for others, the first one first.
#[derive(Default)]
pub(super) struct Waiting {
    numbers: VecDeque<u32>,
    /// A write of this thread has returned its sectors since they were looked at.
    is_due: bool,
    /// When they are looked at again, whatever happens, and how long the pause before that is.
    look_at: Instant,
    pause: Nanos,
}

impl Waiting {
    pub(super) fn reserve(&mut self, bios: usize) {
        self.numbers.reserve(bios);
    }
}

impl Encrypted {
    /// Says whether a bio begins and ends with a sector.
    #[inline]
    pub(super) fn has_whole_sectors(&self, bio: &Bio) -> bool {
        (bio.offset | bio.len) & (u64::from(self.unit) - 1) == 0
    }
}

impl CryptBio {
    /// Leaves out what a discard has of sectors in part: the rest of them stays. Says whether anything is left.
    pub(super) fn keep_whole_sectors(&mut self, disk: &Encrypted) -> bool {
        let unit = u64::from(disk.unit);
        let start = self.bio.offset.next_multiple_of(unit);
        let end = self.bio.offset + self.bio.len;
        self.done = start - self.bio.offset;
        self.piece = (end - end % unit).saturating_sub(start);
        self.piece > 0
    }
}

impl Encrypter {
    /// When to look again at what waits for other threads.
    #[inline]
    pub(crate) fn alarm(&self) -> Option<Instant> {
        (!self.waiting.numbers.is_empty()).then_some(self.waiting.look_at)
    }

    /// Says whether writes may go on that had to wait.
    #[inline]
    pub(super) fn has_due(&self) -> bool {
        self.waiting.is_due && !self.waiting.numbers.is_empty()
    }

    /// Begins with a write, as soon as it may have its sectors.
    pub(super) fn begin_or_wait(&mut self, number: u32, below: &mut Below<'_>) {
        if self.may_begin(number) {
            return self.begin(number, below);
        }
        self.slots[number as usize].stage = Stage::Wait;
        if self.waiting.numbers.is_empty() {
            self.waiting.pause = PAUSE;
            self.waiting.look_at = below.now + PAUSE;
        }
        self.waiting.numbers.push_back(number);
    }

    /// Begins with the writes that have waited long enough.
    #[inline]
    pub(super) fn retry_waiting(&mut self, below: &mut Below<'_>) {
        if self.has_due() || self.alarm().is_some_and(|at| at <= below.now) {
            self.retry(below);
        }
    }

    #[cold]
    fn retry(&mut self, below: &mut Below<'_>) {
        let was_due = std::mem::take(&mut self.waiting.is_due);
        let before = self.waiting.numbers.len();
        for _ in 0..before {
            let number = self.waiting.numbers.pop_front().expect("counted above");
            if self.may_begin(number) {
                self.begin(number, below);
            } else {
                self.waiting.numbers.push_back(number);
            }
        }
        // A drive that hangs is asked less and less often.
        self.waiting.pause = match self.waiting.numbers.len() == before {
            true if was_due => self.waiting.pause,
            true => (self.waiting.pause + self.waiting.pause).min(PAUSE_MAX),
            false => PAUSE,
        };
        self.waiting.look_at = below.now + self.waiting.pause;
    }

    /// Says whether nobody else is between reading and writing a sector of a write, nor writes what it will read.
    fn may_begin(&mut self, number: u32) -> bool {
        let slot = &mut self.slots[number as usize];
        let disk = &self.disks[slot.disk as usize];
        let sectors = disk.sectors(&(slot.bio.offset..slot.bio.offset + slot.bio.len));
        let is_odd = !disk.has_whole_sectors(&slot.bio);
        let ticket = match slot.hold {
            Hold::Listed(ticket) => ticket,
            Hold::None | Hold::Announced => {
                let announced = self.announced.as_ref().expect("made with the first disk");
                if !is_odd {
                    announced.announce(number as usize, slot.disk, &sectors);
                    if disk.locks.are_free(&sectors) {
                        slot.hold = Hold::Announced;
                        return true;
                    }
                    announced.withdraw(number as usize);
                }
                disk.locks.enter(sectors.clone())
            }
        };
        slot.hold = Hold::Listed(ticket);
        // What others have announced is asked last: it is a look at the writes of all threads.
        disk.locks.is_first(ticket, &sectors)
            && (!is_odd || !disk.writers.overlap(DiskId(slot.disk), &sectors))
    }

    /// Others may have the sectors of a write.
    #[inline]
    pub(super) fn return_sectors(&mut self, number: u32) {
        let slot = &mut self.slots[number as usize];
        let hold = std::mem::take(&mut slot.hold);
        self.waiting.is_due |= hold != Hold::None;
        match hold {
            Hold::None => {}
            Hold::Announced => {
                let announced = self.announced.as_ref().expect("made with the first disk");
                announced.withdraw(number as usize);
            }
            Hold::Listed(ticket) => self.disks[slot.disk as usize].locks.leave(ticket),
        }
    }

    /// Decrypts the sectors in which the piece of a write begins and ends, where they were read.
    pub(super) fn decrypt_edges(&mut self, number: u32) {
        let slot = &mut self.slots[number as usize];
        debug_assert_ne!(slot.bio.op, Op::Read);
        let disk = &self.disks[slot.disk as usize];
        let cipher = disk.cipher().expect("bios are taken with a key");
        let (sectors, unit) = (slot.sectors(disk), u64::from(disk.unit));
        let len = sectors.end - sectors.start;
        let area = slot.area.expect("a write has one");
        let areas = self.areas.as_mut().expect("made with the first disk");
        let last = (len > unit).then_some(len - unit);
        for at in [Some(0), last].into_iter().flatten() {
            cipher.decrypt(sectors.start + at, areas.bytes_mut(area, at..at + unit));
            self.left = self.left.saturating_sub(unit.max(LEAST_BYTES));
        }
        self.dirty = Some(slot.disk);
        (slot.is_fetch, slot.stage) = (false, Stage::Encrypt);
    }
}

/// How long a write waits before it looks again for those of other threads: at first, and at most.
const PAUSE: Nanos = Nanos(100_000);
const PAUSE_MAX: Nanos = Nanos(3_200_000);
