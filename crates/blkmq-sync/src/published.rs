//! Decides how one fence serves many looks: who has published once may then ask many others whether they have
//! to be told.
//!
//! [`crate::run_work`] and [`crate::wake_flag`] both need a full fence between a publication and the look at
//! their word. A completion that runs many contexts, or a batch that wakes many reactors, pays for one fence
//! and passes the proof on.

use std::marker::PhantomData;

use crate::atomic::{fence_after_rmw, full_fence};

/// The proof that what this thread has published is ordered before what it looks at from now on. It stays
/// with its thread and is spent where the next publication begins: what is published after it was made is not
/// covered.
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
    /// its last publication: a tag given back ([`crate::TagBitmap::free`]) is both. A push into a ring is
    /// not: it ends with a plain store. On x86-64 this costs nothing.
    #[inline]
    #[must_use]
    pub fn by_rmw() -> Self {
        fence_after_rmw();
        Self(PhantomData)
    }
}
