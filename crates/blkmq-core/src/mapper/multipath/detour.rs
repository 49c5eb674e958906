//! Decides how a request goes if it is not to go inline: over a worker thread, as Linux' request-based device mapper once did
//! it. There to be measured beside the straight way, and only with the feature `baselines`: without it no request goes so.
//!
//! A worker that issues by itself, as the kernel's did, has drivers of the paths of its own, and a copy of what the request says;
//! its end goes back to the reactor that owns the hardware context: one hand-off and back. A worker that does not, or finds no
//! room, gives the request's name back, for that reactor to issue it; so there is a second hand-off for the end.

use super::PathId;
use crate::driver::Done;
use crate::ids::Cookie;
use crate::request::Request;

/// Which parts of a request's way go over the worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Detours {
    /// A request is issued to its path after the worker has asked for it (asynchronous insertion).
    pub insert: bool,
    /// A request that goes over the worker to be issued is issued by the worker itself. Means nothing without `insert`.
    pub issue: bool,
    /// The end of a request is reported by the worker.
    pub complete: bool,
    /// Each end of a request has the worker run the upper queue.
    pub run: bool,
}

impl Detours {
    /// The old way: all of them.
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

/// What a worker is given, and gives back.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a request that is issued by the worker is not to cost an allocation"
)]
pub enum Job {
    /// This request is to be issued to its path, by the reactor that owns the context.
    Insert(Cookie),
    /// This request is to be issued by the worker, which gives back its end, or, without room, its name.
    Issue(ByWorker),
    /// This request has ended.
    Complete(Done),
    /// The upper queue is to be run. Given back to nobody: the run itself is what is asked for.
    Run,
}

/// A request that a worker issues by itself.
#[derive(Debug)]
pub struct ByWorker {
    /// What its end is to name.
    pub cookie: Cookie,
    /// The path that was chosen for it.
    pub path: PathId,
    /// Which path of that number is meant: numbers are given away again.
    pub serial: u64,
    /// What the request says. Its memory is lent until the end is given back.
    pub rq: Request,
}

/// One hardware context's side of a worker.
pub trait Detour {
    /// Gives the worker something to do, and wakes it.
    fn send(&mut self, job: Job);

    /// Takes what has come back, in the order in which it was sent. The worker has had the context's reactor run.
    fn take(&mut self) -> Option<Job>;
}
