//! The drive of disks in files that share a queue: their common limits, and a hardware context for each
//! reactor. `open` makes the disks; `hctx` decides what a request becomes.

use std::any::Any;
use std::fs::File;
use std::io;
#[cfg(feature = "qcow2")]
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use blkmq_core::driver::HctxDriver;
use blkmq_core::ids::{DiskId, HctxId};
use blkmq_core::limits::Limits;
use blkmq_host::block_locks::Announcements;
use blkmq_host::device::{Allocation, Device, Extent, FileId, HandoverState, Losses, Polling, State};
#[cfg(feature = "qcow2")]
use blkmq_host::device::{BitmapInfo, Changed, Replacement};
use blkmq_host::ring::RingHandle;
#[cfg(feature = "qcow2")]
use blkmq_host::runner::Runner;

use super::bounce::LARGE_BYTES;
use super::disk::{self, FileDisk};
use super::disks::{Disks, NewDisk};
use super::hctx::FileHctx;
use super::watch;
use crate::mapping::Mapping;
#[cfg(feature = "qcow2")]
use crate::qcow2::{self, Change, Guests, ImageHctx, PARTS};

/// Disks in files that share a drive, and so a queue.
#[derive(Clone, Debug)]
pub struct FileDevice {
    shared: Arc<Shared>,
    depth: u32,
}

/// What the hardware contexts of a drive share.
#[derive(Debug)]
pub(super) struct Shared {
    disks: RwLock<Disks>,
    /// The smallest block of the first disks, of files the least there is: requests may be cut at it, whatever direct I/O
    /// of one of them needs.
    block: u32,
    /// The writes of each hardware context.
    pub(super) writers: Announcements,
    /// The requests of images.
    #[cfg(feature = "qcow2")]
    guests: Arc<Guests>,
    #[cfg(feature = "qcow2")]
    runner: RwLock<Option<Runner>>,
    /// Never written: source of zeroes where the filesystem cannot zero a range.
    pub(super) zeroes: Mapping,
    /// Requests whose end was found by polling their device.
    pub(super) ended_polled: AtomicU64,
}

impl Shared {
    pub(super) fn disks(&self) -> Disks {
        self.disks.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Visits the files that a disk writes, if it is there: one, or those of an image. Clients call this in each turn: it
    /// allocates nothing.
    fn for_each_file(&self, disk: DiskId, visit: impl FnMut(&FileDisk)) {
        let mut visit = visit;
        let disks = self.disks.read().unwrap_or_else(PoisonError::into_inner);
        #[cfg(feature = "qcow2")]
        if let Some(image) = disks.image(disk) {
            return image.own_files().for_each(|file| visit(file));
        }
        disks.get(disk).into_iter().for_each(|file| visit(file));
    }

    /// Looks what is at the paths of the files that a disk writes: on network filesystems, too, if the caller `may_wait`.
    /// Not under the lock, which reactors take: it may block.
    fn look_at_paths(&self, disk: DiskId, may_wait: bool) {
        let disks = self.disks.read().unwrap_or_else(PoisonError::into_inner);
        #[cfg(feature = "qcow2")]
        if let Some(image) = disks.image(disk).cloned() {
            drop(disks);
            let is_moving = || image.is_closing();
            let files = image.own_files();
            return files.for_each(|file| file.look_at_path(may_wait, is_moving));
        }
        let file = disks.get(disk).cloned();
        drop(disks);
        file.into_iter()
            .for_each(|file| file.look_at_path(may_wait, || false));
    }

    fn set_disk(&self, id: DiskId, disk: Option<NewDisk>) {
        #[cfg(feature = "qcow2")]
        if let Some(image) = disk.as_ref().and_then(|disk| disk.image.as_ref()) {
            image.join(&self.guests, id);
        }
        let mut disks = self.disks.write().unwrap_or_else(PoisonError::into_inner);
        #[cfg(feature = "qcow2")]
        let before = disks.image(id).cloned();
        disks.set(id, disk);
        let file = disks.get(id).cloned();
        drop(disks);
        file.iter().for_each(watch::watch);
        #[cfg(feature = "qcow2")]
        if let Some(image) = before {
            // Not under the lock: it blocks.
            image.close();
        }
    }
}

impl FileDevice {
    /// Joins disks, in the order of their ids, on a queue whose tags number at most `depth`.
    ///
    /// # Errors
    /// `OutOfMemory` if there is no memory for a megabyte of zeroes.
    pub fn new(disks: Vec<FileDisk>, depth: u32) -> io::Result<Self> {
        Self::of(disks.into_iter().map(NewDisk::raw).collect(), depth)
    }

