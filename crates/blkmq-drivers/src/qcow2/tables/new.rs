//! New clusters between their counting and their entry in the tables, for a write that waits in its thread.

use std::io;
use std::ops::Range;

use super::{Claim, Tables};

/// New clusters, one after the other, or new subclusters of one, that are entered by [`New::commit`]; dropped before, they are free again.
pub(in super::super) struct New<'a> {
    pub(super) tables: &'a Tables,
    pub(super) claim: Claim,
    pub(super) is_over: bool,
}

impl New<'_> {
    /// The bytes of the disk that they are for.
    pub(in super::super) fn range(&self) -> Range<u64> {
        let format = self.tables.format;
        let clusters = &self.claim.clusters;
        let (start, end) = (
            clusters.start << format.cluster_bits,
            clusters.end << format.cluster_bits,
        );
        match &self.claim.units {
            Some(units) => {
                start + (units.start << format.unit_bits())..start + (units.end << format.unit_bits())
            }
            None => start..end,
        }
    }

    /// The first of these bytes in the file.
    pub(in super::super) fn host(&self) -> u64 {
        let start = self.claim.clusters.start << self.tables.format.cluster_bits;
        self.claim.host + (self.range().start - start)
    }

    /// Enters the clusters, whose content was written.
    ///
    /// # Errors
    /// The table cannot be read any more: they are free again.
    pub(in super::super) fn commit(mut self) -> io::Result<()> {
        let format = self.tables.format;
        let number = self.claim.clusters.start / format.l2_entries();
        let mut guard = self.tables.state();
        let state = &mut *guard;
        let mut unlinked = Vec::new();
        let table = state.own_l2(&self.tables.disk, format, number)?;
        self.claim.enter(format, table, &mut unlinked);
        state.unlinked.append(&mut unlinked);
        self.tables.note_change();
        self.is_over = true;
        state.end_pending(&self.claim.clusters);
        drop(guard);
        self.tables.ended.notify_all();
        Ok(())
    }
}

impl Drop for New<'_> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let tables = self.tables;
        let mut state = tables.state();
        state.give_up(&tables.disk, tables.format, &self.claim);
        // What was counted may be on the drive.
        tables.note_change();
        state.end_pending(&self.claim.clusters);
        drop(state);
        tables.ended.notify_all();
    }
}
