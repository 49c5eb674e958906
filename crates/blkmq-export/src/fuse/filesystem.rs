//! One mount: the file that it shows, who serves it, and how it ends. Its channels, one on each participating
//! reactor, share it; `mount` does what may block, called from a thread of its own or by the thread that
//! closes the address.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use blkmq_core::bio::Status;
use blkmq_host::disk::Disk;
use blkmq_host::service::Waker;

use super::front_door::DOOR;
use super::mount::{Mount, Ownership, Unmounted};
use super::protocol::{Agreed, Attributes, SET_BY_HANDLE, SET_GID, SET_MODE, SET_SIZE, SET_UID, SetAttr};
use super::saved::SavedMount;
use crate::common::Common;
use crate::common::log::Log;
use crate::common::losses::LossCursor;
use crate::common::worker::{self, Worker};

/// One mount.
pub(super) struct FileSystem {
    pub(super) disk: Disk,
    pub(super) common: Arc<Common>,
    pub(super) log: Arc<Log>,
    /// The address, for people.
    pub(super) name: String,
    /// The path.
    address: String,
    /// The user and the group that own the file.
    owner: (u32, u32),
    since: u64,
    mount: Mutex<Mount>,
    ownership: Ownership,
    /// The losses that flushes through this mount have reported.
    loss_cursor: Mutex<LossCursor>,
    /// Number of open file descriptions.
    opened: AtomicU64,
    /// Nothing more is taken from the kernel.
    is_over: AtomicBool,
    /// An unmount is under way, or done.
    is_unmounting: AtomicBool,
    /// Somebody else has unmounted it.
    is_lost: AtomicBool,
    /// The mount is to end when it is unmounted.
    is_ending: AtomicBool,
    /// The wakers of its channels.
    wakers: Mutex<Vec<Waker>>,
}

