//! The disks of a drive by their ids, and the files below them that are no disks: the bases of images. `device`
//! keeps the list; each hardware context has a copy, which it replaces when it is told of a change.

use std::sync::Arc;

use blkmq_core::ids::DiskId;

use super::disk::FileDisk;
use crate::driver::OpenDisk;
#[cfg(feature = "qcow2")]
use crate::qcow2::{Image, ImageDisk};

/// The disks of a drive by their ids, at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Disks {
    /// The files of the disks, and from `disks_max` on those below images.
    files: Vec<Option<Arc<FileDisk>>>,
    #[cfg(feature = "qcow2")]
    images: Vec<Option<Arc<Image>>>,
    disks_max: usize,
}

/// A disk on its way into a drive.
pub(super) struct NewDisk {
    pub(super) file: Arc<FileDisk>,
    #[cfg(feature = "qcow2")]
    pub(super) image: Option<Arc<Image>>,
}

impl NewDisk {
    /// The disk in a file.
    pub(super) fn raw(disk: FileDisk) -> Self {
        Self {
            file: Arc::new(disk),
            #[cfg(feature = "qcow2")]
            image: None,
        }
    }

    /// The disk in an image.
    #[cfg(feature = "qcow2")]
    pub(super) fn image(image: Arc<Image>) -> Self {
        Self {
            file: Arc::clone(&image.files()[0]),
            image: Some(image),
        }
    }

    /// The disk that one of the drivers of files has opened.
    pub(super) fn of(disk: Box<dyn OpenDisk>) -> Option<Self> {
        let disk: Box<dyn std::any::Any + Send> = disk;
        Self::of_any(disk)
    }

    /// The same, of any type.
    pub(super) fn of_any(disk: Box<dyn std::any::Any + Send>) -> Option<Self> {
        let other = match disk.downcast::<FileDisk>() {
            Ok(disk) => return Some(Self::raw(*disk)),
            Err(other) => other,
        };
        #[cfg(feature = "qcow2")]
        if let Ok(disk) = other.downcast::<ImageDisk>() {
            return Some(Self::image(disk.image));
        }
        #[cfg(not(feature = "qcow2"))]
        drop(other);
        None
    }
}

impl Disks {
    /// No disks yet, of which there will be at most `disks_max`.
    pub(super) fn new(disks_max: usize) -> Self {
        Self {
            disks_max,
            ..Self::default()
        }
    }

    #[inline]
    pub(super) fn get(&self, id: DiskId) -> Option<&Arc<FileDisk>> {
        self.files.get(id.index())?.as_ref()
    }

    /// The disk of a request that is under way.
    #[inline]
    pub(super) fn of(&self, disk: u32) -> &FileDisk {
        self.files[disk as usize]
            .as_ref()
            .expect("nobody removes a disk in use")
    }

    /// The number of entries, used or not.
    pub(super) fn len(&self) -> usize {
        self.files.len()
    }

    /// The files of the disks.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<FileDisk>> {
        self.files.iter().take(self.disks_max).flatten()
    }

    /// Adds a disk, with what is below it, or removes one.
    pub(super) fn set(&mut self, id: DiskId, disk: Option<NewDisk>) {
        if self.files.len() <= id.index() {
            self.files.resize(id.index() + 1, None);
        }
        #[cfg(feature = "qcow2")]
        let image = disk.as_ref().and_then(|disk| disk.image.clone());
        // Before what is below: that may be what was in its place.
        self.files[id.index()] = disk.map(|disk| disk.file);
        #[cfg(feature = "qcow2")]
        self.set_image(id, image);
    }
}

#[cfg(feature = "qcow2")]
impl Disks {
    /// The images by the ids of their disks.
    pub(crate) fn images(&self) -> &[Option<Arc<Image>>] {
        &self.images
    }

    /// The image of a disk, if it lies in one.
    pub(super) fn image(&self, id: DiskId) -> Option<&Arc<Image>> {
        self.images.get(id.index())?.as_ref()
    }

    /// The number under which a file is listed.
    pub(crate) fn id_of(&self, file: &Arc<FileDisk>) -> Option<DiskId> {
        let is_it =
            |other: &Option<Arc<FileDisk>>| other.as_ref().is_some_and(|other| Arc::ptr_eq(other, file));
        self.files.iter().position(is_it).map(|at| DiskId(at as u32))
    }

    fn set_image(&mut self, id: DiskId, image: Option<Arc<Image>>) {
        if image.is_none() && self.image(id).is_none() {
            return;
        }
        if self.images.len() <= id.index() {
            self.images.resize(id.index() + 1, None);
        }
        for file in image.iter().flat_map(|image| &image.files()[1..]) {
            self.add_below(file);
        }
        self.images[id.index()] = image;
        self.drop_unused();
    }

    fn add_below(&mut self, file: &Arc<FileDisk>) {
        if self.id_of(file).is_some() {
            return;
        }
        if self.files.len() < self.disks_max {
            self.files.resize(self.disks_max, None);
        }
        let free = self.files[self.disks_max..].iter().position(Option::is_none);
        match free {
            Some(at) => self.files[self.disks_max + at] = Some(Arc::clone(file)),
            None => self.files.push(Some(Arc::clone(file))),
        }
    }

    /// Closes the files below images that no image has any more.
    fn drop_unused(&mut self) {
        let images = &self.images;
        let is_used = |file: &Arc<FileDisk>| {
            let files = images.iter().flatten().flat_map(|image| image.files());
            files.into_iter().any(|other| Arc::ptr_eq(other, file))
        };
        for entry in self.files.iter_mut().skip(self.disks_max) {
            if entry.as_ref().is_some_and(|file| !is_used(file)) {
                *entry = None;
            }
        }
    }
}
