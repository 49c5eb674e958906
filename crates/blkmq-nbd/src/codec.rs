//! The bytes of each NBD message; nothing here knows when a message may be sent. [`super::client`] and
//! the server in `blkmq-export` have the order of messages.
//!
//! Parsers read from the caller's receive buffer and borrow from it; `None` means that the message is not complete yet.
//! Writers append to a buffer of the caller. All numbers on the wire are big-endian.

pub mod error;
pub mod flags;
pub mod handshake;
pub mod option_reply;
pub mod reply;
pub mod request;

pub use error::ErrorCode;
pub use flags::{ChunkFlags, ClientFlags, CommandFlags, ExtentState, HandshakeFlags, TransmissionFlags};

use std::fmt;

/// Longest string (name, description, message) the protocol allows, in bytes.
pub const STRING_BYTES_MAX: usize = 4096;

/// Which headers the transmission phase uses, as negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HeaderStyle {
    /// Compact requests, simple replies: for a client that negotiates nothing.
    Simple,
    /// Compact requests, replies in structured chunks.
    Structured,
    /// Requests and replies with 32-byte headers and 64-bit lengths.
    Extended,
}

impl HeaderStyle {
    /// Bytes of a request's header.
    #[inline]
    pub fn request_bytes(self) -> usize {
        match self {
            HeaderStyle::Simple | HeaderStyle::Structured => request::COMPACT_BYTES,
            HeaderStyle::Extended => request::EXTENDED_BYTES,
        }
    }
}

/// A message that does not begin with the required number: the stream is out of step or not NBD at
/// all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadMagic {
    /// The number found.
    pub found: u64,
    /// The number required.
    pub expected: u64,
}

impl fmt::Display for BadMagic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "magic number {:#x} where {:#x} belongs",
            self.found, self.expected
        )
    }
}

impl std::error::Error for BadMagic {}

/// A cursor over the data of one option or chunk; every step returns `None` past the end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Reader { rest: bytes }
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        Some(head)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.rest.split_first_chunk::<N>()?;
        self.rest = rest;
        Some(*head)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string preceded by its 32-bit length; `None` also when it is longer than the protocol allows.
    pub(crate) fn counted(&mut self) -> Option<&'a [u8]> {
        let length = usize::try_from(self.u32()?).ok()?;
        if length > STRING_BYTES_MAX {
            return None;
        }
        self.bytes(length)
    }

    pub(crate) fn rest(self) -> &'a [u8] {
        self.rest
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
}
