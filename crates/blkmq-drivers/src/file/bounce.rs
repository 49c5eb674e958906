//! Bounce buffers for client memory that direct I/O cannot use: areas of two sizes, mapped at set-up, one
//! for each request. `hctx` copies a write into its area before, and a read out of it after, the
//! transfer.

use std::io;
use std::ops::Range;

use blkmq_core::bio::Lent;

use crate::mapping::Mapping;

/// The areas of one hardware context. Backed by memory only as far as they have been used.
pub(super) struct Bounces {
    pub(super) memory: Mapping,
    small_free: Vec<u32>,
    large_free: Vec<u32>,
}

/// An area that a request has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Area {
    Small(u32),
    Large(u32),
}

impl Bounces {
    /// Maps the areas.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            memory: Mapping::new(SMALL_COUNT as usize * SMALL_BYTES + LARGE_COUNT as usize * LARGE_AREA)?,
            small_free: (0..SMALL_COUNT).rev().collect(),
            large_free: (0..LARGE_COUNT).rev().collect(),
        })
    }

    /// Takes an area of at least `len` bytes, if one is free.
    pub(super) fn take(&mut self, len: u64) -> Option<Area> {
        if len <= SMALL_BYTES as u64
            && let Some(index) = self.small_free.pop()
        {
            return Some(Area::Small(index));
        }
        if len > LARGE_AREA as u64 {
            return None;
        }
        self.large_free.pop().map(Area::Large)
    }

    /// Gives an area back.
    pub(super) fn put(&mut self, area: Area) {
        match area {
            Area::Small(index) => self.small_free.push(index),
            Area::Large(index) => self.large_free.push(index),
        }
    }

    /// Returns the part of an area from `skip` to `end`.
    pub(super) fn lend(&self, area: Area, part: Range<u64>) -> Lent {
        let start = match area {
            Area::Small(index) => index as usize * SMALL_BYTES,
            Area::Large(index) => SMALL_COUNT as usize * SMALL_BYTES + index as usize * LARGE_AREA,
        };
        self.memory
            .lend(start + part.start as usize..start + part.end as usize)
    }
}

/// The largest request that can be bounced, in bytes: the driver's largest transfer.
pub(super) const LARGE_BYTES: usize = 1 << 20;
/// The largest block of direct I/O, in bytes.
pub(super) const BLOCK_BYTES_MAX: u32 = 64 << 10;
/// A request that is not aligned begins and ends inside a block.
const LARGE_AREA: usize = LARGE_BYTES + 2 * BLOCK_BYTES_MAX as usize;
const LARGE_COUNT: u32 = 16;
const SMALL_BYTES: usize = 64 << 10;
const SMALL_COUNT: u32 = 128;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_do_not_overlap_and_run_out_small_before_large() {
        let mut bounces = Bounces::new().unwrap();
        let mut starts = Vec::new();
        while let Some(area) = bounces.take(4096) {
            starts.push(bounces.lend(area, 0..4096).start().as_ptr().addr());
        }
        assert_eq!(starts.len(), (SMALL_COUNT + LARGE_COUNT) as usize);
        starts.sort_unstable();
        assert!(starts.windows(2).all(|two| two[1] - two[0] >= SMALL_BYTES));
        bounces.put(Area::Small(5));
        assert_eq!(bounces.take(SMALL_BYTES as u64 + 1), None);
        assert_eq!(bounces.take(SMALL_BYTES as u64), Some(Area::Small(5)));
    }
}
