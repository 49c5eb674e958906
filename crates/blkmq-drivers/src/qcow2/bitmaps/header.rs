//! The extension of an image's header that says where its bitmaps are. Each step is durable before the next one begins,
//! and changes 8 bytes of one sector or what nobody looks at, so the header is sound at each moment.

use std::io;

use super::super::chain;
use super::super::header::{
    AUTOCLEAR_BITMAPS, AUTOCLEAR_FIELD, BACKING_FIELD, BITMAPS, BITMAPS_BYTES, BitmapsExtension,
    HEADER_BYTES, Header,
};
use super::super::tables::Tables;
use super::super::transfer;

/// Says that what the extension says of bitmaps is right, or not.
///
/// # Errors
/// The system's. Then it may say either.
pub(super) fn set_valid(tables: &Tables, is_valid: bool) -> io::Result<()> {
    let features = if is_valid { AUTOCLEAR_BITMAPS } else { 0 };
    tables.write_header(AUTOCLEAR_FIELD, &features.to_be_bytes())
}

/// Says how many bitmaps there are, and where their directory is. It does not count as valid.
///
/// # Errors
/// The system's.
pub(super) fn name(tables: &Tables, count: u32, offset: u64, len: u64) -> io::Result<()> {
    let header = chain::read_header(tables.disk()).map_err(io::Error::other)?;
    let place = header.bitmaps.map(|extension| extension.place);
    let place = place.ok_or_else(|| io::Error::other("its header has no extension of bitmaps"))?;
    let extension = BitmapsExtension {
        place,
        count,
        directory_len: len,
        directory_offset: offset,
    };
    tables.write_header(place + TYPE_BYTES, &extension.data())
}

/// Makes an extension that names nothing yet, if there is none.
///
/// # Errors
/// The header has no room for it, or the system's.
pub(super) fn make(tables: &Tables) -> io::Result<()> {
    let header = chain::read_header(tables.disk()).map_err(io::Error::other)?;
    if header.bitmaps.is_some() {
        return Ok(());
    }
    let place = header.extensions_end;
    let end = place + TYPE_BYTES + BITMAPS_BYTES as u64 + TYPE_BYTES;
    let limit = header.cluster().min(HEADER_BYTES as u64);
    let no_room = || io::Error::other("its header has no room for bitmaps: convert it to larger clusters");
    if place == 0 || !place.is_multiple_of(8) || end > limit {
        return Err(no_room());
    }
    if let Some(name) = &header.backing {
        let mut field = [0; 8];
        transfer::read(tables.disk(), BACKING_FIELD, &mut field)?;
        let (before, len) = (u64::from_be_bytes(field), name.len() as u64);
        if before < end {
            // Behind the place that it has: that one counts until the field changes.
            let new = end.max(before + len).next_multiple_of(8);
            if new + len > limit {
                return Err(no_room());
            }
            tables.write_header(new, name.as_bytes())?;
            tables.write_header(BACKING_FIELD, &new.to_be_bytes())?;
        }
    }
    // Behind the mark that ends the extensions, until that becomes the new one's head.
    tables.write_header(place + TYPE_BYTES, &[0; BITMAPS_BYTES + TYPE_BYTES as usize])?;
    let head = [BITMAPS.to_be_bytes(), (BITMAPS_BYTES as u32).to_be_bytes()].concat();
    tables.write_header(place, &head)
}

/// Takes the extension away, if it is the last one: others stay where they are, and then it names nothing valid.
///
/// # Errors
/// The system's.
pub(super) fn remove(tables: &Tables) -> io::Result<()> {
    let header = chain::read_header(tables.disk()).map_err(io::Error::other)?;
    match last_extension(&header) {
        Some(place) => tables.write_header(place, &[0; TYPE_BYTES as usize]),
        None => Ok(()),
    }
}

fn last_extension(header: &Header) -> Option<u64> {
    let place = header.bitmaps?.place;
    let end = place + TYPE_BYTES + BITMAPS_BYTES as u64;
    (end == header.extensions_end).then_some(place)
}

/// Bytes of an extension's type and length, and of the mark that ends all of them.
const TYPE_BYTES: u64 = 8;
