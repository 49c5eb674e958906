//! How what has changed in the tables of an image reaches the drive. Each step is durable before the next one begins:
//!
//! ```text
//!  1  refcounts of what is used now, and the data of new clusters       (refcount table and header, if it has grown)
//!  2  L2 tables     3  the L1 table      (and header, if it has grown)
//!  4  what no table points to any more is free: its space is given back, and others may have it
//! ```
//!
//! It writes copies of one moment, so writes go on meanwhile. If a step fails, all that was taken is written again by the
//! next flush.

use std::io;
use std::ops::Range;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::super::{chain, transfer};
use super::table::{Part, Table};
use super::{Format, State, Tables};

/// What a flush writes.
struct Taken {
    changes: u64,
    blocks: Vec<Part>,
    refcounts: Vec<Part>,
    l2: Vec<Part>,
    l1: Vec<Part>,
    /// The fields of the header that name a table that has moved.
    refcounts_field: Option<[u8; 12]>,
    l1_field: Option<[u8; 12]>,
    unlinked: Vec<Range<u64>>,
}

impl Tables {
    /// Makes the data durable that was written before this call, and the tables. Blocks.
    ///
    /// # Errors
    /// The system's, or a sync has failed before: nothing of it counts as written then.
    pub(in crate::qcow2) fn flush(&self) -> io::Result<()> {
        let wanted = self.changes.load(Ordering::SeqCst);
        let _one = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        if self.flushed.load(Ordering::SeqCst) >= wanted && !self.is_dirty() {
            return self.sync_data();
        }
        let taken = self.take();
        let written = self.write(&taken);
        self.end_writing(&taken, written.is_ok());
        written?;
        self.flushed.store(taken.changes, Ordering::SeqCst);
        if let Err(error) = self.free(taken.unlinked) {
            tracing::warn!(
                "image {:?}: clusters that nothing uses stay counted, which `qemu-img check -r leaks` mends: {error}",
                self.disk.path()
            );
        }
        Ok(())
    }

    /// Makes data durable that was written before this call. Blocks.
    ///
    /// # Errors
    /// A sync has failed, now or before.
    pub(in crate::qcow2) fn sync_data(&self) -> io::Result<()> {
        self.data.iter().try_for_each(|disk| disk.sync())
    }

    /// Writes a field of the header. It is durable afterwards. Blocks.
    ///
    /// # Errors
    /// The system's.
    pub(in crate::qcow2) fn write_header(&self, at: u64, field: &[u8]) -> io::Result<()> {
        // A flush changes the same block.
        let _one = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        self.write_field(at, field)
    }

    /// Goes back to the tables in the file, as a start after a crash does. Nobody uses the image.
    ///
    /// # Errors
    /// They cannot be read: nothing has changed.
    pub(in crate::qcow2) fn forget_unflushed(&self) -> io::Result<()> {
        let _one = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        let header = chain::read_header(&self.disk).map_err(io::Error::other)?;
        let there = State::load(&self.disk, &header)?;
        let mut state = self.state();
        debug_assert!(state.pending.is_empty(), "a write of new clusters is under way");
        *state = there;
        self.reverted.fetch_add(1, Ordering::SeqCst);
        self.flushed
            .store(self.changes.load(Ordering::SeqCst), Ordering::SeqCst);
        Ok(())
    }

    /// How often that has happened.
    pub(in crate::qcow2) fn reverted(&self) -> u64 {
        self.reverted.load(Ordering::SeqCst)
    }

    fn write_field(&self, at: u64, field: &[u8]) -> io::Result<()> {
        transfer::write(&self.disk, at, field)?;
        self.disk.sync()
    }

    fn take(&self) -> Taken {
        let mut guard = self.lock();
        // Before what has landed is entered: all that is counted here is.
        let changes = self.changes.load(Ordering::SeqCst);
        self.enter_landed(&mut guard, true);
        let state = &mut *guard;
        let align = self.align();
        let mut taken = Taken {
            changes,
            blocks: Vec::new(),
            refcounts: Vec::new(),
            l2: Vec::new(),
            l1: Vec::new(),
            refcounts_field: state.counts.has_moved.then(|| state.refcounts_field(self.format)),
            l1_field: state.l1_has_moved.then(|| state.l1_field()),
            unlinked: std::mem::take(&mut state.unlinked),
        };
        state
            .counts
            .blocks
            .tables()
            .for_each(|table| table.take(align, &mut taken.blocks));
        state.counts.table.take(align, &mut taken.refcounts);
        state
            .l2
            .tables()
            .for_each(|table| table.take(align, &mut taken.l2));
        state.l1.take(align, &mut taken.l1);
        taken
    }

