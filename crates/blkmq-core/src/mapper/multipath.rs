//! Request-based multipath: a driver over the drivers of several paths to one drive; each request takes
//! one of them.
//!
//! ```text
//!  hw_ctx ─► MultipathHctx ── choose (selector) ─► path's driver          no hand-off, no clone, the same tag
//!                 │   ▲                                │
//!                 │   └── Done: final, or requeue ◄────┘
//!                 └── failed path, message ─► Multipath (table, epoch) ─► every context looks once
//! ```
//!
//! A hardware context of a multipath queue owns, on its reactor, a driver of each path. The request goes
//! unchanged to one of them, under its own tag, and its end comes back inline: nothing is copied, queued or
//! handed over. `hctx` does this, `choice` chooses the path as `selector` says, `shard` counts. The state
//! that all contexts share (which paths are usable, which group is the current one, what to do without a
//! path) is in `table`, behind a lock that is taken for changes and never for a request; a number that grows
//! with each change tells the contexts to read the table. `hctx::check` finds out whether failed paths are
//! back, `message` has the operator's commands.
//!
//! The semantics are those of Linux' `dm-mpath` (Documentation/admin-guide/device-mapper, and the behaviour
//! of its messages); `docs/mappers/multipath.md` lists the differences.

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

/// Largest number of paths of one drive, including those that are being removed.
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
