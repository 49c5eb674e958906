//! Images whose content is written into what they lie on, while they are used. Whoever asks for it has parts copied
//! down, by reads with [`Flags::TASK`](blkmq_core::bio::Flags::TASK), until little is left; then the rest is copied while
//! requests wait, and an empty image takes the place, on the base that has everything.
//!
//! ```text
//!  begin    open the base for writing, alone; requests go on above it
//!  copy     forget a part in the map, wait for its requests, protect it ─► write it into the base ─┐ again, what
//!  settle   make the base durable; all is copied, or known to have changed                         ┘ has changed
//!  finish   requests wait: copy what has changed ─► base durable ─► rename an empty image into the place
//! ```
//!
//! The image has all of its data until the rename, and hides what is below it, so a crash before leaves it as it was. A
//! part that is protected is written by threads, which note it before: it is copied again.

mod copied;
mod target;

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blkmq_host::device::{Extent, GivenUp};

use self::copied::Copied;
use self::target::Target;
use super::super::replace::{Begun, Change};
use super::super::tables::{Place, Tables};
use super::super::transfer::Buffer;
use super::{Image, flatten};

/// How an image is committed.
#[derive(Debug)]
pub(super) struct Commit {
    target: Target,
    copied: Copied,
    /// All of the image is copied, or known to have changed.
    is_settled: AtomicBool,
    /// It has ended without an end of the image's, and nothing is protected.
    is_over: AtomicBool,
}

/// Says why an image cannot be committed.
///
/// # Errors
/// As for flat images, or another image cannot take its place.
fn check(image: &Image) -> io::Result<()> {
    flatten::check(image)?;
    image.check_change(&Change::Empty)
}

/// Opens what is below an image for writing, and has requests go on above that. Blocks.
///
/// # Errors
/// Somebody else uses the base, it cannot be written, or as of `put`: then nothing has changed.
pub(crate) fn begin(
    image: &Arc<Image>,
    put: impl FnOnce(Vec<Arc<Image>>) -> io::Result<()>,
) -> io::Result<()> {
    check(image)?;
    let tables = image.tables()?;
    flatten::check_written(image)?;
    // A base that this image has taken the place of is written from memory. And who cannot be flushed is not committed.
    image.flush()?;
    let base = image.base().ok_or(io::ErrorKind::InvalidInput)?;
    let (path, target) = (base.path.clone(), Target::open(image, base)?);
    let below = target.as_base(&path)?;
    let commit = Commit {
        // A request of this work has whole parts.
        copied: Copied::new(image.header.unit_bits().min(PART_BITS)),
        target,
        is_settled: AtomicBool::new(false),
        is_over: AtomicBool::new(false),
    };
    image.set_closing(true);
    image.wait_for_flushes();
    let begun = image.alone(0..u64::MAX, || {
        let next = Arc::new(image.laid_on(&tables, Some(below), Some(commit)));
        put(vec![Arc::clone(&next)])?;
        image.follow(Arc::clone(&next));
        Ok(next)
    });
    let next = begun.inspect_err(|_| image.set_closing(false))?;
    let Some(commit) = next.commit() else {
        return Ok(());
    };
    commit.target.keep();
    // Not before: its last cluster may change its place, which only readers of its new tables find.
    let grown = grow(&next, commit);
    if grown.is_err() {
        leave(&next)?;
    }
    grown
}

/// Makes the base as large as the image. Blocks.
fn grow(image: &Image, commit: &Commit) -> io::Result<()> {
    let size = image.size();
    if commit.target.size()? >= size {
        return Ok(());
    }
    image.alone(0..u64::MAX, || commit.target.reach(size))
}

