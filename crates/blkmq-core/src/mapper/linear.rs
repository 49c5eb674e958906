//! The linear map: a disk whose bytes lie in segments of its members, one after the other. `map` calls
//! it; `table` has checked the segments.

use super::member::{Located, Member};

/// Segments of members, one after the other.
#[derive(Clone, Debug)]
pub(super) struct Linear {
    members: Box<[Member]>,
    /// Where each segment begins on the mapped disk, ascending from 0.
    firsts: Box<[u64]>,
    size: u64,
}

impl Linear {
    /// Joins segments, given with their lengths in bytes; there must be at least one, and none may be empty.
    ///
    /// Returns none if the sum is beyond 2^64.
    pub(super) fn new(segments: Vec<(Member, u64)>) -> Option<Self> {
        let mut size = 0u64;
        let mut firsts = Vec::with_capacity(segments.len());
        for (_, len) in &segments {
            firsts.push(size);
            size = size.checked_add(*len)?;
        }
        Some(Self {
            members: segments.into_iter().map(|(member, _)| member).collect(),
            firsts: firsts.into(),
            size,
        })
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    pub(super) fn members(&self) -> &[Member] {
        &self.members
    }

    /// Finds where a byte lies, and how many bytes follow it contiguously.
    #[inline]
    pub(super) fn locate(&self, offset: u64) -> Located<'_> {
        let index = self.firsts.partition_point(|first| *first <= offset) - 1;
        let (member, within) = (&self.members[index], offset - self.firsts[index]);
        Located {
            member,
            at: member.start + within,
            run: self.end_of(index) - offset,
        }
    }

    /// How many bytes of segment `index` lie before byte `offset` of the mapped disk.
    pub(super) fn before(&self, index: usize, offset: u64) -> u64 {
        offset.clamp(self.firsts[index], self.end_of(index)) - self.firsts[index]
    }

    fn end_of(&self, index: usize) -> u64 {
        self.firsts.get(index + 1).copied().unwrap_or(self.size)
    }
}
