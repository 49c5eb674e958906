//! A bounded ring from one thread to another, in order, without a lock or a read-modify-write.
//!
//! The staging lists between a submitter and the holder of a [`crate::gate`] are such rings. For many
//! producers and one consumer, see [`crate::mpsc`].
//!
//! ```text
//!             head (consumer writes)      tail (producer writes)
//!               |                           |
//!               v                           v
//! slots   |   | x | x | x | x | x | x | x |   |   |     positions only grow; slot = position & mask
//! ```
//!
//! Pairings: the producer's Release store of `tail` is seen by the consumer's Acquire load, so the items
//! below it are written. The consumer's Release store of `head` is seen by the producer's Acquire load, so
//! the slots below it have been read and may be written again. Each half remembers the other's index as last
//! seen and loads the shared one only when the remembered index means full, or empty.
//!
//! A push alone wakes no thread and orders nothing against a later load of another variable: a producer that
//! pushes and then checks whether the consumer is looking must use a full fence or a read-modify-write in
//! between, as [`crate::wake_flag`], [`crate::run_work`] and [`crate::gate`] do.

use std::mem::MaybeUninit;

use crate::CachePadded;
use crate::atomic::{Arc, AtomicUsize, Ordering, UnsafeCell};

/// The writing half of a ring; one thread at a time.
#[derive(Debug)]
pub struct Producer<T> {
    ring: Arc<Ring<T>>,
    /// Where the next item goes; equals `ring.tail`, which only this half writes.
    tail: usize,
    /// `ring.head` as last seen: a lower bound of it.
    head_seen: usize,
}

/// The reading half of a ring; one thread at a time.
#[derive(Debug)]
pub struct Consumer<T> {
    ring: Arc<Ring<T>>,
    /// Where the next item is read; equals `ring.head`, which only this half writes.
    head: usize,
    /// `ring.tail` as last seen: a lower bound of it.
    tail_seen: usize,
}

/// Makes a ring that holds at least `capacity_min` items (rounded up to a power of two, at least 1).
///
/// Everything is allocated here; pushing and popping allocate nothing. Remaining items are dropped with the
/// second half.
///
/// # Panics
/// If the rounded capacity does not fit in half of `usize`, or memory for it is not available.
#[must_use]
pub fn ring<T: Send>(capacity_min: usize) -> (Producer<T>, Consumer<T>) {
    assert!(
        capacity_min <= usize::MAX / 4,
        "ring capacity {capacity_min} is too large"
    );
    let capacity = capacity_min.max(1).next_power_of_two();
    let slots = (0..capacity)
        .map(|_| UnsafeCell::new(MaybeUninit::uninit()))
        .collect();
    let ring = Arc::new(Ring {
        head: CachePadded::new(AtomicUsize::new(0)),
        tail: CachePadded::new(AtomicUsize::new(0)),
        slots,
    });
    let producer = Producer {
        ring: Arc::clone(&ring),
        tail: 0,
        head_seen: 0,
    };
    (
        producer,
        Consumer {
            ring,
            head: 0,
            tail_seen: 0,
        },
    )
}

impl<T> Producer<T> {
    /// Appends an item, which the consumer sees at once. Never blocks.
    ///
    /// # Errors
    /// Returns the item if the ring is full.
    #[inline]
    pub fn push(&mut self, item: T) -> Result<(), T> {
        if self.tail.wrapping_sub(self.head_seen) == self.ring.slots.len() && !self.has_room() {
            return Err(item);
        }
        self.ring.slot(self.tail).with_mut(|slot| {
            // SAFETY: `tail - head < capacity`, so no item is in this slot. The consumer reads it only once
            // `tail` has moved past it, which happens below; and the Acquire load that showed `head` came
            // after the consumer's last read of it. This half is the only writer, and `&mut self` makes it
            // one thread.
            unsafe { slot.cast::<T>().write(item) };
        });
        self.tail = self.tail.wrapping_add(1);
        // Release: pairs with the consumer's Acquire load of `tail`.
        self.ring.tail.store(self.tail, Ordering::Release);
        Ok(())
    }

    /// Items pushed and not yet taken; the consumer may lower the number at any moment.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tail.wrapping_sub(self.ring.head.load(Ordering::Relaxed))
    }

    /// Whether all pushed items have been taken.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of items that fit.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.ring.slots.len()
    }

    #[cold]
    fn has_room(&mut self) -> bool {
        // Acquire: pairs with the consumer's Release store of `head`; the slots below it have been read.
        self.head_seen = self.ring.head.load(Ordering::Acquire);
        self.tail.wrapping_sub(self.head_seen) < self.ring.slots.len()
    }
}

