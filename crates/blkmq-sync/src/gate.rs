//! The lock around an elevator that is not multi-queue aware: one thread at a time is inside, and no
//! thread waits.
//!
//! A thread that finds the gate held leaves a mark and continues. The holder finds the mark before it leaves,
//! and takes in once more what the others published (flat combining). The publications themselves are
//! [`crate::spsc`] rings.
//!
//! ```text
//!   0 --try_enter--> 1 --try_enter--> 2 --try_enter--> 3 ...      0: free, 1: held, more: held, look again
//!   ^                | ^              |                |
//!   +-----leave------+ +----leave, and the holder stays+
//!
//!   OWED, beside these: a holder dropped its guard with the mark on the gate; the next holder looks again.
//! ```
//!
//! One `fetch_add` decides all of `try_enter`: the thread that turns 0 into 1 is inside, every other thread
//! has left the mark in the same step. If the mark is set already, a thread need not set it again, but only
//! see it: a full fence and a load.
//!
//! Pairings: the Release in `leave` (1 to 0) is seen by the Acquire in the `try_enter` that succeeds next, so
//! that thread sees the whole value. The Release of the `try_enter` that left a mark is seen by the Acquire of
//! the `leave` that clears the mark, so the next pass sees what was published before. For a `try_enter` that
//! only saw the mark, the fence between its publication and its load pairs with the fence after the mark is
//! cleared.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crate::CachePadded;
use crate::atomic::{AtomicU64, Ordering, UnsafeCell, fence_after_rmw, full_fence, wait_a_little};

/// A value that one thread at a time may use, and that no thread waits for.
pub struct Gate<T> {
    /// Zero, or one for the holder plus one for each mark left; and [`OWED`]. On its own cache line, apart from
    /// the value, since every thread that tries the gate writes it. The value is also apart from the gate's
    /// neighbours in memory, since others than the holder use these.
    state: CachePadded<AtomicU64>,
    value: UnsafeCell<T>,
}

/// The right to use the value of a [`Gate`]. End it with [`GateGuard::leave`], in a loop, or
/// [`GateGuard::leave_owing`].
///
/// A drop (on purpose where nothing is published, or by a panic) opens the gate too. A mark on the gate then
/// stays as a debt: [`Gate::is_owed`] reports it, and the next holder's first `leave` makes that holder look
/// again. Until a thread enters, the work behind the mark is not seen.
#[must_use = "the gate stays held until the guard leaves"]
pub struct GateGuard<'a, T> {
    gate: &'a Gate<T>,
    /// A guard lends `&mut T`: it is `Send` and `Sync` where that is, and not merely where the gate is.
    lent: PhantomData<&'a mut T>,
}

const FREE: u64 = 0;
const HELD: u64 = 1;
/// A thread left a mark that no holder has handled yet.
const OWED: u64 = 1 << 63;

// SAFETY: the state gives the value to one guard at a time, and hands it on with Release and Acquire. Sharing
// a gate therefore moves `T` between threads, which `T: Send` allows, and never lends it to two threads.
unsafe impl<T: Send> Sync for Gate<T> {}

// SAFETY: the gate owns its value; moving it moves the value, which `T: Send` allows. (Needed under loom,
// whose cell is not `Send` by itself for every `T`.)
unsafe impl<T: Send> Send for Gate<T> {}

impl<T> Gate<T> {
    /// A free gate around `value`.
    pub fn new(value: T) -> Self {
        Self {
            state: CachePadded::new(AtomicU64::new(FREE)),
            value: UnsafeCell::new(value),
        }
    }

