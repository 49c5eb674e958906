//! Discards and zeroing of an image: whole clusters become clusters of zeroes that take no space, and the rest is
//! written. `image` sees to it that nobody uses them meanwhile.

use std::io;
use std::ops::Range;

use blkmq_core::bio::{Flags, Op};
use imago::io_buffers::IoBuffer;
use imago::{Mapping, ShallowMapping, StorageExt};

use super::image::{Image, Library};
use super::sys;

/// Does a discard or a zeroing. Blocks.
pub(super) fn run(
    image: &Image,
    library: &Library,
    op: Op,
    flags: Flags,
    range: Range<u64>,
) -> io::Result<()> {
    let is_discard = op == Op::Discard;
    let keeps_space = op == Op::WriteZeroes && flags.has(Flags::NO_UNMAP);
    let whole = inner_clusters(image, &range);
    // Version 2 has no clusters of zeroes: a cluster can only be given back where nothing is below.
    let can_mark = image.has_zero_clusters() || !image.has_base() && !flags.has(Flags::NO_UNMAP);
    if !can_mark && flags.has(Flags::FAST_ONLY) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    image.alone(image.whole_clusters(&range), || {
        if !can_mark || whole.is_empty() {
            return match is_discard {
                true => Ok(()),
                false => write_zeroes(image, library, range),
            };
        }
        mark(image, library, whole.clone(), keeps_space)?;
        image.note_change();
        if !is_discard {
            write_zeroes(image, library, range.start..whole.start)?;
            write_zeroes(image, library, whole.end.min(range.end)..range.end)?;
        }
        Ok(())
    })
}

/// The whole clusters of a range. The last one of the disk is whole without what would be behind its end.
fn inner_clusters(image: &Image, range: &Range<u64>) -> Range<u64> {
    let cluster = image.header.cluster();
    let start = range.start.next_multiple_of(cluster);
    let end = match range.end == image.size() {
        true => range.end,
        false => range.end - range.end % cluster,
    };
    start..end.max(start)
}

/// Marks clusters as zeroes, after their space was given back if that is wanted.
fn mark(image: &Image, library: &Library, range: Range<u64>, keeps_space: bool) -> io::Result<()> {
    let inner = library.image.inner();
    let mut at = range.start;
    while at < range.end {
        let (mapping, len) = inner.get_mapping(at, range.end - at)?;
        let len = len.min(range.end - at).max(1);
        let is_zero = match mapping {
            ShallowMapping::Zero { .. } | ShallowMapping::Eof { .. } => true,
            ShallowMapping::Indirect { layer, offset, .. } => is_zero_below(layer, offset, len)?,
            ShallowMapping::Raw {
                storage,
                offset,
                writable: true,
                ..
            } if !keeps_space => {
                // Before the clusters are free: afterwards they may be others'.
                storage.discard(offset, len)?;
                false
            }
            _ => false,
        };
        if !is_zero {
            mark_part(image, library, at..at + len, keeps_space)?;
        }
        at += len;
    }
    Ok(())
}

/// Returns whether all of a range below reads as zeroes, so that nothing has to be said above.
fn is_zero_below(layer: &imago::FormatAccess<sys::LibraryFile>, offset: u64, len: u64) -> io::Result<bool> {
    let (mapping, known) = layer.get_mapping(offset, len)?;
    Ok(known >= len && matches!(mapping, Mapping::Zero { .. } | Mapping::Eof { .. }))
}

fn mark_part(image: &Image, library: &Library, range: Range<u64>, keeps_space: bool) -> io::Result<()> {
    let inner = library.image.inner();
    let mut at = range.start;
    while at < range.end {
        let left = range.end - at;
        let (done_at, done) = match keeps_space {
            true => inner.ensure_zero_mapping(at, left)?,
            false if image.has_zero_clusters() => sys::discard_to_zero(inner, at, left)?,
            false => sys::discard_to_nothing(inner, at, left)?,
        };
        if done == 0 || done_at != at {
            return Err(io::Error::other(format!(
                "clusters at {at} were not marked as zeroes"
            )));
        }
        at += done;
    }
    Ok(())
}

/// Writes zeroes, as any write.
fn write_zeroes(image: &Image, library: &Library, range: Range<u64>) -> io::Result<()> {
    let mut at = range.start;
    while at < range.end {
        let len = (range.end - at).min(WRITTEN_MAX);
        if !reads_as_zeroes(library, at, len)? {
            let mut buffer = IoBuffer::new(len as usize, library.image.mem_align())?;
            buffer.as_mut().into_slice().fill(0);
            image.write_data(library, at, &buffer)?;
        }
        at += len;
    }
    Ok(())
}

fn reads_as_zeroes(library: &Library, offset: u64, len: u64) -> io::Result<bool> {
    let (mapping, known) = library.image.get_mapping(offset, len)?;
    Ok(known >= len && matches!(mapping, Mapping::Zero { .. }))
}

/// Zeroes are written in such pieces, in bytes.
const WRITTEN_MAX: u64 = 1 << 20;