impl<T> Consumer<T> {
    /// Takes the oldest item, if there is one. Never blocks.
    #[inline]
    pub fn pop(&mut self) -> Option<T> {
        if self.head == self.tail_seen && self.look() == 0 {
            return None;
        }
        let item = self.ring.take(self.head);
        self.head = self.head.wrapping_add(1);
        // Release: pairs with the producer's Acquire load of `head`; the slot has been read.
        self.ring.head.store(self.head, Ordering::Release);
        Some(item)
    }

    /// Calls `f` for each item that is there now, oldest first, and returns how many. Slots are freed for new
    /// items once, at the end. Items pushed meanwhile wait for the next call.
    ///
    /// If `f` panics, the items it was called for are gone and the others stay in the ring.
    #[inline]
    pub fn drain(&mut self, f: impl FnMut(T)) -> usize {
        self.drain_announced(|_| {}, f)
    }

    /// Like [`Consumer::drain`], but shows each item except the first few to `coming` some items ahead, so
    /// that the data it points to can be fetched in time.
    #[inline]
    pub fn drain_announced(&mut self, coming: impl Fn(&T), mut f: impl FnMut(T)) -> usize {
        let count = self.look();
        let taking = Taking(self);
        for taken in 0..count {
            let consumer = &mut *taking.0;
            if taken + AHEAD < count {
                consumer
                    .ring
                    .slot(consumer.head.wrapping_add(AHEAD))
                    .with(|slot| {
                        // SAFETY: the position is below a `tail` that was loaded with Acquire, so the item is written, and it
                        // stays until this half takes it.
                        coming(unsafe { &*slot.cast::<T>() });
                    });
            }
            let item = consumer.ring.take(consumer.head);
            consumer.head = consumer.head.wrapping_add(1);
            f(item);
        }
        if count == 0 {
            std::mem::forget(taking); // Nothing moved: do not write the shared line.
        }
        count
    }

    /// Whether there is nothing to take. One load if so.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        // Acquire: a caller that gets "not empty" may look at what the producer wrote before its push.
        self.head == self.tail_seen && self.ring.tail.load(Ordering::Acquire) == self.head
    }

    /// Items there to take; the producer may raise the number at any moment.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ring.tail.load(Ordering::Acquire).wrapping_sub(self.head)
    }

    /// Number of items that fit.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.ring.slots.len()
    }

    /// Loads the shared tail and returns how many items are there.
    #[inline]
    fn look(&mut self) -> usize {
        // Acquire: pairs with the producer's Release store of `tail`; the items below it are written.
        self.tail_seen = self.ring.tail.load(Ordering::Acquire);
        self.tail_seen.wrapping_sub(self.head)
    }
}

/// How far ahead of its turn an item is announced: about as many as cache lines can be in flight at once.
const AHEAD: usize = 6;

/// Publishes the consumer's head when a drain ends, even by a panic.
struct Taking<'a, T>(&'a mut Consumer<T>);

impl<T> Drop for Taking<'_, T> {
    fn drop(&mut self) {
        // Release: pairs with the producer's Acquire load of `head`; the slots below it have been read.
        self.0.ring.head.store(self.0.head, Ordering::Release);
    }
}

#[derive(Debug)]
struct Ring<T> {
    /// Position of the oldest item; written by the consumer only.
    head: CachePadded<AtomicUsize>,
    /// Position of the next push; written by the producer only.
    tail: CachePadded<AtomicUsize>,
    /// Their number is a power of two.
    slots: Box<[UnsafeCell<MaybeUninit<T>>]>,
}

// SAFETY: the two halves give each slot to one thread at a time (see the pairings above), so sharing a ring
// moves items between threads, which `T: Send` allows, and never lends one to two threads.
unsafe impl<T: Send> Sync for Ring<T> {}

// SAFETY: a ring owns its items; moving it moves them, which `T: Send` allows. (Needed under loom, whose cell
// is not `Send` by itself for every `T`.)
unsafe impl<T: Send> Send for Ring<T> {}

impl<T> Ring<T> {
    #[inline(always)]
    fn slot(&self, position: usize) -> &UnsafeCell<MaybeUninit<T>> {
        &self.slots[position & (self.slots.len() - 1)]
    }

    /// Moves the item at `position` out. Called by the consumer, for positions in `head..tail` as it has seen them.
    #[inline(always)]
    fn take(&self, position: usize) -> T {
        self.slot(position).with(|slot| {
            // SAFETY: `position` is below a `tail` that was loaded with Acquire, so the item is written and
            // visible; it is at or above `head`, so it has not been moved out before, and the producer leaves
            // the slot alone until `head` passes it, which the caller does next.
            unsafe { slot.cast::<T>().read() }
        })
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        // Relaxed: both halves are gone, and the `Arc` ordered their last accesses before this.
        let tail = self.tail.load(Ordering::Relaxed);
        let mut head = self.head.load(Ordering::Relaxed);
        while head != tail {
            drop(self.take(head));
            head = head.wrapping_add(1);
        }
    }
}

#[cfg(all(test, loom))]
mod loom_models;
#[cfg(all(test, not(loom)))]
mod tests;
