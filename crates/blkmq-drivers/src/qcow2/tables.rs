//! The tables of an image: where the clusters of its disk are, and which clusters of its file are used. They change in
//! memory, and `flush` writes what has changed in the format's order. `image` and `chain` look up and change them.
//!
//! ```text
//!  write of new clusters:   prepare (count them) ─► copies and data ─► commit (enter them)
//!  flush:   refcounts ─► sync, of data too ─► L2 tables ─► sync ─► L1 table ─► sync ─► free what nothing points to
//! ```
//!
//! A cluster that was given up is counted as used until no table on the drive points to it. So a crash at any moment
//! leaves clusters that are counted and not used, and nothing worse.

mod apart;
mod claims;
mod flush;
mod format;
mod new;
mod refcounts;
mod table;
#[cfg(test)]
mod tests;

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use self::claims::Landed;
use self::format::{COPIED, Entry, L2_OFFSET, corrupt};
use self::refcounts::Refcounts;
use self::table::{Cache, Table};
use super::bitmaps::Bitmaps;
use super::check::L1_OFFSET;
use super::header::{Header, L1_ENTRIES_MAX};
use super::space::Space;
use crate::file::FileDisk;

pub(super) use self::claims::Claim;
pub(super) use self::format::{Format, Packed, Place};
pub(super) use self::new::New;

/// The tables of an image.
#[derive(Debug)]
pub(super) struct Tables {
    format: Format,
    /// The image's file.
    disk: Arc<FileDisk>,
    /// The files that have data: the image's, and the one beside it.
    data: Vec<Arc<FileDisk>>,
    pub(super) space: Space,
    /// The bitmaps of the disk, if they are read.
    pub(super) bitmaps: Bitmaps,
    state: Mutex<State>,
    /// Claims that are to be entered.
    landed: Mutex<Vec<Landed>>,
    /// A write of new clusters has ended.
    ended: Condvar,
    /// How often the tables have changed, and how many of these changes are on the drive for sure.
    changes: AtomicU64,
    flushed: AtomicU64,
    /// How often the tables in the file have taken the place of those in memory.
    reverted: AtomicU64,
    /// One flush at a time.
    flushing: Mutex<()>,
    /// Held while a cluster is read that a write may replace: its space is given back afterwards.
    readers: RwLock<()>,
}

#[derive(Debug)]
struct State {
    l1: Table,
    l1_entries: u64,
    /// The L1 table has a place that the header does not name yet.
    l1_has_moved: bool,
    l2: Cache,
    counts: Refcounts,
    /// The clusters of the disk for which clusters are allocated that are not entered yet.
    pending: Vec<Range<u64>>,
    /// What no table in memory points to any more, and tables on the drive may.
    unlinked: Vec<Range<u64>>,
}

/// Where a write goes.
pub(super) enum Prepared<'a> {
    /// The clusters are there: `len` bytes from byte `host` on.
    There {
        host: u64,
        len: u64,
    },
    New(New<'a>),
}

/// What becomes of whole clusters that are given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marked {
    /// They read as zeroes.
    Zero,
    /// They read as zeroes and keep their space.
    ZeroInPlace,
    /// What is below shows.
    Below,
}

