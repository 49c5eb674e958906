//! The methods of zeroing and discarding, in their order, and what a filesystem's answer to one leads to.

use std::sync::atomic::Ordering;

use blkmq_core::bio::{Flags, Op, Status};
use blkmq_core::time::Instant;

use super::super::disk::FileDisk;
use super::{Next, Slot, Step};

impl Slot {
    /// Returns the first method of zeroing that the filesystem has not refused yet.
    pub(super) fn way_to_zero(&self, disk: &FileDisk) -> Result<Step, Status> {
        let is_fast_only = self.flags.has(Flags::FAST_ONLY);
        if self.op == Op::Discard && disk.is_block_device() && disk.may_discard() {
            return Ok(Step::Discard);
        }
        let may_punch = self.op == Op::Discard || !self.flags.has(Flags::NO_UNMAP);
        if may_punch && !disk.lacks.punching.load(Ordering::Relaxed) {
            return Ok(Step::Punch);
        }
        if self.op == Op::Discard {
            return Err(Status::Ok);
        }
        // The kernel zeroes a range of a block device by writing where the device cannot do it,
        // without notice.
        let may_be_slow = disk.is_block_device() && is_fast_only;
        if !may_be_slow && !disk.lacks.zeroing.load(Ordering::Relaxed) {
            return Ok(Step::ZeroRange);
        }
        if is_fast_only {
            return Err(Status::NotSupported);
        }
        Ok(Step::WriteOut)
    }

    pub(super) fn take_zeroed(&mut self, result: i32, disk: &FileDisk, now: Instant) -> Next {
        match -result {
            0 => {
                disk.piece_size.record(self.piece, now);
                self.moved += self.piece.len;
                self.retries = 0;
                match self.moved < self.len {
                    true => Next::Submit(self.piece.len),
                    false => self.end_of_change(disk),
                }
            }
            libc::EOPNOTSUPP | libc::ENOSYS => {
                let lack = match self.step {
                    Step::Discard => &disk.lacks.discarding,
                    Step::Punch => &disk.lacks.punching,
                    _ => &disk.lacks.zeroing,
                };
                lack.store(true, Ordering::Relaxed);
                self.next_part(self.offset + self.moved, disk)
            }
            errno => self.fail(errno, disk, now),
        }
    }
}
