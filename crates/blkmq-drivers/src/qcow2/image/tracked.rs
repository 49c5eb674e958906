//! The bitmaps of an image that is served: whoever changes its disk notes that in them before, and they are stored when
//! nobody does any more. `bitmaps` has them.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blkmq_host::device::{BitmapInfo, Changed};

use super::super::bitmaps::{self, Bitmap};
use super::super::header::{AUTOCLEAR_BITMAPS, AUTOCLEAR_FIELD, Header};
use super::super::tables::Tables;
use super::Image;
use crate::file::is_taking_over;

impl Image {
    /// Reads the bitmaps of an image that was just opened; those that cannot be kept are given up, before it is written.
    pub(super) fn load_bitmaps(&self, tables: &Tables, header: &Header) -> io::Result<()> {
        let mut features = 0;
        if bitmaps::are_named(header) {
            let loaded = match self.gives_bitmaps_up.load(Ordering::SeqCst) {
                true => Err("it is written by a commit".to_owned()),
                false => tables.bitmaps.load(tables.disk(), header),
            };
            match loaded {
                Ok(()) => features = AUTOCLEAR_BITMAPS,
                Err(why) => tracing::warn!("image {:?}: its bitmaps are given up: {why}", self.config.path),
            }
        }
        if !self.read_only && header.autoclear != features {
            // What this writer does not keep.
            tables.write_header(AUTOCLEAR_FIELD, &features.to_be_bytes())?;
        }
        Ok(())
    }

    /// Has those that it has be given up when it is first used.
    pub(super) fn give_bitmaps_up(&self) {
        self.gives_bitmaps_up.store(true, Ordering::SeqCst);
    }

    /// Notes that a range is about to change. Others may be at work there. Blocks for the first one.
    ///
    /// # Errors
    /// The file cannot be marked, so nothing may change.
    pub(in crate::qcow2) fn track(&self, tables: &Tables, range: &Range<u64>) -> io::Result<()> {
        let bitmaps = &tables.bitmaps;
        if bitmaps.is_idle() {
            bitmaps.mark(tables)?;
            // What was looked up before does not let requests write.
            self.forget(&(0..u64::MAX));
        }
        bitmaps::set(&bitmaps.list(), range);
        Ok(())
    }

    /// Returns whether the file has to be marked before anything changes, which a reactor cannot do.
    pub(in crate::qcow2) fn is_idle(&self) -> bool {
        self.tables.get().is_some_and(|tables| tables.bitmaps.is_idle())
    }

    /// Adds a bitmap, in which all changes from now on are noted. Blocks.
    ///
    /// # Errors
    /// It cannot have it, there is one of that name, there is no room, or the system's.
    pub(crate) fn add_bitmap(&self, name: &str, granularity: Option<u64>) -> io::Result<()> {
        let usual = self.header.cluster().clamp(GRANULARITY_MIN, GRANULARITY_MAX);
        let bits = bitmaps::check(name, granularity.unwrap_or(usual), self.size())?;
        if self.header.version < 3 {
            return Err(io::Error::other(
                "it is of version 2, which has no bitmaps: qemu-img amend -o compat=1.1",
            ));
        }
        let tables = self.tables_of_bitmaps()?;
        let taken: u64 = tables.bitmaps.list().iter().map(|bitmap| bitmap.memory()).sum();
        let bitmap = Bitmap::new(name.to_owned(), bits, true, self.size());
        if taken + bitmap.memory() > bitmaps::MEMORY_MAX {
            return Err(io::Error::other(
                "its bitmaps take all the memory that they may have",
            ));
        }
        tables.bitmaps.add(&tables, &bitmap)?;
        // Requests under way end before it has changes: they are none of them.
        self.alone(0..u64::MAX, || {
            let bitmap = match self.size() {
                size if size == bitmap.size() => bitmap,
                size => bitmap.resized(size),
            };
            tables.bitmaps.change(|list| list.push(Arc::new(bitmap)));
            Ok(())
        })
    }

    /// Removes a bitmap. Blocks.
    ///
    /// # Errors
    /// There is none of that name, or the system's.
    pub(crate) fn remove_bitmap(&self, name: &str) -> io::Result<()> {
        let tables = self.tables_of_bitmaps()?;
        let removed = tables.bitmaps.remove(&tables, name);
        if removed.is_ok() {
            self.alone(0..u64::MAX, || {
                tables
                    .bitmaps
                    .change(|list| list.retain(|bitmap| bitmap.name != name));
                Ok(())
            })?;
        }
        removed
    }