impl Tables {
    /// Reads the tables of an image whose header and tables were checked.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn open(
        disk: &Arc<FileDisk>,
        beside: Option<&Arc<FileDisk>>,
        header: &Header,
    ) -> io::Result<Self> {
        Ok(Self {
            format: Format::of(header),
            disk: Arc::clone(disk),
            space: Space::new(disk, header.cluster_bits)?,
            data: std::iter::once(disk).chain(beside).cloned().collect(),
            bitmaps: Bitmaps::default(),
            state: Mutex::new(State::load(disk, header)?),
            landed: Mutex::default(),
            ended: Condvar::new(),
            changes: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            reverted: AtomicU64::new(0),
            flushing: Mutex::default(),
            readers: RwLock::default(),
        })
    }

    /// The file that has the data of clusters.
    pub(super) fn data_file(&self) -> &Arc<FileDisk> {
        self.data.last().expect("there is the image's own")
    }

    /// Bytes of a cluster.
    pub(super) fn cluster(&self) -> u64 {
        self.format.cluster()
    }

    /// Returns whether a change is not on the drive, for all that is known: also while a flush is under way.
    pub(super) fn is_dirty(&self) -> bool {
        // `flushed` first: it never is more than `changes`.
        self.flushed.load(Ordering::SeqCst) != self.changes.load(Ordering::SeqCst)
    }

    /// Keeps compressed clusters that were looked up where they are, until it is dropped.
    pub(super) fn hold(&self) -> RwLockReadGuard<'_, ()> {
        self.readers.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the byte `at` of the disk is, and for how many bytes, at most `len`, that goes on.
    ///
    /// # Errors
    /// The system's, or the image is corrupt there.
    pub(super) fn look_up(&self, at: u64, len: u64) -> io::Result<(Place, u64)> {
        let format = self.format;
        let (cluster, entries) = (format.cluster(), format.l2_entries());
        let number = at >> format.cluster_bits;
        let in_table = (entries - number % entries) * cluster - at % cluster;
        let mut state = self.state();
        let Some(table) = state.l2(&self.disk, format, number / entries)? else {
            return Ok((Place::Below, in_table.min(len)));
        };
        let (bits, mask) = (format.unit_bits(), format.units() - 1);
        let unit = 1u64 << bits;
        let inside = at % unit;
        // Units are numbered from the beginning of the table on.
        let start = (number % entries) * format.units() + ((at % cluster) >> bits);
        let place = |number: u64| format.place(format.entry(table, number / (mask + 1)), number & mask);
        let first = place(start)?;
        if let Place::Packed(_) = first {
            return Ok((first, (cluster - at % cluster).min(len)));
        }
        let mut known = unit - inside;
        while known < len.min(in_table) {
            let steps = (inside + known) >> bits;
            if !place(start + steps).is_ok_and(|next| continues(first, next, steps << bits)) {
                break;
            }
            known += unit;
        }
        let place = match first {
            Place::Data { host, is_own } => Place::Data {
                host: host + inside,
                is_own,
            },
            other => other,
        };
        Ok((place, known.min(len)))
    }

    /// Finds where a write of `len` bytes at `at` goes, as far as that is in one piece; allocates what is not there.
    /// Waits while somebody else writes new clusters there.
    ///
    /// # Errors
    /// The system's, there is no more room, or the image is corrupt there.
    pub(super) fn prepare(&self, at: u64, len: u64) -> io::Result<Prepared<'_>> {
        self.relieve()?;
        let format = self.format;
        let (bits, entries) = (format.cluster_bits, format.l2_entries());
        let number = at >> bits;
        let inside = at % format.cluster();
        let last = ((at + len - 1) >> bits).min(number - number % entries + entries - 1);
        let mut guard = self.state();
        while guard.is_pending(number) {
            // Not without end: what lands while this has the tables is entered by the next who has them.
            let waited = self.ended.wait_timeout(guard, LANDING);
            guard = waited.unwrap_or_else(PoisonError::into_inner).0;
            self.enter_landed(&mut guard, true);
        }
        if format.has_subclusters {
            return self.prepare_units(guard, at, len);
        }
        let state = &mut *guard;
        let index = number % entries;
        let table = state.own_l2(&self.disk, format, number / entries)?;
        let first = format.place(format.entry(table, index), 0)?;
        let run = |is_more: &dyn Fn(u64, Place) -> bool| {
            let more = (1..=last - number).take_while(|step| {
                let next = format.place(format.entry(table, index + step), 0);
                next.is_ok_and(|next| is_more(*step, next))
            });
            1 + more.count() as u64
        };
        let spare = match first {
            Place::Data { host, is_own: true } => {
                let count = run(&|step, next| continues(first, next, step << bits));
                return Ok(Prepared::There {
                    host: host + inside,
                    len: ((count << bits) - inside).min(len),
                });
            }
            Place::Zero { spare } => spare,
            _ => None,
        };
        let is_for_new = |place| {
            !matches!(
                place,
                Place::Data { is_own: true, .. } | Place::Zero { spare: Some(_) }
            )
        };
        let wanted = match spare {
            Some(_) => 1,
            None => run(&|_, next| is_for_new(next)),
        };
        let pending = state.pending.iter().map(|range| range.start);
        let free = pending.filter(|start| *start > number).min();
        let wanted = wanted.min(free.map_or(u64::MAX, |start| start - number));
        let (host, count) = match spare {
            Some(host) => (host, 1),
            None if format.has_data_file => (number << bits, wanted),
            None => {
                let found = state.counts.allocate(&self.disk, wanted, &mut state.unlinked)?;
                (found.start << bits, found.end - found.start)
            }
        };
        let clusters = number..number + count;
        state.pending.push(clusters.clone());
        Ok(Prepared::New(New {
            tables: self,
            claim: Claim {
                clusters,
                units: None,
                host,
                is_counted: spare.is_none() && !format.has_data_file,
            },
            is_over: false,
        }))
    }

    /// The same in a cluster with subclusters: those that are not there get a place in the cluster's own, or in a new one.
    fn prepare_units(&self, mut guard: MutexGuard<'_, State>, at: u64, len: u64) -> io::Result<Prepared<'_>> {
        let format = self.format;
        let (bits, unit_bits, entries) = (format.cluster_bits, format.unit_bits(), format.l2_entries());
        let (number, inside) = (at >> bits, at % format.cluster());
        let end = (inside + len).min(format.cluster());
        let touched = inside >> unit_bits..((end - 1) >> unit_bits) + 1;
        let state = &mut *guard;
        let table = state.own_l2(&self.disk, format, number / entries)?;
        let entry = format.entry(table, number % entries);
        let is_data =
            |unit: u64| Ok::<_, io::Error>(matches!(format.place(entry, unit)?, Place::Data { .. }));
        let (host, units, is_counted) = if let Some(host) = format.own_host(entry) {
            let is_there = is_data(touched.start)?;
            let same = touched
                .clone()
                .take_while(|unit| is_data(*unit).is_ok_and(|is| is == is_there));
            let units = touched.start..touched.start + same.count() as u64;
            if is_there {
                let len = (units.end << unit_bits).min(end) - inside;
                let host = host + inside;
                return Ok(Prepared::There { host, len });
            }
            (host, units, false)
        } else {
            // Checked before: what is refused has no consequences.
            format.place(entry, touched.start)?;
            let units = match format.used(entry).is_empty() {
                true => touched,
                // What it had is compressed, or another's, too: all of it moves.
                false => 0..format.units(),
            };
            match format.has_data_file {
                true => (number << bits, units, false),
                false => {
                    let found = state.counts.allocate(&self.disk, 1, &mut state.unlinked)?;
                    (found.start << bits, units, true)
                }
            }
        };
        let clusters = number..number + 1;
        state.pending.push(clusters.clone());
        Ok(Prepared::New(New {
            tables: self,
            claim: Claim {
                clusters,
                units: Some(units),
                host,
                is_counted,
            },
            is_over: false,
        }))
    }

    /// Gives up whole clusters of the disk from the byte `at` on, at most up to `end`: those of one table. Returns the first
    /// byte behind them. Nobody uses them.
    ///
    /// # Errors
    /// The system's, or there is no room for a table.
    pub(super) fn mark(&self, at: u64, end: u64, marked: Marked) -> io::Result<u64> {
        self.relieve()?;
        let format = self.format;
        let (bits, entries) = (format.cluster_bits, format.l2_entries());
        let number = at >> bits;
        let until = end
            .div_ceil(format.cluster())
            .min(number - number % entries + entries);
        let mut guard = self.state();
        let state = &mut *guard;
        let is_there = state.l2(&self.disk, format, number / entries)?.is_some();
        if !is_there && marked == Marked::Below {
            return Ok(until << bits);
        }
        let mut given = Vec::new();
        let table = state.own_l2(&self.disk, format, number / entries)?;
        for cluster in number..until {
            let old = format.entry(table, cluster % entries);
            let new = match (marked, format.place(old, 0)?) {
                (Marked::Below, _) => Entry::default(),
                (Marked::ZeroInPlace, Place::Zero { .. }) if !format.has_subclusters => old,
                (Marked::ZeroInPlace, _) => format.zero_entry(match format.own_host(old) {
                    Some(host) => format.data_entry(host),
                    None => 0,
                }),
                _ => format.zero_entry(0),
            };
            if new == old {
                continue;
            }
            format.set_entry(table, cluster % entries, new);
            if new.word & L2_OFFSET == 0 && !format.used(old).is_empty() {
                given.push(format.used(old));
            }
        }
        state.unlinked.extend(given);
        self.note_change();
        Ok(until << bits)
    }

    /// Makes the L1 table large enough for a disk of `size` bytes; a flush makes that durable.
    ///
    /// # Errors
    /// The system's, or there is no room.
    pub(super) fn grow(&self, size: u64) -> io::Result<()> {
        let format = self.format;
        let needed = size.div_ceil(format.cluster() * format.l2_entries());
        if needed > L1_ENTRIES_MAX {
            return Err(io::Error::other("its clusters are too small for that size"));
        }
        let mut guard = self.state();
        let state = &mut *guard;
        if needed <= state.l1_entries {
            return Ok(());
        }
        if needed > state.l1.entries() {
            let bits = format.cluster_bits;
            let clusters = (needed * 8).div_ceil(format.cluster());
            let place = state
                .counts
                .allocate_all(&self.disk, clusters, &mut state.unlinked)?;
            let mut new = Table::new(place.start << bits, clusters << bits);
            for index in 0..state.l1_entries {
                new.set_entry(index, state.l1.entry(index));
            }
            let old = std::mem::replace(&mut state.l1, new);
            let first = old.offset >> bits;
            state
                .unlinked
                .push(first..first + (old.bytes().len() as u64 >> bits));
        } else {
            // What is behind the end of the table need not be zeroes.
            (state.l1_entries..needed).for_each(|index| state.l1.set_entry(index, 0));
        }
        state.l1_entries = needed;
        state.l1_has_moved = true;
        self.note_change();
        Ok(())
    }

    /// Notes a change of the tables, before anybody finds out.
    fn note_change(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
    }

    /// Writes tables if too many of them have changed.
    fn relieve(&self) -> io::Result<()> {
        let is_full = self.state().is_full_of_changes();
        match is_full {
            true => self.flush(),
            false => Ok(()),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        self.enter_landed(&mut state, true);
        state
    }

    /// The tables without what has landed.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn load(disk: &FileDisk, header: &Header) -> io::Result<Self> {
        let format = Format::of(header);
        let end = match disk.is_block_device() {
            true => disk.end()?,
            false => u64::MAX,
        };
        let l1_bytes = (u64::from(header.l1_entries) * 8).next_multiple_of(format.cluster());
        let l2_max = (L2_CACHE_BYTES >> header.cluster_bits).clamp(16, 1024);
        Ok(Self {
            l1: Table::load(disk, header.l1_offset, l1_bytes)?,
            l1_entries: header.l1_entries.into(),
            l1_has_moved: false,
            l2: Cache::new(l2_max as usize),
            counts: Refcounts::load(disk, header, format, end)?,
            pending: Vec::new(),
            unlinked: Vec::new(),
        })
    }

    /// An L2 table, if there is one.
    fn l2(&mut self, disk: &FileDisk, format: Format, number: u64) -> io::Result<Option<&mut Table>> {
        let entry = match number < self.l1_entries {
            true => self.l1.entry(number),
            false => 0,
        };
        let offset = entry & L1_OFFSET;
        if offset == 0 {
            return Ok(None);
        }
        if !offset.is_multiple_of(format.cluster()) {
            return Err(corrupt(format!("L2 table {number} is at byte {offset}")));
        }
        if !self.l2.has(number) {
            let table = Table::load(disk, offset, format.cluster())?;
            self.l2.insert(number, table);
        }
        Ok(self.l2.get(number))
    }

    /// An L2 table that may be changed: a new one if there is none, a copy if a snapshot inside the image has it, too.
    fn own_l2(&mut self, disk: &FileDisk, format: Format, number: u64) -> io::Result<&mut Table> {
        if number >= self.l1_entries {
            return Err(corrupt(format!("there is no entry {number} in its L1 table")));
        }
        let entry = self.l1.entry(number);
        if entry & L1_OFFSET == 0 || entry & COPIED == 0 {
            let bits = format.cluster_bits;
            let old = self.l2(disk, format, number)?.map(|table| table.bytes().to_vec());
            let place = self.counts.allocate(disk, 1, &mut self.unlinked)?.start;
            let mut new = Table::new(place << bits, format.cluster());
            if let Some(old) = old {
                new.change(0..old.len()).copy_from_slice(&old);
                let first = (entry & L1_OFFSET) >> bits;
                self.unlinked.push(first..first + 1);
            }
            self.l1.set_entry(number, place << bits | COPIED);
            self.l2.insert(number, new);
        }
        let table = self.l2(disk, format, number)?;
        table.ok_or_else(|| corrupt(format!("L2 table {number} is not there")))
    }

    fn is_pending(&self, cluster: u64) -> bool {
        self.pending.iter().any(|range| range.contains(&cluster))
    }

    fn is_full_of_changes(&self) -> bool {
        self.l2.is_full_of_changes() || self.counts.blocks.is_full_of_changes()
    }

    /// Counts the clusters of a claim as free. Nothing has ever pointed to them.
    fn give_up(&mut self, disk: &FileDisk, format: Format, claim: &Claim) {
        if !claim.is_counted {
            return;
        }
        let first = claim.host >> format.cluster_bits;
        for cluster in first..first + (claim.clusters.end - claim.clusters.start) {
            // If that fails, its space is lost.
            let _ = self.counts.release(disk, cluster, true);
        }
    }

    fn end_pending(&mut self, clusters: &Range<u64>) {
        let at = self.pending.iter().position(|range| range == clusters);
        debug_assert!(at.is_some(), "clusters {clusters:?} end twice");
        at.map(|at| self.pending.swap_remove(at));
    }
}

/// Returns whether a place is where one goes on after `len` bytes.
fn continues(first: Place, next: Place, len: u64) -> bool {
    match (first, next) {
        (Place::Below, Place::Below) | (Place::Zero { .. }, Place::Zero { .. }) => true,
        (
            Place::Data { host, is_own },
            Place::Data {
                host: other,
                is_own: is_too,
            },
        ) => host + len == other && is_own == is_too,
        _ => false,
    }
}

/// How long what has landed may wait for who has the tables.
const LANDING: Duration = Duration::from_millis(1);
/// Memory for L2 tables that have not changed, in bytes.
const L2_CACHE_BYTES: u64 = 8 << 20;