    /// The same of disks of any kind.
    pub(super) fn of(disks: Vec<NewDisk>, depth: u32) -> io::Result<Self> {
        let sectors = disks.iter().map(|disk| match disk.file.is_block_device() {
            true => disk.file.block_size(),
            false => LEAST_BLOCK,
        });
        let block = sectors.min().unwrap_or(LEAST_BLOCK);
        let shared = Shared {
            disks: RwLock::new(Disks::new(disks.len().max(DISKS_MAX))),
            block,
            writers: Announcements::default(),
            #[cfg(feature = "qcow2")]
            guests: Arc::default(),
            #[cfg(feature = "qcow2")]
            runner: RwLock::default(),
            zeroes: Mapping::new(ZEROES_BYTES)?,
            ended_polled: AtomicU64::new(0),
        };
        for (id, disk) in (0..).map(DiskId).zip(disks) {
            shared.set_disk(id, Some(disk));
        }
        Ok(Self {
            shared: Arc::new(shared),
            depth,
        })
    }

    /// Returns the disks.
    pub fn disks(&self) -> Vec<Arc<FileDisk>> {
        self.shared.disks().iter().cloned().collect()
    }

    /// The image of a disk.
    #[cfg(all(test, feature = "qcow2"))]
    pub(crate) fn image(&self, disk: DiskId) -> Option<Arc<qcow2::Image>> {
        self.shared.disks().image(disk).cloned()
    }

    /// The image of a disk.
    #[cfg(feature = "qcow2")]
    fn image_of(&self, disk: DiskId) -> io::Result<Arc<qcow2::Image>> {
        let image = self.shared.disks().image(disk).cloned();
        image.ok_or_else(|| io::Error::other("it has no bitmaps: only images of qcow2= can have them"))
    }

    /// Returns how many requests ended that were found by polling their device (IOPOLL).
    pub fn ended_polled(&self) -> u64 {
        self.shared.ended_polled.load(Ordering::Relaxed)
    }

    /// Returns whether a discard of one of the disks has an effect.
    fn gives_back(&self, disks: &Disks) -> bool {
        #[cfg(feature = "qcow2")]
        if disks.images().iter().flatten().any(|image| image.gives_back()) {
            return true;
        }
        disks.iter().any(|disk| disk.gives_back())
    }

    /// Makes a hardware context.
    #[cfg(any(test, not(feature = "qcow2")))]
    pub(super) fn hctx(&self, ring: &RingHandle) -> io::Result<FileHctx> {
        FileHctx::new(Arc::clone(&self.shared), ring, self.depth)
    }

    /// Makes a hardware context that has images, too.
    #[cfg(feature = "qcow2")]
    pub(crate) fn image_hctx(&self, ring: &RingHandle, hctx: HctxId) -> io::Result<ImageHctx> {
        let depth = self.depth + PARTS;
        let file = FileHctx::new(Arc::clone(&self.shared), ring, depth)?;
        let runner = self
            .shared
            .runner
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        Ok(ImageHctx::new(
            file,
            Arc::clone(&self.shared.guests),
            runner,
            hctx,
            self.depth,
        ))
    }
}

impl Device for FileDevice {
    fn polling(&self) -> Polling {
        Polling::Possible
    }

    fn describe_polling(&self) -> Option<String> {
        let disks = self.disks();
        let mut refused = disks
            .iter()
            .filter_map(|disk| Some((disk, disk.polling().err()?)));
        let first = refused.next();
        let polled = disks.len() - first.iter().len() - refused.count();
        let mut text = format!(
            "the devices of {polled} of {} disks (IOPOLL, {} requests so far)",
            disks.len(),
            self.ended_polled()
        );
        if let Some((disk, reason)) = first {
            text += &format!("; of {:?} the ring is looked at, since {reason}", disk.path);
        }
        Some(text)
    }

