//! Applies a stream of replies to the requests that wait for them: data is stored, holes become zeroes,
//! errors are recorded, completions are reported. It also says when the server has broken the protocol,
//! so that its connection must be closed.
//!
//! The driver `nbd` runs it between its socket and the memory of bios. Data that has not been
//! received yet can be received past this parser, straight into its memory: [`Replies::pending`]
//! names the data, and [`Replies::took`] is told when it is stored.

use super::codec::reply::{
    ChunkHead, ChunkKind, ChunkPayload, DATA_OFFSET_BYTES, EXTENDED_BYTES, HOLE_BYTES, ReplyHead,
};
use super::codec::{BadMagic, ChunkFlags, ErrorCode, HeaderStyle, STRING_BYTES_MAX};
use super::cover::Cover;

/// A request that waits for its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Whether its reply has data.
    pub reads: bool,
    /// First byte of its range.
    pub offset: u64,
    /// Bytes of its range.
    pub len: u64,
}

/// The requests of one connection, by a number that the owner chooses.
pub trait Book {
    /// Finds the request with this cookie.
    ///
    /// # Errors
    /// [`Fault::Cookie`]: none waits for a reply on this connection. [`Fault::Early`]: it was not
    /// sent whole.
    fn find(&mut self, cookie: u64) -> Result<(u32, Asked), Fault>;
    /// The answered part of a request that was found.
    fn cover(&mut self, request: u32) -> &mut Cover;
    /// Stores data that belongs `at` bytes into the request.
    fn put(&mut self, request: u32, at: u64, data: &[u8]);
    /// Makes `len` bytes zero, `at` bytes into the request.
    fn put_zeroes(&mut self, request: u32, at: u64, len: u64);
    /// Records that the request has failed; its end follows. Of several errors the first counts.
    fn fail(&mut self, request: u32, error: ErrorCode, message: &str);
    /// The request has ended.
    fn end(&mut self, request: u32);
}

/// How a server has broken the protocol. Everything that it sends afterwards is meaningless.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// A reply that does not begin with a reply's magic.
    #[error("the server is out of step: {0}")]
    Magic(#[from] BadMagic),
    /// A reply to nothing.
    #[error("the server answers a request that was not made (cookie {0:#x})")]
    Cookie(u64),
    /// A reply to a request that the server cannot have read whole.
    #[error("the server answers a request before it was sent whole (cookie {0:#x})")]
    Early(u64),
    /// A reply that does not fit its request, or its own form.
    #[error("the server sends {0}")]
    Misfit(&'static str),
}

/// The position in the stream of replies of one connection.
#[derive(Clone, Debug)]
pub struct Replies {
    style: HeaderStyle,
    data: Option<Pending>,
}

/// Data of a read that comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pending {
    /// The read.
    pub request: u32,
    /// The position of the data in the read, in bytes.
    pub at: u64,
    /// How much data comes, in bytes, at least 1.
    pub left: u64,
    is_last: bool,
}

/// Bytes of replies that must fit the receive buffer, besides data: what is decoded whole.
pub const RECEIVE_BYTES_MIN: usize = EXTENDED_BYTES + ERROR_BYTES_MAX;

impl Replies {
    /// The start of a stream.
    pub const fn new(style: HeaderStyle) -> Self {
        Self { style, data: None }
    }

    /// Takes what it can from `input` and counts the bytes; the caller keeps the rest, which is less than
    /// [`RECEIVE_BYTES_MIN`], for the next call.
    ///
    /// # Errors
    /// The first thing that breaks the protocol.
    #[inline]
    pub fn receive(&mut self, input: &[u8], book: &mut impl Book) -> Result<usize, Fault> {
        let mut taken = 0;
        loop {
            if let Some(pending) = self.data {
                let now = pending.left.min((input.len() - taken) as u64);
                if now == 0 {
                    return Ok(taken);
                }
                let end = taken + now as usize;
                book.put(pending.request, pending.at, &input[taken..end]);
                taken = end;
                self.took(now, book)?;
                continue;
            }
            match self.receive_head(&input[taken..], book)? {
                0 => return Ok(taken),
                bytes => taken += bytes,
            }
        }
    }

    /// The data that comes next in the stream, behind all that was given to [`Self::receive`].
    #[inline]
    pub fn pending(&self) -> Option<Pending> {
        self.data
    }

    /// Reports that this many bytes of the pending data have been stored.
    ///
    /// # Errors
    /// As [`Self::receive`]: it may have been the end of an incomplete reply.
    ///
    /// # Panics
    /// The number is larger than what was pending.
    #[inline]
    pub fn took(&mut self, bytes: u64, book: &mut impl Book) -> Result<(), Fault> {
        let Some(pending) = &mut self.data else {
            assert_eq!(bytes, 0, "data that nobody waits for");
            return Ok(());
        };
        assert!(bytes <= pending.left, "{bytes} bytes of {pending:?}");
        pending.at += bytes;
        pending.left -= bytes;
        if pending.left > 0 {
            return Ok(());
        }
        let Pending { request, is_last, .. } = *pending;
        self.data = None;
        if is_last {
            book.end(request);
        }
        Ok(())
    }

