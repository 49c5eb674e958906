//! Images that are replaced under their disk: by an overlay, so that what was there is a snapshot, or by an empty
//! one. All disks of one call change at one moment; `file::device` passes them here.
//!
//! ```text
//!  requests go on    link the image as the snapshot ─► make an overlay on it beside ─► flush
//!  requests wait     rename the overlay into the image's place, and open it on the image as it is in memory
//!  requests go on    flush what was below it; sync the directories
//! ```
//!
//! At each step the image's name leads to an image that has everything that was flushed: no flush of the successor ends
//! before the last line has.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::chain::{self, Base};
use super::config::Qcow2Config;
use super::create::{BaseFormat, NAME_MAX, NewImage};
use super::disk::ImageDisk;
use super::header::BACKING_FIELD;
use super::image::Image;
use super::rules::Rules;

/// What becomes of an image.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    /// It is kept at this path, read-only, below a new one.
    Snapshot(PathBuf),
    /// Its content is thrown away, so that what is below it shows again.
    Reset,
    /// Its content is below it already: the disk stays what it is.
    Empty,
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
    }
    let mut begun = images
        .iter()
        .map(|(image, change)| Begun::new(image, change))
        .collect::<io::Result<Vec<_>>>()?;
    let close = |on| images.iter().for_each(|(image, _)| image.set_closing(on));
    close(true);
    let replaced = flush_all(images).and_then(|()| {
        let work = || {
            let put_one = |begun: &mut Begun<'_>| begun.put(begun.image.base().cloned());
            let opened = begun.iter_mut().map(put_one).collect::<io::Result<Vec<_>>>()?;
            put(opened.clone())?;
            for ((image, _), next) in images.iter().zip(&opened) {
                image.follow(Arc::clone(next));
            }
            Ok(opened)
        };
        together(images, Box::new(work))
    });
    let opened = match replaced {
        Ok(opened) => opened,
        Err(error) => {
            // The former files are at their places again before anybody looks there.
            drop(begun);
            close(false);
            return Err(error);
        }
    };
    begun.into_iter().for_each(Begun::keep);
    // Durable, or the caller is told; their first flush would do that, too.
    opened.iter().try_for_each(|next| next.settle())
}

/// Flushes images while requests go on, until little is left.
fn flush_all(images: &[(Arc<Image>, Change)]) -> io::Result<()> {
    for _ in 0..FLUSHES_MAX {
        let start = Instant::now();
        images.iter().try_for_each(|(image, _)| image.flush())?;
        if start.elapsed() < LITTLE {
            break;
        }
    }
    images.iter().for_each(|(image, _)| image.wait_for_flushes());
    Ok(())
}

type Work<'a> = Box<dyn FnOnce() -> io::Result<Vec<Arc<Image>>> + 'a>;

/// Does something while nobody uses any of the images.
fn together(images: &[(Arc<Image>, Change)], work: Work<'_>) -> io::Result<Vec<Arc<Image>>> {
    match images {
        [] => work(),
        [(first, _), rest @ ..] => first.alone(0..u64::MAX, || together(rest, work)),
    }
}

/// An image in whose place another one is to be; dropped, it is there again.
pub(super) struct Begun<'a> {
    image: &'a Arc<Image>,
    place: PathBuf,
    /// Where it is meanwhile.
    aside: PathBuf,
    /// What is to be in its place.
    made: PathBuf,
    is_snapshot: bool,
    keeps_bitmaps: bool,
    has_moved: bool,
    is_kept: bool,
}

impl<'a> Begun<'a> {
    /// Makes all that needs no pause.
    pub(super) fn new(image: &'a Arc<Image>, change: &Change) -> io::Result<Self> {
        let place = image.config.path.canonicalize()?;
        let (aside, is_snapshot) = match change {
            Change::Snapshot(path) => (path.clone(), true),
            Change::Reset | Change::Empty => (beside(&place, OLD), false),
        };
        if is_snapshot && directory_of(&aside).canonicalize()? != directory_of(&place) {
            image.anchor()?;
        }
        if !is_snapshot {
            // What a daemon that was killed has left: the image is in its place in any case.
            let _ = std::fs::remove_file(&aside);
        }
        std::fs::hard_link(&place, &aside)
            .map_err(|error| io::Error::new(error.kind(), format!("{aside:?} cannot be made: {error}")))?;
        let begun = Self {
            image,
            made: beside(&place, NEW),
            place,
            aside,
            is_snapshot,
            keeps_bitmaps: matches!(change, Change::Empty),
            has_moved: false,
            is_kept: false,
        };
        let _ = std::fs::remove_file(&begun.made);
        begun.make()?;
        Ok(begun)
    }

    /// Makes the image that takes the place.
    fn make(&self) -> io::Result<()> {
        let base = match self.is_snapshot {
            true => Some((self.aside.clone(), BaseFormat::Qcow2)),
            false => self.image.base_file(),
        };
        let new = NewImage {
            path: self.made.clone(),
            size: Some(self.image.size()),
            cluster: Some(self.image.header.cluster() as u32),
            has_subclusters: self.image.header.has_subclusters,
            base,
        };
        new.create().map_err(io::Error::other)?;
        if let Err(error) = self.begin_bitmaps() {
            tracing::warn!(
                "image {:?}: its bitmaps end here, since the new image can have none: {error}",
                self.place
            );
        }
        let meta = std::fs::metadata(&self.place)?;
        std::fs::set_permissions(&self.made, meta.permissions())?;
        let (user, group) = (
            std::os::unix::fs::MetadataExt::uid(&meta),
            std::os::unix::fs::MetadataExt::gid(&meta),
        );
        // Without the right to, it is this process's, which can use it.
        let _ = std::os::unix::fs::chown(&self.made, Some(user), Some(group));
        Ok(())
    }

