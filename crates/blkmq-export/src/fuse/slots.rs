//! Decides where a request's data lies while it is under way: each has a slot with a buffer for the largest there is, which takes memory
//! only for what was used of it. The slots that were used last are used first, so few requests at a time stay in little memory.

use std::io;

use super::protocol::DATA_BYTES_MAX;
use crate::common::sys::{Buffer, Region};

/// The slots of one channel.
#[derive(Debug)]
pub(super) struct Slots {
    all: Vec<Slot>,
    /// Those that nobody uses, the one that was used last at the end.
    free: Vec<u16>,
    bytes: usize,
}

/// A request under way.
#[derive(Debug)]
pub(super) struct Slot {
    /// The request's number.
    pub(super) unique: u64,
    pub(super) work: Work,
    buffer: Option<Buffer>,
    /// Bytes of the buffer that may have been touched.
    touched: usize,
}

/// What is done for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    None,
    /// A read: so much of what is read comes before what was asked for, and that is so long.
    Read {
        before: u32,
        len: u32,
    },
    Write {
        len: u32,
    },
    Flush,
    Zero,
    /// Data, or a hole, is looked for from there on.
    Seek {
        from: u64,
        is_for_data: bool,
    },
}

impl Slots {
    /// Makes so many slots for a disk with blocks of that size. The first one has its memory from the start, so that one request can be
    /// served however short memory is.
    pub(super) fn new(count: u16, block_size: u32) -> Self {
        let slot = || Slot {
            unique: 0,
            work: Work::None,
            buffer: None,
            touched: 0,
        };
        let mut slots = Self {
            all: std::iter::repeat_with(slot).take(count.into()).collect(),
            free: (0..count).rev().collect(),
            // A read that is no multiple of blocks has parts of two more than it asks for.
            bytes: DATA_BYTES_MAX + 2 * block_size.max(PAGE as u32) as usize,
        };
        if let Ok(mut buffer) = slots.make_buffer() {
            buffer.bytes_mut().fill(0);
            slots.all[0].buffer = Some(buffer);
        }
        slots
    }

    /// The free slot that is used next, if there is one: with a buffer, that is not lent.
    pub(super) fn next(&mut self) -> Option<u16> {
        loop {
            let &index = self.free.last()?;
            if self.all[usize::from(index)].buffer.is_some() {
                return Some(index);
            }
            match self.make_buffer() {
                Ok(buffer) => self.all[usize::from(index)].buffer = Some(buffer),
                // There is no memory for one more at the moment; those that have theirs do.
                Err(_) => {
                    let has_one = |index: &u16| self.all[usize::from(*index)].buffer.is_some();
                    let place = self.free.iter().rposition(has_one)?;
                    let index = self.free.remove(place);
                    self.free.push(index);
                }
            }
        }
    }

    /// Takes the slot that [`Slots::next`] has named.
    pub(super) fn take(&mut self, index: u16, unique: u64, work: Work) {
        debug_assert_eq!(self.free.last(), Some(&index), "another slot than the next");
        self.free.pop();
        let slot = &mut self.all[usize::from(index)];
        (slot.unique, slot.work) = (unique, work);
    }

    /// Takes a slot back.
    pub(super) fn put(&mut self, index: u16) {
        self.all[usize::from(index)].work = Work::None;
        self.free.push(index);
    }

    pub(super) fn get_mut(&mut self, index: u16) -> &mut Slot {
        &mut self.all[usize::from(index)]
    }

    /// Says whether none is under way.
    pub(super) fn are_free(&self) -> bool {
        self.free.len() == self.all.len()
    }

    /// Gives the memory of one slot back that was used for a large request. Says whether there may be more of them.
    pub(super) fn trim(&mut self) -> bool {
        let is_large = |index: &&u16| **index != 0 && self.all[usize::from(**index)].touched > KEPT_BYTES;
        let Some(&index) = self.free.iter().find(is_large) else {
            return false;
        };
        let slot = &mut self.all[usize::from(index)];
        (slot.buffer, slot.touched) = (None, 0);
        true
    }

    fn make_buffer(&self) -> io::Result<Buffer> {
        let region = Region::new(self.bytes)?;
        Ok(region.take(self.bytes).expect("a region that is large enough"))
    }
}

impl Slot {
    /// Its buffer.
    ///
    /// # Panics
    /// If it has none.
    pub(super) fn buffer(&mut self) -> &mut Buffer {
        self.buffer
            .as_mut()
            .expect("a slot that was given out has a buffer")
    }

    /// Notes that so many bytes of the buffer are used.
    pub(super) fn touch(&mut self, bytes: usize) {
        self.touched = self.touched.max(bytes);
    }
}

const PAGE: usize = 4096;
/// Memory of a slot that stays with it.
const KEPT_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slot_that_was_used_last_is_used_first() {
        let mut slots = Slots::new(3, 512);
        for unique in 0..3 {
            let index = slots.next().unwrap();
            slots.take(index, unique, Work::Flush);
        }
        assert_eq!(slots.next(), None);
        slots.put(1);
        slots.put(0);
        assert_eq!(slots.next(), Some(0));
        assert!(!slots.are_free());
    }

    #[test]
    fn what_large_requests_have_used_is_given_back_but_for_the_first() {
        let mut slots = Slots::new(3, 512);
        for index in 0..3 {
            assert_eq!(slots.next(), Some(index));
            slots.take(index, 0, Work::Flush);
            slots
                .get_mut(index)
                .touch(if index == 1 { 4096 } else { 1 << 20 });
        }
        assert!(!slots.trim(), "all are under way");
        (0..3).for_each(|index| slots.put(index));
        assert!(slots.trim() && !slots.trim());
        let kept: Vec<bool> = slots.all.iter().map(|slot| slot.buffer.is_some()).collect();
        assert_eq!(kept, [true, true, false]);
    }
}
