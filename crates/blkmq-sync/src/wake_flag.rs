//! Decides whether a reactor sleeps and who must wake it: at most one wake-up per sleep, none while it is
//! awake; and whether anybody has published work for it since it last asked.
//!
//! The reactor publishes nothing here but its intent to block; the work itself lies in mailboxes
//! ([`crate::mpsc`]) and run states ([`crate::run_work`]).
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
//! The owner: `prepare_to_sleep`, look for work once more, block only if there is none, and in every case
//! `cancel_sleep` before it looks for work again. Everybody else: publish work, `notify`, and wake the owner
//! (write its event, cancel its wait) if told so.
//!
//! An owner with much to look at asks first: where `take_news`, `prepare_to_sleep` and `cancel_sleep` have all
//! said no since its last look, nobody has published anything since that it would find.
//!
//! Why no work is lost: the owner leaves `Told`, or writes `Sleeping`, then a full fence, then reads the work;
//! a notifier writes work, then a full fence, then reads the flag. One of the two fences comes first, so either
//! the notifier sees what the owner wrote (or what came after it), and tells it anew; or the owner sees the
//! work. A notifier that reads the `Notified` or `Told` of an earlier moment is on the second side.

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

    /// Says whether work has been published since the owner last heard so, here or by what the two methods below return. It must look
    /// for all of it then. For the owner.
    #[inline]
    pub fn take_news(&self) -> bool {
        // Relaxed: what is told later is heard later.
        if self.0.load(Ordering::Relaxed) != TOLD {
            return false;
        }
        // Acquire: pairs with the Release in `notify`.
        self.0.swap(AWAKE, Ordering::SeqCst);
        // Pairs with the fence in `notify`: who comes after this tells the owner again.
        fence_after_rmw();
        true
    }

    /// Says whether [`WakeFlag::take_news`] would say so. For the owner.
    #[inline]
    #[must_use]
    pub fn has_news(&self) -> bool {
        // Relaxed: as in `take_news`.
        self.0.load(Ordering::Relaxed) == TOLD
    }

    /// Announces that the owner is about to block, and says whether work has been published since it last heard so. The owner must
    /// look for work once more after this, and must not block if it finds some. For the owner.
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

    /// Says that the owner is awake again, whether it blocked or not. Returns whether somebody was told to
    /// wake it since `prepare_to_sleep`: then a wake-up has arrived or is still under way, and work has been published. For the
    /// owner.
    #[inline]
    pub fn cancel_sleep(&self) -> bool {
        // Acquire: pairs with the Release of the `notify` that was told to wake the owner.
        let before = self.0.swap(AWAKE, Ordering::AcqRel);
        fence_after_rmw();
        before == NOTIFIED
    }

    /// Says that work has been published, and returns whether the caller must wake the owner. At most one
    /// caller is told so per sleep. While the owner is awake this costs a full fence and one load of a line
    /// that is written once between two times that the owner asks.
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
        // The fence that made `published` pairs with those of the owner. Relaxed: that fence orders the load, and a stale value
        // is covered by the argument in the module's text.
        let mut seen = self.0.load(Ordering::Relaxed);
        loop {
            let (told, must_wake) = match seen {
                AWAKE => (TOLD, false),
                SLEEPING => (NOTIFIED, true),
                _ => return false,
            };
            // Release: pairs with the Acquire of the owner who hears of it. A failure means that somebody else has told it, or
            // that it sleeps or has woken meanwhile.
            match self
                .0
                .compare_exchange(seen, told, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return must_wake,
                Err(now) => seen = now,
            }
        }
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
