//! The striped map: chunks of the disk are assigned to its members in turn, as in RAID 0. `map` calls it;
//! `table` has checked the members.
//!
//! ```text
//!   mapped disk:  | 0 | 1 | 2 | 3 | 4 | 5 | ...         chunks of 2^shift bytes
//!   member 0:     | 0 | 3 | ...
//!   member 1:     | 1 | 4 | ...       whatever the range, what of it lies on one member is contiguous there
//!   member 2:     | 2 | 5 | ...
//! ```

use super::member::{Located, Member};

/// Chunks assigned to members in turn.
#[derive(Clone, Debug)]
pub(super) struct Striped {
    members: Box<[Member]>,
    shift: u32,
    size: u64,
}

impl Striped {
    /// Assigns chunks of `chunk` bytes, a power of two, to members that each have `len` bytes, a multiple of it.
    ///
    /// Returns none if the sum is beyond 2^64.
    pub(super) fn new(members: Vec<Member>, len: u64, chunk: u64) -> Option<Self> {
        Some(Self {
            size: len.checked_mul(members.len() as u64)?,
            members: members.into(),
            shift: chunk.trailing_zeros(),
        })
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    pub(super) fn members(&self) -> &[Member] {
        &self.members
    }

    /// Bytes of a chunk.
    pub(super) fn chunk(&self) -> u64 {
        1 << self.shift
    }

    /// Finds where a byte lies, and how many bytes follow it contiguously.
    #[inline]
    pub(super) fn locate(&self, offset: u64) -> Located<'_> {
        let width = self.members.len() as u64;
        let (number, within) = (offset >> self.shift, offset & (self.chunk() - 1));
        let member = &self.members[(number % width) as usize];
        Located {
            member,
            at: member.start + ((number / width) << self.shift) + within,
            run: self.chunk() - within,
        }
    }

    /// How many bytes of member `index` lie before byte `offset` of the mapped disk.
    pub(super) fn before(&self, index: usize, offset: u64) -> u64 {
        let row = self.chunk() * self.members.len() as u64;
        let (rows, rest) = (offset / row, offset % row);
        let in_row = rest.saturating_sub(index as u64 * self.chunk());
        (rows << self.shift) + in_row.min(self.chunk())
    }
}
