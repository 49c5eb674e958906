//! The replies of a session, in the form that was negotiated, and the counts of requests and buffers until
//! they are free. Heads are appended to the caller's buffer; a read's data stays in place and is sent behind
//! its head.

use blkmq_nbd::codec::reply::{
    ChunkHead, ChunkKind, Extent, write_chunk_head, write_data_head, write_error_chunk, write_hole_chunk,
    write_simple, write_status_chunk,
};
use blkmq_nbd::codec::request::RequestHeader;
use blkmq_nbd::codec::{ChunkFlags, CommandFlags, ErrorCode, ExtentState, HeaderStyle};

use super::contexts::{ALLOCATION_CONTEXT_ID, CHANGED, FIRST_BITMAP_ID};
use super::negotiation::Selection;
use super::{Op, Request};
use crate::nbd::limits::Limits;

/// The replies of one connection. Each request begun is replied to by exactly one of [`Replies::ok`],
/// [`Replies::read`], [`Replies::hole`], [`Replies::block_status`] and [`Replies::error`], or cancelled.
#[derive(Debug)]
pub struct Replies {
    style: HeaderStyle,
    requests: u32,
    requests_max: u32,
    memory_bytes: u64,
    memory_bytes_max: u64,
    extents_max: usize,
    size_bytes: u64,
    block_min_bytes: u32,
}

impl Replies {
    pub(super) fn new(selection: &Selection, limits: &Limits) -> Replies {
        Replies {
            style: selection.style,
            requests: 0,
            requests_max: limits.requests_max,
            memory_bytes: 0,
            memory_bytes_max: limits.memory_bytes_max,
            extents_max: limits.extents_max as usize,
            size_bytes: selection.export.size_bytes,
            block_min_bytes: selection.export.block_min_bytes,
        }
    }

    /// Requests begun and not replied to.
    #[inline]
    pub fn requests(&self) -> u32 {
        self.requests
    }

    /// Bytes of payload buffers that count against [`Limits::memory_bytes_max`].
    #[inline]
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Extents worth collecting for one block status reply to `request`.
    pub fn extents_max(&self, request: &Request) -> usize {
        if request.flags.contains(CommandFlags::REQ_ONE) {
            1
        } else {
            self.extents_max
        }
    }

    /// Writes the reply of success to `request`, which is no read and no block status.
    ///
    /// # Panics
    /// The request needs another reply, or none was begun.
    #[inline]
    pub fn ok(&mut self, request: &Request, out: &mut Vec<u8>) {
        assert!(
            !matches!(request.op, Op::Read | Op::BlockStatus),
            "{:?} replied to without data",
            request.op
        );
        self.finish(request.payload_bytes());
        if self.style == HeaderStyle::Simple {
            return write_simple(request.cookie, None, out);
        }
        let head = ChunkHead {
            cookie: request.cookie,
            offset: request.offset,
            payload_bytes: 0,
            kind: ChunkKind::NONE,
            flags: ChunkFlags::DONE,
        };
        write_chunk_head(self.style, &head, out);
    }

    /// Writes the head of a successful read's reply; exactly `request.length` bytes of data must be sent behind it.
    /// The data's buffer counts until [`Replies::read_sent`].
    ///
    /// # Panics
    /// The request is no read, or none was begun.
    #[inline]
    pub fn read(&mut self, request: &Request, out: &mut Vec<u8>) {
        assert_eq!(request.op, Op::Read, "data replied to another operation");
        self.finish(0);
        if self.style == HeaderStyle::Simple {
            return write_simple(request.cookie, None, out);
        }
        write_data_head(
            self.style,
            request.cookie,
            request.offset,
            request.offset,
            request.length,
            out,
        );
    }

    /// Returns whether a read of zeroes can be replied to by [`Replies::hole`].
    #[inline]
    pub fn has_holes(&self) -> bool {
        self.style != HeaderStyle::Simple
    }

    /// Replies to a read that its whole range is zeroes: no data follows, and its buffer is free at
    /// once.
    ///
    /// # Panics
    /// The request is no read, none was begun, or the client takes simple replies, which have no such form.
    #[inline]
    pub fn hole(&mut self, request: &Request, out: &mut Vec<u8>) {
        assert_eq!(request.op, Op::Read, "a hole replied to another operation");
        self.finish(request.payload_bytes());
        let bytes = u32::try_from(request.length).expect("a read is shorter than 4 GiB");
        write_hole_chunk(self.style, request.cookie, request.offset, bytes, out);
    }

    /// Reports that the buffer of a read replied to by [`Replies::read`] is free again.
    ///
    /// # Panics
    /// More bytes than are held.
    #[inline]
    pub fn read_sent(&mut self, request: &Request) {
        self.free(request.payload_bytes());
    }

    /// Drops a request whose reply nobody waits for any more.
    ///
    /// # Panics
    /// No request was begun.
    pub fn cancel(&mut self, request: &Request) {
        self.finish(request.payload_bytes());
    }

