//! The steps that a request takes on a file, and what the result of one step leads to: the next step, the
//! rest of a short transfer, a retry, or completion. `hctx` turns each step into an entry of the ring.
//!
//! ```text
//!  small write ─► Fetch ─► Transfer                (what the blocks have besides, see `blkmq_host::block_locks`)
//!  read, write ─► Transfer ─┐                     (short, or EINTR: Transfer again; FUA through the page cache: Sync behind)
//!  flush ───────► Sync ─────┤                     (others overlapped it: AwaitSyncs behind)
//!  discard ─────► Punch ────┼─► end               (piece by piece, as all zeroing; not supported: nothing to do)
//!  zeroes ──────► Punch ────┤
//!                   │ not supported, or the range must stay allocated
//!                   ▼       │
//!               ZeroRange ──┤
//!                   │ not supported (an error if only fast zeroing will do)
//!                   ▼       │
//!                WriteOut ──┘                     (all ways of zeroing with FUA: Sync behind, once)
//! ```
//!
//! Zeroing that takes whole blocks alone (of a block device, or of direct I/O) has up to three parts, one after the other: what
//! lies before the whole blocks and what lies behind them are written as a small write is.

mod zeroing;

use std::ops::Range;
use std::sync::atomic::Ordering;

use blkmq_core::bio::{Flags, Lent, Op, Status};
use blkmq_core::ids::Cookie;
use blkmq_core::time::Instant;

use super::bounce::Area;
use super::disk::FileDisk;
use super::part::Part;
use super::pieces::Piece;
use super::syncs::{Begun, Fence};
use super::sys;
use blkmq_host::block_locks::Ticket;

/// What a request is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Step {
    /// There is no request.
    #[default]
    Idle,
    /// The first and the last block of a write that does not fill them are read.
    Fetch,
    /// Data moves between memory and file.
    Transfer,
    /// A block device is told that it may forget the range.
    Discard,
    /// A hole is made.
    Punch,
    /// The filesystem zeroes the range.
    ZeroRange,
    /// Zeroes are written.
    WriteOut,
    /// What was written is made durable.
    Sync,
    /// Done, unless a sync that overlapped this one fails: waits until their results are known.
    AwaitSyncs,
}

/// The memory of a transfer.
#[derive(Clone, Debug, Default)]
pub(super) enum Memory {
    /// None.
    #[default]
    None,
    /// One piece that the kernel can use.
    Flat(Lent),
    /// Several; a row of the table, from which the transferred part is cut.
    List(Range<usize>),
    /// Pieces that direct I/O cannot use (a row of the table), and the area that replaces them.
    Bounced(Area, Range<usize>),
}

/// One request under way.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub(super) cookie: Cookie,
    pub(super) step: Step,
    pub(super) op: Op,
    pub(super) flags: Flags,
    /// Its cancellation was requested.
    pub(super) is_cancelled: bool,
    /// Its entry is in the ring for polled devices.
    pub(super) is_polled: bool,
    /// The system had no resources for its step, which is repeated after a while.
    pub(super) is_paused: bool,
    retries: u8,
    pub(super) disk: u32,
    pub(super) offset: u64,
    pub(super) len: u64,
    /// What is zeroed after this range.
    rest: Range<u64>,
    /// Bytes that are done.
    pub(super) moved: u64,
    /// The blocks of direct I/O to which offset and length were widened; 0 if they were not.
    pub(super) block: u64,
    /// Where the client's data is in the area of a request that has one.
    pub(super) data: Range<u64>,
    /// How others know that it writes its range.
    pub(super) hold: Hold,
    pub(super) memory: Memory,
    /// What the kernel discards or zeroes now.
    pub(super) piece: Piece,
    /// The sync that the kernel has, and the fence for which the request waits afterwards.
    sync: Option<Begun>,
    fence: Fence,
}

/// How others know of a write through direct I/O; see `blkmq_host::block_locks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hold {
    /// They do not.
    None,
    /// It is announced.
    Announced,
    /// It is in the disk's list.
    Listed(Ticket),
}