    fn write(&self, taken: &Taken) -> io::Result<()> {
        self.write_parts(&taken.blocks)?;
        if !taken.refcounts.is_empty() {
            // A block is there before the table has it.
            self.disk.sync()?;
            self.write_parts(&taken.refcounts)?;
        }
        if let Some(field) = &taken.refcounts_field {
            self.disk.sync()?;
            self.write_field(REFCOUNTS_FIELD, field)?;
        }
        self.sync_data()?;
        if !taken.l2.is_empty() {
            self.write_parts(&taken.l2)?;
            self.disk.sync()?;
        }
        if !taken.l1.is_empty() {
            self.write_parts(&taken.l1)?;
            self.disk.sync()?;
        }
        match &taken.l1_field {
            Some(field) => self.write_field(L1_FIELD, field),
            None => Ok(()),
        }
    }

    fn write_parts(&self, parts: &[Part]) -> io::Result<()> {
        parts.iter().try_for_each(|part| {
            let end = part.offset + part.bytes.len() as u64;
            self.space.reach(end.next_multiple_of(self.cluster()))?;
            self.space.note_written(part.offset..end);
            transfer::write(&self.disk, part.offset, &part.bytes)
        })
    }

    fn end_writing(&self, taken: &Taken, is_there: bool) {
        let mut guard = self.state();
        let state = &mut *guard;
        state.tables().for_each(|table| table.end_writing(is_there));
        if is_there {
            // Tables that have moved once more since are in the next flush.
            state.counts.has_moved &= taken.refcounts_field != Some(state.refcounts_field(self.format));
            state.l1_has_moved &= taken.l1_field != Some(state.l1_field());
            return;
        }
        state.unlinked.extend(taken.unlinked.iter().cloned());
    }

    /// Frees clusters that no table points to. Nothing needs that to be durable.
    fn free(&self, unlinked: Vec<Range<u64>>) -> io::Result<()> {
        if unlinked.is_empty() {
            return Ok(());
        }
        // Those who have looked them up are done with them.
        drop(self.readers.write().unwrap_or_else(PoisonError::into_inner));
        let mut guard = self.state();
        let mut last = Vec::new();
        for cluster in unlinked.into_iter().flatten() {
            if guard.counts.release(&self.disk, cluster, false)? {
                last.push(cluster);
            }
        }
        drop(guard);
        self.give_back(&last);
        guard = self.state();
        for cluster in last {
            guard.counts.release(&self.disk, cluster, true)?;
        }
        let mut blocks = Vec::new();
        let (align, tables) = (self.align(), guard.counts.blocks.tables());
        tables.for_each(|table| {
            table.take(align, &mut blocks);
            // No sync follows: the next flush writes them again.
            table.end_writing(false);
        });
        drop(guard);
        self.write_parts(&blocks)
    }

    /// What writes of tables are multiples of, in bytes.
    fn align(&self) -> u64 {
        u64::from(self.disk.range())
            .max(SECTOR)
            .min(self.format.cluster())
    }

    /// Gives the space of clusters back to the filesystem, where it takes that.
    fn give_back(&self, clusters: &[u64]) {
        let bits = self.format.cluster_bits;
        let mut clusters = clusters.to_vec();
        clusters.sort_unstable();
        for run in clusters.chunk_by(|one, next| one + 1 == *next) {
            let len = (run.len() as u64) << bits;
            // What fails here is space that is free in the image alone.
            let _ = transfer::zero_range(&self.disk, run[0] << bits, len);
        }
    }
}

impl State {
    fn tables(&mut self) -> impl Iterator<Item = &mut Table> {
        let refcounts = self.counts.blocks.tables().chain([&mut self.counts.table]);
        refcounts.chain(self.l2.tables()).chain([&mut self.l1])
    }

    /// What the header says of the refcount table: where it is, and of how many clusters.
    fn refcounts_field(&self, format: Format) -> [u8; 12] {
        let table = &self.counts.table;
        let clusters = table.bytes().len() as u64 >> format.cluster_bits;
        let mut field = [0; 12];
        field[..8].copy_from_slice(&table.offset.to_be_bytes());
        field[8..].copy_from_slice(&(clusters as u32).to_be_bytes());
        field
    }

    /// What it says of the L1 table: its entries, and where it is.
    fn l1_field(&self) -> [u8; 12] {
        let mut field = [0; 12];
        field[..4].copy_from_slice(&(self.l1_entries as u32).to_be_bytes());
        field[4..].copy_from_slice(&self.l1.offset.to_be_bytes());
        field
    }
}

/// Where the header has these fields, in bytes.
const REFCOUNTS_FIELD: u64 = 48;
const L1_FIELD: u64 = 36;
const SECTOR: u64 = 512;
