//! The content of a modelled drive, block by block: the live image (what reads return), the volatile
//! cache, and the durable image (what survives a power cut). The drive writes them; the oracle examines
//! the durable one.
//!
//! ```text
//!   write ───► live + cache ──── flush, destaging, chance at a power cut ───► durable
//!   write with FUA, or without a cache: live and durable at once
//! ```

use std::collections::BTreeSet;
use std::ops::Range;

use crate::rng::{Ppm, Rng};

/// The three images of one drive. A block's content is one number; all are 0 at first.
#[derive(Debug)]
pub struct Images {
    /// The number of its first block; blocks are numbered across all drives.
    first: u32,
    live: Vec<Cell>,
    durable: Vec<Cell>,
    /// Blocks whose live content is not durable.
    dirty: BTreeSet<u32>,
    /// Blocks with a write that was reported as done and is not durable: the next flush must write
    /// them.
    owed: BTreeSet<u32>,
    /// Blocks whose durable content was written since the oracle last checked.
    changed: Vec<u32>,
    writes: u64,
}

/// A block's content, and the number of the write that put it there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    /// The content.
    pub value: u64,
    write: u64,
}

/// Draws which blocks are written. All blocks of one physical block have the same result.
#[derive(Debug)]
pub struct Lot {
    share: Ppm,
    physical: u32,
    last: Option<(u32, bool)>,
}

impl Lot {
    /// Takes this share of physical blocks, of `physical` blocks each.
    pub fn new(share: Ppm, physical: u32) -> Self {
        Self {
            share,
            physical,
            last: None,
        }
    }

    /// Says whether it takes the block at this place on the drive; call it for blocks in ascending
    /// order.
    pub fn takes(&mut self, block: u32, rng: &mut Rng) -> bool {
        let number = block / self.physical;
        match self.last {
            Some((last, taken)) if last == number => taken,
            _ => self.last.insert((number, rng.chance(self.share))).1,
        }
    }
}

impl Images {
    /// Makes the images of a fresh drive that has the blocks with these numbers.
    pub fn new(blocks: Range<u32>) -> Self {
        Self {
            first: blocks.start,
            live: vec![Cell::default(); blocks.len()],
            durable: vec![Cell::default(); blocks.len()],
            dirty: BTreeSet::new(),
            owed: BTreeSet::new(),
            changed: Vec::new(),
            writes: 0,
        }
    }

    /// Returns the numbers of the drive's blocks.
    pub fn blocks(&self) -> Range<u32> {
        self.first..self.first + self.live.len() as u32
    }

    /// Returns what a read of `block` returns.
    pub fn live(&self, block: u32) -> u64 {
        self.live[self.index(block)].value
    }

    /// Returns the content of `block` after a power cut at which nothing of the cache is saved.
    pub fn durable(&self, block: u32) -> u64 {
        self.durable[self.index(block)].value
    }

    /// Writes a block; with `through` it is durable at once.
    pub fn write(&mut self, block: u32, value: u64, through: bool) {
        self.writes += 1;
        let cell = Cell {
            value,
            write: self.writes,
        };
        let index = self.index(block);
        self.live[index] = cell;
        self.dirty.insert(block);
        if through {
            self.persist(block, cell);
        }
    }

    /// Records that a write of `block` has been reported as done, so that the next flush must write
    /// it.
    pub fn reported(&mut self, block: u32) {
        if self.dirty.contains(&block) {
            self.owed.insert(block);
        }
    }

    /// Returns what a flush of the blocks `range` that starts now must make durable.
    pub fn owed(&self, range: Range<u32>) -> Vec<(u32, Cell)> {
        self.owed
            .range(range)
            .map(|&block| (block, self.live[self.index(block)]))
            .collect()
    }

    /// Makes a cell durable, unless a later one is durable already.
    pub fn persist(&mut self, block: u32, cell: Cell) {
        let index = self.index(block);
        let durable = &mut self.durable[index];
        if cell.write < durable.write {
            return;
        }
        *durable = cell;
        self.changed.push(block);
        if self.live[index] == cell {
            self.dirty.remove(&block);
            self.owed.remove(&block);
        }
    }

    /// Writes some of the cache back, without a flush.
    pub fn destage(&mut self, lot: &mut Lot, rng: &mut Rng) {
        let dirty = self.dirty.iter().copied();
        let chosen: Vec<u32> = dirty.filter(|block| lot.takes(block - self.first, rng)).collect();
        for block in chosen {
            self.persist(block, self.live[self.index(block)]);
        }
    }

    /// Cuts the power: what is not durable is lost. Returns the number of lost blocks.
    pub fn power_cut(&mut self) -> usize {
        let lost = self.dirty.len();
        self.live.copy_from_slice(&self.durable);
        self.dirty.clear();
        self.owed.clear();
        lost
    }

    /// Returns the blocks whose durable content was written since the last call.
    pub fn take_changed(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.changed)
    }

    fn index(&self, block: u32) -> usize {
        (block - self.first) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_write_is_live_at_once_and_durable_after_what_a_flush_owes() {
        let mut images = Images::new(0..8);
        images.write(3, 7, false);
        assert_eq!((images.live(3), images.durable(3)), (7, 0));
        assert_eq!(images.owed(0..8), [], "not reported yet: no flush owes it");
        images.reported(3);
        for (block, cell) in images.owed(0..8) {
            images.persist(block, cell);
        }
        assert_eq!(images.durable(3), 7);
        assert_eq!(images.owed(0..8), []);
        assert_eq!(images.take_changed(), [3]);
    }

    #[test]
    fn older_flush_does_not_overwrite_a_later_write_through() {
        let mut images = Images::new(0..8);
        images.write(1, 10, false);
        images.reported(1);
        let owed = images.owed(0..8);
        images.write(1, 11, true);
        for (block, cell) in owed {
            images.persist(block, cell);
        }
        assert_eq!((images.live(1), images.durable(1)), (11, 11));
    }

    #[test]
    fn power_cut_takes_back_what_is_not_durable() {
        let mut images = Images::new(0..8);
        images.write(1, 10, true);
        images.write(1, 11, false);
        images.write(2, 12, false);
        assert_eq!(images.power_cut(), 2);
        assert_eq!((images.live(1), images.live(2)), (10, 0));
    }
}