/// What follows a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Push an entry for the slot's step; this many more bytes are done.
    Submit(u64),
    /// Direct I/O needs larger blocks than it did: begin again with whole ones.
    Widen,
    /// Begin with the next part of a zeroing, which may need memory and has to wait for others.
    Part,
    /// The file has ended inside its last block: what follows in the memory of the read, from here on, is zeroes, and the
    /// request has ended.
    Pad(u64),
    /// The request has ended.
    End(Status),
}

impl Slot {
    /// A slot without a request.
    pub(super) const IDLE: Self = Self {
        cookie: Cookie::from_raw(0),
        step: Step::Idle,
        op: Op::Read,
        flags: Flags::NONE,
        is_cancelled: false,
        is_polled: false,
        is_paused: false,
        retries: 0,
        disk: 0,
        offset: 0,
        len: 0,
        rest: 0..0,
        moved: 0,
        block: 0,
        data: 0..0,
        hold: Hold::None,
        memory: Memory::None,
        piece: Piece::whole(0),
        sync: None,
        fence: Fence::NONE,
    };

    /// Returns whether bytes that were moved before an error equal those of a successful request:
    /// they are where they belong, and nothing more was promised for them.
    pub(super) fn keeps_what_moved(&self) -> bool {
        self.step == Step::Transfer
            && self.op.has_data()
            && !self.flags.has(Flags::FUA)
            && !matches!(self.memory, Memory::Bounced(..))
    }

    /// Returns whether the write itself is to be durable when it ends (RWF_DSYNC).
    ///
    /// Only with direct I/O. With the page cache, the kernel would write first and then sync, and
    /// return ENOSPC or EDQUOT in either case: this write had no room, or an earlier one, which had
    /// succeeded, found none when it was written out. The second error is reported once, so the
    /// steps are requested apart: the result of the write concerns this request, and that of the
    /// sync behind it concerns the disk.
    pub(super) fn is_forced(&self, disk: &FileDisk) -> bool {
        self.op == Op::Write && self.flags.has(Flags::FUA) && disk.is_direct()
    }

    /// Makes the slot of a request that has not been started.
    pub(super) fn new(rq: &Part<'_>, cookie: Cookie) -> Self {
        Self {
            cookie,
            op: rq.op,
            flags: rq.flags,
            disk: rq.disk.0,
            offset: rq.offset,
            len: rq.len,
            data: 0..rq.len,
            ..Self::IDLE
        }
    }

