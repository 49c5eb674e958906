//! The requests under way: what each is, where its memory lies, how much of its answer has come.
//! `connection` sends and receives with it, `hctx` owns the table: one row for each tag, one more for a
//! probe, and one for a fence.

use std::iter;

use blkmq_core::bio::{Flags, Lent, Op, Status};
use blkmq_core::ids::{Cookie, Tag};
use blkmq_core::request::Request;
use blkmq_core::time::Instant;
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{CommandFlags, ErrorCode};
use blkmq_nbd::cover::Cover;
use blkmq_nbd::replies::{Asked, Book, Fault};

use super::fences::Range;
use super::sys::{self, Pieces};

/// Where a request is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum State {
    /// No request.
    #[default]
    Idle,
    /// Held until there is a connection.
    AwaitsConnection,
    /// Given to the connection of this number.
    Sent(u16),
}

/// Where a request's data is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Memory {
    /// Nowhere: read data is discarded.
    #[default]
    None,
    /// In one piece.
    Flat(Lent),
    /// In this many pieces, in the table's row.
    List(u16),
}

/// One request under way.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub(super) cookie: Cookie,
    pub(super) state: State,
    pub(super) op: Op,
    flags: Flags,
    memory: Memory,
    offset: u64,
    len: u64,
    pub(super) status: Status,
    cover: Cover,
    /// Where it ends in the stream of its connection's requests, in bytes.
    pub(super) stream_end: u64,
    /// When its connection is given up.
    pub(super) expires: Instant,
    /// How often its connection was lost.
    pub(super) losses: u8,
    /// It has expired once already.
    pub(super) was_late: bool,
    /// For a flush: the epoch of the ledger that it covers.
    pub(super) epoch: u64,
    /// Not a request of the engine: the server is to fence the session whose number is the offset.
    pub(super) is_fence: bool,
}

impl Slot {
    const IDLE: Self = Self {
        cookie: Cookie::from_raw(0),
        state: State::Idle,
        op: Op::Read,
        flags: Flags::NONE,
        memory: Memory::None,
        offset: 0,
        len: 0,
        status: Status::Ok,
        cover: Cover::NEW,
        stream_end: 0,
        expires: Instant(0),
        losses: 0,
        was_late: false,
        epoch: 0,
        is_fence: false,
    };

    /// The range that it changes.
    pub(super) fn range(&self) -> Range {
        (self.offset, self.len)
    }

    /// Bytes of its reply's data.
    pub(super) fn read_bytes(&self) -> u64 {
        if self.op == Op::Read { self.len } else { 0 }
    }

    /// Bytes sent behind its header.
    pub(super) fn write_bytes(&self) -> u64 {
        if self.op == Op::Write { self.len } else { 0 }
    }

    /// Returns whether only a flush makes its effect durable.
    pub(super) fn leaves_dirt(&self) -> bool {
        self.op.is_write() && !self.flags.has(Flags::FUA)
    }

    /// Returns whether the server was asked to make it durable before the reply.
    pub(super) fn is_forced(&self) -> bool {
        self.op.is_write() && self.flags.has(Flags::FUA)
    }

    /// Makes the request's header.
    #[inline]
    pub(super) fn header(&self, can_fua: bool) -> RequestHeader {
        let (command, flags) = match self.op {
            _ if self.is_fence => (Command::FENCE, CommandFlags::NONE),
            Op::Read => (Command::READ, CommandFlags::NONE),
            Op::Write => (Command::WRITE, CommandFlags::NONE),
            Op::Flush => (Command::FLUSH, CommandFlags::NONE),
            Op::Discard => (Command::TRIM, CommandFlags::NONE),
            Op::WriteZeroes => {
                let flags = CommandFlags::NONE
                    .with_if(self.flags.has(Flags::NO_UNMAP), CommandFlags::NO_HOLE)
                    .with_if(self.flags.has(Flags::FAST_ONLY), CommandFlags::FAST_ZERO);
                (Command::WRITE_ZEROES, flags)
            }
        };
        let is_durable = can_fua && self.op.is_write() && self.flags.has(Flags::FUA);
        RequestHeader {
            cookie: self.cookie.raw(),
            offset: self.offset,
            length: self.len,
            command,
            flags: flags.with_if(is_durable, CommandFlags::FUA),
        }
    }

