//! The order in which an image reaches its drive: what its tables point to is durable before they are. `sys`
//! asks before and after each write of the library.
//!
//! The library writes its tables in the order of the format (refcounts before the entries that need them, and the
//! other way round when clusters are freed), but has no barrier in between. Here a write of tables is durable when
//! it returns (`RWF_DSYNC`), and data that was written before it is made durable first:
//!
//! ```text
//!  copies and data of new clusters ─► fdatasync ─► refcounts ─► L2 entries          (each durable)
//! ```
//!
//! So a power cut leaves clusters that nothing points to at most.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::counts::Layout;
use crate::file::FileDisk;

/// What is written and not durable, and which part of the image's file was never written.
#[derive(Debug)]
pub(super) struct Order {
    /// The files that have data: the image's, or the one beside it.
    data: Vec<Arc<FileDisk>>,
    /// Data of new clusters was written since the last sync.
    is_dirty: AtomicBool,
    /// The image's own file, if it is a regular one, which grows.
    grows: Option<Arc<FileDisk>>,
    /// Where it ends. Relaxed: it only grows, and a late look makes it grow again.
    end: AtomicU64,
    /// The clusters behind `fresh_from` that have been written, in words of 64: others are holes. A map, since a hostile
    /// image may have them anywhere.
    written: Mutex<BTreeMap<u64, u64>>,
    fresh_from: u64,
    cluster_bits: u32,
    /// Held while tables are written.
    tables: Mutex<Option<Layout>>,
}

impl Order {
    /// Of the files of an image: its own file `top`, and a data file beside it.
    ///
    /// # Errors
    /// The end of the file cannot be found.
    pub(super) fn new(
        top: &Arc<FileDisk>,
        beside: Option<&Arc<FileDisk>>,
        cluster_bits: u32,
    ) -> io::Result<Self> {
        let cluster = 1u64 << cluster_bits;
        let end = top.end()?;
        let grows = (!top.is_block_device() && !top.is_read_only()).then(|| Arc::clone(top));
        Ok(Self {
            data: std::iter::once(top).chain(beside).cloned().collect(),
            is_dirty: AtomicBool::new(false),
            fresh_from: match grows {
                Some(_) => end.next_multiple_of(cluster),
                None => u64::MAX,
            },
            grows,
            end: AtomicU64::new(end),
            written: Mutex::default(),
            cluster_bits,
            tables: Mutex::new(None),
        })
    }

    /// Notes where the tables of an image are that exists.
    #[must_use]
    pub(super) fn with_tables(mut self, layout: Layout) -> Self {
        *self.tables.get_mut().unwrap_or_else(PoisonError::into_inner) = Some(layout);
        self
    }

    /// Writes tables by `write`, after what they point to is counted as used: `bytes` has them.
    ///
    /// # Errors
    /// The system's, or that of `write`.
    pub(super) fn write_tables(
        &self,
        disk: &FileDisk,
        range: &Range<u64>,
        bytes: impl FnOnce() -> Vec<u8>,
        write: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let next = match &*tables {
            Some(layout) if layout.concerns(range) => {
                Some(layout.count_targets(disk, range.start, &bytes())?)
            }
            _ => None,
        };
        write()?;
        if next.is_some() {
            *tables = next;
        }
        Ok(())
    }

    /// Makes data durable that tables are about to point to.
    ///
    /// # Errors
    /// The sync failed: the tables must not be written.
    pub(super) fn before_tables(&self) -> io::Result<()> {
        if self.is_dirty.swap(false, Ordering::SeqCst) {
            let synced = self.sync();
            if synced.is_err() {
                self.is_dirty.store(true, Ordering::SeqCst);
            }
            return synced;
        }
        Ok(())
    }

    /// Makes all data durable.
    ///
    /// # Errors
    /// A sync failed.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.data.iter().try_for_each(|disk| disk.sync())
    }

    /// Notes that a range of the image's own file is written, before it is.
    pub(super) fn note_written(&self, range: Range<u64>) {
        self.end.fetch_max(range.end, Ordering::Relaxed);
        let clusters = self.fresh_clusters(&range);
        if clusters.is_empty() {
            return;
        }
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        clusters.for_each(|number| *written.entry(number / 64).or_default() |= 1 << (number % 64));
    }

    /// Notes that data was written.
    pub(super) fn note_data(&self) {
        self.is_dirty.store(true, Ordering::SeqCst);
    }

    /// Returns whether a range of the image's own file was never written, so that it reads as zeroes.
    pub(super) fn is_fresh(&self, range: Range<u64>) -> bool {
        if range.start < self.fresh_from {
            return false;
        }
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let is_written = |number: u64| {
            written
                .get(&(number / 64))
                .is_some_and(|word| (word >> (number % 64)) & 1 != 0)
        };
        !self.fresh_clusters(&range).any(is_written)
    }

    /// Makes the image's own file so long that a cluster that ends at `end` can be read: in steps, since each is a
    /// change of the filesystem's.
    ///
    /// # Errors
    /// The filesystem's.
    pub(super) fn reach(&self, end: u64) -> io::Result<()> {
        let Some(disk) = &self.grows else { return Ok(()) };
        if end <= self.end.load(Ordering::Relaxed) {
            return Ok(());
        }
        let cluster = 1u64 << self.cluster_bits;
        let wanted = end.next_multiple_of(cluster.max(STEP));
        // Another thread may have made it longer since: it is never made shorter.
        let _alone = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let there = disk.end()?;
        if there < wanted {
            disk.set_end(wanted)?;
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
}

/// By how much the file grows, in bytes: holes.
const STEP: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::FileConfig;
    use crate::testing::scratch_file;

    #[test]
    fn only_clusters_behind_the_old_end_that_were_never_written_are_fresh() {
        let path = scratch_file("order", 100_000);
        let config = FileConfig {
            path: path.to_path_buf(),
            ..FileConfig::default()
        };
        let disk = Arc::new(FileDisk::open_part(crate::driver::Purpose::Serve, &config).unwrap());
        let order = Order::new(&disk, None, 16).unwrap();
        assert!(!order.is_fresh(0..4096));
        assert!(order.is_fresh(131_072..196_608));
        order.note_written(196_608..200_704);
        assert!(order.is_fresh(131_072..196_608));
        assert!(!order.is_fresh(131_072..262_144));
        assert!(!order.is_fresh(196_608..262_144));
        order.reach(262_144).unwrap();
        assert_eq!(disk.end().unwrap(), 1 << 20);
        order.reach(4096).unwrap();
        assert_eq!(disk.end().unwrap(), 1 << 20);
    }
}