    /// Enters if no thread is inside; otherwise marks the gate, so that the holder looks once more before it
    /// leaves.
    ///
    /// Publish first, then call this: on `None`, what was published before the call is seen by the holder in
    /// a pass that begins after it. Never blocks and never repeats.
    #[inline]
    pub fn try_enter(&self) -> Option<GateGuard<'_, T>> {
        if self.state.load(Ordering::Relaxed) & !OWED > HELD && self.is_marked() {
            return None;
        }
        // Acquire: pairs with the Release of the thread that left last. Release: a mark publishes the caller's
        // work.
        let before = self.state.fetch_add(1, Ordering::AcqRel);
        // Only a thread that entered gets a guard: the drop of a guard opens the gate.
        if before & !OWED == FREE {
            Some(GateGuard {
                gate: self,
                lent: PhantomData,
            })
        } else {
            None
        }
    }

    /// Enters, and waits as at a spin lock: the gate exists to avoid this; for comparison. Leaves no mark.
    ///
    /// It yields the CPU now and then: unlike the holder of a kernel's spin lock, this holder may be preempted.
    pub fn enter_spinning(&self) -> GateGuard<'_, T> {
        let mut spins = 0;
        loop {
            let seen = self.state.load(Ordering::Relaxed);
            if seen & !OWED == FREE && self.take(seen) {
                return GateGuard {
                    gate: self,
                    lent: PhantomData,
                };
            }
            wait_a_little(spins);
            spins += 1;
        }
    }

    /// Whether a guard was dropped with the mark on the gate and no thread has entered and left since.
    #[must_use]
    pub fn is_owed(&self) -> bool {
        self.state.load(Ordering::Relaxed) & OWED != 0
    }

    /// Whether a thread is inside, at this moment. A hint for statistics: it may be wrong when the caller
    /// reads it.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.state.load(Ordering::Relaxed) & !OWED != FREE
    }

    /// The value, for the owner of the gate, which need not enter.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.with_mut(|value| {
            // SAFETY: `&mut self` excludes guards, so this is the only reference, for as long as `self` is
            // borrowed.
            unsafe { &mut *value }
        })
    }

    /// Makes a free gate held, if it still is as it was `seen`.
    fn take(&self, seen: u64) -> bool {
        // Acquire: as in `try_enter`.
        self.state
            .compare_exchange(seen, seen + HELD, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    /// Whether the mark is on the gate after all that the caller has published.
    #[inline]
    fn is_marked(&self) -> bool {
        // Pairs with the fence after a mark is cleared: either this load sees the mark cleared, or that pass
        // sees the work.
        full_fence();
        self.state.load(Ordering::Relaxed) & !OWED > HELD
    }
}

impl<'a, T> GateGuard<'a, T> {
    /// Leaves, unless the gate is marked: then clears the mark and returns the guard.
    ///
    /// # Errors
    /// Returns the guard if the gate was marked: make one more pass and leave again.
    #[inline]
    pub fn leave(self) -> Result<(), Self> {
        // Release: pairs with the Acquire of the next `try_enter` that succeeds.
        if self
            .gate
            .state
            .compare_exchange(HELD, FREE, Ordering::Release, Ordering::Relaxed)
            .is_ok()
        {
            std::mem::forget(self);
            return Ok(());
        }
        // Acquire: pairs with the Release of every `try_enter` that marked the gate up to now.
        self.gate.state.swap(HELD, Ordering::AcqRel);
        // Pairs with the fence in `is_marked`: the mark is cleared before the next pass looks.
        fence_after_rmw();
        Err(self)
    }

    /// Leaves in any case, and returns whether the gate was marked: then the caller must cause a run, by any
    /// thread, that begins after this call.
    #[inline]
    #[must_use = "what others published is lost if nobody runs"]
    pub fn leave_owing(self) -> bool {
        let gate = self.gate;
        std::mem::forget(self);
        gate.open() != HELD
    }
}

impl<T> Gate<T> {
    /// Makes the gate free and returns the state that it had. For the holder, at its end.
    #[inline]
    fn open(&self) -> u64 {
        // Release: pairs with the Acquire of the next `try_enter` that succeeds. Acquire: as in `leave`.
        let before = self.state.swap(FREE, Ordering::AcqRel);
        fence_after_rmw();
        before
    }
}

impl<T> Drop for GateGuard<'_, T> {
    fn drop(&mut self) {
        if self.gate.open() != HELD {
            // A thread that entered in between makes one unnecessary pass; the next one that enters makes the
            // necessary pass.
            self.gate.state.fetch_or(OWED, Ordering::Release);
        }
    }
}

impl<T> Deref for GateGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.gate.value.with(|value| {
            // SAFETY: this guard is the only one, and lends the value out no longer than it is borrowed
            // itself.
            unsafe { &*value }
        })
    }
}

impl<T> DerefMut for GateGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        self.gate.value.with_mut(|value| {
            // SAFETY: this guard is the only one, and is borrowed mutably for as long as the reference lives.
            unsafe { &mut *value }
        })
    }
}

impl<T> fmt::Debug for Gate<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate")
            .field("held", &self.is_held())
            .field("owed", &self.is_owed())
            .finish_non_exhaustive()
    }
}

impl<T: fmt::Debug> fmt::Debug for GateGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GateGuard").field(&**self).finish()
    }
}

#[cfg(all(test, loom))]
mod loom_models;
#[cfg(all(test, not(loom)))]
mod tests;
