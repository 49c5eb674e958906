//! Bitmaps of disks in images, which come and go while clients use the disks.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, ensure};
use blkmq_core::ids::DiskId;
use blkmq_host::device::{BitmapInfo, Device};
use blkmq_host::disk::MAPPED;

use super::Running;

impl Running {
    /// Adds a bitmap, in which all changes of a disk from now on are noted.
    ///
    /// # Errors
    /// There is no such disk, it can have none, or there is work on its image.
    pub(crate) fn add_bitmap(&self, disk: &str, name: &str, granularity: Option<u64>) -> Result<()> {
        self.change_bitmaps(disk, name, |device, id| device.add_bitmap(id, name, granularity))
    }

    /// Removes a bitmap of a disk.
    ///
    /// # Errors
    /// There is no such disk or bitmap, or there is work on its image.
    pub(crate) fn remove_bitmap(&self, disk: &str, name: &str) -> Result<()> {
        self.change_bitmaps(disk, name, |device, id| device.remove_bitmap(id, name))
    }

    /// The bitmaps of a disk.
    ///
    /// # Errors
    /// There is no such disk, or they cannot be read.
    pub(crate) fn bitmaps(&self, disk: &str) -> Result<Vec<BitmapInfo>> {
        let (device, id) = self.drive_of(disk)?;
        device
            .bitmaps(id)
            .with_context(|| format!("disk {disk}: its bitmaps cannot be read"))
    }

    fn change_bitmaps(
        &self,
        disk: &str,
        name: &str,
        change: impl FnOnce(&dyn Device, DiskId) -> std::io::Result<()>,
    ) -> Result<()> {
        let state = self.open_state()?;
        self.jobs.check_free(disk)?;
        let (device, id) = self.drive_of(disk)?;
        // Nobody takes over or ends meanwhile, and its image stays. But syncs of a drive that is slow must not prevent
        // changes of others.
        let _claim = self.claims.claim(disk);
        drop(state);
        change(&*device, id).with_context(|| format!("disk {disk}: bitmap {name}"))?;
        // A daemon that is about to take over has looked before. Relaxed, as in `changes`.
        self.changes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn drive_of(&self, name: &str) -> Result<(Arc<dyn Device>, DiskId)> {
        let disk = self.engine.disk(name);
        let disk = disk.with_context(|| format!("disk {name}: there is no such disk"))?;
        ensure!(
            disk.queue != MAPPED,
            "disk {name}: lies on other disks: name those"
        );
        Ok((self.control().device(disk.queue)?, disk.id))
    }
}
