//! The files of an image: what is below it, which of them it writes, and the locks that it has on those.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blkmq_core::limits::Limits;
use blkmq_host::device::FileId;

use super::super::chain::Base;
use super::super::create::BaseFormat;
use super::super::disk::ImageDisk;
use super::super::header::Header;
use super::super::tables::Tables;
use super::commit::Commit;
use super::{Image, Parts, lock};
use crate::file::{FileDisk, FileError};

/// What has to be durable before a flush of an image ends.
pub(super) struct Unsettled {
    below: Option<Arc<Image>>,
    directories: [File; 2],
}

impl Image {
    /// Returns whether a discard gives space back: zero clusters are there since version 3.
    pub(in crate::qcow2) fn has_zero_clusters(&self) -> bool {
        self.header.version >= 3
    }

    /// The file below it, and its format.
    pub(in crate::qcow2) fn base_file(&self) -> Option<(PathBuf, BaseFormat)> {
        let base = self.base.as_ref()?;
        let format = if base.header.is_some() {
            BaseFormat::Qcow2
        } else {
            BaseFormat::Raw
        };
        Some((base.path.clone(), format))
    }

    /// Images of its chain, itself among them.
    pub(in crate::qcow2) fn chain_len(&self) -> usize {
        1 + self.base.iter().flat_map(Base::all).count()
    }

    /// Returns whether a discard has an effect.
    pub(crate) fn gives_back(&self) -> bool {
        self.has_zero_clusters() || !self.has_base()
    }

    /// What clients of the disk are told, of a queue with these limits: what is less than a cluster is not given back.
    pub(crate) fn limits(&self, queue: &Limits) -> Limits {
        Limits {
            discard_max: if self.gives_back() { queue.discard_max } else { 0 },
            discard_granularity: queue.discard_granularity.max(self.header.cluster() as u32),
            ..queue.clone()
        }
    }

    /// Has it served again although data may be lost: all of its files are made durable. After a failed sync the tables
    /// are those in the file again: the kernel may have dropped what was written to new clusters, and with it copies of what
    /// had long been durable. Returns the image that has to take its place, if a filesystem was mounted again. Blocks.
    ///
    /// # Errors
    /// A file is not what was opened, or still cannot be made durable.
    pub(crate) fn reopen(&self) -> io::Result<Option<ImageDisk>> {
        let losses = || self.own_files().map(|file| file.losses().count).sum::<u64>();
        let (before, has_failed) = (losses(), self.own_files().any(|file| file.has_failed_flush()));
        let mut files = self.own_files();
        let went_on = files.try_fold(false, |is_elsewhere, file| {
            file.go_on_if_there().map(|is_there| is_elsewhere | !is_there)
        });
        // Also if one of them could not go on: the others do not tell once more.
        self.has_lost
            .fetch_or(has_failed || losses() > before, Ordering::SeqCst);
        let mut is_elsewhere = went_on?;
        for base in self.base.iter().flat_map(Base::all) {
            let there = std::fs::metadata(&base.path).ok().as_ref().map(FileId::of);
            is_elsewhere |= there != base.disk.id;
        }
        if !is_elsewhere {
            if self.has_lost.load(Ordering::SeqCst) {
                let tables = self.tables()?;
                self.alone(0..u64::MAX, || {
                    self.forget_copied();
                    tables.forget_unflushed()
                })?;
                self.has_lost.store(false, Ordering::SeqCst);
            }
            return self.flush().map(|()| None);
        }
        let image = ImageDisk::open(&self.config).map_err(io::Error::other)?;
        for (new, old) in image.image.files().iter().zip(&self.files) {
            new.note_lost_with(old);
        }
        match image.image.size() < self.size() {
            true => Err(io::Error::other("it is smaller now: restore it first")),
            false => Ok(Some(image)),
        }
    }

    /// Returns whether its data is in a file of its own.
    pub(in crate::qcow2) fn has_beside(&self) -> bool {
        self.has_beside
    }

