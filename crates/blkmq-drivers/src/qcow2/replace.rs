//! Images that are replaced under their disk: by an overlay, so that what was there is a snapshot, or by an empty
//! one. All disks of one call change at one moment; `file::device` passes them here.
//!
//! ```text
//!  link the image as the snapshot ─► make an overlay on it beside ─► rename it into the image's place ─► open it
//! ```
//!
//! At each step the image's name leads to an image that has everything. Requests wait meanwhile at the image's gate,
//! and go on with the successor.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::config::Qcow2Config;
use super::create::{BaseFormat, NewImage};
use super::disk::ImageDisk;
use super::image::Image;
use super::rules::Rules;
use crate::driver::Purpose;

/// What becomes of an image.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    /// It is kept at this path, read-only, below a new one.
    Snapshot(PathBuf),
    /// Its content is thrown away, so that what is below it shows again.
    Reset,
}

/// Replaces images at one moment: `put` gives the successors their places, and tells all reactors. Blocks.
///
/// # Errors
/// Nothing has changed then, and the error says why.
pub(crate) fn replace(
    images: &[(Arc<Image>, Change)],
    put: impl FnOnce(Vec<Arc<Image>>) -> io::Result<()>,
) -> io::Result<()> {
    for (image, change) in images {
        image.check_change(change)?;
        // Most of it, while requests go on.
        image.flush()?;
    }
    let close = |on| images.iter().for_each(|(image, _)| image.set_closing(on));
    close(true);
    let replaced = together(images, Box::new(|| change_all(images, put)));
    if replaced.is_err() {
        close(false);
    }
    replaced
}

/// Does something while nobody uses any of the images.
fn together(
    images: &[(Arc<Image>, Change)],
    work: Box<dyn FnOnce() -> io::Result<()> + '_>,
) -> io::Result<()> {
    match images {
        [] => work(),
        [(first, _), rest @ ..] => first.alone(0..u64::MAX, || together(rest, work)),
    }
}

fn change_all(
    images: &[(Arc<Image>, Change)],
    put: impl FnOnce(Vec<Arc<Image>>) -> io::Result<()>,
) -> io::Result<()> {
    let mut begun: Vec<Begun<'_>> = Vec::new();
    for (image, change) in images {
        image.flush()?;
        begun.push(Begun::new(image, change)?);
    }
    let opened = begun
        .iter_mut()
        .map(Begun::open)
        .collect::<io::Result<Vec<_>>>()?;
    put(opened.clone())?;
    for ((image, _), next) in images.iter().zip(opened) {
        image.follow(next);
    }
    begun.into_iter().for_each(Begun::keep);
    Ok(())
}

/// An image in whose place another one is; dropped, it is there again.
struct Begun<'a> {
    image: &'a Image,
    place: PathBuf,
    /// Where it is meanwhile.
    aside: PathBuf,
    is_snapshot: bool,
    has_moved: bool,
    is_kept: bool,
}

impl<'a> Begun<'a> {
    fn new(image: &'a Image, change: &Change) -> io::Result<Self> {
        let place = image.config.path.canonicalize()?;
        let (aside, is_snapshot) = match change {
            Change::Snapshot(path) => (path.clone(), true),
            Change::Reset => (beside(&place, OLD), false),
        };
        if !is_snapshot {
            // What a daemon that was killed has left: the image is in its place in any case.
            let _ = std::fs::remove_file(&aside);
        }
        std::fs::hard_link(&place, &aside)
            .map_err(|error| io::Error::new(error.kind(), format!("{aside:?} cannot be made: {error}")))?;
        let mut begun = Self {
            image,
            place,
            aside,
            is_snapshot,
            has_moved: false,
            is_kept: false,
        };
        let made = beside(&begun.place, NEW);
        let _ = std::fs::remove_file(&made);
        let moved = begun
            .make(&made)
            .and_then(|()| std::fs::rename(&made, &begun.place));
        if let Err(error) = moved {
            let _ = std::fs::remove_file(&made);
            return Err(error);
        }
        begun.has_moved = true;
        sync_directory(&begun.place)?;
        Ok(begun)
    }

    /// Makes the image that takes the place.
    fn make(&self, path: &Path) -> io::Result<()> {
        let base = match self.is_snapshot {
            true => Some((self.aside.clone(), BaseFormat::Qcow2)),
            false => self.image.base_file(),
        };
        let new = NewImage {
            path: path.to_owned(),
            size: Some(self.image.size()),
            cluster: Some(self.image.header.cluster() as u32),
            base,
        };
        new.create().map_err(io::Error::other)?;
        let meta = std::fs::metadata(&self.place)?;
        std::fs::set_permissions(path, meta.permissions())?;
        let (user, group) = (
            std::os::unix::fs::MetadataExt::uid(&meta),
            std::os::unix::fs::MetadataExt::gid(&meta),
        );
        // Without the right to, it is this process's, which can use it.
        let _ = std::os::unix::fs::chown(path, Some(user), Some(group));
        Ok(())
    }

    fn open(&mut self) -> io::Result<Arc<Image>> {
        if self.is_snapshot {
            // It is read below the new one from now on.
            self.image.share_locks().map_err(io::Error::other)?;
        }
        let opened = ImageDisk::open_for(Purpose::Serve, &self.image.config);
        Ok(opened.map_err(io::Error::other)?.image)
    }

    fn keep(mut self) {
        self.is_kept = true;
        if !self.is_snapshot {
            let _ = std::fs::remove_file(&self.aside);
        }
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        let restored = match self.has_moved {
            true => std::fs::rename(&self.aside, &self.place),
            false => std::fs::remove_file(&self.aside),
        };
        let restored = restored.and_then(|()| self.image.take_locks_back().map_err(io::Error::other));
        if let Err(error) = restored {
            let (place, aside) = (&self.place, &self.aside);
            tracing::error!("image {place:?}: it is at {aside:?} now, and could not be put back: {error}");
        }
    }
}

impl Image {
    fn check_change(&self, change: &Change) -> io::Result<()> {
        let refuse = |why: String| Err(io::Error::other(why));
        if self.read_only {
            return refuse("it is read-only".to_owned());
        }
        if self.files()[0].is_block_device() {
            return refuse("it lies on a block device, which nothing can take the place of".to_owned());
        }
        match change {
            Change::Reset if self.has_beside() => refuse("its data is in a file of its own".to_owned()),
            Change::Reset => Ok(()),
            Change::Snapshot(path) => {
                let Qcow2Config {
                    path: own,
                    directories,
                    chain_max,
                    ..
                } = &self.config;
                if self.chain_len() >= usize::from(*chain_max) {
                    return refuse(format!("its chain has {chain_max} images already: set chain="));
                }
                let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
                let rules = Rules::new(own, directories, (*chain_max).into()).map_err(io::Error::other)?;
                let directory = directory.unwrap_or(Path::new(".")).canonicalize()?;
                match rules.is_inside(&directory) {
                    true => Ok(()),
                    false => refuse(format!(
                        "{path:?} is not below its own directory, nor one of dirs="
                    )),
                }
            }
        }
    }
}

/// A path in the same directory.
fn beside(of: &Path, end: &str) -> PathBuf {
    let mut name = of.file_name().unwrap_or_default().to_owned();
    name.push(end);
    of.with_file_name(name)
}

fn sync_directory(of: &Path) -> io::Result<()> {
    std::fs::File::open(of.parent().unwrap_or(Path::new("/")))?.sync_all()
}

/// Ends of names of our own, beside the image's.
const OLD: &str = ".blkmq-old";
const NEW: &str = ".blkmq-new";
