//! The headers of LUKS2: two copies, each a binary part of 4 KiB and a text in JSON, with a checksum over
//! both. The intact copy with the larger sequence number counts.

use super::json::Metadata;
use super::{Header, ReadAt, text};
use crate::error::LuksError;
use crate::kdf::Hash;

/// A copy that is intact.
struct Copy {
    sequence: u64,
    uuid: String,
    json: Vec<u8>,
}

/// Reads the header, if there is one of this version.
pub(super) fn read(from: &mut dyn ReadAt) -> Result<Option<Header>, LuksError> {
    let first = read_copy(from, 0, FIRST)?;
    let second = match &first {
        Found::Copy(copy) => read_copy(from, copy.json.len() as u64 + BINARY_BYTES, SECOND)?,
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
    let mut header = Metadata::parse(&copy.json)?.header(copy.uuid)?;
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
    let mut binary = [0; BINARY_BYTES as usize];
    if !read_at(from, offset, &mut binary)? {
        return Ok(Found::Nothing);
    }
    let long = |at: usize| u64::from_be_bytes(binary[at..at + 8].try_into().expect("eight bytes"));
    let version = u16::from_be_bytes([binary[6], binary[7]]);
    if binary[..6] != magic || version != 2 {
        return Ok(Found::Nothing);
    }
    let (size, sequence, at) = (long(8), long(16), long(256));
    let damaged = |what: &str| Ok(Found::Damaged(format!("both copies; {what}")));
    if !SIZES.contains(&size) || at != offset {
        return damaged("the first one contradicts itself");
    }
    let mut json = vec![0; (size - BINARY_BYTES) as usize];
    if !read_at(from, offset + BINARY_BYTES, &mut json)? {
        return damaged("the first one is cut off");
    }
    let (Ok(name), Ok(uuid)) = (text(&binary[72..104]), text(&binary[168..208])) else {
        return damaged("the first one contradicts itself");
    };
    let Ok(hash) = Hash::named(&name) else {
        return damaged("the checksum of the first one is of an unknown kind");
    };
    let checksum: [u8; CHECKSUM_BYTES] = binary[CHECKSUM_AT..].first_chunk().copied().expect("inside");
    binary[CHECKSUM_AT..CHECKSUM_AT + CHECKSUM_BYTES].fill(0);
    let digest = hash.digest(&[&binary, &json]);
    if digest.as_ref() != &checksum[..hash.len()] {
        return damaged("the checksum of the first one is wrong");
    }
    Ok(Found::Copy(Copy { sequence, uuid, json }))
}

/// Fills `bytes`. Says whether there are so many.
fn read_at(from: &mut dyn ReadAt, offset: u64, bytes: &mut [u8]) -> Result<bool, LuksError> {
    match from.read_at(offset, bytes) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(LuksError::Read(error)),
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