    /// Takes one head, with what belongs to it besides data; returns its bytes, 0 if it is not
    /// complete.
    #[inline]
    fn receive_head(&mut self, input: &[u8], book: &mut impl Book) -> Result<usize, Fault> {
        let Some((head, bytes)) = ReplyHead::parse(self.style, input)? else {
            return Ok(0);
        };
        match head {
            ReplyHead::Simple { cookie, error } => {
                self.receive_simple(cookie, error, book)?;
                Ok(bytes)
            }
            ReplyHead::Chunk(chunk) => {
                let payload = self.receive_chunk(&chunk, &input[bytes..], book)?;
                Ok(payload.map_or(0, |payload| bytes + payload))
            }
        }
    }

    #[inline]
    fn receive_simple(&mut self, cookie: u64, error: u32, book: &mut impl Book) -> Result<(), Fault> {
        let (request, asked) = book.find(cookie)?;
        if asked.reads && self.style != HeaderStyle::Simple {
            return Err(Fault::Misfit("a simple reply to a read where chunks are agreed"));
        }
        if error != 0 {
            book.fail(request, ErrorCode::from_wire(error), "");
        } else if asked.reads {
            self.expect(request, 0, asked.len, true);
            return Ok(());
        }
        book.end(request);
        Ok(())
    }

    /// Takes the payload of a chunk without its data. Returns its bytes; `None` if it is not
    /// complete.
    #[inline]
    fn receive_chunk(
        &mut self,
        chunk: &ChunkHead,
        input: &[u8],
        book: &mut impl Book,
    ) -> Result<Option<usize>, Fault> {
        let (request, asked) = book.find(chunk.cookie)?;
        let is_last = chunk.flags.contains(ChunkFlags::DONE);
        if chunk.kind == ChunkKind::OFFSET_DATA {
            let Some(offset) = input.first_chunk::<DATA_OFFSET_BYTES>() else {
                return Ok(None);
            };
            let len = chunk.payload_bytes.saturating_sub(DATA_OFFSET_BYTES as u64);
            let at = add_part(request, &asked, u64::from_be_bytes(*offset), len, book)?;
            self.expect_last(request, &asked, at, len, is_last, book)?;
            return Ok(Some(DATA_OFFSET_BYTES));
        }
        let len_max = match chunk.kind {
            ChunkKind::NONE => 0,
            ChunkKind::OFFSET_HOLE => HOLE_BYTES,
            kind if kind.is_error() => ERROR_BYTES_MAX,
            _ => return Err(Fault::Misfit("a chunk of a kind that was not asked for")),
        };
        if chunk.payload_bytes > len_max as u64 {
            return Err(Fault::Misfit("a chunk that is longer than its kind allows"));
        }
        let len = chunk.payload_bytes as usize;
        let Some(payload) = input.get(..len) else {
            return Ok(None);
        };
        let payload = ChunkPayload::parse(chunk.kind, payload);
        match payload.ok_or(Fault::Misfit("a chunk that does not have the form of its kind"))? {
            ChunkPayload::None if !is_last => {
                return Err(Fault::Misfit("an empty chunk that does not end its reply"));
            }
            ChunkPayload::Hole { offset, bytes } => {
                let at = add_part(request, &asked, offset, bytes.into(), book)?;
                book.put_zeroes(request, at, bytes.into());
            }
            ChunkPayload::Error { error, message, .. } => {
                if !book.cover(request).add_error() {
                    return Err(Fault::Misfit("more errors than fit one reply"));
                }
                book.fail(request, error, message);
            }
            _ => {}
        }
        if is_last {
            check_whole(request, &asked, book)?;
            book.end(request);
        }
        Ok(Some(len))
    }

    #[inline]
    fn expect_last(
        &mut self,
        request: u32,
        asked: &Asked,
        at: u64,
        len: u64,
        is_last: bool,
        book: &mut impl Book,
    ) -> Result<(), Fault> {
        if is_last {
            check_whole(request, asked, book)?;
        }
        self.expect(request, at, len, is_last);
        Ok(())
    }

    #[inline]
    fn expect(&mut self, request: u32, at: u64, left: u64, is_last: bool) {
        self.data = Some(Pending {
            request,
            at,
            left,
            is_last,
        });
    }
}

/// Adds a part of a read's reply. Returns its offset in the read.
#[inline]
fn add_part(request: u32, asked: &Asked, offset: u64, len: u64, book: &mut impl Book) -> Result<u64, Fault> {
    let at = offset
        .checked_sub(asked.offset)
        .filter(|at| asked.reads && len > 0 && at.checked_add(len).is_some_and(|end| end <= asked.len));
    let at = at.ok_or(Fault::Misfit("data that was not asked for"))?;
    if !book.cover(request).add(at..at + len) {
        return Err(Fault::Misfit("the same data twice, or in too many pieces"));
    }
    Ok(at)
}

/// A reply may end only when everything was answered, or an error gives the reason.
#[inline]
fn check_whole(request: u32, asked: &Asked, book: &mut impl Book) -> Result<(), Fault> {
    let cover = book.cover(request);
    if asked.reads && !cover.is_whole(asked.len) && !cover.has_errors() {
        return Err(Fault::Misfit("less data than was asked for"));
    }
    Ok(())
}

/// Longest payload of an error chunk: the number, the message and its length, an offset.
const ERROR_BYTES_MAX: usize = 4 + 2 + STRING_BYTES_MAX + 8;

#[cfg(test)]
#[path = "replies_tests.rs"]
mod tests;
