//! Requests that wait for others: for blocks of a file that others change, or for an area with whole blocks. A timer
//! tries them again, since requests of other reactors end without notice.

use blkmq_core::bio::Status;
use blkmq_core::driver::Done;
use blkmq_core::ids::DiskId;
use blkmq_core::time::Instant;
use blkmq_host::ring::USER_MAX;
use io_uring::opcode;
use io_uring::types::Timespec;

use super::{FileHctx, RingMemory, ring_memory};
use crate::file::device::SEGMENTS_MAX;
use crate::file::slot::{Hold, Memory};
use crate::file::sys;

impl FileHctx {
    /// Begins a request again with whole blocks of direct I/O, as soon as it gets an area and the blocks.
    #[cold]
    pub(super) fn widen(&mut self, number: usize) {
        self.release(number);
        let slot = &mut self.slots[number];
        let RingMemory { vectors, bounces } = ring_memory(&mut self.ring_memory);
        slot.narrow();
        let row = match std::mem::take(&mut slot.memory) {
            Memory::Flat(piece) => {
                let first = number * SEGMENTS_MAX;
                vectors.set(first, piece.part(piece.len() - slot.len as u32, piece.len()));
                first..first + 1
            }
            Memory::List(row) => row,
            Memory::Bounced(area, row) => {
                bounces.put(area);
                row
            }
            Memory::None => unreachable!("a transfer without memory"),
        };
        slot.memory = Memory::List(row);
        slot.widen(self.disks.of(slot.disk).range());
        self.wait(number);
    }

    /// Returns whether a request may go on: nobody else reads, changes and writes blocks that it writes.
    #[inline]
    pub(super) fn may_go(&mut self, number: usize) -> bool {
        let slot = &mut self.slots[number];
        let disk = self.disks.of(slot.disk);
        if !slot.op.is_write() || !disk.is_direct() {
            return true;
        }
        if slot.block == 0 {
            let range = slot.range();
            self.announced.announce(number, slot.disk, &range);
            if disk.locks.are_free(&range) {
                slot.hold = Hold::Announced;
                return true;
            }
            self.announced.withdraw(number);
        }
        self.has_turn(number)
    }

    /// Returns whether a request that has to wait has waited long enough.
    #[cold]
    pub(super) fn has_turn(&mut self, number: usize) -> bool {
        let slot = &mut self.slots[number];
        if let Memory::List(row) = &slot.memory
            && slot.block > 0
        {
            let Some(area) = ring_memory(&mut self.ring_memory).bounces.take(slot.len) else {
                return false;
            };
            slot.memory = Memory::Bounced(area, row.clone());
        }
        if !slot.op.is_write() {
            return true;
        }
        let (disk, range) = (self.disks.of(slot.disk), slot.range());
        let ticket = match slot.hold {
            Hold::Listed(ticket) => ticket,
            Hold::None | Hold::Announced => disk.locks.enter(range.clone()),
        };
        slot.hold = Hold::Listed(ticket);
        // What others have announced is asked last: it is a look at the writes of all threads.
        disk.locks.is_first(ticket, &range)
            && (slot.block == 0 || !self.device.writers.overlap(DiskId(slot.disk), &range))
    }

    /// Has a request wait until [`Self::retry`].
    #[cold]
    pub(super) fn wait(&mut self, number: usize) {
        self.slots[number].is_polled = false;
        self.waiting.push(number);
        self.set_timer();
    }

    /// Others' requests end without notice.
    pub(super) fn set_timer(&mut self) {
        if !self.is_timer_set && !self.waiting.is_empty() {
            self.is_timer_set = true;
            sys::push(
                &self.ring_client,
                opcode::Timeout::new(&AWAIT_BLOCKS).build(),
                BLOCKS,
            );
        }
    }

    /// Goes on with the requests that have waited long enough.
    #[cold]
    pub(super) fn retry(&mut self, now: Instant, done: &mut Vec<Done>) {
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.retain(|&number| {
            if self.slots[number].is_cancelled {
                done.push(self.end(number, Status::Timeout, now));
            } else if self.has_turn(number) {
                self.push(number, now);
            } else {
                return true;
            }
            false
        });
        self.waiting = waiting;
        self.set_timer();
    }

    /// Others may have the blocks of a write.
    #[inline]
    pub(super) fn release(&mut self, number: usize) {
        let slot = &mut self.slots[number];
        match std::mem::replace(&mut slot.hold, Hold::None) {
            Hold::None => {}
            Hold::Announced => self.announced.withdraw(number),
            Hold::Listed(ticket) => self.disks.of(slot.disk).locks.leave(ticket),
        }
    }
}

/// How long requests wait at most before they look again for those of other reactors that write to the same blocks.
static AWAIT_BLOCKS: Timespec = Timespec::new().nsec(100_000);
/// User data of the timer for requests that wait for blocks.
pub(super) const BLOCKS: u64 = USER_MAX - 1;
