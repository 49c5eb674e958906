//! The mapping of a mapped disk of any kind, for callers that need not know the kind; it decides nothing
//! itself. [`super::linear`] and [`super::striped`] have the arithmetic, [`super::table`] stacks maps on
//! maps.

use super::linear::Linear;
use super::member::{Located, Member};
use super::striped::Striped;

/// How the bytes of a mapped disk lie on its members.
#[derive(Clone, Debug)]
pub(super) enum Map {
    Linear(Linear),
    Striped(Striped),
}

impl Map {
    pub(super) fn size(&self) -> u64 {
        match self {
            Self::Linear(map) => map.size(),
            Self::Striped(map) => map.size(),
        }
    }

    pub(super) fn members(&self) -> &[Member] {
        match self {
            Self::Linear(map) => map.members(),
            Self::Striped(map) => map.members(),
        }
    }

    /// Finds where a byte lies; it must be on the disk.
    #[inline]
    pub(super) fn locate(&self, offset: u64) -> Located<'_> {
        match self {
            Self::Linear(map) => map.locate(offset),
            Self::Striped(map) => map.locate(offset),
        }
    }

    /// Returns the range of member `index`'s disk that holds its share of the bytes from `start` to `end`. It
    /// is one range, since no map scatters a member's share; it may be empty.
    pub(super) fn share(&self, index: usize, start: u64, end: u64) -> (u64, u64) {
        let before = |offset| match self {
            Self::Linear(map) => map.before(index, offset),
            Self::Striped(map) => map.before(index, offset),
        };
        let base = self.members()[index].start;
        (base + before(start), base + before(end))
    }
}
