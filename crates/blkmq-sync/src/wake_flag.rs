//! Decides whether a reactor sleeps and who must wake it: at most one wake-up per sleep, none while it is
//! awake.
//!
//! The reactor publishes nothing here but its intent to block; the work itself lies in mailboxes
//! ([`crate::mpsc`]) and run states ([`crate::run_work`]).
//!
//! ```text
//!           prepare_to_sleep              notify: true, once
//!   Awake ------------------> Sleeping ------------------> Notified
//!     ^                          |                            |
//!     +------ cancel_sleep ------+----------------------------+
//! ```
//!
//! The owner: `prepare_to_sleep`, look for work once more, block only if there is none, and in every case
//! `cancel_sleep` before it looks for work again. Everybody else: publish work, `notify`, and wake the owner
//! (write its event, cancel its wait) if told so.
//!
//! Why no wake-up is lost: the owner writes `Sleeping`, then a full fence, then reads the work; a notifier
//! writes work, then a full fence, then reads the flag. One of the two fences comes first, so either the
//! notifier sees `Sleeping` (or what came after it), or the owner sees the work. A notifier that reads the
//! `Notified` or `Awake` of an earlier moment is on the second side: the owner's next `prepare_to_sleep`
//! comes after its fence, and the owner looks after that.

use crate::Published;
use crate::atomic::{AtomicU32, Ordering, fence_after_rmw};

/// The sleeping state of one reactor. See the module for the protocol.
#[derive(Debug)]
pub struct WakeFlag(AtomicU32);

const AWAKE: u32 = 0;
const SLEEPING: u32 = 1;
const NOTIFIED: u32 = 2;

impl Default for WakeFlag {
    fn default() -> Self {
        Self::new()
    }
}

impl WakeFlag {
    /// The flag of a reactor that is awake.
    #[must_use]
    pub fn new() -> Self {
        Self(AtomicU32::new(AWAKE))
    }

    /// Announces that the owner is about to block. The owner must look for work once more after this, and
    /// must not block if it finds some. For the owner.
    #[inline]
    pub fn prepare_to_sleep(&self) {
        let before = self.0.swap(SLEEPING, Ordering::SeqCst);
        debug_assert_eq!(
            before, AWAKE,
            "a reactor prepares to sleep once, and cancels before it does so again"
        );
        // Pairs with the fence in `notify`: the announcement comes before the owner's last look for work.
        fence_after_rmw();
    }

    /// Says that the owner is awake again, whether it blocked or not. Returns whether somebody was told to
    /// wake it since `prepare_to_sleep`: then a wake-up has arrived or is still under way. For the owner.
    #[inline]
    pub fn cancel_sleep(&self) -> bool {
        // Acquire: pairs with the Release of the `notify` that was told to wake the owner.
        let before = self.0.swap(AWAKE, Ordering::AcqRel);
        fence_after_rmw();
        before == NOTIFIED
    }

    /// Says that work has been published, and returns whether the caller must wake the owner. At most one
    /// caller is told so per sleep. While the owner is awake this costs a full fence and one load of a line
    /// that nobody writes.
    ///
    /// The caller's publication may be a plain store: the fence in here orders it before the look at the
    /// flag.
    #[inline]
    #[must_use = "the owner sleeps on if nobody wakes it"]
    pub fn notify(&self) -> bool {
        self.notify_published(&Published::now())
    }

    /// Like [`WakeFlag::notify`], for one who has something for many owners: the fence is `published`'s.
    #[inline]
    #[must_use = "the owner sleeps on if nobody wakes it"]
    pub fn notify_published(&self, _published: &Published) -> bool {
        // The fence that made `published` pairs with the fence in `prepare_to_sleep`. Relaxed: the fence
        // above orders the load, and a stale value is covered by the argument in the module's text.
        if self.0.load(Ordering::Relaxed) != SLEEPING {
            return false;
        }
        // Release: pairs with the Acquire in `cancel_sleep`. A failure means somebody else wakes it, or it
        // woke itself.
        self.0
            .compare_exchange(SLEEPING, NOTIFIED, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    /// Whether somebody was told to wake the owner and the owner has not yet said that it is awake.
    #[inline]
    #[must_use]
    pub fn is_notified(&self) -> bool {
        // Acquire: pairs with the Release in `notify`.
        self.0.load(Ordering::Acquire) == NOTIFIED
    }
}

#[cfg(all(test, loom))]
mod loom_models;
#[cfg(all(test, not(loom)))]
mod tests;
