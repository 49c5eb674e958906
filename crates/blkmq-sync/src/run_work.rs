//! The run state of a hardware context: whether it must run now, later, once more, or not at all. One
//! word has the state.
//!
//! Submitters, completions and timers request runs; the reactor that owns the context takes the work, makes a
//! pass over all that is published, and finishes. [`crate::wake_flag`] wakes that reactor.
//!
//! ```text
//!   Idle ----run----> Queued <----run---- Delayed(t) <----run_delayed(t)---- Idle
//!    ^                  |                     |           (of two times the earlier one stays)
//!    |                take         take, once t is reached
//!    |                  v                     |
//!    +---finish---- Running <-----------------+
//!
//!   run while Running: finish leaves it Queued.    run_delayed while Running: finish leaves it Delayed(t).
//!   Stopped, beside these: stop takes back what is queued or delayed; start queues one run in every case.
//! ```
//!
//! The word: bit 0 an immediate run is wanted, bit 1 running, bit 2 stopped, bits 4 to 63 the time of a
//! delayed run in microseconds, 0 for none. A wanted immediate run makes a delayed one void.
//!
//! Pairings: a thread publishes before it requests a run. If it changes the word, its Release is seen by the
//! Acquire of the `take` or `finish` that consumes the change, and the pass after it sees the publication. If it
//! finds the run wanted already and only loads, a full fence between publication and load pairs with the fence
//! in `take`: either the load sees the mark cleared (and the thread sets it), or the pass sees the publication,
//! because `take` clears the mark *before* the pass looks at anything.

use crate::Published;
use crate::atomic::{AtomicU64, Ordering, fence_after_rmw, full_fence};

/// The run-queue state of one hardware context. See the module for the states.
#[derive(Debug)]
pub struct RunWork(AtomicU64);

/// What the caller of [`RunWork::run`] and [`RunWork::start`] must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a run that nobody announces to the owner is not made"]
pub enum Kick {
    /// The run has just been queued: make the owner look.
    Wake,
    /// Nothing: a pass that begins later than the call is certain already, or waits for `start`.
    None,
}

/// What the caller of [`RunWork::run_delayed`] must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a delayed run is not made unless the owner's timer is armed for it"]
pub enum Delay {
    /// The deadline is now earlier than it was: make the owner look at [`RunWork::deadline`] and arm its
    /// timer.
    Rearm,
    /// Nothing: an immediate run is wanted, or an earlier deadline is known, or the context is stopped.
    Kept,
}

const IDLE: u64 = 0;
const WANTED: u64 = 1 << 0;
const RUNNING: u64 = 1 << 1;
const STOPPED: u64 = 1 << 2;
const FLAGS: u64 = WANTED | RUNNING | STOPPED;
const DEADLINE_SHIFT: u32 = 4;
const NS_PER_UNIT: u64 = 1_000;

impl Default for RunWork {
    fn default() -> Self {
        Self::new()
    }
}

impl RunWork {
    /// The state of a context that is idle and not stopped.
    #[must_use]
    pub fn new() -> Self {
        Self(AtomicU64::new(IDLE))
    }

    /// Asks for a run as soon as possible. Publish first, then call this: a pass that begins after the call
    /// sees what was published. Any thread.
    ///
    /// When a run is wanted already this is a full fence and a load, and writes nothing.
    #[inline]
    pub fn run(&self) -> Kick {
        if self.is_wanted_now() {
            // Pairs with the fence in `take`. The first load was a hint; this one comes after the
            // publication.
            full_fence();
            if self.is_wanted_now() {
                return Kick::None;
            }
        }
        self.ask()
    }

    /// Like [`RunWork::run`], for a caller that requests many runs after one publication: the fence is
    /// `published`'s, and a run that is wanted already costs one load. Any thread.
    #[inline]
    pub fn run_published(&self, _published: &Published) -> Kick {
        // The fence that made `published` pairs with the fence in `take`.
        if self.is_wanted_now() {
            Kick::None
        } else {
            self.ask()
        }
    }

    /// Like [`RunWork::run`], for the owner: a run that is wanted already costs one load and no fence,
    /// because it is this thread that will take it, later.
    #[inline]
    pub fn run_by_owner(&self) -> Kick {
        // Only the owner clears the mark, so the owner always sees its present state.
        if self.is_wanted_now() {
            Kick::None
        } else {
            self.ask()
        }
    }

    /// Like [`RunWork::run`], but ignores the mark: the word is written every time, and the owner must always be
    /// notified. It exists for measurement.
    pub fn run_unmarked(&self) {
        let _ = self.ask();
    }

    /// Asks for a run at `deadline_ns` or soon after, on the caller's clock; it is rounded up to a microsecond.
    /// The earlier of two deadlines stays, and an immediate run that is wanted stays immediate. Any thread.
    ///
    /// An owner whom others ask for delayed runs must read [`RunWork::deadline`] after it has announced its
    /// sleep: a [`Delay::Rearm`] just before that finds it awake, and wakes nobody.
    pub fn run_delayed(&self, deadline_ns: u64) -> Delay {
        let asked = units_of(deadline_ns);
        // A word that does not change is written too: the Release publishes the caller's work.
        self.update(|word| {
            let known = word >> DEADLINE_SHIFT;
            if word & STOPPED != 0 {
                (word | WANTED, Delay::Kept)
            } else if word & WANTED != 0 || (known != 0 && known <= asked) {
                (word, Delay::Kept)
            } else {
                (word & FLAGS | asked << DEADLINE_SHIFT, Delay::Rearm)
            }
        })
    }

