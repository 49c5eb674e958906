//! A ring of small records from one thread to another *process*, in order, through memory that both have
//! mapped. [`crate::spsc`] does this within a process, for any items. `blkmq_core::trace` sends its
//! events through such rings.
//!
//! ```text
//! words of the memory:   0      8      16            24
//!                        tail   head   dropped  ...  record 0, record 1, ... (4 words each, a power of two of them)
//! ```
//!
//! Pairings, as in [`crate::spsc`]: the consumer's Acquire load of `tail` sees the producer's Release
//! store, so the records below `tail` are written. The producer's Acquire load of `head` sees the
//! consumer's Release store, so the slots below `head` were read.
//!
//! Neither half trusts the other: a wrong index makes records wrong or lost, but never causes an
//! access outside the memory. Records consist of atomic words, so this module needs no `unsafe`.

use crate::atomic::{Arc, AtomicU64, Ordering};

/// The unit of transfer.
pub type Record = [u64; RECORD_WORDS];

/// Words of memory that may be shared with another process. All words start as 0.
pub trait Memory: Send + Sync {
    /// The words; every call returns the same ones.
    fn words(&self) -> &[AtomicU64];
}

/// The words of a ring that holds so many records.
///
/// # Panics
/// If `records` is not a power of two.
#[must_use]
pub const fn words_of(records: usize) -> usize {
    assert!(records.is_power_of_two(), "a power of two of records");
    HEADER_WORDS + records * RECORD_WORDS
}

/// The writing half; one thread at a time.
pub struct Producer {
    ring: Ring,
    /// Where the next record goes; what this half has stored in `tail`.
    tail: u64,
    /// The last known value of `head`.
    head_seen: u64,
    /// The number of dropped records; what this half has stored in `dropped`.
    dropped: u64,
}

/// The reading half; one thread at a time.
pub struct Consumer {
    ring: Ring,
    /// Where the next record is read; what this half has stored in `head`.
    head: u64,
    /// `dropped` at the last call of `take_dropped`.
    dropped_seen: u64,
}

impl Producer {
    /// Makes the writing half of the ring in `memory`.
    ///
    /// # Panics
    /// If `memory` does not have the size of a ring ([`words_of`]).
    #[must_use]
    pub fn new(memory: Arc<dyn Memory>) -> Self {
        Self {
            ring: Ring::new(memory),
            tail: 0,
            head_seen: 0,
            dropped: 0,
        }
    }

    /// Appends a record, which the consumer can see at once. Without room the record is dropped and counted. Never blocks.
    #[inline]
    pub fn push(&mut self, record: Record) {
        if self.tail.wrapping_sub(self.head_seen) >= self.ring.records && !self.has_room() {
            self.dropped += 1;
            // Relaxed: a count by itself.
            self.ring.words()[DROPPED].store(self.dropped, Ordering::Relaxed);
            return;
        }
        let words = self.ring.words();
        for (word, value) in self.ring.slot(words, self.tail).iter().zip(record) {
            // Relaxed: published by the store of `tail`.
            word.store(value, Ordering::Relaxed);
        }
        let tail = self.tail.wrapping_add(1);
        // Release: pairs with the consumer's Acquire load of `tail`.
        words[TAIL].store(tail, Ordering::Release);
        self.tail = tail;
    }

    #[cold]
    fn has_room(&mut self) -> bool {
        // Acquire: pairs with the consumer's Release store of `head`; the slots below it have been read.
        self.head_seen = self.ring.words()[HEAD].load(Ordering::Acquire);
        self.tail.wrapping_sub(self.head_seen) < self.ring.records
    }
}

impl Consumer {
    /// Makes the reading half of the ring in `memory`.
    ///
    /// # Panics
    /// If `memory` does not have the size of a ring ([`words_of`]).
    #[must_use]
    pub fn new(memory: Arc<dyn Memory>) -> Self {
        Self {
            ring: Ring::new(memory),
            head: 0,
            dropped_seen: 0,
        }
    }

    /// Calls `f` for each record in the ring, oldest first, and returns their number. The slots become free once, at the end. If
    /// `f` fails, the remaining records are lost.
    ///
    /// # Errors
    /// The error of `f`.
    #[inline]
    pub fn drain<E>(&mut self, mut f: impl FnMut(Record) -> Result<(), E>) -> Result<u64, E> {
        // Acquire: pairs with the producer's Release store of `tail`; the records below it are written.
        let words = self.ring.words();
        let tail = words[TAIL].load(Ordering::Acquire);
        // A larger difference is an error of the producer.
        let count = tail.wrapping_sub(self.head).min(self.ring.records);
        let done = (0..count).try_for_each(|ahead| {
            let slot = self.ring.slot(words, self.head.wrapping_add(ahead));
            // Relaxed: ordered by the load of `tail`.
            f(std::array::from_fn(|word| slot[word].load(Ordering::Relaxed)))
        });
        if count > 0 {
            self.head = tail;
            // Release: pairs with the producer's Acquire load of `head`; the slots below it have been read.
            self.ring.words()[HEAD].store(tail, Ordering::Release);
        }
        done.map(|()| count)
    }

    /// The number of records dropped since the last call.
    pub fn take_dropped(&mut self) -> u64 {
        // Relaxed: a count by itself.
        let dropped = self.ring.words()[DROPPED].load(Ordering::Relaxed);
        dropped.wrapping_sub(std::mem::replace(&mut self.dropped_seen, dropped))
    }

    /// The number of records that the ring holds.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.ring.records
    }
}

impl std::fmt::Debug for Producer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Producer of {} records", self.tail)
    }
}

impl std::fmt::Debug for Consumer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Consumer of {} records", self.head)
    }
}

struct Ring {
    memory: Arc<dyn Memory>,
    /// A power of two.
    records: u64,
}

impl Ring {
    fn new(memory: Arc<dyn Memory>) -> Self {
        let words = memory.words().len();
        let records = words.saturating_sub(HEADER_WORDS) / RECORD_WORDS;
        assert!(
            records.is_power_of_two() && words == words_of(records),
            "{words} words are no ring"
        );
        let records = records as u64;
        Self { memory, records }
    }

    #[inline(always)]
    fn words(&self) -> &[AtomicU64] {
        self.memory.words()
    }

    #[inline(always)]
    fn slot<'a>(&self, words: &'a [AtomicU64], position: u64) -> &'a [AtomicU64] {
        let start = HEADER_WORDS + (position & (self.records - 1)) as usize * RECORD_WORDS;
        &words[start..start + RECORD_WORDS]
    }
}

const RECORD_WORDS: usize = 4;
/// Each index has a cache line of its own.
const TAIL: usize = 0;
const HEAD: usize = 8;
const DROPPED: usize = 16;
const HEADER_WORDS: usize = 24;

#[cfg(all(test, loom))]
mod loom_models;
#[cfg(all(test, not(loom)))]
mod tests;