    /// Prepares it to be sent again, from its beginning.
    pub(super) fn rewind(&mut self) {
        self.state = State::AwaitsConnection;
        self.status = Status::Ok;
        self.cover.clear();
    }
}

/// The requests under way, by tag.
pub(super) struct Slots {
    slots: Box<[Slot]>,
    /// A row of pieces for each slot.
    pieces: Box<[Option<Lent>]>,
    /// Requests that ended and were not taken yet.
    pub(super) ended: Vec<u32>,
}

impl Slots {
    /// Makes a table of `count` slots for requests.
    pub(super) fn new(count: usize) -> Self {
        let fence = Slot {
            cookie: Cookie::new(Tag(count as u32), 0),
            op: Op::Flush,
            is_fence: true,
            ..Slot::IDLE
        };
        let slots = iter::repeat_n(Slot::IDLE, count).chain([fence]);
        Self {
            slots: slots.collect(),
            pieces: vec![None; count * SEGMENTS_MAX].into(),
            ended: Vec::with_capacity(count),
        }
    }

    /// Fills the slot of `cookie`'s tag.
    ///
    /// # Errors
    /// `Invalid` if the request's memory does not fit its range, or has more pieces than the limits allow.
    #[inline]
    pub(super) fn fill(&mut self, rq: &Request, cookie: Cookie) -> Result<u32, Status> {
        let number = cookie.tag().index();
        debug_assert_eq!(
            self.slots[number].state,
            State::Idle,
            "tag {number} is issued twice"
        );
        let memory = if rq.op().has_data() {
            self.memory_of(rq, number)?
        } else {
            Memory::None
        };
        let slot = &mut self.slots[number];
        slot.cookie = cookie;
        slot.op = rq.op();
        slot.flags = rq.flags();
        slot.offset = rq.offset();
        slot.len = rq.len();
        slot.memory = memory;
        slot.status = Status::Ok;
        slot.losses = 0;
        slot.was_late = false;
        slot.cover.clear();
        Ok(number as u32)
    }

    /// Prepares the fence of a session to be sent. Returns its slot.
    pub(super) fn fill_fence(&mut self, session: u64) -> u32 {
        let number = self.fence();
        let slot = self.get_mut(number);
        debug_assert_eq!(slot.state, State::Idle, "two fences at a time");
        slot.cookie = Cookie::new(slot.cookie.tag(), slot.cookie.generation().wrapping_add(1));
        slot.offset = session;
        slot.status = Status::Ok;
        slot.was_late = false;
        number
    }

    /// The slot of the fence.
    #[inline]
    pub(super) fn fence(&self) -> u32 {
        self.slots.len() as u32 - 1
    }

    #[inline]
    fn memory_of(&mut self, rq: &Request, number: usize) -> Result<Memory, Status> {
        if let Some(piece) = rq.single_piece() {
            let fits = u64::from(piece.len()) == rq.len();
            return fits.then_some(Memory::Flat(piece)).ok_or(Status::Invalid);
        }
        let row = &mut self.pieces[number * SEGMENTS_MAX..][..SEGMENTS_MAX];
        let (mut count, mut len) = (0, 0);
        rq.for_each_piece(|piece| {
            if let Some(place) = row.get_mut(count) {
                *place = Some(piece);
            }
            count += 1;
            len += u64::from(piece.len());
        });
        match count {
            0 if rq.op() == Op::Read => Ok(Memory::None),
            1..=SEGMENTS_MAX if len == rq.len() => Ok(Memory::List(count as u16)),
            _ => Err(Status::Invalid),
        }
    }

    #[inline]
    pub(super) fn get(&self, number: u32) -> &Slot {
        &self.slots[number as usize]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, number: u32) -> &mut Slot {
        &mut self.slots[number as usize]
    }