    fn limits(&self) -> Limits {
        let (block, disks) = (self.shared.block, self.shared.disks());
        let granularities = disks.iter().map(|disk| disk.discards.granularity);
        let ranges = disks.iter().map(|disk| disk.range().max(disk.block_size()));
        Limits {
            logical_block: block,
            any_alignment: true,
            // Smaller writes read first.
            physical_block: ranges.max().unwrap_or(1).max(block).max(PHYSICAL_BLOCK),
            transfer_max: LARGE_BYTES as u32,
            segments_max: SEGMENTS_MAX as u16,
            // Nothing is offered that has no effect.
            discard_max: match self.gives_back(&disks) {
                true => DISCARD_MAX,
                false => 0,
            },
            discard_granularity: granularities.max().unwrap_or(0).max(block).max(PHYSICAL_BLOCK),
            zeroes_max: ZEROES_MAX,
            zeroes_are_written: disks.iter().any(|disk| disk.writes_zeroes()),
            cache: true,
            // With the page cache each forced write would be a sync of its own; with flushes by the
            // queue, writes share them.
            fua: disks.iter().all(|disk| disk.is_direct()),
            ..Limits::default()
        }
    }

    fn disks_max(&self, disks: usize) -> usize {
        disks.max(DISKS_MAX)
    }

    fn add_disk(&self, id: DiskId, disk: Box<dyn Any + Send>) -> io::Result<()> {
        let Some(disk) = NewDisk::of_any(disk) else {
            return Err(io::Error::other("its queue has disks in files alone"));
        };
        self.shared.set_disk(id, Some(disk));
        Ok(())
    }

    fn remove_disk(&self, id: DiskId) {
        self.shared.set_disk(id, None);
    }

    fn resize(&self, disk: DiskId, wanted: Option<u64>) -> io::Result<u64> {
        self.shared.look_at_paths(disk, true);
        let disks = self.shared.disks();
        #[cfg(feature = "qcow2")]
        if let Some(image) = disks.image(disk) {
            return image.resize(wanted);
        }
        disks.get(disk).ok_or(io::ErrorKind::InvalidInput)?.resize(wanted)
    }

    fn reopen(&self, disk: DiskId) -> io::Result<Option<Box<dyn Any + Send>>> {
        let disks = self.shared.disks();
        #[cfg(feature = "qcow2")]
        if let Some(image) = disks.image(disk) {
            return Ok(image.reopen()?.map(|new| Box::new(new) as _));
        }
        let new = disks.get(disk).ok_or(io::ErrorKind::InvalidInput)?.reopen()?;
        Ok(new.map(|new| Box::new(new) as _))
    }

    #[cfg(feature = "qcow2")]
    fn replace(
        &self,
        disks: &[(DiskId, Replacement)],
        refresh: &dyn Fn() -> io::Result<()>,
    ) -> io::Result<()> {
        let all = self.shared.disks();
        let other = || io::Error::other("it is no image: only those of qcow2= can be replaced");
        let found = disks
            .iter()
            .map(|(id, _)| all.image(*id).cloned().ok_or_else(other));
        let former = found.collect::<io::Result<Vec<_>>>()?;
        drop(all);
        let set = |images: &[Arc<qcow2::Image>]| {
            for ((id, _), image) in disks.iter().zip(images) {
                self.shared.set_disk(*id, Some(NewDisk::image(Arc::clone(image))));
            }
        };
        let put = |opened: Vec<Arc<qcow2::Image>>| {
            set(&opened);
            refresh().inspect_err(|_| {
                // Nothing of what they have is written any more.
                opened.iter().for_each(|image| image.set_closing(true));
                set(&former);
                // Contexts that have them let them go.
                let _ = refresh();
            })
        };
        if let ([(_, wanted)], [image]) = (disks, &former[..]) {
            match wanted {
                Replacement::BeginFlat => return qcow2::flatten::check(image),
                Replacement::SettleFlat(given_up) => return qcow2::flatten::settle(image, given_up),
                Replacement::Flat => return qcow2::flatten::finish(image, put),
                Replacement::BeginCommit => return qcow2::commit::begin(image, put),
                Replacement::SettleCommit(given_up) => return qcow2::commit::settle(image, given_up),
                Replacement::Commit => return qcow2::commit::finish(image, put),
                Replacement::LeaveCommit => return qcow2::commit::leave(image),
                Replacement::Snapshot(_) | Replacement::Reset => {}
            }
        }
        let change = |(image, (_, wanted)): (&Arc<qcow2::Image>, &(DiskId, Replacement))| {
            let change = match wanted {
                Replacement::Snapshot(path) => Change::Snapshot(path.clone()),
                Replacement::Reset => Change::Reset,
                _ => return Err(io::Error::other("one at a time is made flat or committed")),
            };
            Ok((Arc::clone(image), change))
        };
        let images = former.iter().zip(disks).map(change);
        qcow2::replace(&images.collect::<io::Result<Vec<_>>>()?, put)
    }

