//! The locks of the blocks that small requests read, change and write: nothing that others write to the same blocks
//! meanwhile is lost. The file driver has them for direct I/O, and the encrypter for sectors. Both take and return them, and
//! try a request that has to wait again later, so no reactor blocks.
//!
//! Writes are many, and small requests few. So each thread announces its writes in a table that it alone
//! changes, and only requests that change blocks, and writes that meet one, enter the disk's list, in order of arrival:
//!
//! ```text
//!  aligned write:  announce; is the list empty? ─ yes ─────────────────────────► go
//!                                               └ no: does an entry overlap? no ► go
//!                                                     yes: withdraw, and enter the list as a small one does
//!  small write:    enter the list; no earlier entry overlaps, and no announced write ► go
//! ```
//!
//! One of the two sees the other, since each makes itself visible before it looks (SeqCst). An entry waits only for earlier
//! ones and for writes that the kernel has, so every one has its turn. Threads that write for images enter the list, too.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_core::ids::DiskId;

/// The tables of all threads that use a drive.
#[derive(Debug, Default)]
pub struct Announcements(Mutex<Vec<Arc<Announced>>>);

impl Announcements {
    /// Adds the table of a new thread, for tags below `depth`.
    pub fn add(&self, depth: u32) -> Arc<Announced> {
        let announced = Arc::new(Announced {
            writes: (0..depth).map(|_| Write::default()).collect(),
            used: AtomicUsize::new(0),
        });
        self.lock().push(Arc::clone(&announced));
        announced
    }

    /// Removes it.
    pub fn remove(&self, announced: &Arc<Announced>) {
        self.lock().retain(|other| !Arc::ptr_eq(other, announced));
    }

    /// Returns whether an announced range overlaps a range of a disk.
    ///
    /// The caller is in the disk's list. A tag that is used again while this looks may count or not: its new range was
    /// announced after the caller had entered, and finds the caller in the list.
    pub fn overlap(&self, disk: DiskId, range: &Range<u64>) -> bool {
        self.lock().iter().any(|writes| writes.overlaps(disk, range))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Announced>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The ranges that one thread has under way, by their tags: writes here, all requests where clusters are freed.
#[derive(Debug)]
pub struct Announced {
    writes: Box<[Write]>,
    /// How many tags, from 0 on, were ever used: others have nothing.
    used: AtomicUsize,
}

/// A range of bytes of a disk; nothing if its end is 0.
#[derive(Debug, Default)]
struct Write {
    disk: AtomicU64,
    start: AtomicU64,
    end: AtomicU64,
}

impl Announced {
    /// Announces a write, before it looks into the disk's list.
    #[inline]
    pub fn announce(&self, tag: usize, disk: u32, range: &Range<u64>) {
        let write = &self.writes[tag];
        // Relaxed: only this thread changes it. SeqCst: who does not see it yet has entered the list before this thread looks
        // there.
        if tag >= self.used.load(Ordering::Relaxed) {
            self.used.store(tag + 1, Ordering::SeqCst);
        }
        // Relaxed: visible with the end, which is stored behind them and makes them count.
        write.disk.store(disk.into(), Ordering::Relaxed);
        write.start.store(range.start, Ordering::Relaxed);
        write.end.store(range.end, Ordering::SeqCst);
    }

    /// Withdraws the announcement of a write that has ended.
    #[inline]
    pub fn withdraw(&self, tag: usize) {
        // Release: who sees it gone reads what the write has left.
        self.writes[tag].end.store(0, Ordering::Release);
    }

    fn overlaps(&self, disk: DiskId, range: &Range<u64>) -> bool {
        self.writes[..self.used.load(Ordering::SeqCst)]
            .iter()
            .any(|write| {
                let end = write.end.load(Ordering::SeqCst);
                end > range.start
                    && write.start.load(Ordering::Relaxed) < range.end
                    && write.disk.load(Ordering::Relaxed) == u64::from(disk.0)
            })
    }
}

/// The list of one disk: requests that hold blocks of it or wait for them. It is never longer than requests are in flight.
#[derive(Debug, Default)]
pub struct BlockLocks {
    list: Mutex<List>,
    /// The list's length, to be read without its lock.
    len: AtomicUsize,
}

#[derive(Debug, Default)]
struct List {
    entries: Vec<Entry>,
    last: u64,
}

#[derive(Debug)]
struct Entry {
    ticket: Ticket,
    range: Range<u64>,
}

/// An entry of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

impl BlockLocks {
    /// Returns whether an announced write may go: no entry overlaps it.
    #[inline]
    pub fn are_free(&self, range: &Range<u64>) -> bool {
        // SeqCst: see the module's doc.
        self.len.load(Ordering::SeqCst) == 0 || !self.list().overlaps(range, Ticket(u64::MAX))
    }

    /// Enters the list behind all others.
    pub fn enter(&self, range: Range<u64>) -> Ticket {
        let mut list = self.list();
        list.last += 1;
        let ticket = Ticket(list.last);
        list.entries.push(Entry { ticket, range });
        self.len.store(list.entries.len(), Ordering::SeqCst);
        ticket
    }

    /// Returns whether no earlier entry overlaps this one.
    pub fn is_first(&self, ticket: Ticket, range: &Range<u64>) -> bool {
        !self.list().overlaps(range, ticket)
    }

    /// Does something to a range on a thread that may block, behind all small requests that have entered before, and
    /// before those that come later: one of these would write back what it has read of the range before.
    pub fn in_turn<T>(&self, range: &Range<u64>, work: impl FnOnce() -> T) -> T {
        let turn = InTurn(self, self.enter(range.clone()));
        while !self.is_first(turn.1, range) {
            std::thread::sleep(LOOK);
        }
        work()
    }

    /// Leaves the list.
    pub fn leave(&self, ticket: Ticket) {
        let mut list = self.list();
        list.entries.retain(|entry| entry.ticket != ticket);
        self.len.store(list.entries.len(), Ordering::SeqCst);
    }

    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread's entry of the list.
struct InTurn<'a>(&'a BlockLocks, Ticket);

impl Drop for InTurn<'_> {
    fn drop(&mut self) {
        self.0.leave(self.1);
    }
}

impl List {
    /// Returns whether an entry before `ticket` overlaps a range.
    fn overlaps(&self, range: &Range<u64>, ticket: Ticket) -> bool {
        let earlier = self.entries.iter().take_while(|entry| entry.ticket < ticket);
        let mut ranges = earlier.map(|entry| &entry.range);
        ranges.any(|other| other.start < range.end && range.start < other.end)
    }
}

/// How often a thread looks whether it is its turn: small requests end within the drive's time.
const LOOK: std::time::Duration = std::time::Duration::from_micros(50);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_the_list_have_their_turn_in_order_of_arrival() {
        let locks = BlockLocks::default();
        let block = 4096..8192;
        assert!(locks.are_free(&block));
        let first = locks.enter(block.clone());
        let second = locks.enter(0..8192);
        let third = locks.enter(0..4096);
        assert!(locks.is_first(first, &block));
        assert!(!locks.is_first(second, &(0..8192)) && !locks.is_first(third, &(0..4096)));
        assert!(!locks.are_free(&(8191..8192)) && locks.are_free(&(8192..9000)));
        locks.leave(first);
        assert!(locks.is_first(second, &(0..8192)) && !locks.is_first(third, &(0..4096)));
        locks.leave(second);
        assert!(locks.is_first(third, &(0..4096)));
        locks.leave(third);
        assert!(locks.are_free(&block));
    }

