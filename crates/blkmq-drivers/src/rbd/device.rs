//! The drive of the images of a pool that share a queue: their common limits, and a hardware context for
//! each reactor. `image` opens the images; `hctx` decides what a request becomes.

use std::any::Any;
use std::io;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use blkmq_core::driver::HctxDriver;
use blkmq_core::ids::{DiskId, HctxId};
use blkmq_core::limits::Limits;
use blkmq_host::device::{Allocation, Device, Extent, HandoverState, Losses, Polling, State};
use blkmq_host::ring::RingHandle;
use blkmq_host::runner::Runner;

use super::calls::Calls;
use super::hctx::RbdHctx;
use super::image::{Image, RbdDisk};
use super::sys::SEGMENTS_MAX;

/// Images that share a queue.
pub struct RbdDevice {
    shared: Arc<Shared>,
    depth: u32,
    /// The smallest object size of the first images.
    object_size: u32,
}

/// What the hardware contexts of a drive share.
#[derive(Default)]
pub(super) struct Shared {
    images: RwLock<Images>,
    runner: RwLock<Option<Runner>>,
    /// Closes of its images under way.
    closings: Arc<Calls>,
}

/// The images of a drive by the ids of their disks, at one moment.
#[derive(Clone, Default)]
pub(super) struct Images(Vec<Option<Arc<Image>>>);

impl Images {
    #[inline]
    pub(super) fn get(&self, id: DiskId) -> Option<&Arc<Image>> {
        self.0.get(id.index())?.as_ref()
    }
}

impl Shared {
    pub(super) fn images(&self) -> Images {
        self.images.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn image(&self, id: DiskId) -> io::Result<Arc<Image>> {
        let images = self.images.read().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::clone(images.get(id).ok_or(io::ErrorKind::InvalidInput)?))
    }

    fn set_image(&self, id: DiskId, image: Option<Arc<Image>>) {
        let mut images = self.images.write().unwrap_or_else(PoisonError::into_inner);
        if images.0.len() <= id.index() {
            images.0.resize(id.index() + 1, None);
        }
        images.0[id.index()] = image;
    }

    fn set_runner_of(&self, image: &Image) {
        if let Some(runner) = &*self.runner.read().unwrap_or_else(PoisonError::into_inner) {
            image.set_runner(runner);
        }
    }
}

impl RbdDevice {
    /// Joins images, in the order of the ids of their disks, on a queue whose tags number at most `depth`.
    pub fn new(disks: Vec<RbdDisk>, depth: u32) -> Self {
        let images: Vec<_> = disks.into_iter().map(|disk| Some(disk.image)).collect();
        let sizes = images.iter().flatten().map(|image| image.object_size);
        let object_size = sizes.min().unwrap_or(OBJECT_SIZE_MIN);
        let closings = Arc::default();
        images.iter().flatten().for_each(|image| image.join(&closings));
        Self {
            object_size,
            shared: Arc::new(Shared {
                images: RwLock::new(Images(images)),
                runner: RwLock::default(),
                closings,
            }),
            depth,
        }
    }
}

impl Device for RbdDevice {
    /// Completions are then found in the mailbox, and librbd's threads need not wake the reactor.
    fn polling(&self) -> Polling {
        Polling::Possible
    }

    fn limits(&self) -> Limits {
        Limits {
            segments_max: SEGMENTS_MAX as u16,
            optimal_io: self.object_size,
            discard_max: RANGE_MAX,
            discard_granularity: self.object_size.max(OBJECT_SIZE_MIN),
            zeroes_max: RANGE_MAX,
            // Without librbd's own cache a flush only waits for requests under way; with it, the
            // flush is needed.
            cache: true,
            ..Limits::default()
        }
    }

    fn set_runner(&self, runner: Runner) {
        *self.shared.runner.write().unwrap_or_else(PoisonError::into_inner) = Some(runner);
        let images = self.shared.images();
        images
            .0
            .iter()
            .flatten()
            .for_each(|image| self.shared.set_runner_of(image));
    }