    /// The image as a base, which is at `path` now and is not written any more. What is only in memory stays there.
    pub(in crate::qcow2) fn become_base(&self, path: &Path) -> io::Result<Arc<Base>> {
        // It is read below another one from now on.
        self.share_locks().map_err(io::Error::other)?;
        self.as_base(path.canonicalize()?)
    }

    /// The image as it is in memory, which is at `path`, as what others lie on.
    pub(super) fn as_base(&self, path: PathBuf) -> io::Result<Arc<Base>> {
        Ok(Arc::new(Base {
            disk: Arc::clone(&self.files[0]),
            path,
            beside: self.beside().cloned(),
            header: Some(Header {
                size: self.size(),
                ..self.header.clone()
            }),
            below: self.base.clone(),
            size: self.size(),
            tables: self.tables()?.into(),
        }))
    }

    /// The same image, with the same files and tables, on something else.
    pub(super) fn laid_on(
        &self,
        tables: &Arc<Tables>,
        base: Option<Arc<Base>>,
        commit: Option<Commit>,
    ) -> Self {
        let header = Header {
            size: self.size(),
            ..self.header.clone()
        };
        let mut next = Self::new(Parts {
            header: Header {
                backing: header.backing.filter(|_| base.is_some()),
                ..header
            },
            top: Arc::clone(&self.files[0]),
            beside: self.beside().cloned(),
            base,
            config: self.config.clone(),
            block_size: self.block_size,
            found_bitmaps: Vec::new(),
        });
        let is_first = next.tables.set(Arc::clone(tables));
        debug_assert!(is_first.is_ok(), "it was just made");
        next.has_lost
            .store(self.has_lost.load(Ordering::SeqCst), Ordering::SeqCst);
        next.commit = commit;
        next
    }

    /// Notes what has to be durable before a flush of this image ends: the image below it, which it has taken the place of,
    /// and its name in these directories: open, since threads that reactors start may open nothing.
    pub(in crate::qcow2) fn set_unsettled(&self, below: Option<Arc<Self>>, directories: [File; 2]) {
        *lock(&self.unsettled) = Some(Unsettled { below, directories });
        self.is_settled.store(false, Ordering::SeqCst);
    }

    /// Makes that durable. Blocks.
    pub(in crate::qcow2) fn settle(&self) -> io::Result<()> {
        if self.is_settled.load(Ordering::SeqCst) {
            return Ok(());
        }
        let mut unsettled = lock(&self.unsettled);
        if let Some(what) = &*unsettled {
            if let Some(below) = &what.below {
                below.flush()?;
                below.store_bitmaps();
            }
            for directory in &what.directories {
                directory.sync_all()?;
            }
        }
        *unsettled = None;
        self.is_settled.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Waits until no flush of the data alone is under way. The image is closing, so none begins.
    pub(in crate::qcow2) fn wait_for_flushes(&self) {
        if let Some((guests, disk)) = self.place.get() {
            guests.wait_for(*disk, &(u64::MAX - 1..u64::MAX));
        }
    }

    /// The files that it writes, which others may read from now on.
    pub(in crate::qcow2) fn share_locks(&self) -> Result<(), FileError> {
        self.own_files().try_for_each(|file| file.share_lock())
    }

    /// They may not any more.
    pub(in crate::qcow2) fn take_locks_back(&self) -> Result<(), FileError> {
        self.own_files().try_for_each(|file| file.take_lock_back())
    }

    /// The files that it writes.
    pub(crate) fn own_files(&self) -> impl Iterator<Item = &Arc<FileDisk>> {
        self.files.iter().take(1 + usize::from(self.has_beside))
    }

    /// The files that what is below it writes when it is committed.
    pub(crate) fn files_of_base(&self) -> Vec<FileId> {
        let base = self.base.iter();
        let files = base.flat_map(|base| base.beside.iter().chain([&base.disk]));
        files.filter_map(|file| file.id).collect()
    }

    pub(in crate::qcow2) fn has_base(&self) -> bool {
        self.base.is_some()
    }

    /// What is below it.
    pub(in crate::qcow2) fn base(&self) -> Option<&Arc<Base>> {
        self.base.as_ref()
    }
}
