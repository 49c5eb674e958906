//! Decides nothing itself: the shape of a mapped disk, whichever kind it is, for those who need not know.
//! [`super::linear`] and [`super::striped`] have the arithmetic, [`super::table`] puts maps on maps.

use super::linear::Linear;
use super::striped::Striped;

/// What lies under a part of a mapped disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Below {
    /// A disk of a queue: its place in the table's list of them.
    Leaf(u32),
    /// Another mapped disk of the table, made before.
    Mapped(u32),
}

/// A range of a disk that holds a part of a mapped disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    pub(super) below: Below,
    /// The range's first byte.
    pub(super) start: u64,
}

/// Where a byte lies.
#[derive(Debug)]
pub(super) struct Located<'a> {
    pub(super) member: &'a Member,
    /// The byte's offset on the member's disk.
    pub(super) at: u64,
    /// From it on, so many bytes of the mapped disk follow each other on the member too.
    pub(super) run: u64,
}

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
