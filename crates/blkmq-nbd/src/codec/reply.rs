//! Replies of the transmission phase: 16-byte simple ones, and chunks behind 20 (structured) or 32
//! (extended) bytes. The data of a read is never copied here: a head is written, the payload follows by
//! reference.

use super::option_reply::truncate;
use super::{BadMagic, ChunkFlags, ErrorCode, ExtentState, HeaderStyle, Reader, STRING_BYTES_MAX};

/// Bytes of a simple reply before its data.
pub const SIMPLE_BYTES: usize = 16;
/// Bytes of a structured chunk's header.
pub const STRUCTURED_BYTES: usize = 20;
/// Bytes of an extended chunk's header.
pub const EXTENDED_BYTES: usize = 32;
/// Bytes a chunk of data has between its header and the data itself (the data's offset).
pub const DATA_OFFSET_BYTES: usize = 8;
/// Bytes of a hole's payload: its offset and its length.
pub const HOLE_BYTES: usize = 12;

const SIMPLE_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_MAGIC: u32 = 0x6e8a_278c;
const ERROR_BIT: u16 = 1 << 15;

/// What a chunk holds; unknown numbers are kept as they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkKind(pub u16);

impl ChunkKind {
    /// Nothing: only the end.
    pub const NONE: ChunkKind = ChunkKind(0);
    /// Data read, behind its offset.
    pub const OFFSET_DATA: ChunkKind = ChunkKind(1);
    /// A range that reads as zeroes.
    pub const OFFSET_HOLE: ChunkKind = ChunkKind(2);
    /// Extents with 32-bit lengths.
    pub const BLOCK_STATUS: ChunkKind = ChunkKind(5);
    /// Extents with 64-bit lengths.
    pub const BLOCK_STATUS_EXT: ChunkKind = ChunkKind(6);
    /// The request failed.
    pub const ERROR: ChunkKind = ChunkKind(ERROR_BIT + 1);
    /// The request failed at an offset.
    pub const ERROR_OFFSET: ChunkKind = ChunkKind(ERROR_BIT + 2);

    /// Whether the chunk reports that the request failed.
    #[inline]
    pub const fn is_error(self) -> bool {
        self.0 & ERROR_BIT != 0
    }
}

/// A chunk's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHead {
    /// The request's cookie.
    pub cookie: u64,
    /// The request's offset; on the wire in extended headers only, zero when read from a structured one.
    pub offset: u64,
    /// Bytes of payload behind the header.
    pub payload_bytes: u64,
    /// What the payload is.
    pub kind: ChunkKind,
    /// Whether more chunks follow.
    pub flags: ChunkFlags,
}

/// The head of any reply, as a client reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyHead {
    /// The whole reply; the data of a successful read follows, as long as the request asked for.
    Simple {
        /// The request's cookie.
        cookie: u64,
        /// Zero, or the error's value.
        error: u32,
    },
    /// One chunk of a reply.
    Chunk(ChunkHead),
}

impl ReplyHead {
    /// Reads the head at the start of `input` and counts its bytes; `None` when it is not complete.
    ///
    /// # Errors
    /// The bytes begin with no magic that `style` allows.
    #[inline]
    pub fn parse(style: HeaderStyle, input: &[u8]) -> Result<Option<(ReplyHead, usize)>, BadMagic> {
        let mut reader = Reader::new(input);
        let Some(magic) = reader.u32() else {
            return Ok(None);
        };
        let (parsed, bytes) = match (magic, style) {
            (SIMPLE_MAGIC, HeaderStyle::Simple | HeaderStyle::Structured) => {
                (Self::parse_simple(reader), SIMPLE_BYTES)
            }
            (STRUCTURED_MAGIC, HeaderStyle::Structured) => (Self::parse_structured(reader), STRUCTURED_BYTES),
            (EXTENDED_MAGIC, HeaderStyle::Extended) => (Self::parse_extended(reader), EXTENDED_BYTES),
            _ => {
                return Err(BadMagic {
                    found: u64::from(magic),
                    expected: u64::from(expected_magic(style)),
                });
            }
        };
        Ok(parsed.map(|head| (head, bytes)))
    }