    /// Its range.
    pub(super) fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }

    /// Widens a read or write to whole blocks.
    pub(super) fn widen(&mut self, block: u32) {
        let (block, own) = (u64::from(block), self.range());
        self.offset -= self.offset % block;
        self.len = own.end.next_multiple_of(block) - self.offset;
        self.data = own.start - self.offset..own.end - self.offset;
        self.block = block;
        self.moved = 0;
        if self.op.is_write() {
            self.step = Step::Fetch;
            self.moved = if self.data.start > 0 { 0 } else { self.len - block };
        }
    }

    /// Narrows a read or write to what is not done of the client's range.
    pub(super) fn narrow(&mut self) {
        match self.memory {
            Memory::Bounced(..) => {
                self.offset += self.data.start;
                self.len = self.data.end - self.data.start;
            }
            _ => {
                self.offset += self.moved;
                self.len -= self.moved;
            }
        }
        (self.moved, self.data) = (0, 0..self.len);
    }

    /// Where what is read now of the blocks ends: with the first block, if only the last one is needed besides.
    pub(super) fn fetch_end(&self) -> u64 {
        let needs_last = self.data.end < self.len;
        let is_apart = self.moved < self.block && self.len > 2 * self.block;
        match self.data.start > 0 && (is_apart || !needs_last) {
            true => self.block,
            false => self.len,
        }
    }

    /// Copies the data of a short read from a file in memory, as a copy takes less time than its way
    /// through a thread of the kernel. Returns whether the request is done; if not, nothing is decided.
    #[inline]
    pub(super) fn is_read_at_once(&self, disk: &FileDisk, now: Instant) -> bool {
        match self.memory {
            Memory::Flat(piece)
                if self.op == Op::Read
                    && self.len <= AT_ONCE_MAX
                    && !disk.has_lost(self.offset + self.len) =>
            {
                let is_read = sys::read_all(&disk.file, piece, self.offset);
                disk.look_after(now);
                // What is lost may have been read as zeroes: the request finds that out.
                is_read && !disk.has_lost(self.offset + self.len)
            }
            _ => false,
        }
    }

    /// Starts a request at its first step. Returns its status if there is nothing to do.
    pub(super) fn start(&mut self, disk: &FileDisk) -> Option<Status> {
        if self.op != Op::Flush && disk.has_lost(self.offset + self.len) {
            return Some(disk.refuse_lost());
        }
        if self.op == Op::Discard && disk.is_block_device() && !self.keep_whole_blocks(disk) {
            return Some(Status::Ok);
        }
        let first = match self.op {
            Op::Read | Op::Write => Ok(Step::Transfer),
            Op::Flush if disk.flush_failed.load(Ordering::Relaxed) => Err(Status::Io),
            Op::Flush if disk.read_only => Err(Status::Ok),
            Op::Flush => Ok(Step::Sync),
            Op::Discard | Op::WriteZeroes => self.begin_part(self.range(), disk),
        };
        match first {
            Ok(step) => {
                self.step = step;
                None
            }
            Err(status) => Some(status),
        }
    }

    /// Cuts the first part of a range to be zeroed: what lies before its first whole block, or its whole blocks, or what lies
    /// behind them. Returns how it is zeroed.
    fn begin_part(&mut self, range: Range<u64>, disk: &FileDisk) -> Result<Step, Status> {
        let step = self.way_to_zero(disk)?;
        let block = match step {
            Step::WriteOut => u64::from(disk.range()),
            _ if disk.is_block_device() => whole_block(disk),
            _ => 1,
        };
        let (first, last) = (range.start.next_multiple_of(block), range.end - range.end % block);
        let is_whole = range.start == first && first < last;
        let end = match is_whole {
            true => last,
            false if range.start < first => first.min(range.end),
            false => range.end,
        };
        (self.offset, self.len) = (range.start, end - range.start);
        (self.moved, self.block, self.data) = (0, 0, 0..self.len);
        self.rest = end..range.end;
        Ok(if is_whole { step } else { Step::Transfer })
    }

    /// Begins with what is not zeroed yet, from here on.
    fn next_part(&mut self, from: u64, disk: &FileDisk) -> Next {
        match self.begin_part(from..self.rest.end, disk) {
            Ok(step) => {
                self.step = step;
                Next::Part
            }
            Err(status) => Next::End(status),
        }
    }

    /// Narrows a discard to the whole blocks in its range: a device frees no others, and refuses the rest. Returns whether
    /// there are any.
    fn keep_whole_blocks(&mut self, disk: &FileDisk) -> bool {
        let block = whole_block(disk);
        let (start, end) = (self.offset.next_multiple_of(block), self.offset + self.len);
        let end = end - end % block;
        if start < end {
            (self.offset, self.len) = (start, end - start);
        }
        start < end
    }

    /// Decides what the result of the slot's step leads to: a count of bytes, or a negative errno.
    pub(super) fn take_result(&mut self, result: i32, disk: &FileDisk, now: Instant) -> Next {
        if std::mem::take(&mut self.is_paused) && result != -libc::ECANCELED {
            return self.repeat_or_end(disk);
        }
        match -result {
            libc::EINVAL if self.needs_wider(disk) => return Next::Widen,
            libc::EOPNOTSUPP if self.is_polled => {
                disk.lacks.polling.store(true, Ordering::Relaxed);
                return self.repeat();
            }
            libc::EINTR | libc::EAGAIN if self.retries < RETRIES_MAX && !self.is_cancelled => {
                // A polled device that is too busy for polling will interrupt.
                self.is_paused = -result == libc::EAGAIN && !self.is_polled;
                self.retries += 1;
                return self.repeat();
            }
            libc::ECANCELED => {
                self.end_sync(disk);
                return Next::End(Status::Timeout);
            }
            _ => {}
        }
        match self.step {
            Step::Fetch | Step::Transfer | Step::WriteOut => self.take_moved(result, disk, now),
            Step::Discard | Step::Punch | Step::ZeroRange => self.take_zeroed(result, disk, now),
            Step::Sync => {
                if result != 0 {
                    disk.note_failed_flush();
                }
                self.end_sync(disk);
                match result {
                    0 => self.await_syncs(disk),
                    _ => self.fail(-result, disk, now),
                }
            }
            Step::AwaitSyncs => self.await_syncs(disk),
            Step::Idle => unreachable!("a completion for an idle slot"),
        }
    }

    /// Returns whether a refused transfer is not aligned to what direct I/O needs by now.
    fn needs_wider(&self, disk: &FileDisk) -> bool {
        if !matches!(self.step, Step::Fetch | Step::Transfer) || self.is_cancelled {
            return false;
        }
        disk.look_at_alignment();
        disk.is_odd(self.offset + self.moved, self.len - self.moved)
    }

    /// The step is due again, after a pause.
    fn repeat_or_end(&mut self, disk: &FileDisk) -> Next {
        if self.is_cancelled {
            self.end_sync(disk);
        }
        self.repeat()
    }

    /// How long the present pause is: one of [`PAUSES_MAX`] steps, each twice as long as the one before.
    pub(super) fn pause(&self) -> usize {
        usize::from(self.retries).clamp(1, PAUSES_MAX) - 1
    }

    /// To be called when the slot's entry is pushed.
    pub(super) fn pushed(&mut self, disk: &FileDisk, now: Instant) {
        if self.is_paused {
            return;
        }
        if self.op.is_write() && matches!(self.step, Step::Transfer | Step::WriteOut) {
            disk.look_before_write(now, self.offset + self.len);
        }
        if matches!(self.step, Step::Discard | Step::Punch | Step::ZeroRange) {
            self.piece = disk.cut(self.offset + self.moved, self.len - self.moved, now);
        }
        if self.step == Step::Sync && self.sync.is_none() {
            self.sync = Some(disk.syncs.begin());
        }
    }

    /// Records that the kernel does not have this sync any more.
    fn end_sync(&mut self, disk: &FileDisk) {
        if let Some(begun) = self.sync.take() {
            self.fence = disk.syncs.end(begun);
        }
    }

    /// Ends a successful sync, if those that overlapped it have ended, too, and succeeded.
    fn await_syncs(&mut self, disk: &FileDisk) -> Next {
        let is_past = disk.syncs.is_past(self.fence);
        if !is_past && !self.is_cancelled {
            self.step = Step::AwaitSyncs;
            return Next::Submit(0);
        }
        // Read after `is_past`: a failure is recorded before the sync's end.
        Next::End(match disk.flush_failed.load(Ordering::Relaxed) {
            _ if self.is_cancelled => Status::Timeout,
            true => Status::Io,
            false => Status::Ok,
        })
    }

    /// Repeats the step through the reactor's ring.
    fn repeat(&mut self) -> Next {
        if self.is_cancelled {
            return Next::End(Status::Timeout);
        }
        self.is_polled = false;
        Next::Submit(0)
    }

    fn take_moved(&mut self, result: i32, disk: &FileDisk, now: Instant) -> Next {
        let Ok(moved) = u64::try_from(result) else {
            if self.op == Op::Write
                && self.flags.has(Flags::FUA)
                && self.step != Step::Fetch
                && !is_no_room(-result)
            {
                // The kernel may have synced the file for this write, and reported only here that
                // an earlier write was lost.
                disk.note_failed_flush();
            }
            return self.fail(-result, disk, now);
        };
        let end = self.step_end();
        if moved >= end - self.moved {
            self.moved = end;
            return match self.step {
                Step::Fetch => self.end_of_fetch(),
                _ => self.end_of_change(disk),
            };
        }
        let reached = self.moved + moved;
        if self.op == Op::Read && self.offset + reached >= disk.content_end() {
            self.moved = end;
            return Next::Pad(reached);
        }
        // A short transfer that direct I/O cannot continue is repeated from the last whole block.
        let block = u64::from(disk.range());
        let moved = moved - moved % block;
        if moved == 0 {
            disk.look_after_short_read(now);
            return match self.op == Op::Read && disk.has_lost(self.offset + self.len) {
                true => Next::End(disk.refuse_lost()),
                false => self.fail(0, disk, now),
            };
        }
        self.moved += moved;
        if self.is_cancelled {
            return Next::End(Status::Timeout);
        }
        Next::Submit(moved)
    }

    /// Where the transfer of the present step ends, in bytes of the request.
    pub(super) fn step_end(&self) -> u64 {
        match self.step {
            Step::Fetch => self.fetch_end(),
            _ => self.len,
        }
    }

    /// Reads the last block, or writes what was read and changed.
    fn end_of_fetch(&mut self) -> Next {
        if self.moved < self.len && self.data.end < self.len {
            self.moved = self.len - self.block;
        } else {
            (self.step, self.moved) = (Step::Transfer, 0);
        }
        Next::Submit(0)
    }

    /// Ends a request, or first makes durable what has to be and is not yet.
    fn end_of_change(&mut self, disk: &FileDisk) -> Next {
        if !self.rest.is_empty() {
            return self.next_part(self.rest.start, disk);
        }
        let is_durable = self.step == Step::Transfer && self.is_forced(disk);
        if self.op.is_write() && self.flags.has(Flags::FUA) && !is_durable {
            self.step = Step::Sync;
            return Next::Submit(0);
        }
        Next::End(Status::Ok)
    }

    fn fail(&self, errno: i32, disk: &FileDisk, now: Instant) -> Next {
        disk.note_failure(
            now,
            self.doing(),
            self.offset + self.moved,
            self.len - self.moved,
            errno,
        );
        Next::End(match errno {
            0 => Status::Io,
            libc::EFBIG => Status::NoSpace,
            errno => Status::from_errno(errno),
        })
    }

    fn doing(&self) -> &'static str {
        match (self.step, self.op) {
            (Step::Transfer, Op::Read) | (Step::Fetch, _) => "read",
            (Step::Transfer | Step::WriteOut, _) => "write",
            (Step::Sync | Step::AwaitSyncs, _) => "flush",
            (_, Op::Discard) => "discard",
            _ => "zeroing",
        }
    }
}

/// Bytes of a read that is a copy at once: longer ones are copied on other processors, by threads of
/// the kernel.
const AT_ONCE_MAX: u64 = 16 << 10;
/// How often one request is repeated after EINTR, at once, or EAGAIN, after pauses of 3.2 s in all.
const RETRIES_MAX: u8 = 32;
/// Lengths of pauses: 1 ms, and twice as long each time.
pub(super) const PAUSES_MAX: usize = 8;

/// The blocks that a block device zeroes and discards, in bytes: its sectors, or larger ones.
fn whole_block(disk: &FileDisk) -> u64 {
    u64::from(match disk.is_direct() {
        true => disk.range(),
        false => disk.block_size,
    })
}

/// Returns whether an error of a write means that the write itself had no room, while earlier
/// writes are safe.
fn is_no_room(errno: i32) -> bool {
    matches!(errno, libc::ENOSPC | libc::EDQUOT | libc::EFBIG | libc::EINVAL)
}

#[cfg(test)]
mod tests;