    /// All slots.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Slot)> {
        (0..).zip(&self.slots)
    }

    /// Returns whether there is memory for what is read for a slot.
    #[inline]
    pub(super) fn has_memory(&self, number: u32) -> bool {
        self.get(number).memory != Memory::None
    }

    /// Appends the memory of `len` bytes, `at` bytes into a request, as far as pieces fit.
    #[inline]
    pub(super) fn gather(&self, number: u32, at: u64, len: u64, into: &mut Pieces<'_>) {
        self.for_each(number, at, len, |piece| {
            let has_room = !into.is_full();
            if has_room {
                into.push_lent(piece);
            }
            has_room
        });
    }

    /// Visits the memory of `len` bytes, `at` bytes into a request, while `visit` returns true.
    #[inline]
    fn for_each(&self, number: u32, mut at: u64, mut len: u64, mut visit: impl FnMut(Lent) -> bool) {
        match self.get(number).memory {
            Memory::None => {}
            Memory::Flat(piece) => {
                visit(piece.part(at as u32, len as u32));
            }
            Memory::List(count) => {
                let row = &self.pieces[number as usize * SEGMENTS_MAX..][..usize::from(count)];
                for piece in row.iter().flatten() {
                    let skip = at.min(u64::from(piece.len()));
                    at -= skip;
                    let part = piece.part(skip as u32, len.min(u64::from(u32::MAX)) as u32);
                    if !part.is_empty() {
                        len -= u64::from(part.len());
                        if !visit(part) || len == 0 {
                            return;
                        }
                    }
                }
            }
        }
    }
}

/// The requests of one connection, for its replies.
pub(super) struct OfConnection<'a> {
    pub(super) slots: &'a mut Slots,
    pub(super) connection: u16,
    /// Bytes of the stream of its requests that were sent.
    pub(super) sent: u64,
    /// The server is shutting down: its requests were not executed.
    pub(super) is_leaving: &'a mut bool,
}

impl Book for OfConnection<'_> {
    #[inline]
    fn find(&mut self, cookie: u64) -> Result<(u32, Asked), Fault> {
        let number = Cookie::from_raw(cookie).tag().0;
        let slot = self.slots.slots.get(number as usize);
        let is_it = |slot: &&Slot| slot.cookie.raw() == cookie && slot.state == State::Sent(self.connection);
        let slot = slot.filter(is_it).ok_or(Fault::Cookie(cookie))?;
        // The rest would be sent from memory that is somebody else's once the request has ended.
        if slot.stream_end > self.sent {
            return Err(Fault::Early(cookie));
        }
        let asked = Asked {
            reads: slot.op == Op::Read,
            offset: slot.offset,
            len: slot.len,
        };
        Ok((number, asked))
    }

    #[inline]
    fn cover(&mut self, number: u32) -> &mut Cover {
        &mut self.slots.get_mut(number).cover
    }

    #[inline]
    fn put(&mut self, number: u32, at: u64, mut data: &[u8]) {
        self.slots.for_each(number, at, data.len() as u64, |piece| {
            let (now, later) = data.split_at(piece.len() as usize);
            sys::put(piece, now);
            data = later;
            true
        });
    }

    fn put_zeroes(&mut self, number: u32, at: u64, len: u64) {
        self.slots.for_each(number, at, len, |piece| {
            sys::put_zeroes(piece);
            true
        });
    }

    fn fail(&mut self, number: u32, error: ErrorCode, message: &str) {
        let slot = self.slots.get_mut(number);
        tracing::debug!(
            "nbd: {:?} of {} bytes at {}: the server says {error} {message}",
            slot.op,
            slot.len,
            slot.offset
        );
        *self.is_leaving |= error == ErrorCode::Shutdown;
        slot.status = slot.status.and(status_of(error));
    }

    #[inline]
    fn end(&mut self, number: u32) {
        if *self.is_leaving && self.slots.get(number).status == Status::Transport {
            // It stays with its connection, and is handled with all others there when that is
            // closed.
            return;
        }
        self.slots.get_mut(number).state = State::Idle;
        self.slots.ended.push(number);
    }
}

/// The engine's status for a server's error.
fn status_of(error: ErrorCode) -> Status {
    match error {
        ErrorCode::Perm => Status::ReadOnly,
        ErrorCode::Io => Status::Io,
        ErrorCode::NoMemory => Status::NoMemory,
        ErrorCode::Invalid | ErrorCode::Overflow => Status::Invalid,
        ErrorCode::NoSpace => Status::NoSpace,
        ErrorCode::NotSupported => Status::NotSupported,
        ErrorCode::Shutdown => Status::Transport,
    }
}

/// Most pieces of memory in one request.
pub(super) const SEGMENTS_MAX: usize = 128;
