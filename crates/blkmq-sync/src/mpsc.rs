//! A bounded ring from many threads to one: the mailbox of a reactor.
//!
//! For one producer, [`crate::spsc`] needs no read-modify-write. Whether the receiver must be woken after a
//! push is decided by [`crate::wake_flag`].
//!
//! Every push draws a ticket; tickets number the positions of an endless row that is mapped onto the slots.
//! Ticket `t` goes to slot `t mod capacity` in lap `t / capacity`. Each slot has a turn:
//!
//! ```text
//!   turn = 2 * lap       free, waits for the item of this lap      (the producer with the ticket may write)
//!   turn = 2 * lap + 1   holds the item of this lap                (the receiver may read)
//! ```
//!
//! Pairings: the producer's Release store of `turn` is seen by the receiver's Acquire load, so the item is
//! written; the receiver's Release store of `turn` is seen by the Acquire load of the next lap's producer, so
//! the item has been moved out. The ticket counter itself orders nothing (relaxed): a turn belongs only to
//! the winner of its ticket.
//!
//! A producer that is descheduled between drawing its ticket and writing its item holds back the items behind
//! it until it continues. Nothing is lost: it wakes the receiver after its own push, and the receiver then
//! finds all items.

use std::mem::MaybeUninit;

use crate::CachePadded;
use crate::atomic::{Arc, AtomicU64, Ordering, UnsafeCell};

/// A handle to push with; clone one for each thread, or share it.
#[derive(Debug)]
pub struct Sender<T>(Arc<Mpsc<T>>);

/// The one handle to take items with.
#[derive(Debug)]
pub struct Receiver<T> {
    ring: Arc<Mpsc<T>>,
    /// The ticket of the next item to take. Only this half knows it; producers find free slots by their turns.
    head: u64,
}

/// Makes a ring that holds at least `capacity_min` items (rounded up to a power of two, at least 1).
///
/// Everything is allocated here; pushing and popping allocate nothing. Remaining items are dropped with the
/// last handle.
///
/// # Panics
/// If the rounded capacity does not fit in half of `usize`, or memory for it is not available.
#[must_use]
pub fn channel<T: Send>(capacity_min: usize) -> (Sender<T>, Receiver<T>) {
    assert!(
        capacity_min <= usize::MAX / 4,
        "mailbox capacity {capacity_min} is too large"
    );
    let capacity = capacity_min.max(1).next_power_of_two();
    let slots = (0..capacity).map(|_| Slot::new()).collect();
    let ring = Arc::new(Mpsc {
        tickets: CachePadded::new(AtomicU64::new(0)),
        slots,
    });
    (Sender(Arc::clone(&ring)), Receiver { ring, head: 0 })
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Sender<T> {
    /// Appends an item. Lock-free: a push repeats only if another one came first.
    ///
    /// # Errors
    /// Returns the item if the ring is full.
    #[inline]
    pub fn push(&self, item: T) -> Result<(), T> {
        self.0.push(item)
    }

    /// Appends all items, next to each other, at the cost of one; items left in `items` on return did not
    /// fit: all, or none.
    #[inline]
    pub fn push_all(&self, items: &mut Vec<T>) {
        self.0.push_all(items);
    }

    /// Number of items that fit.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.0.slots.len()
    }
}

impl<T> Receiver<T> {
    /// Takes the oldest item, if it is there. Never blocks.
    #[inline]
    pub fn pop(&mut self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        let item = self.ring.take(self.head);
        self.head += 1;
        Some(item)
    }

    /// Calls `f` for each item that is there, oldest first, for at most a full ring of items, and returns how many.
    ///
    /// If `f` panics, the items it was called for are gone and the others stay in the ring.
    #[inline]
    pub fn drain(&mut self, mut f: impl FnMut(T)) -> usize {
        for taken in 0..self.ring.slots.len() {
            let Some(item) = self.pop() else { return taken };
            f(item);
        }
        self.ring.slots.len()
    }

    /// Shows the item that will be taken after `ahead` others, if it is there.
    #[inline]
    pub fn peek(&self, ahead: u64, see: impl FnOnce(&T)) {
        let (slot, lap) = self.ring.place(self.head + ahead);
        // Acquire: pairs with the Release store of a push; the item is written.
        if slot.turn.load(Ordering::Acquire) == full_in(lap) {
            slot.item.with(|item| {
                // SAFETY: the turn says that the item of this lap is here and written; only this half moves it out, and it
                // is borrowed.
                see(unsafe { &*item.cast::<T>() });
            });
        }
    }

    /// Whether there is nothing to take. One load of a line that only a push writes.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let (slot, lap) = self.ring.place(self.head);
        // Acquire: pairs with the Release store of a push; the item is written.
        slot.turn.load(Ordering::Acquire) != full_in(lap)
    }

    /// Number of items that fit.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.ring.slots.len()
    }
}

/// The state that senders and the receiver share.
#[derive(Debug)]
struct Mpsc<T> {
    /// The next ticket. 64 bits do not wrap in the life of a process.
    tickets: CachePadded<AtomicU64>,
    /// Their number is a power of two.
    slots: Box<[Slot<T>]>,
}

