//! The slots in which requests' data lies while they are under way. All memory is there, and touched, before
//! the mount is: so nothing here waits for memory whose write-back needs this disk.
//!
//! Each slot has a small buffer of its own. A request that does not fit takes one of a few large
//! buffers: a write is received into both, one after the other, as its length is not known before;
//! a long read uses only the large one.

use std::io;
use std::sync::Arc;

use blkmq_core::bio::{Data, Lent};

use super::protocol::DATA_BYTES_MAX;
use crate::common::sys::{Buffer, Chunk};
use crate::common::touched::touched;

/// Memory of the slots of one mount, allocated by a thread that may block.
#[derive(Debug)]
pub(super) struct MountMemory {
    small: Vec<Chunk>,
    large: Vec<Chunk>,
}

/// The slots of one mount.
#[derive(Debug)]
pub(super) struct Slots {
    all: Vec<Slot>,
    /// Free slots, the one used last at the end.
    free: Vec<u16>,
    /// Free large buffers.
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
    /// For the two parts of a long write; kept for reuse.
    list: Arc<[Lent]>,
}

/// What is done for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    None,
    /// A read: `before` bytes of what is read precede the wanted range, which has `len` bytes.
    Read {
        before: u32,
        len: u32,
    },
    Write {
        len: u32,
    },
    Flush,
    Zero,
    /// The start of data, or of a hole, is looked for from there on.
    Seek {
        from: u64,
        is_for_data: bool,
    },
}

impl MountMemory {
    /// Allocates it for a disk with blocks of `block_size` bytes. May block.
    ///
    /// # Errors
    /// The system's error: it has no memory, or no more mappings.
    pub(super) fn new(block_size: u32) -> io::Result<Self> {
        // A read that is not aligned to blocks covers up to two more than it asks for.
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
    pub(super) fn new(memory: MountMemory) -> Self {
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

    /// The free slot that is used next, and where to receive data: its own buffer, and behind that
    /// a large one. `None` while all are in use.
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

    /// Lends the memory that a read of `bytes` bytes fills.
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

    /// Lends the first bytes of a write that was just received.
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

    /// Frees a slot.
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

    /// Returns whether no request is under way.
    pub(super) fn are_free(&self) -> bool {
        self.free.len() == self.all.len()
    }
}

impl Slot {
    /// Its bio has ended: ends the loan.
    pub(super) fn take_back(&mut self) {
        for buffer in [Some(&mut self.small), self.large.as_mut()].into_iter().flatten() {
            if buffer.is_lent() {
                buffer.take_back();
            }
        }
    }

    /// The data that a read has brought.
    pub(super) fn read_data(&self) -> &[u8] {
        self.large.as_ref().unwrap_or(&self.small).bytes()
    }
}

/// Most requests under way at a time.
pub(super) const SLOTS: u16 = 128;
/// Large buffers: for requests longer than a slot's buffer, and for one that is being received.
const LARGE: usize = 8;
const SMALL_BYTES: usize = 32 << 10;
/// Small buffers that share a region, which is as large as those of other doors.
const SMALL_OF_REGION: usize = REGION_BYTES / SMALL_BYTES;
const REGION_BYTES: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn slots() -> Slots {
        Slots::new(MountMemory::new(4096).unwrap())
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
    fn long_write_has_both_buffers_and_nobody_receives_without_a_large_one() {
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
        // Memory that is dropped while it is lent is leaked.
        for index in 1..LARGE as u16 {
            slots.get_mut(index).take_back();
        }
    }
}
