//! Where a file ends, and whether that is before its disk does: somebody has truncated it then. What was behind is lost, and
//! reads there are short, which shows it; but a write lengthens the file again, and from then on they find zeroes. So, while
//! the disk is written, the file's size is looked at after requests and before their ends are reported: a request that has
//! seen the zeroes ended before the look, and the file is most often shorter than the disk still.
//!
//! ```text
//!  truncated ─► a write lengthens it ─► a read finds zeroes ─► look: shorter than the disk ─► the read fails, and all others
//! ```
//!
//! A write that reaches the end of the disk hides it, as the file has its whole size again: that is looked at when the write
//! is issued, and a truncation between that look and the write is not noticed. Where the size is that of a server, reactors look
//! at what the kernel knows, and the thread of `watch` asks.

use std::sync::atomic::Ordering;

use blkmq_core::time::{Instant, Nanos};
use rustix::fs::{AtFlags, StatxFlags, statx};

use super::FileDisk;

impl FileDisk {
    /// Looks where the file ends before a write up to `end` is issued: if none was issued lately, or it reaches the end of
    /// the disk. Does not block.
    #[inline]
    pub(in crate::file) fn look_before_write(&self, now: Instant, end: u64) {
        if self.is_block_device() {
            return;
        }
        let next = now.0 + WATCH.0;
        if next >= self.watched_until.load(Ordering::Relaxed) + LOOK_PERIOD.0 {
            self.watch_from(now);
        } else if end >= self.content() {
            self.look_at_end(now);
        }
    }

    #[cold]
    fn watch_from(&self, now: Instant) {
        // Before it is marked as written: nothing that is under way has lengthened it.
        self.look_at_end(now);
        // Release: pairs with `note_end`. Of writes that do this at one moment, each has looked.
        self.watched_until.store(now.0 + WATCH.0, Ordering::Release);
        if self.may_block {
            self.is_look_due.store(true, Ordering::Relaxed);
        } else {
            self.look_at_alignment();
        }
    }

    /// Looks where the file ends, if it was written lately: after requests, and before their ends are reported. Does not block.
    #[inline]
    pub(in crate::file) fn look_after(&self, now: Instant) {
        // Relaxed: the write that has lengthened the file was issued before these requests were, or beside them.
        if now.0 < self.watched_until.load(Ordering::Relaxed) {
            self.look_at_end(now);
        }
    }

    /// Looks where the file ends, as far as the kernel knows. Does not block.
    pub(in crate::file) fn look_at_end(&self, now: Instant) {
        let known = self.content();
        // A file of an image has none, since its end is no end of a disk.
        if known > 0
            && self.tells_size
            // Not by lseek(2), which waits for another one on the file, as of a search for holes.
            && let Ok(end) = self.size_by(AtFlags::STATX_DONT_SYNC)
        {
            self.note_end(end, known, now);
        }
    }

    /// A read was short. Has another thread look where the file ends, where this one does not know it for certain.
    pub(in crate::file) fn look_after_short_read(&self, now: Instant) {
        self.look_at_end(now);
        if self.may_block {
            self.is_look_due.store(true, Ordering::Relaxed);
        }
    }

    /// Asks the file's server where it ends, if that is due. May block for as long as the server does not answer.
    pub(in crate::file) fn look_if_due(&self) {
        if self.is_look_due.swap(false, Ordering::Relaxed) && self.content() > 0 {
            self.look_for_certain();
        }
    }

    /// Finds out where the file ends. May block.
    pub(in crate::file) fn look_for_certain(&self) {
        let known = self.content();
        if let Ok(end) = self.size_by(AtFlags::STATX_FORCE_SYNC) {
            self.note_end(end, known, Instant(0));
        }
    }

    fn size_by(&self, how: AtFlags) -> rustix::io::Result<u64> {
        let found = statx(&self.file, "", AtFlags::EMPTY_PATH | how, StatxFlags::SIZE)?;
        Ok(found.stx_size)
    }