impl Commit {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Copies what the image has of a range, whose parts are protected.
    ///
    /// What is written to the base must be hidden by tables that are durable. Others are of new clusters, whose data the kernel
    /// may have dropped where it could not write it, and with it copies of what the base had: a flush tells. Unless the caller
    /// `is_alone`, what is not protected any more may just have become a new cluster.
    fn copy(&self, image: &Image, tables: &Tables, range: &Range<u64>, is_alone: bool) -> io::Result<()> {
        let end = range.end.min(image.size());
        let mut at = range.start;
        while at < end {
            // Compressed clusters stay where they are until they are read. A flush waits for that.
            let held = tables.hold();
            let (place, known) = tables.look_up(at, end - at)?;
            let len = known.clamp(1, end - at);
            let now = match place {
                Place::Data { .. } | Place::Packed(_) => len.min(PIECE),
                Place::Below | Place::Zero { .. } => len,
            };
            match place {
                Place::Below => {}
                Place::Zero { .. } => self.target.zero(at..at + now)?,
                Place::Data { .. } | Place::Packed(_) => {
                    let mut content = Buffer::new(now as usize)?;
                    image.read_old(tables, at, &mut content)?;
                    drop(held);
                    let is_as_it_was = is_alone || self.copied.look(&(at..at + now)) == (true, now);
                    if tables.is_dirty() || !is_as_it_was {
                        image.flush()?;
                    }
                    self.target.write(at, &content)?;
                }
            }
            at += now;
        }
        Ok(())
    }
}

/// Copies a range down, beside requests of others. Blocks.
///
/// # Errors
/// The image is not written here, the system's, or an image is corrupt there.
pub(super) fn copy_down(
    image: &Image,
    tables: &Tables,
    commit: &Commit,
    range: &Range<u64>,
) -> io::Result<()> {
    flatten::check_written(image)?;
    grow(image, commit)?;
    let range = commit.copied.whole(range);
    // A write to new clusters enters all of a cluster into the map.
    let whole = image.whole_clusters(&range);
    if let Some(moved) = commit.target.moves(&range)? {
        let all = whole.start.min(moved.start)..whole.end.max(moved.end);
        return image.alone(all, || {
            commit.copied.begin(&range);
            commit.copy(image, tables, &range, true)
        });
    }
    image.alone(whole, || {
        commit.copied.begin(&range);
        Ok(())
    })?;
    // Who writes there now has it copied again, and the image hides what the base has until then.
    let _gate = image.enter()?;
    commit.copy(image, tables, &range, false)
}

/// Makes durable what was copied, and sees to it that all of the image was, or is known to have changed since. Blocks, for
/// long: clients go on meanwhile.
///
/// # Errors
/// Something was not copied, it is given up, or the system's.
pub(crate) fn settle(image: &Image, given_up: &GivenUp) -> io::Result<()> {
    let commit = under_way(image)?;
    commit.target.flush()?;
    let tables = image.tables()?;
    // Before the look: tables of a former moment that take the place of these take it back.
    commit.is_settled.store(true, Ordering::SeqCst);
    let mut at = 0;
    while at < image.size() {
        if given_up.is_given_up() {
            return Err(io::Error::other("it was given up"));
        }
        let end = image.size().min(at + WINDOW);
        while at < end {
            let (place, known) = tables.look_up(at, end - at)?;
            let next = at + known.clamp(1, end - at);
            if place != Place::Below && !commit.copied.knows_all(&(at..next)) {
                commit.is_settled.store(false, Ordering::SeqCst);
                return Err(io::Error::other(format!(
                    "what is at {at} was not copied: begin again"
                )));
            }
            at = next;
        }
    }
    Ok(())
}

/// Copies what is left while requests wait, and puts an empty image into the place, on a base that has everything: `put`
/// gives it the place. Blocks.
///
/// # Errors
/// It is not settled, or the system's. Then the image is as it was.
pub(crate) fn finish(
    image: &Arc<Image>,
    put: impl FnOnce(Vec<Arc<Image>>) -> io::Result<()>,
) -> io::Result<()> {
    let commit = under_way(image)?;
    let path = image.base().map(|base| base.path.clone()).unwrap_or_default();
    let mut begun = Begun::new(image, &Change::Empty)?;
    image.set_closing(true);
    image.wait_for_flushes();
    // While requests go on, so that little is left.
    let flushed = image.flush();
    let finished = flushed.and_then(|()| {
        image.alone(0..u64::MAX, || {
            // A flush that has failed is told as long as the image is there.
            image.flush()?;
            if !commit.is_settled.load(Ordering::SeqCst) {
                return Err(io::Error::other("it was opened again meanwhile: begin again"));
            }
            let tables = image.tables()?;
            commit.target.reach(image.size())?;
            for range in commit.copied.changed() {
                commit.copy(image, &tables, &range, true)?;
            }
            commit.target.flush()?;
            let below = commit.target.as_base(&path)?;
            commit.target.share()?;
            let next = begun.put(Some(below))?;
            put(vec![Arc::clone(&next)])?;
            image.follow(Arc::clone(&next));
            Ok(next)
        })
    });
    match finished {
        Ok(next) => {
            begun.keep();
            next.settle()
        }
        Err(error) => {
            // The former file is at its place again before anybody looks there.
            drop(begun);
            image.set_closing(false);
            Err(error)
        }
    }
}