    /// Replies that `request` failed. `message` is for people and reaches clients with structured replies.
    ///
    /// # Panics
    /// No request was begun.
    pub fn error(&mut self, request: &Request, error: ErrorCode, message: &str, out: &mut Vec<u8>) {
        self.finish(request.payload_bytes());
        let error = permitted(error, request);
        self.write_error(request.cookie, request.offset, error, message, out);
    }

    /// Replies to a block status request with the extents known from its offset on, in each context that was selected: of
    /// the allocation if it was, and then of the bitmaps in their order. Extents that the client must not see (beyond the
    /// first if it asked for one, beyond the range except in the last, beyond the export) are cut off. No extents mean that
    /// nothing is known: then the range is reported as allocated, and as changed.
    ///
    /// # Panics
    /// The request is no block status, none was begun, or there is no context.
    pub fn block_status(
        &mut self,
        request: &Request,
        allocation: Option<&[Extent]>,
        bitmaps: &[Vec<Extent>],
        out: &mut Vec<u8>,
    ) {
        assert_eq!(
            request.op,
            Op::BlockStatus,
            "extents replied to another operation"
        );
        self.finish(0);
        let unknown = |context| {
            [Extent {
                bytes: request.length,
                state: match context {
                    ALLOCATION_CONTEXT_ID => ExtentState::NONE,
                    _ => CHANGED,
                },
            }]
        };
        let allocation = allocation.map(|extents| (ALLOCATION_CONTEXT_ID, extents));
        let bitmaps = (FIRST_BITMAP_ID..).zip(bitmaps.iter().map(|extents| &extents[..]));
        let mut contexts = allocation.into_iter().chain(bitmaps).peekable();
        assert!(contexts.peek().is_some(), "a block status without a context");
        while let Some((context, extents)) = contexts.next() {
            let known = extents.iter().any(|extent| extent.bytes > 0);
            let unknown = unknown(context);
            let visible = self.visible(request, if known { extents } else { &unknown });
            let flags = ChunkFlags::NONE.with_if(contexts.peek().is_none(), ChunkFlags::DONE);
            let reply = (request.cookie, request.offset);
            write_status_chunk(self.style, reply, context, visible, flags, out);
        }
    }

    #[inline]
    pub(super) fn has_room(&self, request: &Request) -> bool {
        self.requests < self.requests_max
            && request.payload_bytes() <= self.memory_bytes_max.saturating_sub(self.memory_bytes)
    }

    #[inline]
    pub(super) fn begin(&mut self, request: &Request) {
        self.requests += 1;
        self.memory_bytes += request.payload_bytes();
    }

    /// Replies to a request that was never begun.
    pub(super) fn refuse(&self, header: &RequestHeader, error: ErrorCode, message: &str, out: &mut Vec<u8>) {
        self.write_error(header.cookie, header.offset, error, message, out);
    }

    #[inline]
    fn finish(&mut self, bytes: u64) {
        assert!(self.requests > 0, "a reply without a request");
        self.requests -= 1;
        self.free(bytes);
    }

    #[inline]
    fn free(&mut self, bytes: u64) {
        assert!(
            bytes <= self.memory_bytes,
            "{bytes} bytes freed of {}",
            self.memory_bytes
        );
        self.memory_bytes -= bytes;
    }

    fn write_error(&self, cookie: u64, offset: u64, error: ErrorCode, message: &str, out: &mut Vec<u8>) {
        match self.style {
            HeaderStyle::Simple => write_simple(cookie, Some(error), out),
            style => write_error_chunk(style, cookie, offset, error, message, out),
        }
    }

    /// The part of `extents` that the reply to `request` may contain.
    fn visible<'a>(
        &self,
        request: &Request,
        extents: &'a [Extent],
    ) -> impl Iterator<Item = Extent> + Clone + use<'a> {
        let one = request.flags.contains(CommandFlags::REQ_ONE);
        let compact_max = u64::from(!(self.block_min_bytes - 1));
        let run_max = if self.style == HeaderStyle::Extended {
            u64::MAX
        } else {
            compact_max
        };
        let (wanted, count) = (request.length, if one { 1 } else { self.extents_max });
        let mut room = if one {
            wanted
        } else {
            self.size_bytes - request.offset
        };
        let mut shown = 0;
        extents
            .iter()
            .filter(|extent| extent.bytes > 0)
            .take(count)
            .map_while(move |extent| {
                if shown >= wanted || room == 0 {
                    return None;
                }
                let bytes = extent.bytes.min(room).min(run_max);
                shown += bytes;
                // An extent that was cut is the last one: what follows it is not contiguous.
                room = if bytes < extent.bytes { 0 } else { room - bytes };
                Some(Extent {
                    bytes,
                    state: extent.state,
                })
            })
    }
}

/// `ENOTSUP` belongs to fast zeroing alone; elsewhere clients expect `EINVAL`.
fn permitted(error: ErrorCode, request: &Request) -> ErrorCode {
    let fast = request.op == Op::WriteZeroes && request.flags.contains(CommandFlags::FAST_ZERO);
    if error == ErrorCode::NotSupported && !fast {
        ErrorCode::Invalid
    } else {
        error
    }
}
