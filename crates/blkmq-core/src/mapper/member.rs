//! Decides what a member of a mapped disk is, and how a byte on it is named.

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
