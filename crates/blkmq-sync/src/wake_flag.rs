//! The wake flag of a reactor: whether it sleeps, which thread must wake it (at most one wake-up per
//! sleep, none while it is awake), and whether work was published for it since its last query.
//!
//! The reactor publishes here only its intent to block; the work itself is in mailboxes ([`crate::mpsc`]) and
//! run states ([`crate::run_work`]).
//!
//! ```text
//!     +----- take_news ------+
//!     v                      |
//!   Awake --- notify ---> Told
//!     |                      |
//!     |  prepare_to_sleep    |  prepare_to_sleep: true
//!     v                      |
//!   Sleeping <---------------+
//!     |
//!     |  notify: true, once
//!     v
//!   Notified       cancel_sleep: from here and from Sleeping back to Awake
//! ```
//!
//! The owner calls `prepare_to_sleep`, looks for work once more, blocks only if there is none, and in every
//! case calls `cancel_sleep` before it looks for work again. Other threads publish work, call `notify`, and wake
//! the owner (write its event, cancel its wait) if `notify` returns true.
//!
//! An owner with many sources of work asks first: if `take_news`, `prepare_to_sleep` and `cancel_sleep` have all
//! returned false since its last look, no work was published since then.
//!
//! Why no work is lost: the owner leaves `Told`, or writes `Sleeping`, then a full fence, then reads the work;
//! a notifier writes work, then a full fence, then reads the flag. One of the two fences comes first, so either
//! the notifier sees the owner's store (or a later one), and notifies it again; or the owner sees the work. For
//! a notifier that reads the `Notified` or `Told` of an earlier moment, the second case holds.

use crate::Published;
use crate::atomic::{AtomicU32, Ordering, fence_after_rmw};

/// The sleeping state of one reactor. See the module for the protocol.
#[derive(Debug)]
pub struct WakeFlag(AtomicU32);

const AWAKE: u32 = 0;
const TOLD: u32 = 1;
const SLEEPING: u32 = 2;
const NOTIFIED: u32 = 3;

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

    /// Says whether work was published since this method, or one of the two below, last returned true. Then the
    /// owner must look for all of it. For the owner.
    #[inline]
    pub fn take_news(&self) -> bool {
        // Relaxed: a later notification is seen by a later call.
        if self.0.load(Ordering::Relaxed) != TOLD {
            return false;
        }
        // Acquire: pairs with the Release in `notify`.
        self.0.swap(AWAKE, Ordering::SeqCst);
        // Pairs with the fence in `notify`: a thread that comes after this notifies the owner again.
        fence_after_rmw();
        true
    }

    /// Says whether [`WakeFlag::take_news`] would return true. For the owner.
    #[inline]
    #[must_use]
    pub fn has_news(&self) -> bool {
        // Relaxed: as in `take_news`.
        self.0.load(Ordering::Relaxed) == TOLD
    }

    /// Announces that the owner is about to block, and says whether work was published, as
    /// [`WakeFlag::take_news`] does. The owner must look for work once more after this, and must not block if it
    /// finds some. For the owner.
    #[inline]
    pub fn prepare_to_sleep(&self) -> bool {
        let before = self.0.swap(SLEEPING, Ordering::SeqCst);
        debug_assert!(
            before <= TOLD,
            "a reactor prepares to sleep once, and cancels before it does so again"
        );
        // Pairs with the fence in `notify`: the announcement comes before the owner's last look for work.
        fence_after_rmw();
        before == TOLD
    }

    /// Announces that the owner is awake again, whether it blocked or not. Returns whether a `notify` has returned
    /// true since `prepare_to_sleep`: then a wake-up has arrived or is still under way, and work was published.
    /// For the owner.
    #[inline]
    pub fn cancel_sleep(&self) -> bool {
        // Acquire: pairs with the Release of the `notify` that returned true.
        let before = self.0.swap(AWAKE, Ordering::AcqRel);
        fence_after_rmw();
        before == NOTIFIED
    }

    /// Announces published work, and returns whether the caller must wake the owner; at most one call per sleep
    /// returns true. While the owner is awake this costs a full fence and one load of a line that is written once
    /// between two queries of the owner.
    ///
    /// The caller's publication may be a plain store: the fence in here orders it before the look at the
    /// flag.
    #[inline]
    #[must_use = "the owner sleeps on if nobody wakes it"]
    pub fn notify(&self) -> bool {
        self.notify_published(&Published::now())
    }

    /// Like [`WakeFlag::notify`], for a caller with work for many owners: the fence is `published`'s.
    #[inline]
    #[must_use = "the owner sleeps on if nobody wakes it"]
    pub fn notify_published(&self, _published: &Published) -> bool {
        // The fence that made `published` pairs with those of the owner. Relaxed: that fence orders the load, and a stale value
        // is covered by the argument in the module's text.
        let mut seen = self.0.load(Ordering::Relaxed);
        loop {
            let (told, must_wake) = match seen {
                AWAKE => (TOLD, false),
                SLEEPING => (NOTIFIED, true),
                _ => return false,
            };
            // Release: pairs with the Acquire of the owner that sees it. A failure means that another thread has
            // notified the owner, or that the owner sleeps or has woken meanwhile.
            match self
                .0
                .compare_exchange(seen, told, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return must_wake,
                Err(now) => seen = now,
            }
        }
    }

    /// Whether a `notify` has returned true and the owner has not yet announced that it is awake.
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
