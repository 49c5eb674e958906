//! Decides by which of several ways a request reaches its drive: request-based multipath, a driver over drivers.
//!
//! ```text
//!  hw_ctx ─► MultipathHctx ── choose (selector) ─► path's driver          no hand-off, no clone, the same tag
//!                 │   ▲                                │
//!                 │   └── Done: final, or requeue ◄────┘
//!                 └── failed path, message ─► Multipath (table, epoch) ─► every context looks once
//! ```
//!
//! A hardware context of a multipath queue owns, on its reactor, a driver of each path. The request
//! goes to one of them as it is, under the tag that it has already, and comes back inline: nothing
//! is copied, queued or handed over. `hctx` is that way, `choice` chooses in the way that
//! `selector` names, `shard` counts. What all contexts agree on (which paths are usable, which
//! group is the current one, what to do without a path) is in `table`, behind a lock that is taken
//! when something changes and never for a request; a number that grows with each change tells the
//! contexts to look. `hctx::check` finds out whether failed paths are back, `message` is what an
//! operator can do.
//!
//! The semantics are those of Linux' `dm-mpath` (Documentation/admin-guide/device-mapper, and the behaviour of its messages);
//! where ours differ, `docs/mappers/multipath.md` says so.

mod choice;
mod detour;
mod hctx;
mod history;
mod message;
mod selector;
mod shard;
mod shared;
mod table;

pub use detour::{ByWorker, Detour, Detours, Job};
pub use hctx::{MultipathHctx, Opener};
pub use message::MessageError;
pub use selector::Selector;
pub use shared::{Config, Kick, Multipath};
pub use table::{Failback, GroupStats, NoPath, PathSpec, PathState, PathStats};

/// The most paths of one drive, those that are being removed included.
pub const PATHS_MAX: usize = 32;

/// A path of a multipath drive. The number of a path that was removed may be given to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId(pub u8);

impl PathId {
    /// Returns the number as an index into a table.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The paths of a set, a bit each, in the order of their numbers.
fn paths_in(mut set: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let path = set.trailing_zeros() as usize;
        set &= set.wrapping_sub(1);
        (path < PATHS_MAX).then_some(path)
    })
}
