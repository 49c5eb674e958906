//! The server's replies to options, for the server that writes and the client that decodes them.

use std::fmt;

use super::handshake::{InfoKind, OptionCode, parse_name};
use super::{BadMagic, Reader, TransmissionFlags};

/// Bytes of a reply before its data.
pub const REPLY_HEADER_BYTES: usize = 20;
/// Bytes of zeroes after the reply to `EXPORT_NAME`, unless the client declined them.
pub const EXPORT_NAME_PADDING_BYTES: usize = 124;

const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const ERROR_BIT: u32 = 1 << 31;

/// The kind of a reply; unknown numbers are kept as they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReplyKind(pub u32);

impl fmt::Display for ReplyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)?;
        let meaning = match *self {
            Self::ERR_UNSUP => "it does not know this option",
            Self::ERR_POLICY => "its policy",
            Self::ERR_INVALID => "an invalid request",
            Self::ERR_TLS_REQD => "it requires TLS",
            Self::ERR_UNKNOWN => "it has no such export",
            Self::ERR_SHUTDOWN => "it shuts down",
            Self::ERR_BLOCK_SIZE_REQD => "it requires block sizes",
            Self::ERR_TOO_BIG => "the request is too large",
            Self::ERR_EXT_HEADER_REQD => "it requires extended headers",
            _ => return Ok(()),
        };
        write!(f, " ({meaning})")
    }
}

impl ReplyKind {
    /// Done, successfully.
    pub const ACK: ReplyKind = ReplyKind(1);
    /// One export of a list.
    pub const SERVER: ReplyKind = ReplyKind(2);
    /// One detail of an export.
    pub const INFO: ReplyKind = ReplyKind(3);
    /// One metadata context.
    pub const META_CONTEXT: ReplyKind = ReplyKind(4);
    /// The instance of the server, in reply to `SESSION`.
    pub const SESSION: ReplyKind = ReplyKind(0x626c_6b71);
    /// The option is unknown here.
    pub const ERR_UNSUP: ReplyKind = ReplyKind(ERROR_BIT + 1);
    /// The server's configuration forbids it.
    pub const ERR_POLICY: ReplyKind = ReplyKind(ERROR_BIT + 2);
    /// The option's data or its position is wrong.
    pub const ERR_INVALID: ReplyKind = ReplyKind(ERROR_BIT + 3);
    /// TLS has to be started first.
    pub const ERR_TLS_REQD: ReplyKind = ReplyKind(ERROR_BIT + 5);
    /// The export is unknown.
    pub const ERR_UNKNOWN: ReplyKind = ReplyKind(ERROR_BIT + 6);
    /// The server is shutting down.
    pub const ERR_SHUTDOWN: ReplyKind = ReplyKind(ERROR_BIT + 7);
    /// The client must ask for the block size first.
    pub const ERR_BLOCK_SIZE_REQD: ReplyKind = ReplyKind(ERROR_BIT + 8);
    /// The option's data is too long.
    pub const ERR_TOO_BIG: ReplyKind = ReplyKind(ERROR_BIT + 9);
    /// Extended headers are negotiated and exclude this option.
    pub const ERR_EXT_HEADER_REQD: ReplyKind = ReplyKind(ERROR_BIT + 10);

    /// Whether the option failed.
    pub const fn is_error(self) -> bool {
        self.0 & ERROR_BIT != 0
    }
}

/// The header of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyHeader {
    /// The option that is answered.
    pub option: OptionCode,
    /// The kind of the reply.
    pub kind: ReplyKind,
    /// Bytes of data that follow.
    pub data_bytes: u32,
}

