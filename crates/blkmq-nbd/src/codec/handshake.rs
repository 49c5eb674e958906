//! The greeting and the client's options; `option_reply` has the replies to options.

use std::fmt;

use super::{BadMagic, ClientFlags, HandshakeFlags, Reader};

/// Bytes of the server's greeting.
pub const GREETING_BYTES: usize = 18;
/// Bytes of an option before its data.
pub const OPTION_HEADER_BYTES: usize = 16;

/// `NBDMAGIC`, the first eight bytes from any server.
const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`, the second eight bytes of a newstyle greeting and the first of each option.
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;

/// An option's number; unknown numbers are kept as they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OptionCode(pub u32);

impl OptionCode {
    /// Select an export, without an error reply.
    pub const EXPORT_NAME: OptionCode = OptionCode(1);
    /// End the session.
    pub const ABORT: OptionCode = OptionCode(2);
    /// List the exports.
    pub const LIST: OptionCode = OptionCode(3);
    /// Start TLS.
    pub const STARTTLS: OptionCode = OptionCode(5);
    /// Describe an export.
    pub const INFO: OptionCode = OptionCode(6);
    /// Describe an export and select it.
    pub const GO: OptionCode = OptionCode(7);
    /// Reply in structured chunks.
    pub const STRUCTURED_REPLY: OptionCode = OptionCode(8);
    /// List the metadata contexts of an export.
    pub const LIST_META_CONTEXT: OptionCode = OptionCode(9);
    /// Select metadata contexts.
    pub const SET_META_CONTEXT: OptionCode = OptionCode(10);
    /// Use 32-byte headers with 64-bit lengths.
    pub const EXTENDED_HEADERS: OptionCode = OptionCode(11);
    /// Name the session, so that it can be fenced. An extension of ours (`docs/exports/nbd.md`):
    /// other servers do not know it.
    pub const SESSION: OptionCode = OptionCode(0x626c_6b71);
}

impl fmt::Display for OptionCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            OptionCode::EXPORT_NAME => f.write_str("EXPORT_NAME"),
            OptionCode::ABORT => f.write_str("ABORT"),
            OptionCode::LIST => f.write_str("LIST"),
            OptionCode::STARTTLS => f.write_str("STARTTLS"),
            OptionCode::INFO => f.write_str("INFO"),
            OptionCode::GO => f.write_str("GO"),
            OptionCode::STRUCTURED_REPLY => f.write_str("STRUCTURED_REPLY"),
            OptionCode::LIST_META_CONTEXT => f.write_str("LIST_META_CONTEXT"),
            OptionCode::SET_META_CONTEXT => f.write_str("SET_META_CONTEXT"),
            OptionCode::EXTENDED_HEADERS => f.write_str("EXTENDED_HEADERS"),
            OptionCode::SESSION => f.write_str("SESSION"),
            OptionCode(other) => write!(f, "option {other}"),
        }
    }
}

/// A detail of an export that `INFO` or `GO` asks for, or that a reply carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InfoKind(pub u16);

impl InfoKind {
    /// Size and transmission flags.
    pub const EXPORT: InfoKind = InfoKind(0);
    /// The name as in `LIST`.
    pub const NAME: InfoKind = InfoKind(1);
    /// The description for people.
    pub const DESCRIPTION: InfoKind = InfoKind(2);
    /// Minimum and preferred block, largest payload.
    pub const BLOCK_SIZE: InfoKind = InfoKind(3);
}

/// Appends the server's greeting.
pub fn write_greeting(flags: HandshakeFlags, out: &mut Vec<u8>) {
    out.extend_from_slice(&INIT_MAGIC.to_be_bytes());
    out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    out.extend_from_slice(&flags.0.to_be_bytes());
}

/// Decodes the server's greeting; `None` when it is not complete.
///
/// # Errors
/// The peer is no NBD server, or an oldstyle one.
pub fn parse_greeting(input: &[u8]) -> Result<Option<HandshakeFlags>, BadMagic> {
    let mut reader = Reader::new(input);
    for expected in [INIT_MAGIC, OPTION_MAGIC] {
        let Some(found) = reader.u64() else {
            return Ok(None);
        };
        if found != expected {
            return Err(BadMagic { found, expected });
        }
    }
    Ok(reader.u16().map(HandshakeFlags))
}

/// Appends the client's flags.
pub fn write_client_flags(flags: ClientFlags, out: &mut Vec<u8>) {
    out.extend_from_slice(&flags.0.to_be_bytes());
}

/// Decodes the client's flags; `None` when they are not complete.
pub fn parse_client_flags(input: &[u8]) -> Option<ClientFlags> {
    Reader::new(input).u32().map(ClientFlags)
}

/// The header of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// Which option.
    pub code: OptionCode,
    /// Bytes of data that follow.
    pub data_bytes: u32,
}

impl OptionHeader {
    /// Decodes the header; `None` when it is not complete.
    ///
    /// # Errors
    /// The bytes do not begin with the option magic.
    pub fn parse(input: &[u8]) -> Result<Option<OptionHeader>, BadMagic> {
        let mut reader = Reader::new(input);
        let Some(found) = reader.u64() else {
            return Ok(None);
        };
        if found != OPTION_MAGIC {
            return Err(BadMagic {
                found,
                expected: OPTION_MAGIC,
            });
        }
        let (Some(code), Some(data_bytes)) = (reader.u32(), reader.u32()) else {
            return Ok(None);
        };
        Ok(Some(OptionHeader {
            code: OptionCode(code),
            data_bytes,
        }))
    }
}

/// Appends an option with its data.
///
/// # Panics
/// `data` is 4 GiB or longer.
pub fn write_option(code: OptionCode, data: &[u8], out: &mut Vec<u8>) {
    let data_bytes = u32::try_from(data.len()).expect("option data fits its length field");
    out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    out.extend_from_slice(&code.0.to_be_bytes());
    out.extend_from_slice(&data_bytes.to_be_bytes());
    out.extend_from_slice(data);
}

/// The data of `INFO` and `GO`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// The export's name; empty for the default export.
    pub name: &'a str,
    kinds: &'a [u8],
}

impl<'a> InfoRequest<'a> {
    /// Decodes the option's data; `None` when its lengths do not match or the name is no valid
    /// string.
    pub fn parse(data: &'a [u8]) -> Option<Self> {
        let mut reader = Reader::new(data);
        let name = parse_name(reader.counted()?)?;
        let count = usize::from(reader.u16()?);
        let kinds = reader.rest();
        (kinds.len() == 2 * count).then_some(InfoRequest { name, kinds })
    }

    /// Whether `kind` was asked for.
    pub fn wants(&self, kind: InfoKind) -> bool {
        self.kinds.chunks_exact(2).any(|raw| raw == kind.0.to_be_bytes())
    }

    /// Appends the data of an `INFO` or `GO` for `name` that asks for `kinds`.
    ///
    /// # Panics
    /// `name` or `kinds` do not fit their length fields.
    pub fn write(name: &str, kinds: &[InfoKind], out: &mut Vec<u8>) {
        write_counted(name, out);
        let count = u16::try_from(kinds.len()).expect("few kinds of information exist");
        out.extend_from_slice(&count.to_be_bytes());
        for kind in kinds {
            out.extend_from_slice(&kind.0.to_be_bytes());
        }
    }
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(Clone, Copy, Debug)]
pub struct MetaRequest<'a> {
    /// The export's name; empty for the default export.
    pub name: &'a str,
    /// The number of queries behind the name.
    pub query_count: u32,
    queries: Reader<'a>,
}

impl<'a> MetaRequest<'a> {
    /// Decodes the option's data; `None` when its lengths do not match or a string is invalid.
    pub fn parse(data: &'a [u8]) -> Option<Self> {
        let mut reader = Reader::new(data);
        let name = parse_name(reader.counted()?)?;
        let query_count = reader.u32()?;
        let queries = reader;
        for _ in 0..query_count {
            parse_name(reader.counted()?)?;
        }
        reader.is_empty().then_some(MetaRequest {
            name,
            query_count,
            queries,
        })
    }

    /// The queries in the client's order.
    pub fn queries(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let mut reader = self.queries;
        (0..self.query_count).map_while(move |_| parse_name(reader.counted()?))
    }

    /// Appends the data of a meta context option.
    ///
    /// # Panics
    /// A string is longer than the protocol allows.
    pub fn write(name: &str, queries: &[&str], out: &mut Vec<u8>) {
        write_counted(name, out);
        let count = u32::try_from(queries.len()).expect("queries fit their count");
        out.extend_from_slice(&count.to_be_bytes());
        for query in queries {
            write_counted(query, out);
        }
    }
}

/// The data of `SESSION`: which session of which client this is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SessionName {
    /// The client. Random, and known only to it and its servers: everybody who knows it may end the
    /// client's sessions.
    pub client: u128,
    /// The number of the session; the client uses no number twice.
    pub number: u64,
}

impl SessionName {
    /// Decodes the option's data; `None` when it has another length.
    pub fn parse(data: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(data);
        let (high, low) = (reader.u64()?, reader.u64()?);
        let number = reader.u64()?;
        reader.is_empty().then_some(Self {
            client: u128::from(high) << 64 | u128::from(low),
            number,
        })
    }

    /// Appends the option's data.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.client.to_be_bytes());
        out.extend_from_slice(&self.number.to_be_bytes());
    }
}

impl fmt::Debug for SessionName {
    /// Without the client, which is a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "session {}", self.number)
    }
}

/// A name as the protocol demands: UTF-8, no NUL, at most 4096 bytes.
pub fn parse_name(bytes: &[u8]) -> Option<&str> {
    let fits = bytes.len() <= super::STRING_BYTES_MAX && !bytes.contains(&0);
    if fits {
        std::str::from_utf8(bytes).ok()
    } else {
        None
    }
}

fn write_counted(string: &str, out: &mut Vec<u8>) {
    assert!(
        string.len() <= super::STRING_BYTES_MAX,
        "string of {} bytes",
        string.len()
    );
    out.extend_from_slice(&(string.len() as u32).to_be_bytes());
    out.extend_from_slice(string.as_bytes());
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
