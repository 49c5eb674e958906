//! The proof that a thread has passed a full fence after its publication: one fence serves many checks of
//! whether others must be notified.
//!
//! [`crate::run_work`] and [`crate::wake_flag`] both need a full fence between a publication and the check of
//! their word. A completion that runs many contexts, or a batch that wakes many reactors, pays for one fence
//! and passes the proof on.

use std::marker::PhantomData;

use crate::atomic::{fence_after_rmw, full_fence};

/// The proof that what this thread has published is ordered before its later loads. It stays with its thread
/// and is used up where the next publication begins: it does not cover what is published after it was made.
#[derive(Debug)]
pub struct Published(PhantomData<*const ()>);

impl Published {
    /// Orders everything published until now, plain stores included. One full fence.
    #[inline]
    #[must_use]
    pub fn now() -> Self {
        full_fence();
        Self(PhantomData)
    }

    /// Like [`Published::now`], for a thread that has passed a read-modify-write of this crate after, or as,
    /// its last publication: freeing a tag ([`crate::TagBitmap::free`]) is both. A push into a ring is not:
    /// it ends with a plain store. On x86-64 this costs nothing.
    #[inline]
    #[must_use]
    pub fn by_rmw() -> Self {
        fence_after_rmw();
        Self(PhantomData)
    }
}