impl ReplyHeader {
    /// Decodes the header; `None` when it is not complete.
    ///
    /// # Errors
    /// The bytes do not begin with the magic of option replies.
    pub fn parse(input: &[u8]) -> Result<Option<ReplyHeader>, BadMagic> {
        let mut reader = Reader::new(input);
        let Some(found) = reader.u64() else {
            return Ok(None);
        };
        if found != REPLY_MAGIC {
            return Err(BadMagic {
                found,
                expected: REPLY_MAGIC,
            });
        }
        let (Some(option), Some(kind), Some(data_bytes)) = (reader.u32(), reader.u32(), reader.u32()) else {
            return Ok(None);
        };
        Ok(Some(ReplyHeader {
            option: OptionCode(option),
            kind: ReplyKind(kind),
            data_bytes,
        }))
    }
}

/// Sizes that requests to an export should respect, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Smallest unit of offset and length; a power of two from 1 to 65536.
    pub minimum: u32,
    /// Unit at which requests are efficient; a power of two, at least 512 and `minimum`.
    pub preferred: u32,
    /// Longest payload of a read or write.
    pub payload_max: u32,
}

/// One detail of an export, as a client reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Info<'a> {
    /// Size in bytes and what the export can do.
    Export {
        /// Bytes of the export.
        size_bytes: u64,
        /// What the export can do.
        flags: TransmissionFlags,
    },
    /// The name as in `LIST`.
    Name(&'a str),
    /// The description for people.
    Description(&'a str),
    /// The sizes that requests should respect.
    BlockSize(BlockSizes),
    /// A detail this implementation does not know.
    Unknown(InfoKind),
}

impl<'a> Info<'a> {
    /// Decodes the data of a [`ReplyKind::INFO`] reply; `None` when its length does not fit its
    /// kind.
    pub fn parse(data: &'a [u8]) -> Option<Info<'a>> {
        let mut reader = Reader::new(data);
        let info = match InfoKind(reader.u16()?) {
            InfoKind::EXPORT => Info::Export {
                size_bytes: reader.u64()?,
                flags: TransmissionFlags(reader.u16()?),
            },
            InfoKind::BLOCK_SIZE => Info::BlockSize(BlockSizes {
                minimum: reader.u32()?,
                preferred: reader.u32()?,
                payload_max: reader.u32()?,
            }),
            InfoKind::NAME => return parse_name(reader.rest()).map(Info::Name),
            InfoKind::DESCRIPTION => return parse_name(reader.rest()).map(Info::Description),
            other => return Some(Info::Unknown(other)),
        };
        reader.is_empty().then_some(info)
    }
}

/// Decodes the data of a [`ReplyKind::META_CONTEXT`] reply: the context's id and name.
pub fn parse_meta_context(data: &[u8]) -> Option<(u32, &str)> {
    let mut reader = Reader::new(data);
    Some((reader.u32()?, parse_name(reader.rest())?))
}

/// Decodes the data of a [`ReplyKind::SERVER`] reply: the export's name and description.
pub fn parse_server(data: &[u8]) -> Option<(&str, &str)> {
    let mut reader = Reader::new(data);
    let name = parse_name(reader.counted()?)?;
    Some((name, parse_name(reader.rest())?))
}

/// Decodes the data of a [`ReplyKind::SESSION`] reply: the server's instance.
pub fn parse_session(data: &[u8]) -> Option<u64> {
    let mut reader = Reader::new(data);
    let instance = reader.u64()?;
    reader.is_empty().then_some(instance)
}

/// Decodes the server's reply to `EXPORT_NAME`, the padding included; `None` when it is not
/// complete. The last field counts the decoded bytes.
pub fn parse_export_name_reply(input: &[u8], padded: bool) -> Option<(u64, TransmissionFlags, usize)> {
    let mut reader = Reader::new(input);
    let (size_bytes, flags) = (reader.u64()?, TransmissionFlags(reader.u16()?));
    let padding = if padded { EXPORT_NAME_PADDING_BYTES } else { 0 };
    reader.bytes(padding)?;
    Some((size_bytes, flags, 10 + padding))
}

/// Writes the replies to one option.
#[derive(Debug)]
pub struct OptionReplies<'a> {
    option: OptionCode,
    out: &'a mut Vec<u8>,
}

impl<'a> OptionReplies<'a> {
    /// Replies to `option`, appended to `out`.
    pub fn new(option: OptionCode, out: &'a mut Vec<u8>) -> Self {
        OptionReplies { option, out }
    }

    /// Success: the last reply.
    pub fn ack(&mut self) {
        self.write(ReplyKind::ACK, &[]);
    }

    /// Failure with a reason for people: the last reply. The message is cut at the protocol's
    /// longest string.
    pub fn error(&mut self, kind: ReplyKind, message: &str) {
        debug_assert!(kind.is_error(), "{kind:?} is no error");
        let message = truncate(message, super::STRING_BYTES_MAX);
        self.write(kind, &[message.as_bytes()]);
    }

    /// One export of a list.
    pub fn server(&mut self, name: &str, description: &str) {
        let length = name.len() as u32;
        self.write(
            ReplyKind::SERVER,
            &[&length.to_be_bytes(), name.as_bytes(), description.as_bytes()],
        );
    }

    /// One detail of an export.
    pub fn info(&mut self, info: Info<'_>) {
        match info {
            Info::Export { size_bytes, flags } => {
                self.write_info(
                    InfoKind::EXPORT,
                    &[&size_bytes.to_be_bytes(), &flags.0.to_be_bytes()],
                );
            }
            Info::Name(name) => self.write_info(InfoKind::NAME, &[name.as_bytes()]),
            Info::Description(text) => self.write_info(InfoKind::DESCRIPTION, &[text.as_bytes()]),
            Info::BlockSize(sizes) => self.write_info(
                InfoKind::BLOCK_SIZE,
                &[
                    &sizes.minimum.to_be_bytes(),
                    &sizes.preferred.to_be_bytes(),
                    &sizes.payload_max.to_be_bytes(),
                ],
            ),
            Info::Unknown(kind) => self.write_info(kind, &[]),
        }
    }

    /// One metadata context.
    pub fn meta_context(&mut self, id: u32, name: &str) {
        self.write(ReplyKind::META_CONTEXT, &[&id.to_be_bytes(), name.as_bytes()]);
    }

    /// The server's instance.
    pub fn session(&mut self, instance: u64) {
        self.write(ReplyKind::SESSION, &[&instance.to_be_bytes()]);
    }

    fn write_info(&mut self, kind: InfoKind, parts: &[&[u8]]) {
        let kind = kind.0.to_be_bytes();
        let mut all: [&[u8]; 4] = [&kind, &[], &[], &[]];
        all[1..=parts.len()].copy_from_slice(parts);
        self.write(ReplyKind::INFO, &all);
    }

    fn write(&mut self, kind: ReplyKind, parts: &[&[u8]]) {
        let data_bytes: usize = parts.iter().map(|part| part.len()).sum();
        self.out.extend_from_slice(&REPLY_MAGIC.to_be_bytes());
        self.out.extend_from_slice(&self.option.0.to_be_bytes());
        self.out.extend_from_slice(&kind.0.to_be_bytes());
        self.out.extend_from_slice(&(data_bytes as u32).to_be_bytes());
        for part in parts {
            self.out.extend_from_slice(part);
        }
    }
}

/// Appends the reply to `EXPORT_NAME`.
pub fn write_export_name_reply(size_bytes: u64, flags: TransmissionFlags, padded: bool, out: &mut Vec<u8>) {
    out.extend_from_slice(&size_bytes.to_be_bytes());
    out.extend_from_slice(&flags.0.to_be_bytes());
    if padded {
        out.extend_from_slice(&[0; EXPORT_NAME_PADDING_BYTES]);
    }
}

/// The longest start of `text` of at most `bytes_max` bytes that ends between characters.
pub fn truncate(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

#[cfg(test)]
#[path = "option_reply_tests.rs"]
mod tests;
