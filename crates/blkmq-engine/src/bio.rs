//! What a caller asks of a disk: one operation on one byte range, with the buffer that it owns. `attached` and
//! `client` submit it.

use blkmq_core::bio::{self, Flags, Op, Prio};

use crate::buffer::Buffer;
use crate::sys::Loan;

/// One I/O. Offsets and lengths are bytes, multiples of the disk's [block size](crate::Disk::block_size).
#[derive(Debug)]
#[must_use = "a bio does nothing until it is submitted"]
pub struct Bio {
    pub(crate) op: Op,
    pub(crate) flags: Flags,
    pub(crate) prio: Prio,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) buffer: Buffer,
}

impl Bio {
    /// Fills the buffer from `offset`.
    #[inline]
    pub fn read(offset: u64, buffer: Buffer) -> Self {
        Self::with_data(Op::Read, offset, buffer)
    }

    /// Stores the buffer at `offset`. It is durable when a [flush](Self::flush) that was submitted later has
    /// ended.
    #[inline]
    pub fn write(offset: u64, buffer: Buffer) -> Self {
        Self::with_data(Op::Write, offset, buffer)
    }

    /// Makes all writes durable that have ended.
    pub fn flush() -> Self {
        Self::without_data(Op::Flush, 0, 0)
    }

    /// Tells the disk that the content is no longer needed: it reads as zeroes or as before.
    pub fn discard(offset: u64, len: u64) -> Self {
        Self::without_data(Op::Discard, offset, len)
    }

    /// Stores zeroes.
    pub fn write_zeroes(offset: u64, len: u64) -> Self {
        Self::without_data(Op::WriteZeroes, offset, len)
    }

    /// The same, durable when it has ended (force unit access).
    pub fn fua(self) -> Self {
        Self {
            flags: self.flags.with(Flags::FUA),
            ..self
        }
    }

    /// The same, but nobody waits for this write: schedulers prefer others to it.
    pub fn in_background(self) -> Self {
        Self {
            flags: self.flags.with(Flags::ASYNC),
            ..self
        }
    }

    /// The same with a priority, as `ioprio_set(2)` has it. Default: best effort, 4.
    pub fn priority(self, prio: Prio) -> Self {
        Self { prio, ..self }
    }

    /// Takes the buffer out; nothing is done.
    #[inline]
    pub fn into_buffer(self) -> Buffer {
        self.buffer
    }

    #[inline]
    fn with_data(op: Op, offset: u64, buffer: Buffer) -> Self {
        Self {
            len: buffer.len() as u64,
            buffer,
            ..Self::without_data(op, offset, 0)
        }
    }

    #[inline]
    fn without_data(op: Op, offset: u64, len: u64) -> Self {
        Self {
            op,
            flags: Flags::NONE,
            prio: Prio::default(),
            offset,
            len,
            buffer: Buffer::default(),
        }
    }

    /// The engine's form of it, and the loan of its buffer.
    #[inline]
    pub(crate) fn lend(self, disk: &blkmq_host::Disk, cookie: u64) -> (Loan, bio::Bio) {
        let (loan, data) = Loan::new(self.buffer);
        let bio = bio::Bio {
            op: self.op,
            flags: self.flags,
            prio: self.prio,
            disk: disk.id,
            group: disk.group,
            offset: self.offset,
            len: self.len,
            data,
            cookie,
            ..bio::Bio::default()
        };
        (loan, bio)
    }

    /// The bio that was lent, which the engine refused.
    #[inline]
    pub(crate) fn take_back(loan: Loan, refused: bio::Bio) -> Self {
        Self {
            op: refused.op,
            flags: refused.flags,
            prio: refused.prio,
            offset: refused.offset,
            len: refused.len,
            buffer: loan.end(refused),
        }
    }
}
