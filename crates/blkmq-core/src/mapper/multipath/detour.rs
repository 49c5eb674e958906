//! A detour over a worker thread, as Linux' request-based device mapper once took it. It exists for
//! measurement against the direct way, and only with the feature `baselines`: without it every request
//! goes inline.
//!
//! A worker that issues by itself, as the kernel's did, has its own drivers of the paths, and a copy of the
//! request; the request's end returns to the reactor that owns the hardware context: one hand-off in each
//! direction. A worker that does not, or finds no room, returns the request's cookie to that reactor, which
//! issues it; so there is a second hand-off for the end.

use super::PathId;
use crate::driver::Done;
use crate::ids::Cookie;
use crate::request::Request;

/// Which parts of a request's way go over the worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Detours {
    /// A request is issued to its path after the worker has asked for it (asynchronous insertion).
    pub insert: bool,
    /// A request that goes over the worker to be issued is issued by the worker itself. No effect without `insert`.
    pub issue: bool,
    /// The end of a request is reported by the worker.
    pub complete: bool,
    /// At each end of a request the worker runs the upper queue.
    pub run: bool,
}

impl Detours {
    /// All of them, as Linux once did.
    pub const ALL: Self = Self {
        insert: true,
        issue: true,
        complete: true,
        run: true,
    };

    /// Says whether any part goes over the worker.
    pub const fn has_any(self) -> bool {
        cfg!(feature = "baselines") && (self.insert || self.complete || self.run)
    }
}

/// A job sent to a worker, or returned by it.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a request that is issued by the worker is not to cost an allocation"
)]
pub enum Job {
    /// Issue this request to its path: for the reactor that owns the context.
    Insert(Cookie),
    /// Issue this request: for the worker, which returns the request's end or, without room, its cookie.
    Issue(ByWorker),
    /// Report the end of this request.
    Complete(Done),
    /// Run the upper queue. Never returned: the run itself is the result.
    Run,
}

/// A request that a worker issues by itself.
#[derive(Debug)]
pub struct ByWorker {
    /// The cookie for the request's end.
    pub cookie: Cookie,
    /// The path that was chosen for the request.
    pub path: PathId,
    /// Which path of that number is meant: numbers are reused.
    pub serial: u64,
    /// A copy of the request. Its memory is lent until the end is returned.
    pub rq: Request,
}

/// One hardware context's side of a worker.
pub trait Detour {
    /// Sends a job to the worker, and wakes it.
    fn send(&mut self, job: Job);

    /// Takes a returned job, in the order in which jobs were sent. The worker has made the context's reactor run.
    fn take(&mut self) -> Option<Job>;
}
