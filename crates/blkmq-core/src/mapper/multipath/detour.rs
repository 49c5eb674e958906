//! Decides how a request goes if it is not to go inline: over a worker thread, as Linux' request-based device mapper once did
//! it. There to be measured beside the straight way; off by default, and then nobody asks for it.
//!
//! Hardware contexts belong to reactors here, so a worker cannot issue by itself. It does what is left of the old way: it is
//! woken, takes the request's name out of its queue, and asks the reactor that owns the context to go on.

use crate::driver::Done;
use crate::ids::Cookie;

/// Which parts of a request's way go over the worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Detours {
    /// A request is issued to its path after the worker has asked for it (asynchronous insertion).
    pub insert: bool,
    /// The end of a request is reported by the worker.
    pub complete: bool,
    /// Each end of a request has the worker run the upper queue.
    pub run: bool,
}

impl Detours {
    /// The old way: all three.
    pub const ALL: Self = Self {
        insert: true,
        complete: true,
        run: true,
    };

    /// Says whether any part goes over the worker.
    pub const fn has_any(self) -> bool {
        self.insert || self.complete || self.run
    }
}

/// What a worker is given, and gives back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// This request is to be issued to its path.
    Insert(Cookie),
    /// This request has ended.
    Complete(Done),
    /// The upper queue is to be run. Given back to nobody: the run itself is what is asked for.
    Run,
}

/// One hardware context's side of a worker.
pub trait Detour {
    /// Gives the worker something to do, and wakes it.
    fn send(&mut self, job: Job);

    /// Takes what has come back, in the order in which it was sent. The worker has had the context's reactor run.
    fn take(&mut self) -> Option<Job>;
}