    #[inline]
    fn parse_simple(mut reader: Reader<'_>) -> Option<ReplyHead> {
        Some(ReplyHead::Simple {
            error: reader.u32()?,
            cookie: reader.u64()?,
        })
    }

    #[inline]
    fn parse_structured(mut reader: Reader<'_>) -> Option<ReplyHead> {
        Some(ReplyHead::Chunk(ChunkHead {
            flags: ChunkFlags(reader.u16()?),
            kind: ChunkKind(reader.u16()?),
            cookie: reader.u64()?,
            offset: 0,
            payload_bytes: u64::from(reader.u32()?),
        }))
    }

    #[inline]
    fn parse_extended(mut reader: Reader<'_>) -> Option<ReplyHead> {
        Some(ReplyHead::Chunk(ChunkHead {
            flags: ChunkFlags(reader.u16()?),
            kind: ChunkKind(reader.u16()?),
            cookie: reader.u64()?,
            offset: reader.u64()?,
            payload_bytes: reader.u64()?,
        }))
    }
}

/// Appends a simple reply; the data of a successful read must follow at once.
#[inline]
pub fn write_simple(cookie: u64, error: Option<ErrorCode>, out: &mut Vec<u8>) {
    let mut bytes = [0; SIMPLE_BYTES];
    bytes[0..4].copy_from_slice(&SIMPLE_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.map_or(0, ErrorCode::to_wire).to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    out.extend_from_slice(&bytes);
}

/// Appends a chunk's header; its payload must follow at once.
///
/// # Panics
/// `style` is [`HeaderStyle::Simple`], or a structured chunk's payload is 4 GiB or longer.
#[inline]
pub fn write_chunk_head(style: HeaderStyle, head: &ChunkHead, out: &mut Vec<u8>) {
    let mut bytes = [0; EXTENDED_BYTES];
    let length = fill_chunk_head(style, head, &mut bytes);
    out.extend_from_slice(&bytes[..length]);
}

/// Appends the head of a chunk that carries `data_bytes` read from `data_offset` and ends the
/// reply; the data must follow at once. `request_offset` is the offset of the request.
///
/// # Panics
/// As [`write_chunk_head`].
#[inline]
pub fn write_data_head(
    style: HeaderStyle,
    cookie: u64,
    request_offset: u64,
    data_offset: u64,
    data_bytes: u64,
    out: &mut Vec<u8>,
) {
    let head = ChunkHead {
        cookie,
        offset: request_offset,
        payload_bytes: data_bytes + DATA_OFFSET_BYTES as u64,
        kind: ChunkKind::OFFSET_DATA,
        flags: ChunkFlags::DONE,
    };
    let mut bytes = [0; EXTENDED_BYTES + DATA_OFFSET_BYTES];
    let (header, _) = bytes.split_first_chunk_mut().expect("the array holds a header");
    let length = fill_chunk_head(style, &head, header);
    bytes[length..length + DATA_OFFSET_BYTES].copy_from_slice(&data_offset.to_be_bytes());
    out.extend_from_slice(&bytes[..length + DATA_OFFSET_BYTES]);
}

/// Appends a chunk that ends the reply to a read and reports that its whole range is zeroes.
///
/// # Panics
/// As [`write_chunk_head`].
#[inline]
pub fn write_hole_chunk(style: HeaderStyle, cookie: u64, offset: u64, hole_bytes: u32, out: &mut Vec<u8>) {
    let head = ChunkHead {
        cookie,
        offset,
        payload_bytes: HOLE_BYTES as u64,
        kind: ChunkKind::OFFSET_HOLE,
        flags: ChunkFlags::DONE,
    };
    let mut bytes = [0; EXTENDED_BYTES + HOLE_BYTES];
    let (header, _) = bytes.split_first_chunk_mut().expect("the array holds a header");
    let length = fill_chunk_head(style, &head, header);
    bytes[length..length + 8].copy_from_slice(&offset.to_be_bytes());
    bytes[length + 8..length + HOLE_BYTES].copy_from_slice(&hole_bytes.to_be_bytes());
    out.extend_from_slice(&bytes[..length + HOLE_BYTES]);
}

/// Appends a chunk that ends the reply with an error and a message for people (cut at the longest string).
///
/// # Panics
/// As [`write_chunk_head`].
pub fn write_error_chunk(
    style: HeaderStyle,
    cookie: u64,
    request_offset: u64,
    error: ErrorCode,
    message: &str,
    out: &mut Vec<u8>,
) {
    let message = truncate(message, STRING_BYTES_MAX);
    let head = ChunkHead {
        cookie,
        offset: request_offset,
        payload_bytes: 6 + message.len() as u64,
        kind: ChunkKind::ERROR,
        flags: ChunkFlags::DONE,
    };
    write_chunk_head(style, &head, out);
    out.extend_from_slice(&error.to_wire().to_be_bytes());
    out.extend_from_slice(&(message.len() as u16).to_be_bytes());
    out.extend_from_slice(message.as_bytes());
}

/// A run of bytes in one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes of the run, not zero.
    pub bytes: u64,
    /// Its state, as far as known.
    pub state: ExtentState,
}