    /// Has the image above a snapshot begin the bitmaps anew that are complete in the snapshot: at the moment when it takes the
    /// place, nothing has changed. One of a disk that stays what it is has them in use, until it is given their bits.
    fn begin_bitmaps(&self) -> io::Result<()> {
        let bitmaps = match self.is_snapshot {
            true => self.image.enabled_bitmaps(),
            false if self.keeps_bitmaps => self.image.known_bitmaps(),
            false => return Ok(()),
        };
        if bitmaps.is_empty() {
            return Ok(());
        }
        let config = Qcow2Config {
            path: self.made.clone(),
            ..self.image.config.clone()
        };
        let made = ImageDisk::open_on(&config, None).map_err(io::Error::other)?;
        for (name, granularity) in bitmaps {
            made.add_bitmap(&name, Some(granularity))?;
        }
        if self.is_snapshot {
            made.close();
        }
        Ok(())
    }

    /// Puts it in its place: on the image as it is in memory, or on `base`. Nobody uses that image.
    pub(super) fn put(&mut self, base: Option<Arc<Base>>) -> io::Result<Arc<Image>> {
        let open = |path| File::open(directory_of(path));
        let directories = [open(&self.place)?, open(&self.aside)?];
        std::fs::rename(&self.made, &self.place)?;
        self.has_moved = true;
        let image = self.image;
        let below = match self.is_snapshot {
            true => Some(image.become_base(&self.aside)?),
            false => base,
        };
        let opened = ImageDisk::open_on(&image.config, below).map_err(io::Error::other)?;
        if opened.image.size() != image.size() {
            return Err(io::Error::other("it was resized meanwhile: try again"));
        }
        if self.keeps_bitmaps {
            opened.image.adopt_bitmaps(image)?;
        }
        let snapshot = self.is_snapshot.then(|| Arc::clone(image));
        opened.image.set_unsettled(snapshot, directories);
        Ok(opened.image)
    }

    pub(super) fn keep(mut self) {
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
        let _ = std::fs::remove_file(&self.made);
        let restored = match self.has_moved {
            true => std::fs::rename(&self.aside, &self.place)
                .and_then(|()| self.image.take_locks_back().map_err(io::Error::other)),
            false => std::fs::remove_file(&self.aside),
        };
        if let Err(error) = restored {
            let (place, aside) = (&self.place, &self.aside);
            tracing::error!("image {place:?}: it is at {aside:?} now, and could not be put back: {error}");
        }
    }
}

impl Image {
    /// Has the image name its base by a path that is right from every directory. It is durable then.
    fn anchor(&self) -> io::Result<()> {
        let top = &self.files()[0];
        let header = chain::read_header(top).map_err(io::Error::other)?;
        let is_relative =
            |name: &Option<String>| name.as_ref().is_some_and(|name| Path::new(name).is_relative());
        if is_relative(&header.data_file) {
            return Err(io::Error::other(
                "its data file has a relative name: keep the snapshot in the image's own directory",
            ));
        }
        let Some((base, _)) = self.base_file().filter(|_| is_relative(&header.backing)) else {
            return Ok(());
        };
        let name = base
            .to_str()
            .map(str::as_bytes)
            .filter(|name| name.len() <= NAME_MAX);
        let place = header.names_end.next_multiple_of(8);
        let Some(name) = name.filter(|name| place + name.len() as u64 <= header.cluster()) else {
            return Err(io::Error::other(format!(
                "its header has no room for the path of its base, {base:?}: keep the snapshot in the image's own directory"
            )));
        };
        let tables = self.tables()?;
        tables.write_header(place, name)?;
        let field = [&place.to_be_bytes()[..], &(name.len() as u32).to_be_bytes()].concat();
        tables.write_header(BACKING_FIELD, &field)
    }

    pub(super) fn check_change(&self, change: &Change) -> io::Result<()> {
        let refuse = |why: String| Err(io::Error::other(why));
        if self.read_only {
            return refuse("it is read-only".to_owned());
        }
        if self.files()[0].is_block_device() {
            return refuse("it lies on a block device, which nothing can take the place of".to_owned());
        }
        match change {
            Change::Reset | Change::Empty if self.has_beside() => {
                refuse("its data is in a file of its own".to_owned())
            }
            Change::Reset | Change::Empty => Ok(()),
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
                let rules = Rules::new(own, directories, (*chain_max).into()).map_err(io::Error::other)?;
                let directory = directory_of(path).canonicalize()?;
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
pub(super) fn beside(of: &Path, end: &str) -> PathBuf {
    let mut name = of.file_name().unwrap_or_default().to_owned();
    name.push(end);
    of.with_file_name(name)
}

/// The directory of a file.
pub(super) fn directory_of(path: &Path) -> &Path {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

/// Ends of names of our own, beside the image's.
const OLD: &str = ".blkmq-old";
const NEW: &str = ".blkmq-new";
/// Flushes before the pause at most: each leaves what was written meanwhile.
const FLUSHES_MAX: u32 = 4;
/// A flush that takes less has had little to do.
const LITTLE: Duration = Duration::from_millis(10);
