//! Decides nothing itself: the shape of a mapped disk, whichever kind it is, for those who need not know.
//! [`super::linear`] and [`super::striped`] have the arithmetic, [`super::table`] puts maps on maps.

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

    /// Returns the range of member `index`'s disk that holds its share of the bytes from `start` to `end`; one range, since no
    /// map scatters a member's share. It may be empty.
    pub(super) fn share(&self, index: usize, start: u64, end: u64) -> (u64, u64) {
        let before = |offset| match self {
            Self::Linear(map) => map.before(index, offset),
            Self::Striped(map) => map.before(index, offset),
        };
        let base = self.members()[index].start;
        (base + before(start), base + before(end))
    }
}
