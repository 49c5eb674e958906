//! Where the file of an image ends, and which part of it was never written: new clusters there read as zeroes already.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::file::FileDisk;

/// The space of an image's own file.
#[derive(Debug)]
pub(super) struct Space {
    /// The file, if it is a regular one, which grows.
    grows: Option<Arc<FileDisk>>,
    /// Where it ends. Relaxed: it only grows, and a late look makes it grow again.
    end: AtomicU64,
    /// Held while it grows.
    growing: Mutex<()>,
    /// The clusters behind `fresh_from` that have been written, in words of 64: others are holes. A map, since a hostile
    /// image may have them anywhere.
    written: Mutex<BTreeMap<u64, u64>>,
    fresh_from: u64,
    cluster_bits: u32,
}

impl Space {
    /// Of the image's own file.
    ///
    /// # Errors
    /// The end of the file cannot be found.
    pub(super) fn new(file: &Arc<FileDisk>, cluster_bits: u32) -> io::Result<Self> {
        let end = file.end()?;
        let grows = (!file.is_block_device() && !file.is_read_only()).then(|| Arc::clone(file));
        Ok(Self {
            fresh_from: match grows {
                Some(_) => end.next_multiple_of(1 << cluster_bits),
                None => u64::MAX,
            },
            grows,
            end: AtomicU64::new(end),
            growing: Mutex::default(),
            written: Mutex::default(),
            cluster_bits,
        })
    }

    /// Notes that a range, which the file has by [`Space::reach`], is written, before it is.
    pub(super) fn note_written(&self, range: Range<u64>) {
        let clusters = self.fresh_clusters(&range);
        if clusters.is_empty() {
            return;
        }
        let mut written = self.written();
        clusters.for_each(|number| *written.entry(number / 64).or_default() |= 1 << (number % 64));
    }

    /// Returns whether a range was never written, so that it reads as zeroes.
    pub(super) fn is_fresh(&self, range: Range<u64>) -> bool {
        if range.start < self.fresh_from {
            return false;
        }
        let written = self.written();
        let is_written = |number: u64| {
            written
                .get(&(number / 64))
                .is_some_and(|word| (word >> (number % 64)) & 1 != 0)
        };
        !self.fresh_clusters(&range).any(is_written)
    }

    /// Returns whether the file is so long that a cluster that ends at `end` can be read.
    pub(super) fn has(&self, end: u64) -> bool {
        self.grows.is_none() || end <= self.end.load(Ordering::Relaxed)
    }

    /// Makes the file so long that a cluster that ends at `end` can be read: in steps, since each is a change of the
    /// filesystem's.
    ///
    /// # Errors
    /// The filesystem's.
    pub(super) fn reach(&self, end: u64) -> io::Result<()> {
        let Some(file) = &self.grows else { return Ok(()) };
        if self.has(end) {
            return Ok(());
        }
        let cluster = 1u64 << self.cluster_bits;
        let step = (end / 4).next_power_of_two().clamp(STEP_MIN, STEP_MAX);
        let wanted = end.next_multiple_of(cluster.max(step));
        // Another thread may have made it longer since: it is never made shorter.
        let _alone = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let there = file.end()?;
        if there < wanted {
            file.set_end(wanted)?;
        }
        self.end.fetch_max(wanted.max(there), Ordering::Relaxed);
        Ok(())
    }

    fn fresh_clusters(&self, range: &Range<u64>) -> Range<u64> {
        let start = range.start.max(self.fresh_from);
        if start >= range.end {
            return 0..0;
        }
        let number = |at: u64| (at - self.fresh_from) >> self.cluster_bits;
        number(start)..number(range.end - 1) + 1
    }

    fn written(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// By how much the file grows, in bytes: holes, a fourth of what is there.
const STEP_MIN: u64 = 1 << 20;
const STEP_MAX: u64 = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::FileConfig;
    use crate::testing::scratch_file;

    #[test]
    fn only_clusters_behind_the_old_end_that_were_never_written_are_fresh() {
        let path = scratch_file("space", 100_000);
        let config = FileConfig {
            path: path.to_path_buf(),
            ..FileConfig::default()
        };
        let file = Arc::new(FileDisk::open_part(crate::driver::Purpose::Serve, &config).unwrap());
        let space = Space::new(&file, 16).unwrap();
        assert!(!space.is_fresh(0..4096));
        assert!(space.is_fresh(131_072..196_608));
        space.note_written(196_608..200_704);
        assert!(space.is_fresh(131_072..196_608));
        assert!(!space.is_fresh(131_072..262_144));
        assert!(!space.is_fresh(196_608..262_144));
        space.reach(262_144).unwrap();
        assert_eq!(file.end().unwrap(), 1 << 20);
        space.reach(4096).unwrap();
        assert_eq!(file.end().unwrap(), 1 << 20);
    }
}
