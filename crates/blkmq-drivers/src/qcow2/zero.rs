//! Discards and zeroing of an image: whole clusters become clusters of zeroes that take no space, and the rest is
//! written. `image` sees to it that nobody uses them meanwhile.

use std::io;
use std::ops::Range;

use blkmq_core::bio::{Flags, Op};

use super::image::Image;
use super::layers;
use super::tables::{Marked, Place, Tables};
use super::transfer::{self, Buffer};

/// Does a discard or a zeroing. Blocks.
pub(super) fn run(image: &Image, tables: &Tables, op: Op, flags: Flags, range: Range<u64>) -> io::Result<()> {
    let is_discard = op == Op::Discard;
    let keeps_space = op == Op::WriteZeroes && flags.has(Flags::NO_UNMAP);
    let whole = inner_clusters(image, &range);
    // Version 2 has no clusters of zeroes: a cluster can only be given back where nothing is below.
    let can_mark = image.has_zero_clusters() || !image.has_base() && !flags.has(Flags::NO_UNMAP);
    if !can_mark && flags.has(Flags::FAST_ONLY) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    image.alone(image.whole_clusters(&range), || {
        if can_mark || !is_discard {
            image.track(tables, &range)?;
        }
        if !can_mark || whole.is_empty() {
            return match is_discard {
                true => Ok(()),
                false => write_zeroes(image, tables, range),
            };
        }
        mark(image, tables, whole.clone(), keeps_space)?;
        if !is_discard {
            write_zeroes(image, tables, range.start..whole.start)?;
            write_zeroes(image, tables, whole.end.min(range.end)..range.end)?;
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

/// Has a range that a disk is about to get read as zeroes, whatever is below it, or was in its last cluster. Nobody uses it.
pub(super) fn hide(image: &Image, tables: &Tables, range: Range<u64>) -> io::Result<()> {
    let start = range
        .start
        .next_multiple_of(image.header.cluster())
        .min(range.end);
    write_zeroes(image, tables, range.start..start)?;
    match image.has_zero_clusters() || !image.has_base() {
        true => mark(image, tables, start..range.end, false),
        false => write_zeroes(image, tables, start..range.end),
    }
}

/// Marks clusters as zeroes, and gives their space back unless it is to be kept.
fn mark(image: &Image, tables: &Tables, range: Range<u64>, keeps_space: bool) -> io::Result<()> {
    let marked = match image.has_zero_clusters() {
        true if keeps_space => Marked::ZeroInPlace,
        true => Marked::Zero,
        false => Marked::Below,
    };
    image.note_change(&range);
    let mut at = range.start;
    while at < range.end {
        let (place, len) = tables.look_up(at, range.end - at)?;
        let end = at + len;
        let is_marked = match place {
            Place::Zero { spare } => keeps_space || spare.is_none(),
            Place::Below => layers::is_zero_below(image.base(), at, len)?,
            Place::Data { host, .. } if image.has_beside() && !keeps_space => {
                // The space in the file beside has no refcount. Where it cannot be given back, it is kept.
                let _ = transfer::zero_range(tables.data_file(), host, len);
                false
            }
            _ => false,
        };
        let mut from = if is_marked { end } else { at };
        while from < end {
            from = tables.mark(from, end, marked)?;
        }
        at = end;
    }
    Ok(())
}

/// Writes zeroes, as any write.
fn write_zeroes(image: &Image, tables: &Tables, range: Range<u64>) -> io::Result<()> {
    let mut at = range.start;
    while at < range.end {
        let (is_zero, known) = image.reads_as_zeroes(tables, at, range.end - at)?;
        let len = if is_zero { known } else { known.min(WRITTEN_MAX) };
        if !is_zero {
            let mut zeroes = Buffer::new(len as usize)?;
            zeroes.fill(0);
            image.write_data(tables, at, &zeroes)?;
        }
        at += len;
    }
    Ok(())
}

/// Zeroes are written in such pieces, in bytes.
const WRITTEN_MAX: u64 = 1 << 20;
