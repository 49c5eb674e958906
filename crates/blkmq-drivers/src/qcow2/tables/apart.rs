//! Clusters of an image's file that its tables do not name, and something else does: bitmaps. They are counted as others
//! are, and are durable after the next flush.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::super::transfer;
use super::Tables;
use crate::file::FileDisk;

impl Tables {
    /// The image's file.
    pub(in crate::qcow2) fn disk(&self) -> &Arc<FileDisk> {
        &self.disk
    }

    /// Writes something to new clusters, one after the other, and zeroes behind it. Returns their numbers. Blocks.
    ///
    /// # Errors
    /// The system's, or there is no room.
    pub(in crate::qcow2) fn write_apart(&self, content: &[u8]) -> io::Result<Range<u64>> {
        let cluster = self.cluster();
        let count = (content.len() as u64).div_ceil(cluster).max(1);
        let clusters = {
            let mut guard = self.state();
            let state = &mut *guard;
            let found = state
                .counts
                .allocate_all(&self.disk, count, &mut state.unlinked)?;
            self.note_change();
            found
        };
        let mut whole = content.to_vec();
        whole.resize((count * cluster) as usize, 0);
        let written = self.space.reach(clusters.end * cluster).and_then(|()| {
            self.space
                .note_written(clusters.start * cluster..clusters.end * cluster);
            transfer::write(&self.disk, clusters.start * cluster, &whole)
        });
        match written {
            Ok(()) => Ok(clusters),
            Err(error) => {
                self.release([clusters]);
                Err(error)
            }
        }
    }

    /// Gives up clusters that nothing durable names: they are free after the next flush.
    pub(in crate::qcow2) fn release(&self, clusters: impl IntoIterator<Item = Range<u64>>) {
        self.state().unlinked.extend(clusters);
        self.note_change();
    }
}