impl FileSystem {
    pub(super) fn new(disk: Disk, mount: Mount, common: &Arc<Common>, log: &Arc<Log>) -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let address = mount.path().display().to_string();
        Self {
            loss_cursor: Mutex::new(LossCursor::sample(&disk)),
            name: format!("{} at {address}", disk.name),
            address,
            disk,
            common: Arc::clone(common),
            log: Arc::clone(log),
            owner: mount.owner(),
            ownership: mount.ownership(),
            since: since.map_or(0, |since| since.as_secs()),
            mount: Mutex::new(mount),
            opened: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            is_unmounting: AtomicBool::new(false),
            is_lost: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            wakers: Mutex::default(),
        }
    }

    /// Continues a mount that another daemon has saved.
    pub(super) fn restored(
        disk: Disk,
        mount: Mount,
        saved: &SavedMount,
        common: &Arc<Common>,
        log: &Arc<Log>,
    ) -> Self {
        let mut filesystem = Self::new(disk, mount, common, log);
        filesystem.since = saved.since;
        filesystem.opened = AtomicU64::new(saved.opened);
        if saved.has_losses {
            *lock(&filesystem.loss_cursor) = LossCursor::unsampled();
        }
        filesystem
    }

    /// What another daemon needs to continue the mount, given the size that the kernel knows and
    /// what was negotiated.
    pub(super) fn save(&self, reported_size: u64, agreed: Option<Agreed>) -> SavedMount {
        let (is_made, entry) = lock(&self.mount).handover_state();
        SavedMount {
            disk: self.disk.name.clone(),
            size: reported_size,
            block_size: self.disk.block_size,
            read_only: self.disk.read_only,
            agreed,
            // Relaxed, as everywhere: only a count.
            opened: self.opened.load(Ordering::Relaxed),
            has_losses: lock(&self.loss_cursor).check(&self.disk),
            owner: self.owner,
            since: self.since,
            is_made,
            entry: entry.map(|entry| (entry.device, entry.kind)),
        }
    }

    /// The path, as the hand-over names the address.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Whether this daemon is to unmount it.
    pub(super) fn ownership(&self) -> &Ownership {
        &self.ownership
    }

    /// What the file looks like.
    pub(super) fn attributes(&self) -> Attributes {
        Attributes {
            size: self.disk.current_size(),
            mode: libc::S_IFREG | if self.disk.read_only { 0o400 } else { 0o600 },
            uid: self.owner.0,
            gid: self.owner.1,
            block_size: self.disk.limits.physical_block.max(self.block_size()).max(PAGE),
            since: self.since,
        }
    }

    /// The smallest unit of writes.
    pub(super) fn block_size(&self) -> u32 {
        self.disk.block_size
    }

    /// Checks that attributes may change as asked: only the times, which nothing stores. The
    /// disk determines the size, even if the file is opened with `O_TRUNC`, as with a block device.
    ///
    /// # Errors
    /// The errno of Linux.
    pub(super) fn set_attributes(&self, wanted: &SetAttr) -> Result<(), i32> {
        if wanted.valid & (SET_MODE | SET_UID | SET_GID) != 0 {
            return Err(libc::EPERM);
        }
        let is_of_opening = wanted.size == 0 && wanted.valid & SET_BY_HANDLE == 0;
        let is_kept = wanted.size == self.disk.current_size() || is_of_opening;
        if wanted.valid & SET_SIZE != 0 && !is_kept {
            return Err(libc::EINVAL);
        }
        Ok(())
    }

    /// Checks that the file may be opened with these flags of `open`.
    ///
    /// # Errors
    /// The errno of Linux.
    pub(super) fn open(&self, flags: u32) -> Result<(), i32> {
        if self.disk.read_only && flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32 {
            return Err(libc::EROFS);
        }
        // Relaxed, as everywhere: only a count.
        self.opened.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn release(&self) {
        let release = |opened: u64| opened.checked_sub(1);
        let _ = self
            .opened
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, release);
    }

    /// The status of a flush through this mount, from the status of the flush that it shared.
    pub(super) fn end_flush(&self, status: Status) -> Status {
        lock(&self.loss_cursor).check_and_advance(&self.disk, status)
    }

    /// Adds a channel, which is woken at the end with `waker`.
    pub(super) fn join(&self, waker: Waker) {
        lock(&self.wakers).push(waker);
    }

    /// Returns whether nothing more is to be taken from the kernel.
    pub(super) fn is_over(&self) -> bool {
        // Acquire: pairs with the Release in `end`.
        self.is_over.load(Ordering::Acquire)
    }

    /// Makes all channels finish what they have begun, and end. Returns whether this call is the
    /// first.
    pub(super) fn end(&self) -> bool {
        let is_first = !self.is_over.swap(true, Ordering::AcqRel);
        if is_first {
            let wakers = lock(&self.wakers).clone();
            wakers.iter().for_each(Waker::wake);
        }
        is_first
    }

    /// Reports, once, that somebody else has unmounted it, and ends it. Does nothing but end it if
    /// this daemon unmounts it.
    pub(super) fn lose(self: &Arc<Self>) {
        let is_ours = self.is_unmounting.load(Ordering::Relaxed);
        if !is_ours && !self.is_lost.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "fuse: {}: somebody has unmounted it, and it is not served any more; to mount it again, remove the export and add it",
                self.name
            );
        }
        self.unmount_and_end();
    }

    /// Unmounts it, if it is ours; processes that have it open keep the disk. Blocks.
    pub(super) fn unmount(&self) {
        if !self.ownership.is_ours() {
            return;
        }
        if !self.is_unmounting.swap(true, Ordering::Relaxed) {
            // The hand-over's copy of the descriptor would keep processes waiting that have it open
            // when its channel is gone.
            self.common.handover.remove_door(DOOR, &self.address);
        }
        let is_lost = self.is_lost.load(Ordering::Relaxed);
        match lock(&self.mount).unmount(is_lost) {
            Ok(Unmounted::Whole) => {}
            // After `umount -f` the path stays covered while it is open, but nobody keeps the disk.
            Ok(Unmounted::Busy) if is_lost => {}
            Ok(Unmounted::Busy) => tracing::warn!(
                "fuse: {} unmounted while open: who has it open keeps the disk until it is not served any more",
                self.name
            ),
            Err(error) => tracing::warn!("fuse: {} stays mounted: {error}", self.name),
        }
    }

    /// Unmounts it by a thread, if it is ours, and then ends it. Only the first call has an effect.
    pub(super) fn unmount_and_end(self: &Arc<Self>) {
        // The end waits for the thread: until then the process stays, so that the file that was
        // made for the mount is removed.
        if self.is_ending.swap(true, Ordering::Relaxed) {
            return;
        }
        if !self.ownership.is_ours() {
            self.end();
            return;
        }
        let left = match THREAD.get() {
            Some(thread) => thread.try_send(Arc::clone(self)).err().map(|_| self),
            None => Some(self),
        };
        if let Some(left) = left {
            left.unmount();
            left.end();
        }
    }
}

/// Starts the thread that unmounts, so that no reactor has to.
pub(super) fn start_thread() {
    THREAD.get();
}

fn serve(receiver: &Receiver<Arc<FileSystem>>) {
    for filesystem in receiver {
        filesystem.unmount();
        filesystem.end();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic under these locks leaves nothing half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One thread for the process.
static THREAD: Worker<Arc<FileSystem>> = Worker::new(|| worker::spawn("unmount", WAITING_MAX, serve));
/// Mounts that wait to be unmounted.
const WAITING_MAX: usize = 4096;
const PAGE: u32 = 4096;