/// Appends a chunk with the extents of one context, which begin at the request's offset; `flags` say whether it ends the
/// reply.
///
/// # Panics
/// As [`write_chunk_head`]; `extents` is empty or, for structured chunks, has a run of 4 GiB or more.
pub fn write_status_chunk(
    style: HeaderStyle,
    (cookie, request_offset): (u64, u64),
    context: u32,
    extents: impl Iterator<Item = Extent> + Clone,
    flags: ChunkFlags,
    out: &mut Vec<u8>,
) {
    let extended = style == HeaderStyle::Extended;
    let count = extents.clone().count() as u64;
    assert!(count > 0, "a block status needs an extent");
    let head = ChunkHead {
        cookie,
        offset: request_offset,
        payload_bytes: if extended { 8 + 16 * count } else { 4 + 8 * count },
        kind: if extended {
            ChunkKind::BLOCK_STATUS_EXT
        } else {
            ChunkKind::BLOCK_STATUS
        },
        flags,
    };
    write_chunk_head(style, &head, out);
    out.extend_from_slice(&context.to_be_bytes());
    if extended {
        out.extend_from_slice(&(count as u32).to_be_bytes());
    }
    for extent in extents {
        write_extent(extended, &extent, out);
    }
}

fn write_extent(extended: bool, extent: &Extent, out: &mut Vec<u8>) {
    if extended {
        out.extend_from_slice(&extent.bytes.to_be_bytes());
        out.extend_from_slice(&u64::from(extent.state.0).to_be_bytes());
    } else {
        let bytes = u32::try_from(extent.bytes).expect("a compact extent is shorter than 4 GiB");
        out.extend_from_slice(&bytes.to_be_bytes());
        out.extend_from_slice(&extent.state.0.to_be_bytes());
    }
}

#[inline]
fn fill_chunk_head(style: HeaderStyle, head: &ChunkHead, bytes: &mut [u8; EXTENDED_BYTES]) -> usize {
    bytes[4..6].copy_from_slice(&head.flags.0.to_be_bytes());
    bytes[6..8].copy_from_slice(&head.kind.0.to_be_bytes());
    bytes[8..16].copy_from_slice(&head.cookie.to_be_bytes());
    match style {
        HeaderStyle::Simple => panic!("chunk {:?} without structured replies", head.kind),
        HeaderStyle::Structured => {
            assert!(
                head.payload_bytes <= u64::from(u32::MAX),
                "chunk of {} bytes",
                head.payload_bytes
            );
            bytes[0..4].copy_from_slice(&STRUCTURED_MAGIC.to_be_bytes());
            bytes[16..20].copy_from_slice(&(head.payload_bytes as u32).to_be_bytes());
            STRUCTURED_BYTES
        }
        HeaderStyle::Extended => {
            bytes[0..4].copy_from_slice(&EXTENDED_MAGIC.to_be_bytes());
            bytes[16..24].copy_from_slice(&head.offset.to_be_bytes());
            bytes[24..32].copy_from_slice(&head.payload_bytes.to_be_bytes());
            EXTENDED_BYTES
        }
    }
}

