//! Decides how memory is got that nobody may have to wait for later: all of its pages are there before it is used. For doors whose disks
//! this host writes its memory back to.

use std::io;

use super::sys::{Chunk, Region};

/// A region of so many bytes, all of which are in memory. May block.
///
/// # Errors
/// What the system says: it has no memory, or no more mappings.
pub(crate) fn touched(bytes: usize) -> io::Result<Chunk> {
    let region = Region::new(bytes)?;
    let mut buffer = region.take(bytes).expect("a region that is large enough");
    buffer.bytes_mut().fill(0);
    drop(buffer);
    Ok(region.into_chunk().expect("nobody else has a part in it"))
}
