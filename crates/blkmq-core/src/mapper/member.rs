//! A member of a mapped disk, and the place of a byte on it.

/// The disk under a part of a mapped disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Below {
    /// A disk of a queue, by its index in the table's list of leaves.
    Leaf(u32),
    /// Another mapped disk of the table, added before.
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
    /// How many bytes from this one on are contiguous both on the mapped disk and on the member.
    pub(super) run: u64,
}
