//! A command of the transmission phase: it is decoded from 28 (compact) or 32 (extended) bytes, and
//! written. The hot path of the server: fixed arrays, no allocation, no branch but the magic's.

use super::{BadMagic, CommandFlags, HeaderStyle};

/// Bytes of a compact request's header.
pub const COMPACT_BYTES: usize = 28;
/// Bytes of an extended request's header.
pub const EXTENDED_BYTES: usize = 32;

/// First number of a compact request.
pub const COMPACT_MAGIC: u32 = 0x2560_9513;
/// First number of an extended request.
pub const EXTENDED_MAGIC: u32 = 0x21e4_1c71;

/// A command's number; unknown numbers are kept as they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Command(pub u16);

impl Command {
    /// Read from the export.
    pub const READ: Command = Command(0);
    /// Write the payload to the export.
    pub const WRITE: Command = Command(1);
    /// End the session after outstanding requests.
    pub const DISC: Command = Command(2);
    /// Make completed writes durable.
    pub const FLUSH: Command = Command(3);
    /// The range is no longer needed.
    pub const TRIM: Command = Command(4);
    /// The range will be read soon.
    pub const CACHE: Command = Command(5);
    /// Make the range read as zeroes.
    pub const WRITE_ZEROES: Command = Command(6);
    /// Report which parts of the range are allocated.
    pub const BLOCK_STATUS: Command = Command(7);
    /// End the client's session whose number is in the place of the offset, and reply when all of
    /// its requests have ended. An extension of ours: only where `SESSION` was negotiated.
    pub const FENCE: Command = Command(0x6266);

    /// The protocol's name, for messages.
    pub fn name(self) -> &'static str {
        match self {
            Command::READ => "READ",
            Command::WRITE => "WRITE",
            Command::DISC => "DISC",
            Command::FLUSH => "FLUSH",
            Command::TRIM => "TRIM",
            Command::CACHE => "CACHE",
            Command::WRITE_ZEROES => "WRITE_ZEROES",
            Command::BLOCK_STATUS => "BLOCK_STATUS",
            Command::FENCE => "FENCE",
            _ => "unknown command",
        }
    }
}

/// A request's header as on the wire, with nothing checked but its magic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Opaque to the server; every reply returns it.
    pub cookie: u64,
    /// First byte of the range.
    pub offset: u64,
    /// Bytes of the range, or of the payload where one follows.
    pub length: u64,
    /// What to do.
    pub command: Command,
    /// How to do it.
    pub flags: CommandFlags,
}

impl RequestHeader {
    /// Decodes the header at the start of `input`; `None` when there are fewer bytes than a header.
    ///
    /// # Errors
    /// The first four bytes are not the magic of `style`: the stream is out of step and cannot be
    /// trusted again.
    #[inline]
    pub fn parse(style: HeaderStyle, input: &[u8]) -> Result<Option<RequestHeader>, BadMagic> {
        match style {
            HeaderStyle::Simple | HeaderStyle::Structured => Self::parse_compact(input),
            HeaderStyle::Extended => Self::parse_extended(input),
        }
    }

    #[inline]
    fn parse_compact(input: &[u8]) -> Result<Option<RequestHeader>, BadMagic> {
        let Some(bytes) = input.first_chunk::<COMPACT_BYTES>() else {
            return Ok(None);
        };
        check_magic(be32(bytes, 0), COMPACT_MAGIC)?;
        Ok(Some(RequestHeader {
            flags: CommandFlags(be16(bytes, 4)),
            command: Command(be16(bytes, 6)),
            cookie: be64(bytes, 8),
            offset: be64(bytes, 16),
            length: u64::from(be32(bytes, 24)),
        }))
    }

    #[inline]
    fn parse_extended(input: &[u8]) -> Result<Option<RequestHeader>, BadMagic> {
        let Some(bytes) = input.first_chunk::<EXTENDED_BYTES>() else {
            return Ok(None);
        };
        check_magic(be32(bytes, 0), EXTENDED_MAGIC)?;
        Ok(Some(RequestHeader {
            flags: CommandFlags(be16(bytes, 4)),
            command: Command(be16(bytes, 6)),
            cookie: be64(bytes, 8),
            offset: be64(bytes, 16),
            length: be64(bytes, 24),
        }))
    }

    /// Appends the header in `style`.
    ///
    /// # Panics
    /// A compact header cannot carry a length of 4 GiB or more.
    #[inline]
    pub fn write(&self, style: HeaderStyle, out: &mut Vec<u8>) {
        let mut bytes = [0; EXTENDED_BYTES];
        let extended = style == HeaderStyle::Extended;
        bytes[0..4].copy_from_slice(&if extended { EXTENDED_MAGIC } else { COMPACT_MAGIC }.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.0.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.0.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        if extended {
            bytes[24..32].copy_from_slice(&self.length.to_be_bytes());
            out.extend_from_slice(&bytes);
        } else {
            assert!(
                self.length <= u64::from(u32::MAX),
                "compact header with length {}",
                self.length
            );
            bytes[24..28].copy_from_slice(&(self.length as u32).to_be_bytes());
            out.extend_from_slice(&bytes[..COMPACT_BYTES]);
        }
    }
}

#[inline]
fn check_magic(found: u32, expected: u32) -> Result<(), BadMagic> {
    if found == expected {
        return Ok(());
    }
    Err(BadMagic {
        found: u64::from(found),
        expected: u64::from(expected),
    })
}

#[inline]
fn be16<const N: usize>(bytes: &[u8; N], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

#[inline]
fn be32<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[inline]
fn be64<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    (u64::from(be32(bytes, at)) << 32) | u64::from(be32(bytes, at + 4))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn compact_read_is_laid_out_as_the_protocol_draws_it() {
        let header = RequestHeader {
            cookie: 0x0102_0304_0506_0708,
            offset: 4096,
            length: 512,
            command: Command::READ,
            flags: CommandFlags::DF,
        };
        let mut out = Vec::new();
        header.write(HeaderStyle::Simple, &mut out);
        assert_eq!(
            out,
            [
                0x25, 0x60, 0x95, 0x13, 0, 4, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0,
                2, 0
            ]
        );
    }

    #[test]
    fn header_cut_short_asks_for_more_and_a_foreign_magic_is_an_error() {
        assert_eq!(RequestHeader::parse(HeaderStyle::Simple, &[0x25; 27]), Ok(None));
        let error = RequestHeader::parse(HeaderStyle::Simple, &[0x47; 28]).unwrap_err();
        assert_eq!(
            error,
            BadMagic {
                found: 0x4747_4747,
                expected: u64::from(COMPACT_MAGIC)
            }
        );
    }

    proptest! {
        #[test]
        fn every_request_survives_the_wire(
            cookie: u64, offset: u64, length: u64, command: u16, flags: u16, extended: bool,
        ) {
            let style = if extended { HeaderStyle::Extended } else { HeaderStyle::Structured };
            let length = if extended { length } else { length & 0xffff_ffff };
            let header = RequestHeader {
                cookie, offset, length, command: Command(command), flags: CommandFlags(flags),
            };
            let mut out = Vec::new();
            header.write(style, &mut out);
            prop_assert_eq!(out.len(), style.request_bytes());
            prop_assert_eq!(RequestHeader::parse(style, &out), Ok(Some(header)));
            prop_assert_eq!(RequestHeader::parse(style, &out[..out.len() - 1]), Ok(None));
        }
    }
}