    fn is_removable(&self) -> bool {
        true
    }

    /// Written data is in the page cache or on the device, where another process's flush covers it,
    /// too. Only the lock and the records that a flush has failed or data was lost are in this process.
    fn handover_state(&self, disk: DiskId) -> io::Result<HandoverState> {
        let (id, disks) = (disk, self.shared.disks());
        let disk = disks.get(id).ok_or(io::ErrorKind::InvalidInput)?;
        #[cfg(not(feature = "qcow2"))]
        let (files, must_flush) = (vec![disk], false);
        #[cfg(feature = "qcow2")]
        let (files, must_flush) = match disks.image(id) {
            // The tables are in memory until a flush. The other process reads them with its first request.
            Some(image) => (image.own_files().collect(), true),
            None => (vec![disk], false),
        };
        let locks = files
            .iter()
            .filter_map(|disk| disk.locking_file())
            .map(File::try_clone);
        let locks = locks
            .map(|file| file.map(Into::into))
            .collect::<io::Result<_>>()?;
        let obstacle = files.iter().find_map(|file| {
            // Relaxed: nothing is in flight.
            let what = match file.flush_failed.load(Ordering::Relaxed) {
                true => "a flush of it has failed",
                false if file.is_truncated() => "it was truncated",
                false => return None,
            };
            Some(format!(
                "file {:?}: {what}, and another process would not know",
                file.path
            ))
        });
        Ok(HandoverState {
            locks,
            must_flush,
            obstacle,
            ..HandoverState::default()
        })
    }

    fn files(&self, disk: DiskId) -> Vec<FileId> {
        let disks = self.shared.disks();
        #[cfg(feature = "qcow2")]
        if let Some(image) = disks.image(disk) {
            return image.files().iter().filter_map(|file| file.id).collect();
        }
        disks.get(disk).and_then(|disk| disk.id).into_iter().collect()
    }

    #[cfg(feature = "qcow2")]
    fn files_of_base(&self, disk: DiskId) -> Vec<FileId> {
        let disks = self.shared.disks();
        disks
            .image(disk)
            .map_or_else(Vec::new, |image| image.files_of_base())
    }

    #[cfg(feature = "qcow2")]
    fn add_bitmap(&self, disk: DiskId, name: &str, granularity: Option<u64>) -> io::Result<()> {
        self.image_of(disk)?.add_bitmap(name, granularity)
    }

    #[cfg(feature = "qcow2")]
    fn remove_bitmap(&self, disk: DiskId, name: &str) -> io::Result<()> {
        self.image_of(disk)?.remove_bitmap(name)
    }

    #[cfg(feature = "qcow2")]
    fn bitmaps(&self, disk: DiskId) -> io::Result<Vec<BitmapInfo>> {
        let image = self.shared.disks().image(disk).cloned();
        image.map_or_else(|| Ok(Vec::new()), |image| image.bitmaps())
    }

    #[cfg(feature = "qcow2")]
    fn prepare_handover(&self, disk: DiskId) {
        if let Ok(image) = self.image_of(disk) {
            image.rest();
        }
    }

    fn drives(&self) -> Vec<String> {
        let mut drives: Vec<String> = Vec::new();
        for disk in self.shared.disks().iter() {
            drives.extend_from_slice(&disk.place.drives);
        }
        drives
    }