#[derive(Debug)]
struct Slot<T> {
    turn: AtomicU64,
    item: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: turns give each slot to one thread at a time (see the pairings above), so sharing the ring moves
// items between threads, which `T: Send` allows, and never lends one to two threads.
unsafe impl<T: Send> Sync for Mpsc<T> {}

// SAFETY: the ring owns its items; moving it moves them, which `T: Send` allows. (Needed under loom, whose
// cell is not `Send` by itself for every `T`.)
unsafe impl<T: Send> Send for Mpsc<T> {}

impl<T> Mpsc<T> {
    #[inline]
    fn push(&self, item: T) -> Result<(), T> {
        let mut ticket = self.tickets.load(Ordering::Relaxed);
        loop {
            let (slot, lap) = self.place(ticket);
            // Acquire: pairs with the receiver's Release store; the item of the previous lap has been moved out.
            let turn = slot.turn.load(Ordering::Acquire);
            if turn < free_in(lap) {
                return Err(item); // The item of the previous lap is still there.
            }
            if turn > free_in(lap) {
                // Another producer took this ticket. The load above saw a store that came after its exchange,
                // so this load sees a newer ticket.
                ticket = self.tickets.load(Ordering::Relaxed);
                continue;
            }
            match self
                .tickets
                .compare_exchange_weak(ticket, ticket + 1, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => {
                    slot.put(item, lap);
                    return Ok(());
                }
                Err(now) => ticket = now,
            }
        }
    }

    #[inline]
    fn push_all(&self, items: &mut Vec<T>) {
        let count = items.len() as u64;
        if count == 0 || items.len() > self.slots.len() {
            return;
        }
        let mut first = self.tickets.load(Ordering::Relaxed);
        loop {
            // Slots become free in the order of their tickets: if the last one is free, all are.
            let (slot, lap) = self.place(first + count - 1);
            // Acquire: pairs with the receiver's Release store; the items of the previous lap have been moved out.
            let turn = slot.turn.load(Ordering::Acquire);
            if turn < free_in(lap) {
                return;
            }
            let tickets = &self.tickets;
            let won = turn == free_in(lap)
                && tickets
                    .compare_exchange_weak(first, first + count, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok();
            if won {
                break;
            }
            // Another producer took one of these tickets.
            first = tickets.load(Ordering::Relaxed);
        }
        for (ticket, item) in (first..).zip(items.drain(..)) {
            let (slot, lap) = self.place(ticket);
            slot.put(item, lap);
        }
    }

    /// Moves the item of `ticket` out and frees its slot. Called once by the receiver, after it saw the turn.
    #[inline]
    fn take(&self, ticket: u64) -> T {
        let (slot, lap) = self.place(ticket);
        let item = slot.item.with(|item| {
            // SAFETY: the receiver saw `full_in(lap)` with Acquire, so the item is written and visible; it is
            // the only reader and has not passed this ticket before; producers leave the slot alone until the
            // store below.
            unsafe { item.cast::<T>().read() }
        });
        // Release: pairs with the Acquire load of the next lap's push.
        slot.turn.store(free_in(lap + 1), Ordering::Release);
        item
    }

    /// Slot and lap of a ticket.
    #[inline(always)]
    fn place(&self, ticket: u64) -> (&Slot<T>, u64) {
        let capacity = self.slots.len();
        let index = ticket as usize & (capacity - 1);
        (&self.slots[index], ticket >> capacity.trailing_zeros())
    }
}

impl<T> Slot<T> {
    fn new() -> Self {
        Self {
            turn: AtomicU64::new(free_in(0)),
            item: UnsafeCell::new(MaybeUninit::uninit()),
        }
    }

    /// Writes the item of `lap`. Called by the producer that won the ticket of this slot in this lap.
    #[inline(always)]
    fn put(&self, item: T, lap: u64) {
        self.item.with_mut(|slot| {
            // SAFETY: the turn was `free_in(lap)`, so the slot is empty, and its ticket was won by this
            // thread alone; the receiver waits for the store below.
            unsafe { slot.cast::<T>().write(item) };
        });
        // Release: pairs with the receiver's Acquire load.
        self.turn.store(full_in(lap), Ordering::Release);
    }
}

impl<T> Drop for Receiver<T> {
    /// Items that will never be taken are dropped now; items pushed later are dropped with the ring.
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}

impl<T> Drop for Mpsc<T> {
    fn drop(&mut self) {
        for slot in &mut self.slots {
            // Relaxed: all handles are gone, and the `Arc` ordered their last accesses before this. An odd
            // turn means full.
            if slot.turn.load(Ordering::Relaxed) % 2 == 1 {
                slot.item.with_mut(|item| {
                    // SAFETY: the turn says that an item is here, and `&mut self` that nobody else can move
                    // it out.
                    unsafe { std::ptr::drop_in_place(item.cast::<T>()) };
                });
            }
        }
    }
}

#[inline(always)]
fn free_in(lap: u64) -> u64 {
    lap * 2
}

#[inline(always)]
fn full_in(lap: u64) -> u64 {
    lap * 2 + 1
}

#[cfg(all(test, loom))]
mod loom_models;
#[cfg(all(test, not(loom)))]
mod tests;