fn expected_magic(style: HeaderStyle) -> u32 {
    match style {
        HeaderStyle::Simple => SIMPLE_MAGIC,
        HeaderStyle::Structured => STRUCTURED_MAGIC,
        HeaderStyle::Extended => EXTENDED_MAGIC,
    }
}

/// The payload of a chunk, as a client reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkPayload<'a> {
    /// Nothing.
    None,
    /// Data read.
    Data {
        /// The offset of the data.
        offset: u64,
        /// The bytes.
        data: &'a [u8],
    },
    /// A range that reads as zeroes.
    Hole {
        /// The offset of the range.
        offset: u64,
        /// How long it is, in bytes.
        bytes: u32,
    },
    /// Extents of one context.
    Status(StatusPayload<'a>),
    /// The request failed.
    Error {
        /// The error.
        error: ErrorCode,
        /// A message for people.
        message: &'a str,
        /// The offset, if the server sent one.
        offset: Option<u64>,
    },
}

impl<'a> ChunkPayload<'a> {
    /// Decodes the whole payload of a chunk of `kind`; `None` when it does not have the form that
    /// its kind demands or the kind is unknown (and no error).
    pub fn parse(kind: ChunkKind, payload: &'a [u8]) -> Option<ChunkPayload<'a>> {
        let mut reader = Reader::new(payload);
        let parsed = match kind {
            ChunkKind::NONE => ChunkPayload::None,
            ChunkKind::OFFSET_DATA => {
                let (offset, data) = (reader.u64()?, reader.rest());
                return (!data.is_empty()).then_some(ChunkPayload::Data { offset, data });
            }
            ChunkKind::OFFSET_HOLE => ChunkPayload::Hole {
                offset: reader.u64()?,
                bytes: reader.u32().filter(|&bytes| bytes != 0)?,
            },
            ChunkKind::BLOCK_STATUS | ChunkKind::BLOCK_STATUS_EXT => {
                return StatusPayload::parse(kind, reader).map(ChunkPayload::Status);
            }
            kind if kind.is_error() => return Self::parse_error(kind, reader),
            _ => return None,
        };
        reader.is_empty().then_some(parsed)
    }

    fn parse_error(kind: ChunkKind, mut reader: Reader<'a>) -> Option<ChunkPayload<'a>> {
        let error = ErrorCode::from_wire(reader.u32()?);
        let length = usize::from(reader.u16()?);
        let message = std::str::from_utf8(reader.bytes(length)?).unwrap_or("(message is not UTF-8)");
        let offset = if kind == ChunkKind::ERROR_OFFSET {
            Some(reader.u64()?)
        } else {
            None
        };
        Some(ChunkPayload::Error {
            error,
            message,
            offset,
        })
    }
}

/// The extents in a block status chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusPayload<'a> {
    /// The context they belong to.
    pub context: u32,
    extended: bool,
    extents: &'a [u8],
}

impl<'a> StatusPayload<'a> {
    fn parse(kind: ChunkKind, mut reader: Reader<'a>) -> Option<StatusPayload<'a>> {
        let extended = kind == ChunkKind::BLOCK_STATUS_EXT;
        let context = reader.u32()?;
        let count = if extended {
            Some(reader.u32()? as usize)
        } else {
            None
        };
        let extents = reader.rest();
        let unit = if extended { 16 } else { 8 };
        let whole = !extents.is_empty() && extents.len().is_multiple_of(unit);
        let counted = count.is_none_or(|count| count == extents.len() / unit);
        (whole && counted).then_some(StatusPayload {
            context,
            extended,
            extents,
        })
    }

    /// The extents, from the request's offset on.
    pub fn extents(&self) -> impl Iterator<Item = Extent> + use<'a> {
        let extended = self.extended;
        self.extents
            .chunks_exact(if extended { 16 } else { 8 })
            .filter_map(move |raw| {
                let mut reader = Reader::new(raw);
                let (bytes, state) = if extended {
                    (reader.u64()?, reader.u64()? as u32)
                } else {
                    (u64::from(reader.u32()?), reader.u32()?)
                };
                Some(Extent {
                    bytes,
                    state: ExtentState(state),
                })
            })
    }
}

#[cfg(test)]
#[path = "reply_tests.rs"]
mod tests;
