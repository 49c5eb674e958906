//! Where writes are encrypted: areas of two sizes, made with the first encrypted disk. A group may hold any
//! number while more than half of a size is free, and then a share of what is free, so that one that holds
//! areas without returning them leaves some to others.

use std::ops::Range;

use blkmq_core::bio::Lent;
use blkmq_core::ids::GroupId;

use super::sys::BounceMemory;

/// The areas of one thread. Backed by memory only as far as they have been used.
pub(super) struct Areas {
    memory: BounceMemory,
    small: Pool,
    large: Pool,
}

/// An area that a bio has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Area {
    Small(u32),
    Large(u32),
}

/// The areas of one size.
struct Pool {
    count: u32,
    free: Vec<u32>,
    /// How many each group holds that holds some.
    held: Vec<(GroupId, u32)>,
}

impl Areas {
    pub(super) fn new() -> Self {
        let bytes = u64::from(SMALL_COUNT) * SMALL_BYTES + u64::from(LARGE_COUNT) * LARGE_BYTES;
        Self {
            memory: BounceMemory::new(bytes as usize),
            small: Pool::new(SMALL_COUNT),
            large: Pool::new(LARGE_COUNT),
        }
    }

    /// Takes an area of at least `len` bytes for a group, if one is free for it.
    pub(super) fn take(&mut self, len: u64, group: GroupId) -> Option<Area> {
        match len {
            0..=SMALL_BYTES => self.small.take(group).map(Area::Small),
            _ => self.large.take(group).map(Area::Large),
        }
    }

    /// Gives an area back.
    pub(super) fn put(&mut self, area: Area, group: GroupId) {
        match area {
            Area::Small(index) => self.small.put(index, group),
            Area::Large(index) => self.large.put(index, group),
        }
    }

    /// A part of an area that is not lent.
    pub(super) fn bytes_mut(&mut self, area: Area, part: Range<u64>) -> &mut [u8] {
        let start = start_of(area);
        self.memory
            .bytes_mut((start + part.start) as usize..(start + part.end) as usize)
    }

    /// Lends the first `len` bytes of an area.
    pub(super) fn lend(&self, area: Area, len: u64) -> Lent {
        let start = start_of(area);
        self.memory.lend(start as usize..(start + len) as usize)
    }
}

fn start_of(area: Area) -> u64 {
    match area {
        Area::Small(index) => u64::from(index) * SMALL_BYTES,
        Area::Large(index) => u64::from(SMALL_COUNT) * SMALL_BYTES + u64::from(index) * LARGE_BYTES,
    }
}

impl Pool {
    fn new(count: u32) -> Self {
        Self {
            count,
            free: (0..count).rev().collect(),
            held: Vec::with_capacity(count as usize),
        }
    }

    fn take(&mut self, group: GroupId) -> Option<u32> {
        let free = self.free.len() as u32;
        let place = self.held.iter().position(|(holder, _)| *holder == group);
        if 2 * free <= self.count {
            let held = place.map_or(0, |place| self.held[place].1);
            let share = free / (self.held.len() as u32 + NEWCOMERS);
            if held >= share.max(1) {
                return None;
            }
        }
        let index = self.free.pop()?;
        match place {
            Some(place) => self.held[place].1 += 1,
            None => self.held.push((group, 1)),
        }
        Some(index)
    }

    fn put(&mut self, index: u32, group: GroupId) {
        self.free.push(index);
        let place = self.held.iter().position(|(holder, _)| *holder == group);
        let place = place.expect("a group that gives an area back holds it");
        self.held[place].1 -= 1;
        if self.held[place].1 == 0 {
            self.held.swap_remove(place);
        }
    }
}

/// The largest piece of a write that is encrypted together, in bytes.
pub(super) const LARGE_BYTES: u64 = 1 << 20;
const LARGE_COUNT: u32 = 16;
const SMALL_BYTES: u64 = 64 << 10;
const SMALL_COUNT: u32 = 128;
/// For how many groups that hold nothing yet the rest must do.
const NEWCOMERS: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_do_not_overlap_and_can_be_taken_again() {
        let mut areas = Areas::new();
        let group = GroupId(1);
        let one = areas.take(4096, group).unwrap();
        let two = areas.take(4096, group).unwrap();
        let large = areas.take(LARGE_BYTES, group).unwrap();
        areas.bytes_mut(one, 0..SMALL_BYTES).fill(1);
        areas.bytes_mut(two, 0..SMALL_BYTES).fill(2);
        areas.bytes_mut(large, 0..LARGE_BYTES).fill(3);
        assert!(areas.bytes_mut(one, 0..SMALL_BYTES).iter().all(|byte| *byte == 1));
        assert!(areas.bytes_mut(two, 0..SMALL_BYTES).iter().all(|byte| *byte == 2));
        areas.put(two, group);
        assert_eq!(areas.take(1, group), Some(two));
    }

    #[test]
    fn group_that_holds_its_areas_leaves_some_to_each_newcomer() {
        let mut pool = Pool::new(16);
        let flood = (0..16).filter(|_| pool.take(GroupId(0)).is_some()).count();
        assert_eq!(flood, 8);
        for group in 1..8 {
            assert!(pool.take(GroupId(group)).is_some(), "group {group}");
            assert!(pool.take(GroupId(0)).is_none());
        }
    }
}
