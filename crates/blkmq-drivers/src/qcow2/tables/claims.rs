//! Clusters that are allocated and not entered yet. Threads have them as [`New`](super::New), reactors as [`Claim`]:
//! a reactor takes what memory answers at once, and never waits for the tables.
//!
//! ```text
//!  reactor:  claim (tables in memory, nobody at them) ─► data ─► land ─┐
//!  whoever next has the tables:                              enter ◄───┘
//! ```
//!
//! What has landed counts as a change of the tables, and everybody who looks into them enters it first.

use std::ops::Range;
use std::sync::{MutexGuard, PoisonError, TryLockError};

use super::format::{ALL, COPIED, Entry, Format};
use super::table::Table;
use super::{L1_OFFSET, Place, State, Tables};

/// New clusters, one after the other.
#[derive(Debug)]
pub(in crate::qcow2) struct Claim {
    /// The clusters of the disk.
    pub(super) clusters: Range<u64>,
    /// Those subclusters of it that are new, if there are any.
    pub(super) units: Option<Range<u64>>,
    /// The first byte of the first one in the file.
    pub(in crate::qcow2) host: u64,
    /// They were counted just now, and nothing has their content.
    pub(super) is_counted: bool,
}

/// A claim whose data was written, or that is given up.
#[derive(Debug)]
pub(super) struct Landed {
    claim: Claim,
    is_written: bool,
}

impl Claim {
    /// Returns whether it is for one of these clusters of the disk.
    pub(in crate::qcow2) fn overlaps(&self, clusters: &Range<u64>) -> bool {
        self.clusters.start < clusters.end && clusters.start < self.clusters.end
    }

    /// What the entry of its cluster, at `host` now, says of subclusters: the new ones are there, and others as they were.
    /// A cluster that is new has no others there: the entry of a damaged image may say so.
    fn subclusters(&self, format: Format, old: Entry, host: u64) -> u64 {
        let Some(units) = &self.units else { return 0 };
        let new = units.clone().fold(0, |new, unit| new | 1 << unit);
        let kept = match format.own_host(old) == Some(host) {
            true => old.subclusters,
            false => old.subclusters & (ALL << 32),
        };
        (kept | new) & !(new << 32)
    }

    /// Enters the clusters into their table. Appends what nothing there points to any more.
    pub(super) fn enter(&self, format: Format, table: &mut Table, unlinked: &mut Vec<Range<u64>>) {
        let entries = format.l2_entries();
        for (step, cluster) in (0..).zip(self.clusters.clone()) {
            let old = format.entry(table, cluster % entries);
            let host = self.host + (step << format.cluster_bits);
            let new = Entry {
                word: format.data_entry(host),
                subclusters: self.subclusters(format, old, host),
            };
            format.set_entry(table, cluster % entries, new);
            if self.is_counted && !format.used(old).is_empty() {
                unlinked.push(format.used(old));
            }
        }
    }
}

impl Tables {
    /// Allocates the clusters `clusters` of the disk, if they are not there, and memory and nobody else is needed for it.
    /// [`Tables::land`] follows. Does not block.
    pub(in crate::qcow2) fn claim(&self, clusters: Range<u64>) -> Option<Claim> {
        let format = self.format;
        let entries = format.l2_entries();
        let (number, index) = (clusters.start / entries, clusters.start % entries);
        let count = clusters.end - clusters.start;
        let mut guard = self.try_state()?;
        let state = &mut *guard;
        let is_busy = |other: &Range<u64>| other.start < clusters.end && clusters.start < other.end;
        if format.has_subclusters
            || index + count > entries
            || state.is_full_of_changes()
            || state.pending.iter().any(is_busy)
        {
            return None;
        }
        let l1 = state.l1.entry(number);
        if number >= state.l1_entries || l1 & L1_OFFSET == 0 || l1 & COPIED == 0 {
            return None;
        }
        let table = state.l2.get(number)?;
        let mut spare = None;
        for step in 0..count {
            match format.place(format.entry(table, index + step), 0).ok()? {
                Place::Below | Place::Zero { spare: None } => {}
                Place::Zero { spare: Some(host) } if count == 1 => spare = Some(host),
                _ => return None,
            }
        }
        let (host, is_counted) = match spare {
            Some(host) => (host, false),
            None if format.has_data_file => (clusters.start << format.cluster_bits, false),
            None => (
                state.counts.take_cached(count)?.start << format.cluster_bits,
                true,
            ),
        };
        // It stays in memory until the claim is entered.
        table.pins += 1;
        state.pending.push(clusters.clone());
        Some(Claim {
            clusters,
            units: None,
            host,
            is_counted,
        })
    }

    /// Ends a claim: its data was written, or it is given up. Does not block.
    pub(in crate::qcow2) fn land(&self, claim: Claim, is_written: bool) {
        let landed = Landed { claim, is_written };
        self.landed().push(landed);
        // Behind it: a flush that counts the change finds it.
        self.note_change();
        // Somebody may wait for these clusters.
        drop(self.try_state());
    }

    /// The tables, if nobody has them.
    fn try_state(&self) -> Option<MutexGuard<'_, State>> {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        self.enter_landed(&mut state, false);
        Some(state)
    }

    /// Enters what has landed. Only who `may_read` counts clusters as free that are given up.
    pub(super) fn enter_landed(&self, state: &mut State, may_read: bool) {
        let landed = std::mem::take(&mut *self.landed());
        if landed.is_empty() {
            return;
        }
        let format = self.format;
        for landed in landed {
            if !landed.is_written && !may_read {
                self.landed().push(landed);
                continue;
            }
            let Landed { claim, is_written } = landed;
            let table = state.l2.get(claim.clusters.start / format.l2_entries());
            let table = table.expect("a pinned table stays in memory");
            table.pins -= 1;
            match is_written {
                true => claim.enter(format, table, &mut state.unlinked),
                false => state.give_up(&self.disk, format, &claim),
            }
            state.end_pending(&claim.clusters);
        }
        self.ended.notify_all();
    }

    /// Held for moments only, so reactors wait for it.
    fn landed(&self) -> MutexGuard<'_, Vec<Landed>> {
        self.landed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