    /// Those that there are. Blocks.
    ///
    /// # Errors
    /// They cannot be read.
    pub(crate) fn bitmaps(&self) -> io::Result<Vec<BitmapInfo>> {
        match self.next.get() {
            Some(next) => next.bitmaps(),
            None => Ok(self.tables()?.bitmaps.describe()),
        }
    }

    /// The names of those that changes are noted in, and the bytes that a bit of each stands for.
    pub(in crate::qcow2) fn enabled_bitmaps(&self) -> Vec<(String, u64)> {
        self.bitmaps_that(|bitmap| bitmap.is_enabled)
    }

    /// The same of all whose bits are known.
    pub(in crate::qcow2) fn known_bitmaps(&self) -> Vec<(String, u64)> {
        self.bitmaps_that(|_| true)
    }

    fn bitmaps_that(&self, is_wanted: impl Fn(&Bitmap) -> bool) -> Vec<(String, u64)> {
        let tables = self.tables.get();
        let list = tables.map(|tables| tables.bitmaps.list()).unwrap_or_default();
        let wanted = list.iter().filter(|bitmap| is_wanted(bitmap));
        wanted
            .map(|bitmap| (bitmap.name.clone(), 1 << bitmap.granularity_bits))
            .collect()
    }

    /// Takes the bits of an image of the same disk, in whose place this one is. Nobody uses either. Blocks.
    ///
    /// # Errors
    /// Its tables cannot be read.
    pub(in crate::qcow2) fn adopt_bitmaps(&self, former: &Self) -> io::Result<()> {
        let Some(tables) = former.tables.get() else {
            return Ok(());
        };
        let list = tables.bitmaps.list();
        if !list.is_empty() {
            self.tables()?.bitmaps.adopt(&list);
        }
        Ok(())
    }

    /// The names of those that clients can ask for. Does not block.
    pub(crate) fn bitmap_names(&self) -> Vec<String> {
        match self.tables.get() {
            None => self.found_bitmaps.clone(),
            Some(tables) => tables
                .bitmaps
                .list()
                .iter()
                .map(|bitmap| bitmap.name.clone())
                .collect(),
        }
    }

    /// Appends what has changed of a range, as a bitmap says; see [`blkmq_host::device::Allocation`]. Blocks.
    pub(crate) fn changed(
        &self,
        name: &str,
        range: Range<u64>,
        max: usize,
        out: &mut Vec<Changed>,
    ) -> io::Result<()> {
        if let Some(next) = self.next.get() {
            return next.changed(name, range, max, out);
        }
        let range = range.start..range.end.min(self.size());
        if range.is_empty() || max == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let tables = self.tables()?;
        let bitmap = tables.bitmaps.find(name).ok_or_else(bitmaps::not_there)?;
        bitmap.changed(range, self.block_size.into(), max, out);
        Ok(())
    }

    /// Writes the bitmaps, and has the file say that they are right, until something changes. Nobody uses the image. Blocks.
    pub(in crate::qcow2) fn store_bitmaps(&self) {
        let Some(tables) = self.writable_tables() else {
            return;
        };
        if let Err(error) = tables.bitmaps.store(tables) {
            // Nobody tries again, when another daemon may have the image: it says that they are in use.
            tables.bitmaps.change(Vec::clear);
            tracing::error!(
                "image {:?}: its bitmaps could not be stored, and are not used any more: {error}",
                self.config.path
            );
        }
    }

    /// The same of an image that is handed over or closed: requests that come nevertheless mark it again before. Blocks.
    pub(crate) fn rest(&self) {
        if self
            .tables
            .get()
            .is_none_or(|tables| tables.bitmaps.list().is_empty())
        {
            return;
        }
        let rested = self.alone(0..u64::MAX, || {
            self.store_bitmaps();
            Ok(())
        });
        if let Err(error) = rested {
            tracing::error!("image {:?}: its bitmaps: {error}", self.config.path);
        }
    }

    fn tables_of_bitmaps(&self) -> io::Result<Arc<Tables>> {
        if self.read_only || is_taking_over() {
            return Err(io::Error::other(
                "it is read-only, or another daemon still writes to it",
            ));
        }
        self.check_place()?;
        self.tables()
    }
}

/// What a bit stands for by default: a cluster, within these, as QEMU has it.
const GRANULARITY_MIN: u64 = 4 << 10;
const GRANULARITY_MAX: u64 = 64 << 10;
