//! The headers of LUKS2: two copies, each a binary part of 4 KiB and a text in JSON, with a checksum over
//! both. The intact copy with the larger sequence number counts.

use std::io;

use super::json::Metadata;
use super::{Header, ReadAt, text};
use crate::error::LuksError;
use crate::kdf::Hash;

/// A copy that is intact.
struct Copy {
    sequence: u64,
    /// Bytes of it.
    size: u64,
    /// What it says, unless that is not supported.
    header: Result<Header, LuksError>,
}

/// Reads the header, if there is one of this version.
pub(super) fn read(from: &mut dyn ReadAt) -> Result<Option<Header>, LuksError> {
    let first = read_copy(from, 0, FIRST)?;
    let second = match &first {
        Found::Copy(copy) => read_copy(from, copy.size, SECOND)?,
        Found::Damaged(_) | Found::Nothing => find_second(from)?,
    };
    let (copy, warning) = match (first, second) {
        (Found::Copy(first), Found::Copy(second)) if second.sequence > first.sequence => (
            second,
            Some("the first copy of the LUKS header is older than the second"),
        ),
        (Found::Copy(first), Found::Copy(_)) => (first, None),
        (Found::Copy(first), _) => (first, Some("the second copy of the LUKS header is damaged")),
        (_, Found::Copy(second)) => (second, Some("the first copy of the LUKS header is damaged")),
        (Found::Damaged(why), _) => return Err(LuksError::Damaged(why)),
        (Found::Nothing, Found::Damaged(_) | Found::Nothing) => return Ok(None),
    };
    let mut header = copy.header?;
    header.warning = warning.map(|warning| format!("{warning}; cryptsetup repair restores it"));
    Ok(Some(header))
}

/// What is found at a place.
enum Found {
    Nothing,
    Damaged(String),
    Copy(Copy),
}

/// Looks for the second copy at the places where it may be.
fn find_second(from: &mut dyn ReadAt) -> Result<Found, LuksError> {
    for offset in SIZES {
        if let found @ Found::Copy(_) = read_copy(from, offset, SECOND)? {
            return Ok(found);
        }
    }
    Ok(Found::Nothing)
}

fn read_copy(from: &mut dyn ReadAt, offset: u64, magic: [u8; 6]) -> Result<Found, LuksError> {
    let damaged = |what: &str| Ok(Found::Damaged(format!("both copies; the first one {what}")));
    let mut binary = [0; BINARY_BYTES as usize];
    match read_at(from, offset, &mut binary)? {
        Read::All => {}
        Read::Beyond => return Ok(Found::Nothing),
        Read::Failed(error) => return damaged(&format!("cannot be read: {error}")),
    }
    let long = |at: usize| u64::from_be_bytes(binary[at..at + 8].try_into().expect("eight bytes"));
    let version = u16::from_be_bytes([binary[6], binary[7]]);
    if binary[..6] != magic || version != 2 {
        return Ok(Found::Nothing);
    }
    let (size, sequence, at) = (long(8), long(16), long(256));
    if !SIZES.contains(&size) || at != offset {
        return damaged("contradicts itself");
    }
    let mut json = vec![0; (size - BINARY_BYTES) as usize];
    match read_at(from, offset + BINARY_BYTES, &mut json)? {
        Read::All => {}
        Read::Beyond => return damaged("is cut off"),
        Read::Failed(error) => return damaged(&format!("cannot be read: {error}")),
    }
    let (Ok(name), Ok(uuid)) = (text(&binary[72..104]), text(&binary[168..208])) else {
        return damaged("contradicts itself");
    };
    let Ok(hash) = Hash::named(&name) else {
        return damaged("has a checksum of an unknown kind");
    };
    let checksum: [u8; CHECKSUM_BYTES] = binary[CHECKSUM_AT..].first_chunk().copied().expect("inside");
    binary[CHECKSUM_AT..CHECKSUM_AT + CHECKSUM_BYTES].fill(0);
    let digest = hash.digest(&[&binary, &json]);
    if digest.as_ref() != &checksum[..hash.len()] {
        return damaged("has a wrong checksum");
    }
    match Metadata::parse(&json).and_then(|metadata| metadata.header(uuid)) {
        Err(LuksError::Damaged(why)) => damaged(&format!("has a right checksum, but {why}")),
        header => Ok(Found::Copy(Copy {
            sequence,
            size,
            header,
        })),
    }
}

/// What became of a read.
enum Read {
    All,
    /// There are not so many bytes.
    Beyond,
    /// The medium has lost them; the other copy may be there.
    Failed(io::Error),
}

/// Fills `bytes`.
///
/// # Errors
/// The drive does not answer: it would not for the other copy.
fn read_at(from: &mut dyn ReadAt, offset: u64, bytes: &mut [u8]) -> Result<Read, LuksError> {
    match from.read_at(offset, bytes) {
        Ok(()) => Ok(Read::All),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(Read::Beyond),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(LuksError::Read(error)),
        Err(error) => Ok(Read::Failed(error)),
    }
}

const FIRST: [u8; 6] = *b"LUKS\xba\xbe";
const SECOND: [u8; 6] = *b"SKUL\xba\xbe";
const BINARY_BYTES: u64 = 4096;
const CHECKSUM_AT: usize = 448;
const CHECKSUM_BYTES: usize = 64;
/// The sizes that a copy may have, binary part and JSON together; the second copy follows the first.
const SIZES: [u64; 9] = [
    16 << 10,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    2 << 20,
    4 << 20,
];
