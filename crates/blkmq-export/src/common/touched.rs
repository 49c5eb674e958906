//! Memory that nobody may wait for later: all of its pages are there before it is used. For doors to whose
//! disks this host writes back its memory.

use std::io;

use super::sys::{Chunk, Region};

/// A region of `bytes` bytes, all of which are in memory. May block.
///
/// # Errors
/// The system's error: it has no memory, or no more mappings.
pub(crate) fn touched(bytes: usize) -> io::Result<Chunk> {
    let region = Region::new(bytes)?;
    let mut buffer = region.take(bytes).expect("a region that is large enough");
    buffer.bytes_mut().fill(0);
    drop(buffer);
    Ok(region.into_chunk().expect("nobody else has a part in it"))
}
