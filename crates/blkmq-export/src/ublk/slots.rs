//! The memory in which a request's data lies while the request is under way: in the memory of its tag, which
//! belongs to the kernel until a request comes, then to the disk, and again to the kernel once the request is
//! answered. All of it is there, and touched, before the device is: so nothing here waits for memory whose
//! write-back needs this disk.

use std::io;

use blkmq_core::bio::{Data, Lent};

use super::protocol::DATA_BYTES_MAX;
use super::sys::address;
use crate::common::command_ring::CommandRing;
use crate::common::sys::{Buffer, Chunk};
use crate::common::touched::touched;

/// The parts of one queue, allocated by a thread that may block.
pub(super) struct QueueMemory {
    pub(super) ring: CommandRing,
    chunks: Vec<Chunk>,
}

/// The slots of one queue, by tag.
#[derive(Debug)]
pub(super) struct Slots {
    all: Vec<Slot>,
    /// Slots that wait for a request.
    at_kernel: usize,
    /// Requests that are not answered yet.
    under_way: usize,
}

#[derive(Debug)]
struct Slot {
    buffer: Buffer,
    /// The address of its memory.
    address: u64,
    /// The result of the request if all goes well.
    result: i32,
    /// The slot waits for a request.
    is_at_kernel: bool,
}

impl QueueMemory {
    /// Allocates it for `depth` requests at a time.
    ///
    /// # Errors
    /// The system's error: it has no memory, or no ring.
    pub(super) fn new(depth: u16) -> io::Result<Self> {
        let chunks = (0..depth).map(|_| touched(DATA_BYTES_MAX as usize));
        Ok(Self {
            chunks: chunks.collect::<io::Result<_>>()?,
            ring: CommandRing::for_one_thread(depth.into())?,
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
    /// The number of slots.
    pub(super) fn len(&self) -> u16 {
        self.all.len() as u16
    }

    /// The address of the data of a tag's requests.
    pub(super) fn address(&self, tag: u16) -> u64 {
        self.all[usize::from(tag)].address
    }

    /// Lends a tag's memory to the kernel, for a request.
    pub(super) fn lend_to_kernel(&mut self, tag: u16) -> Lent {
        let slot = &mut self.all[usize::from(tag)];
        debug_assert!(!slot.is_at_kernel, "tag {tag} is at the kernel already");
        slot.is_at_kernel = true;
        self.at_kernel += 1;
        slot.buffer.lend(0, DATA_BYTES_MAX)
    }

    /// The kernel returns a tag's memory, with a request or for good.
    pub(super) fn take_from_kernel(&mut self, tag: u16) {
        let slot = &mut self.all[usize::from(tag)];
        if std::mem::take(&mut slot.is_at_kernel) {
            slot.buffer.take_back();
            self.at_kernel -= 1;
        }
    }

    /// A request has come that ends with `result` if all goes well.
    pub(super) fn begin(&mut self, tag: u16, result: i32) {
        self.all[usize::from(tag)].result = result;
        self.under_way += 1;
    }

    /// Lends the memory that a read fills or a write stores.
    pub(super) fn lend(&mut self, tag: u16, bytes: u64) -> Data {
        Data::Flat(self.all[usize::from(tag)].buffer.lend(0, bytes as u32))
    }

    /// A request has ended. Returns its result if all has gone well.
    pub(super) fn end(&mut self, tag: u16) -> i32 {
        let slot = &mut self.all[usize::from(tag)];
        if slot.buffer.is_lent() {
            slot.buffer.take_back();
        }
        self.under_way -= 1;
        slot.result
    }

    /// Returns whether no request is under way.
    pub(super) fn are_idle(&self) -> bool {
        self.under_way == 0
    }

    /// Returns whether the kernel has no slot.
    pub(super) fn are_back(&self) -> bool {
        self.at_kernel == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slot_goes_from_the_kernel_to_the_disk_and_back() {
        let (_ring, mut slots) = QueueMemory::new(2).unwrap().into_parts();
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
