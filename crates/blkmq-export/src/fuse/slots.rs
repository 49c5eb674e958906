//! Decides where a request's data lies while it is under way. All memory is there, and touched, before the mount is: whoever waits for
//! this disk to have memory written back is never waited for here.
//!
//! Each slot has a small buffer of its own. What does not fit into it takes a large one, of which there are few: a write is received into
//! both, one after the other, as nobody knows its length before; a long read has the large one alone.

use std::io;
use std::sync::Arc;

use blkmq_core::bio::{Data, Lent};

use super::protocol::DATA_BYTES_MAX;
use crate::common::sys::{Buffer, Chunk};
use crate::common::touched::touched;

/// Memory of the slots of one mount, got by a thread that may wait for it.
#[derive(Debug)]
pub(super) struct Memory {
    small: Vec<Chunk>,
    large: Vec<Chunk>,
}

/// The slots of one mount.
#[derive(Debug)]
pub(super) struct Slots {
    all: Vec<Slot>,
    /// Those that nobody uses, the one that was used last at the end.
    free: Vec<u16>,
    /// Large buffers that nobody uses.
    large: Vec<Buffer>,
}

/// A request under way.
#[derive(Debug)]
pub(super) struct Slot {
    /// The request's number.
    pub(super) unique: u64,
    pub(super) work: Work,
    small: Buffer,
    large: Option<Buffer>,
    /// For the two parts of a long write; kept to be used again.
    list: Arc<[Lent]>,
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

impl Memory {
    /// Gets it for a disk with blocks of that size. May block.
    ///
    /// # Errors
    /// What the system says: it has no memory, or no more mappings.
    pub(super) fn new(block_size: u32) -> io::Result<Self> {
        // A read that is no multiple of blocks has parts of two more than it asks for.
        let large_bytes = DATA_BYTES_MAX + 2 * block_size as usize;
        let chunks =
            |count: usize, bytes: usize| (0..count).map(|_| touched(bytes)).collect::<io::Result<_>>();
        Ok(Self {
            small: chunks(usize::from(SLOTS) / SMALL_OF_REGION, REGION_BYTES)?,
            large: chunks(LARGE, large_bytes)?,
        })
    }
}

impl Slots {
    pub(super) fn new(memory: Memory) -> Self {
        let take = |chunk: Chunk, bytes| {
            let region = chunk.into_region();
            std::iter::from_fn(move || region.take(bytes))
        };
        let slot = |mut small: Buffer| {
            let nothing = small.lend(0, 0);
            small.take_back();
            Slot {
                unique: 0,
                work: Work::None,
                small,
                large: None,
                list: Arc::new([nothing, nothing]),
            }
        };
        let small = memory.small.into_iter();
        let large = memory.large.into_iter();
        Self {
            all: small
                .flat_map(|chunk| take(chunk, SMALL_BYTES))
                .map(slot)
                .collect(),
            free: (0..SLOTS).rev().collect(),
            large: large.flat_map(|chunk| take(chunk, DATA_BYTES_MAX)).collect(),
        }
    }

    /// The free slot that is used next, and where data is to be received into: its own buffer, and behind that a large one. None as long
    /// as others have all of them.
    pub(super) fn next(&mut self) -> Option<(u16, [&mut [u8]; 2])> {
        let &index = self.free.last()?;
        let large = self.large.last_mut()?;
        let small = &mut self.all[usize::from(index)].small;
        Some((index, [small.bytes_mut(), large.bytes_mut()]))
    }

    /// Takes the slot that [`Slots::next`] has named.
    pub(super) fn take(&mut self, index: u16, unique: u64, work: Work) {
        debug_assert_eq!(self.free.last(), Some(&index), "another slot than the next");
        self.free.pop();
        let slot = &mut self.all[usize::from(index)];
        (slot.unique, slot.work) = (unique, work);
    }