    /// The file was found to end at `end`, and `known` was its content before, which may have grown since. Data behind the end is
    /// lost, if the content ended later: requests there fail until the disk is opened again. If the file may have been made longer meanwhile, it is not known where it was cut off, and all fail.
    /// A time of 0 is one that is not known.
    pub(super) fn note_end(&self, end: u64, known: u64, now: Instant) {
        if end >= known.min(self.lost_from.load(Ordering::Relaxed)) {
            // It is as long as the disk, or as was found before.
            return;
        }
        // Acquire: a write that has lengthened the file was issued after this was stored, and the file was looked at before.
        let is_exact = now.0 >= self.watched_until.load(Ordering::Acquire);
        let lost_from = if is_exact { end } else { 0 };
        if self.lost_from.fetch_min(lost_from, Ordering::Relaxed) < u64::MAX {
            return;
        }
        self.note_loss();
        let (size, path) = (self.size(), &self.path);
        let what = match is_exact {
            true => "what was behind is lost, and requests there fail",
            false => {
                "it was written meanwhile, which may have made it longer, so nobody knows what is lost, and all requests fail"
            }
        };
        tracing::error!(
            source = %path.display(),
            "file {path:?}: is truncated: it ends at {end}, and the disk at {size}; {what} until the disk is opened again (blkmq \
             ctl reopen): restore the file first"
        );
    }

    /// Where the file ends if nothing is lost, in bytes.
    pub(super) fn content(&self) -> u64 {
        self.size().min(self.content_end)
    }
}

/// How long after a write the ends of requests look at the size: longer than writes take that have not ended.
const WATCH: Nanos = Nanos::from_secs(10);
/// How often a write has its disk marked as written, and looks before it is issued.
const LOOK_PERIOD: Nanos = Nanos::from_millis(100);

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::super::Backing;
    use super::*;
    use crate::testing::{Scratch, scratch_file};

    fn disk(path: &Scratch) -> FileDisk {
        let file = File::options().read(true).write(true).open(&**path).unwrap();
        let mut disk = FileDisk::new(file, path.to_path_buf(), 8192, 512, Backing::Filesystem(1));
        disk.may_block = false;
        disk
    }

    #[test]
    fn end_of_a_file_that_nobody_writes_is_where_it_was_cut_off() {
        let path = scratch_file("ends", 8192);
        let disk = disk(&path);
        disk.file.set_len(4096).unwrap();
        disk.look_after(Instant(5));
        assert!(!disk.is_truncated(), "nothing was written: reads are short");
        disk.look_before_write(Instant(5), 512);
        assert!(disk.has_lost(8192) && !disk.has_lost(4096));
    }

    #[test]
    fn all_is_lost_of_a_file_that_was_written_when_it_was_cut_off() {
        let path = scratch_file("written-ends", 8192);
        let start = Instant(5);
        for (ms, end, has_lost) in [
            (0, 512, false),
            (99, 512, false),
            (99, 8192, true),
            (100, 512, true),
        ] {
            let disk = disk(&path);
            disk.file.set_len(8192).unwrap();
            disk.look_before_write(start, 512);
            disk.file.set_len(4096).unwrap();
            disk.look_before_write(start + Nanos::from_millis(ms), end);
            assert_eq!(disk.has_lost(1), has_lost, "{ms} ms, a write up to {end}");
            disk.look_after(start + Nanos::from_millis(ms));
            assert!(disk.has_lost(1));
        }
    }

    #[test]
    fn file_that_is_made_longer_during_a_look_is_not_truncated() {
        let path = scratch_file("grows-during-a-look", 8192);
        let disk = disk(&path);
        let (known, end) = (disk.content(), 8192);
        assert_eq!(disk.resize(Some(16384)).unwrap(), 16384);
        disk.note_end(end, known, Instant(5));
        assert!(!disk.is_truncated());
        disk.look_at_end(Instant(5));
        assert!(!disk.is_truncated());
    }

    #[test]
    fn file_of_a_server_is_looked_at_by_another_thread() {
        let path = scratch_file("served-ends", 8192);
        let mut disk = disk(&path);
        disk.may_block = true;
        disk.look_if_due();
        disk.file.set_len(4096).unwrap();
        disk.look_if_due();
        assert!(!disk.is_truncated(), "nothing was due");
        disk.look_after_short_read(Instant(5));
        assert!(disk.has_lost(8192) && !disk.has_lost(4096), "the kernel knows it");
        disk.lost_from.store(u64::MAX, Ordering::Relaxed);
        disk.look_if_due();
        assert!(disk.has_lost(8192) && !disk.has_lost(4096), "and the server");
    }
}