    #[cfg(feature = "qcow2")]
    fn close(&self) {
        self.shared
            .disks()
            .images()
            .iter()
            .flatten()
            .for_each(|image| image.close());
    }

    #[cfg(feature = "qcow2")]
    fn set_runner(&self, runner: Runner) {
        *self.shared.runner.write().unwrap_or_else(PoisonError::into_inner) = Some(runner);
    }

    #[cfg(feature = "qcow2")]
    fn open_hctx(&self, ring: &RingHandle, hctx: HctxId) -> io::Result<Box<dyn HctxDriver>> {
        Ok(Box::new(self.image_hctx(ring, hctx)?))
    }

    #[cfg(not(feature = "qcow2"))]
    fn open_hctx(&self, ring: &RingHandle, _hctx: HctxId) -> io::Result<Box<dyn HctxDriver>> {
        Ok(Box::new(self.hctx(ring)?))
    }
}

impl Allocation for FileDevice {
    fn extents(
        &self,
        disk: DiskId,
        offset: u64,
        len: u64,
        max: usize,
        out: &mut Vec<Extent>,
    ) -> io::Result<()> {
        // Not under the lock: the query may take long.
        let disks = self.shared.disks();
        #[cfg(feature = "qcow2")]
        if let Some(image) = disks.image(disk) {
            return image.extents(offset, len, max, out);
        }
        disks
            .get(disk)
            .ok_or(io::ErrorKind::InvalidInput)?
            .extents(offset, len, max, out)
    }

    #[cfg(feature = "qcow2")]
    fn left(&self, disk: DiskId, offset: u64, len: u64, max: usize, out: &mut Vec<Extent>) -> io::Result<()> {
        let image = self.shared.disks().image(disk).cloned();
        image
            .ok_or(io::ErrorKind::InvalidInput)?
            .left(offset, len, max, out)
    }

    #[cfg(feature = "qcow2")]
    fn bitmap_names(&self, disk: DiskId) -> Vec<String> {
        let image = self.shared.disks().image(disk).cloned();
        image.map_or_else(Vec::new, |image| image.bitmap_names())
    }

    #[cfg(feature = "qcow2")]
    fn changed(
        &self,
        disk: DiskId,
        bitmap: &str,
        range: Range<u64>,
        max: usize,
        out: &mut Vec<Changed>,
    ) -> io::Result<()> {
        self.image_of(disk)?.changed(bitmap, range, max, out)
    }

    #[cfg(feature = "qcow2")]
    fn limits_of(&self, disk: DiskId, queue: &Limits) -> Limits {
        match self.shared.disks().image(disk) {
            Some(image) => image.limits(queue),
            None => queue.clone(),
        }
    }

    fn losses(&self, disk: DiskId) -> Losses {
        if !disk::has_any_loss() {
            return Losses::default();
        }
        let mut losses = Losses::default();
        self.shared
            .for_each_file(disk, |file| losses = losses.and(file.losses()));
        losses
    }

    fn mark_losses_seen(&self, disk: DiskId) {
        self.shared.for_each_file(disk, FileDisk::mark_losses_seen);
    }

    fn look(&self, disk: DiskId) {
        self.shared.look_at_paths(disk, false);
    }

    fn state(&self, disk: DiskId) -> State {
        let mut state = State::Ok;
        self.shared
            .for_each_file(disk, |file| state = state.max(file.state()));
        state
    }
}

/// Most disks on one filesystem or device: memory for their lists is reserved from the start.
const DISKS_MAX: usize = 1024;
/// Most pieces of memory in one request: a row of the table of each slot.
pub(super) const SEGMENTS_MAX: usize = 128;
/// The data of zeroes, in bytes: the largest piece in which they are written.
pub(super) const ZEROES_BYTES: usize = 1 << 20;
/// Largest discard in one request, in bytes. The kernel executes it on a thread of its own.
const DISCARD_MAX: u64 = 1 << 30;
/// Largest zeroing in one request, in bytes: even if written out, it ends well within a time limit.
const ZEROES_MAX: u64 = 256 << 20;
/// The smallest logical block, in bytes.
const LEAST_BLOCK: u32 = 512;
/// The usual page and block size of filesystems, in bytes.
const PHYSICAL_BLOCK: u32 = 4096;