/// Gives it up: the image goes on as before, and its base may be read by others. Blocks.
///
/// # Errors
/// What was copied cannot be made durable, or nobody can be let in.
pub(crate) fn leave(image: &Image) -> io::Result<()> {
    let Ok(commit) = under_way(image) else {
        return Ok(());
    };
    commit.is_over.store(true, Ordering::SeqCst);
    commit.copied.clear();
    let mut flushed = commit.target.flush();
    if flushed.is_err() {
        // Parts that have changed their place may be lost at the new one.
        let reverted = image.alone(0..u64::MAX, || commit.target.revert());
        flushed = flushed.and(reverted);
    }
    commit.target.share().and(flushed)
}

fn under_way(image: &Image) -> io::Result<&Commit> {
    let commit = image.commit();
    commit.ok_or_else(|| io::Error::other("another image is in its place: begin again"))
}

impl Image {
    /// How it is committed, if it is.
    pub(super) fn commit(&self) -> Option<&Commit> {
        self.commit.as_ref().filter(|commit| !commit.is_over())
    }

    /// Notes that a range is about to change: its base has to get it once more.
    pub(in crate::qcow2) fn note_change(&self, range: &Range<u64>) {
        if let Some(commit) = self.commit() {
            commit.copied.note_change(range);
        }
    }

    /// Returns whether a part of a range is protected: who writes it notes that before.
    pub(in crate::qcow2) fn is_protected(&self, range: &Range<u64>) -> bool {
        self.commit().is_some_and(|commit| commit.copied.has_any(range))
    }

    /// Forgets what was copied: tables of a former moment take the place of these. Nobody uses the image.
    pub(super) fn forget_copied(&self) {
        if let Some(commit) = self.commit() {
            commit.is_settled.store(false, Ordering::SeqCst);
            commit.copied.clear();
        }
    }

    /// Appends what work in the background has still to do; see [`blkmq_host::device::Allocation::left`].
    pub(crate) fn left(&self, offset: u64, len: u64, max: usize, out: &mut Vec<Extent>) -> io::Result<()> {
        if let Some(next) = self.next.get() {
            return next.left(offset, len, max, out);
        }
        let Some(commit) = self.commit() else {
            return self.extents(offset, len, max, out);
        };
        let end = offset.saturating_add(len).min(self.size());
        if offset >= end || max == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let tables = self.tables()?;
        let _gate = self.enter()?;
        let (mut at, first) = (offset, out.len());
        while at < end {
            let (place, known) = tables.look_up(at, end - at)?;
            let known = at..at + known.clamp(1, end - at);
            let (is_done, len) = match place {
                Place::Below => (true, known.end - known.start),
                _ => commit.copied.look(&known),
            };
            let extent = match is_done {
                true => Extent::hole(len),
                false => Extent::data(len),
            };
            let is_full = out.len() - first == max;
            match out[first..].last_mut() {
                Some(last) if last.zero == extent.zero => last.len += len,
                _ if is_full => break,
                _ => out.push(extent),
            }
            at += len;
        }
        Ok(())
    }
}

/// The logarithm of the largest part, in bytes: that of a request for it.
const PART_BITS: u32 = 18;
/// Bytes that are copied at once.
const PIECE: u64 = 256 << 10;
/// Bytes whose tables are looked at before somebody may give the work up.
const WINDOW: u64 = 256 << 20;