    #[test]
    fn announced_writes_count_for_their_range_of_their_disk_until_they_end() {
        let writers = Announcements::default();
        let writes = writers.add(4);
        writes.announce(3, 7, &(4096..8192));
        assert!(writers.overlap(DiskId(7), &(8191..9000)));
        assert!(!writers.overlap(DiskId(7), &(8192..9000)));
        assert!(!writers.overlap(DiskId(7), &(0..4096)));
        assert!(!writers.overlap(DiskId(6), &(4096..8192)));
        writes.withdraw(3);
        assert!(!writers.overlap(DiskId(7), &(4096..8192)));
    }

    /// Threads add 1 to their halves of one block, some by reading, changing and writing the whole block.
    #[test]
    fn writes_and_changes_of_one_block_from_several_threads_lose_nothing() {
        let (locks, block) = (BlockLocks::default(), 0..2);
        let writers = Announcements::default();
        let tables: Vec<_> = (0..4).map(|_| writers.add(1)).collect();
        let halves = [const { AtomicU64::new(0) }; 2];
        let change = |mine: usize| {
            let ticket = locks.enter(block.clone());
            while !locks.is_first(ticket, &block) || writers.overlap(DiskId(0), &block) {
                std::thread::yield_now();
            }
            let read = [0, 1].map(|half| halves[half].load(Ordering::Relaxed));
            std::thread::yield_now();
            for (half, value) in read.into_iter().enumerate() {
                halves[half].store(value + u64::from(half == mine), Ordering::Relaxed);
            }
            locks.leave(ticket);
        };
        let write = |number: usize| {
            loop {
                tables[number].announce(0, 0, &(1..2));
                if locks.are_free(&(1..2)) {
                    break;
                }
                tables[number].withdraw(0);
                std::thread::yield_now();
            }
            halves[1].fetch_add(1, Ordering::Relaxed);
            tables[number].withdraw(0);
        };
        std::thread::scope(|scope| {
            for number in 0..4 {
                let (change, write) = (&change, &write);
                scope.spawn(move || {
                    for _ in 0..ROUNDS {
                        match number {
                            0 | 1 => change(0),
                            2 => change(1),
                            _ => write(number),
                        }
                    }
                });
            }
        });
        assert_eq!(halves.map(AtomicU64::into_inner), [2 * ROUNDS, 2 * ROUNDS]);
    }

    const ROUNDS: u64 = 2000;
}