    /// Begins a pass if one is due at `now_ns`: clears the mark, then returns true, and the caller must look at
    /// everything that was published and call [`RunWork::finish`]. False if nothing is due, during a pass, and
    /// when stopped. For the owner.
    #[inline]
    pub fn take(&self, now_ns: u64) -> bool {
        let mut word = self.0.load(Ordering::Relaxed);
        while is_due(word, now_ns) {
            // Acquire: pairs with the Release of the thread that requested the run.
            match self
                .0
                .compare_exchange_weak(word, RUNNING, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => {
                    // Pairs with the fence in `run`: the mark is cleared before the pass looks.
                    fence_after_rmw();
                    return true;
                }
                Err(now) => word = now,
            }
        }
        false
    }

    /// Ends a pass. True: a run was asked for meanwhile and is queued, so take it again (now, or in the next
    /// round of the owner). False: the state is idle, delayed or stopped; if [`RunWork::deadline`] is
    /// something, arm the timer. For the owner.
    ///
    /// # Panics
    /// If no pass was being made.
    #[inline]
    pub fn finish(&self) -> bool {
        self.update(|word| {
            assert!(word & RUNNING != 0, "finish without take: run work is {word:#x}");
            (word & !RUNNING, word & (WANTED | STOPPED) == WANTED)
        })
    }

    /// When the delayed run is due, in nanoseconds of the caller's clock (a whole number of microseconds, at
    /// or after what was asked). None when there is none, or when an immediate run is wanted.
    #[inline]
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        let word = self.0.load(Ordering::Relaxed);
        let units = word >> DEADLINE_SHIFT;
        (word & (WANTED | STOPPED) == 0 && units != 0).then(|| units.saturating_mul(NS_PER_UNIT))
    }

    /// Takes back what is queued or delayed and lets no pass begin until [`RunWork::start`]. A pass that is
    /// being made goes on: who must know when it ends asks [`RunWork::is_running`]. Any thread; stopping
    /// twice is stopping once.
    pub fn stop(&self) {
        self.update(|word| {
            let asked = if word & WANTED != 0 || word >> DEADLINE_SHIFT != 0 {
                WANTED
            } else {
                0
            };
            (word & RUNNING | STOPPED | asked, ())
        });
    }

    /// Ends a stop and queues one run, whether or not one was asked for: a caller of `run` that raced the
    /// stop is then served in every case. On a context that is not stopped this is [`RunWork::run`]. Any
    /// thread.
    pub fn start(&self) -> Kick {
        self.update(|word| {
            let is_certain = word & STOPPED == 0 && word & WANTED != 0 || word & RUNNING != 0;
            let kick = if is_certain { Kick::None } else { Kick::Wake };
            (word & RUNNING | WANTED, kick)
        })
    }

    /// Whether it is stopped. A pass may still be under way, see [`RunWork::is_running`].
    #[inline]
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Acquire) & STOPPED != 0
    }

    /// Whether a pass is being made. After `stop`, once this is false it stays false until `start`, and what
    /// the last pass did is visible.
    #[inline]
    #[must_use]
    pub fn is_running(&self) -> bool {
        // Acquire: pairs with the Release of `finish`.
        self.0.load(Ordering::Acquire) & RUNNING != 0
    }

    /// Whether an immediate run is wanted: queued, or once more after this pass, or asked for while stopped.
    #[inline]
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.0.load(Ordering::Acquire) & WANTED != 0
    }

    #[inline(always)]
    fn is_wanted_now(&self) -> bool {
        self.0.load(Ordering::Relaxed) & WANTED != 0
    }

    #[inline]
    fn ask(&self) -> Kick {
        self.update(|word| {
            let kick = if word & FLAGS == 0 { Kick::Wake } else { Kick::None };
            (word & FLAGS | WANTED, kick)
        })
    }

    /// Replaces the word by what `next` makes of it, in one read-modify-write, and returns what `next` says
    /// of it.
    #[inline(always)]
    fn update<R>(&self, next: impl Fn(u64) -> (u64, R)) -> R {
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            let (new, answer) = next(word);
            // Release: publications go with the change. Acquire: whoever consumes a change sees them.
            match self
                .0
                .compare_exchange_weak(word, new, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return answer,
                Err(now) => word = now,
            }
        }
    }
}

fn is_due(word: u64, now_ns: u64) -> bool {
    let units = word >> DEADLINE_SHIFT;
    let is_reached = units != 0 && units <= now_ns / NS_PER_UNIT;
    word & (RUNNING | STOPPED) == 0 && (word & WANTED != 0 || is_reached)
}

/// Rounds up, so that a run is never early; at least 1, because 0 stands for no deadline.
fn units_of(deadline_ns: u64) -> u64 {
    deadline_ns.div_ceil(NS_PER_UNIT).max(1)
}

#[cfg(all(test, loom))]
mod loom_models;
#[cfg(all(test, not(loom)))]
mod tests;