    /// Lends what a read of so many bytes fills.
    pub(super) fn lend_for_read(&mut self, index: u16, bytes: usize) -> Data {
        let slot = &mut self.all[usize::from(index)];
        if bytes <= SMALL_BYTES {
            return Data::Flat(slot.small.lend(0, bytes as u32));
        }
        let large = slot
            .large
            .insert(self.large.pop().expect("there was one to receive into"));
        Data::Flat(large.lend(0, bytes as u32))
    }

    /// Lends the first bytes of a write that was received just now.
    pub(super) fn lend_write(&mut self, index: u16, bytes: usize) -> Data {
        let slot = &mut self.all[usize::from(index)];
        if bytes <= SMALL_BYTES {
            return Data::Flat(slot.small.lend(0, bytes as u32));
        }
        let large = slot
            .large
            .insert(self.large.pop().expect("there was one to receive into"));
        let parts = [
            slot.small.lend(0, SMALL_BYTES as u32),
            large.lend(0, (bytes - SMALL_BYTES) as u32),
        ];
        match Arc::get_mut(&mut slot.list) {
            Some(list) => list.copy_from_slice(&parts),
            None => slot.list = Arc::new(parts),
        }
        Data::List(Arc::clone(&slot.list))
    }

    /// Takes a slot back.
    pub(super) fn put(&mut self, index: u16) {
        let slot = &mut self.all[usize::from(index)];
        slot.work = Work::None;
        self.large.extend(slot.large.take());
        self.free.push(index);
    }

    pub(super) fn get(&self, index: u16) -> &Slot {
        &self.all[usize::from(index)]
    }

    pub(super) fn get_mut(&mut self, index: u16) -> &mut Slot {
        &mut self.all[usize::from(index)]
    }

    /// Says whether none is under way.
    pub(super) fn are_free(&self) -> bool {
        self.free.len() == self.all.len()
    }
}

impl Slot {
    /// Its bio has ended: what was lent to it is ours again.
    pub(super) fn take_back(&mut self) {
        for buffer in [Some(&mut self.small), self.large.as_mut()].into_iter().flatten() {
            if buffer.is_lent() {
                buffer.take_back();
            }
        }
    }

    /// What a read has filled.
    pub(super) fn read_data(&self) -> &[u8] {
        self.large.as_ref().unwrap_or(&self.small).bytes()
    }
}

/// Requests under way at a time.
pub(super) const SLOTS: u16 = 128;
/// Of them, those that are longer than what a slot has, and one that is being received.
const LARGE: usize = 8;
const SMALL_BYTES: usize = 32 << 10;
/// Small buffers that share a region, which is as large as those of other doors.
const SMALL_OF_REGION: usize = REGION_BYTES / SMALL_BYTES;
const REGION_BYTES: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn slots() -> Slots {
        Slots::new(Memory::new(4096).unwrap())
    }

    #[test]
    fn each_slot_has_a_buffer_and_the_one_that_was_used_last_is_used_first() {
        let mut slots = slots();
        assert_eq!((slots.all.len(), slots.large.len()), (usize::from(SLOTS), LARGE));
        for unique in 0..SLOTS {
            let (index, _) = slots.next().unwrap();
            slots.take(index, unique.into(), Work::Flush);
        }
        assert!(slots.next().is_none());
        slots.put(1);
        slots.put(0);
        assert_eq!(slots.next().unwrap().0, 0);
        assert!(!slots.are_free());
    }

    #[test]
    fn a_long_write_has_both_buffers_and_nobody_receives_without_a_large_one() {
        let mut slots = slots();
        for _ in 0..LARGE {
            let (index, [small, large]) = slots.next().expect("a large one is left");
            assert!(small.len() == SMALL_BYTES && large.len() >= DATA_BYTES_MAX);
            slots.take(index, 7, Work::Write { len: 1 << 20 });
            let Data::List(list) = slots.lend_write(index, 1 << 20) else {
                panic!("two pieces")
            };
            assert_eq!(list.iter().map(|piece| piece.len()).sum::<u32>(), 1 << 20);
        }
        assert!(slots.next().is_none());
        slots.get_mut(0).take_back();
        slots.put(0);
        assert!(slots.next().is_some());
    }
}
