//! Decides where a request's data lies while it is under way: in memory of its tag, which is the kernel's until a request comes, the
//! disk's while it is done, and the kernel's again from when it is answered. All of it is there, and touched, before the device is: whoever
//! waits for this disk to have memory written back is never waited for here.

use std::io;

use blkmq_core::bio::{Data, Lent};

use super::protocol::DATA_BYTES_MAX;
use super::sys::address;
use crate::common::command_ring::CommandRing;
use crate::common::sys::{Buffer, Chunk};
use crate::common::touched::touched;

/// What one queue is made of, got by a thread that may wait for it.
pub(super) struct Memory {
    pub(super) ring: CommandRing,
    chunks: Vec<Chunk>,
}

/// The slots of one queue, by tag.
#[derive(Debug)]
pub(super) struct Slots {
    all: Vec<Slot>,
    /// Those that wait for a request.
    at_kernel: usize,
    /// Requests that have come and are not answered.
    under_way: usize,
}

#[derive(Debug)]
struct Slot {
    buffer: Buffer,
    /// Where it lies.
    address: u64,
    /// What a request ends with if all goes well.
    result: i32,
    /// It waits for a request.
    is_at_kernel: bool,
}

impl Memory {
    /// Gets it for so many requests at a time.
    ///
    /// # Errors
    /// What the system says: it has no memory, or no ring.
    pub(super) fn new(depth: u16) -> io::Result<Self> {
        let chunks = (0..depth).map(|_| touched(DATA_BYTES_MAX as usize));
        Ok(Self {
            chunks: chunks.collect::<io::Result<_>>()?,
            ring: CommandRing::new(depth.into())?,
        })
    }

    /// The ring, and the slots.
    pub(super) fn into_parts(self) -> (CommandRing, Slots) {
        let slot = |chunk: Chunk| {
            let region = chunk.into_region();
            let mut buffer = region
                .take(DATA_BYTES_MAX as usize)
                .expect("a region that is large enough");
            let address = address(buffer.lend(0, 0));
            buffer.take_back();
            Slot {
                buffer,
                address,
                result: 0,
                is_at_kernel: false,
            }
        };
        let slots = Slots {
            all: self.chunks.into_iter().map(slot).collect(),
            at_kernel: 0,
            under_way: 0,
        };
        (self.ring, slots)
    }
}

impl Slots {
    /// How many there are.
    pub(super) fn len(&self) -> u16 {
        self.all.len() as u16
    }

    /// Where the data of a tag's requests lies.
    pub(super) fn address(&self, tag: u16) -> u64 {
        self.all[usize::from(tag)].address
    }

    /// A tag's memory, for the kernel to put a request there.
    pub(super) fn lend_to_kernel(&mut self, tag: u16) -> Lent {
        let slot = &mut self.all[usize::from(tag)];
        debug_assert!(!slot.is_at_kernel, "tag {tag} is at the kernel already");
        slot.is_at_kernel = true;
        self.at_kernel += 1;
        slot.buffer.lend(0, DATA_BYTES_MAX)
    }

    /// The kernel gives a tag's memory back, with a request or for good.
    pub(super) fn take_from_kernel(&mut self, tag: u16) {
        let slot = &mut self.all[usize::from(tag)];
        if std::mem::take(&mut slot.is_at_kernel) {
            slot.buffer.take_back();
            self.at_kernel -= 1;
        }
    }

    /// A request has come that ends with this if all goes well.
    pub(super) fn begin(&mut self, tag: u16, result: i32) {
        self.all[usize::from(tag)].result = result;
        self.under_way += 1;
    }

    /// What a read fills, or a write stores.
    pub(super) fn lend(&mut self, tag: u16, bytes: u64) -> Data {
        Data::Flat(self.all[usize::from(tag)].buffer.lend(0, bytes as u32))
    }

    /// A request has ended. Returns with what, if all has gone well.
    pub(super) fn end(&mut self, tag: u16) -> i32 {
        let slot = &mut self.all[usize::from(tag)];
        if slot.buffer.is_lent() {
            slot.buffer.take_back();
        }
        self.under_way -= 1;
        slot.result
    }

    /// Says whether none is under way.
    pub(super) fn are_idle(&self) -> bool {
        self.under_way == 0
    }

    /// Says whether the kernel has none.
    pub(super) fn are_back(&self) -> bool {
        self.at_kernel == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_goes_from_the_kernel_to_the_disk_and_back() {
        let (_ring, mut slots) = Memory::new(2).unwrap().into_parts();
        assert!(slots.are_back() && slots.are_idle());
        let memory = slots.lend_to_kernel(1);
        assert_eq!(address(memory), slots.address(1));
        assert_ne!(slots.address(0), slots.address(1));
        assert!(!slots.are_back());
        slots.take_from_kernel(1);
        slots.begin(1, 4096);
        assert!(matches!(slots.lend(1, 4096), Data::Flat(lent) if lent.len() == 4096));
        assert!(slots.are_back() && !slots.are_idle());
        assert_eq!(slots.end(1), 4096);
        let _ = slots.lend_to_kernel(1);
        slots.take_from_kernel(1);
        slots.take_from_kernel(1);
        assert!(slots.are_back() && slots.are_idle());
    }
}
