//! Images that come to lie on nothing, while they are used: what is read from below is copied into them, a range at a
//! time, and at the end the header names no base any more. Whoever asks for it decides the order of the ranges and how
//! fast: reads with [`Flags::TASK`](blkmq_core::bio::Flags::TASK).
//!
//! The image is sound at each moment: a cluster that was copied reads as before, and the header changes when all were.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blkmq_host::device::GivenUp;

use super::super::header::BACKING_FIELD;
use super::super::layers;
use super::super::tables::{Place, Prepared, Tables};
use super::super::transfer::{self, Buffer};
use super::Image;

/// Says why an image cannot be made flat.
///
/// # Errors
/// It has no base, is not written, has snapshots inside, which may read from the base as well, or a base is not whole.
pub(crate) fn check(image: &Image) -> io::Result<()> {
    match (&image.base, image.read_only) {
        (None, _) => Err(io::Error::other("it lies on nothing")),
        (_, true) => Err(io::Error::other("it is read-only")),
        _ if image.header.snapshots > 0 => Err(io::Error::other(
            "it has snapshots inside, which may read from its base: delete them with qemu-img first",
        )),
        _ => check_bases(image),
    }
}

/// Says whether a raw base has become shorter since it was opened: what it has lost reads as zeroes, and would for ever.
fn check_bases(image: &Image) -> io::Result<()> {
    let bases = image.base.iter().flat_map(|base| base.all());
    for base in bases.filter(|base| base.header.is_none()) {
        let (end, had) = (base.disk.end()?, base.size);
        if end < had {
            let path = base.path.display();
            return Err(io::Error::other(format!(
                "its base {path} ends at {end} and ended at {had} bytes: restore it first"
            )));
        }
    }
    Ok(())
}

/// Copies what is below a range into the image, beside requests of others. Blocks.
///
/// # Errors
/// The image is not written here, the system's, or the image is corrupt there.
pub(super) fn copy_up(image: &Image, tables: &Tables, range: Range<u64>) -> io::Result<()> {
    check_written(image)?;
    let _gate = image.enter()?;
    let mut at = range.start;
    while let Some(part) = next_below(image, tables, at..range.end)? {
        at = match tables.prepare(part.start, part.end - part.start)? {
            // Somebody has written it since.
            Prepared::There { len, .. } => part.start + len,
            Prepared::New(new) => {
                // As it is now: others who write there wait for this.
                let (start, end) = (new.range().start, new.range().end.min(image.size()));
                let mut content = Buffer::new((end - start) as usize)?;
                image.read_old(tables, start, &mut content)?;
                image.write_new(tables, new, start, &content)?;
                end
            }
        };
    }
    Ok(())
}

/// Tables that are not kept are of a moment in which another daemon writes.
pub(super) fn check_written(image: &Image) -> io::Result<()> {
    match image.writable_tables() {
        Some(_) => Ok(()),
        None => Err(io::Error::other(
            "it is read-only, or another daemon still writes to it",
        )),
    }
}

/// Finds the first bytes of a range that are read from below, and may be other than zeroes: holes of files are left out.
fn next_below(image: &Image, tables: &Tables, range: Range<u64>) -> io::Result<Option<Range<u64>>> {
    let mut at = range.start;
    while at < range.end {
        let (place, known) = tables.look_up(at, range.end - at)?;
        let mut len = known.clamp(1, range.end - at);
        if place == Place::Below {
            let (below, known) = layers::look_up_below(image.base.as_ref(), at, len)?;
            let (is_zero, known) = below.reads_as_zeroes(len.min(known))?;
            len = len.min(known.max(1));
            if !is_zero {
                return Ok(Some(at..at + len));
            }
        }
        at += len;
    }
    Ok(None)
}

/// Makes sure that nothing of an image is read from below any more, and that this is durable. Blocks, for long: clients go
/// on meanwhile.
///
/// # Errors
/// Something is still read from below, it is given up, or the system's.
pub(crate) fn settle(image: &Image, given_up: &GivenUp) -> io::Result<()> {
    check(image)?;
    let tables = image.tables()?;
    check_written(image)?;
    // What was looked at stays as it is, unless tables of a former moment take the place of these.
    let reverted = tables.reverted();
    let (mut at, size) = (0, image.size());
    while at < size {
        if given_up.is_given_up() {
            return Err(io::Error::other("it was given up"));
        }
        let end = size.min(at + WINDOW);
        if let Some(part) = next_below(image, &tables, at..end)? {
            let at = part.start;
            return Err(io::Error::other(format!(
                "what is at {at} is still read from below: begin again"
            )));
        }
        at = end;
    }
    image.flush()?;
    if tables.reverted() != reverted {
        return Err(io::Error::other("it was opened again meanwhile: begin again"));
    }
    image.is_flat.store(true, Ordering::SeqCst);
    Ok(())
}

/// Takes the base from an image that is [settled](settle): `put` gives the image without one its place. Blocks; requests
/// wait only for `put`.
///
/// # Errors
/// It is not settled, or the system's. Then it lies on its base as before.
pub(crate) fn finish(
    image: &Arc<Image>,
    put: impl FnOnce(Vec<Arc<Image>>) -> io::Result<()>,
) -> io::Result<()> {
    check(image)?;
    if !image.is_flat.load(Ordering::SeqCst) {
        return Err(io::Error::other("another image is in its place: begin again"));
    }
    let tables = image.tables()?;
    // It is true from now on, whatever happens.
    let link = Removed::new(image, &tables)?;
    image.set_closing(true);
    image.wait_for_flushes();
    let finished = image.alone(0..u64::MAX, || {
        let next = Arc::new(image.laid_on(&tables, None, None));
        put(vec![Arc::clone(&next)])?;
        image.follow(next);
        Ok(())
    });
    match finished {
        Ok(()) => link.keep(),
        Err(_) => image.set_closing(false),
    }
    finished
}

/// A header without the name of a base; dropped, it has it again.
struct Removed<'a> {
    tables: &'a Tables,
    before: [u8; LINK_BYTES],
    is_kept: bool,
}

impl<'a> Removed<'a> {
    fn new(image: &Image, tables: &'a Tables) -> io::Result<Self> {
        let mut before = [0; LINK_BYTES];
        transfer::read(&image.files[0], BACKING_FIELD, &mut before)?;
        let removed = Self {
            tables,
            before,
            is_kept: false,
        };
        // In one sector, which is written as a whole or not at all.
        tables.write_header(BACKING_FIELD, &[0; LINK_BYTES])?;
        Ok(removed)
    }

    fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for Removed<'_> {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        if let Err(error) = self.tables.write_header(BACKING_FIELD, &self.before) {
            tracing::error!("an image may lie on nothing now, which was to be undone: {error}");
        }
    }
}

/// Bytes whose tables are looked at before somebody may give the work up: some tables.
const WINDOW: u64 = 256 << 20;
/// The offset of the base's name in the header, and its length, in bytes.
const LINK_BYTES: usize = 12;