    fn disks_max(&self, disks: usize) -> usize {
        disks.max(DISKS_MAX)
    }

    fn add_disk(&self, id: DiskId, disk: Box<dyn Any + Send>) -> io::Result<()> {
        let Ok(disk) = disk.downcast::<RbdDisk>() else {
            return Err(io::Error::other("its queue has disks of a Ceph cluster alone"));
        };
        self.shared.set_runner_of(&disk.image);
        disk.image.join(&self.shared.closings);
        self.shared.set_image(id, Some(disk.image));
        Ok(())
    }

    fn remove_disk(&self, id: DiskId) {
        self.shared.set_image(id, None);
    }

    fn resize(&self, disk: DiskId, wanted: Option<u64>) -> io::Result<u64> {
        self.shared.image(disk)?.resize(wanted)
    }

    fn reopen(&self, disk: DiskId) -> io::Result<Option<Box<dyn Any + Send>>> {
        let new = self.shared.image(disk)?.reopen()?;
        Ok(new.map(|new| Box::new(new) as _))
    }

    fn is_silent(&self) -> bool {
        let images = self.shared.images();
        images.0.iter().flatten().any(|image| image.is_silent())
    }

    fn is_removable(&self) -> bool {
        true
    }

    /// Waits for its images to be closed, so that the next user of their locks need not wait.
    fn close(&self) {
        *self.shared.images.write().unwrap_or_else(PoisonError::into_inner) = Images::default();
        if !self.shared.closings.wait_for_none(CLOSE_MAX) {
            tracing::warn!(
                "rbd: images are not closed after {CLOSE_MAX:?}: does the cluster answer? Their locks are held on"
            );
        }
    }

    /// The lock belongs to this process's connection: another process could only break it, and with
    /// it the requests under way.
    fn handover_state(&self, disk: DiskId) -> io::Result<HandoverState> {
        let image = self.shared.image(disk)?;
        let obstacle = format!(
            "the exclusive lock of rbd {} is held by this process's connection to the cluster",
            image.name()
        );
        Ok(HandoverState {
            must_flush: true,
            obstacle: image.is_locked().then_some(obstacle),
            is_exclusive: image.is_locked(),
            ..HandoverState::default()
        })
    }

    fn open_hctx(&self, ring: &RingHandle, _hctx: HctxId) -> io::Result<Box<dyn HctxDriver>> {
        Ok(Box::new(RbdHctx::new(
            Arc::clone(&self.shared),
            ring,
            self.depth,
        )?))
    }
}

impl Allocation for RbdDevice {
    fn extents(
        &self,
        disk: DiskId,
        offset: u64,
        len: u64,
        max: usize,
        out: &mut Vec<Extent>,
    ) -> io::Result<()> {
        // Not under the lock: the query may take long.
        self.shared.image(disk)?.extents(offset, len, max, out)
    }

    fn losses(&self, disk: DiskId) -> Losses {
        self.shared
            .image(disk)
            .map_or(Losses::default(), |image| image.losses())
    }

    fn mark_losses_seen(&self, disk: DiskId) {
        if let Ok(image) = self.shared.image(disk) {
            image.mark_losses_seen();
        }
    }

    fn state(&self, disk: DiskId) -> State {
        self.shared.image(disk).map_or(State::Gone, |image| image.state())
    }
}

impl Drop for RbdDevice {
    fn drop(&mut self) {
        self.close();
    }
}

/// Most images on one queue: memory for their lists is reserved from the start.
const DISKS_MAX: usize = 1024;
/// Largest discard or zeroing in one request, in bytes: 256 objects of the default size, an
/// operation for each.
const RANGE_MAX: u64 = 1 << 30;
/// The smallest objects that an image can have, in bytes.
const OBJECT_SIZE_MIN: u32 = 4096;
const CLOSE_MAX: Duration = Duration::from_secs(5);
