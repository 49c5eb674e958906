//! What clients have written is made durable, and that of removed disks for the last time.

use anyhow::Result;

use super::{Removed, Running, SYNC_MAX};
use crate::serve::last_sync::Files;

impl Running {
    /// Makes what clients have written to removed disks durable. The drives are closed: this is the
    /// last report of lost writes.
    pub(super) fn sync_removed(&self, removed: Vec<Removed>) {
        for Removed { disk, files, stays } in removed {
            if let Err(error) = files.sync(SYNC_MAX) {
                tracing::error!(disk, "disk {disk}: removed; {error:#}");
            }
            if !stays {
                self.files().remove(&files);
            }
        }
    }

    /// Has a disk served again whose drive was full or gone.
    ///
    /// # Errors
    /// As for [`Control::reopen_disk`].
    pub(crate) fn reopen(&self, disk: &str) -> Result<()> {
        self.control().reopen_disk(disk)?;
        self.follow_files(disk)
    }

    /// Has the last sync be of what a disk has now, and report what is lost from now on: what it had is closed.
    pub(super) fn follow_files(&self, disk: &str) -> Result<()> {
        let config = self.config();
        let opened = Files::open_of(&config, disk)?;
        let mut files = self.files();
        let former = files.of(&config, disk);
        files.remove(&former);
        files.add(&opened);
        Ok(())
    }

    /// Makes writes of clients durable that no flush has covered.
    ///
    /// # Errors
    /// All files with data that may be lost, by name.
    pub(in crate::serve) fn sync(&self) -> Result<()> {
        let files = self.files().clone();
        files.sync(self.shutdown_limit().max(SYNC_MAX))
    }
}
