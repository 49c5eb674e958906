//! The base that an image is committed into, opened for writing: a raw file, or an image that nobody serves. Who commits
//! decides what may be written when; here is how.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use blkmq_core::bio::{Flags, Op};

use super::super::super::chain::{self, Base, Listed};
use super::super::super::config::{BaseCache, Qcow2Config};
use super::super::super::disk::ImageDisk;
use super::super::super::tables::Place;
use super::super::super::{transfer, zero};
use super::super::{Image, lock};
use crate::driver::Purpose;
use crate::file::{Direct, FileConfig, FileDisk};

/// A base that is written, and that nobody else uses.
#[derive(Debug)]
pub(super) struct Target {
    kind: Kind,
    growing: Mutex<()>,
    /// What it was opened in the place of, until the image lies on it.
    former: Mutex<Option<Former>>,
}

#[derive(Debug)]
enum Kind {
    Raw(Arc<FileDisk>),
    Image(Arc<Image>),
}

impl Target {
    /// Opens what is below an image for writing, and takes its lock. Blocks.
    ///
    /// # Errors
    /// Somebody else uses it, or it cannot be written: it is below the image as before.
    pub(super) fn open(of: &Image, base: &Arc<Base>) -> io::Result<Self> {
        let refuse = |why: &dyn std::fmt::Display| {
            let path = base.path.display();
            io::Error::other(format!("its base {path} cannot be written: {why}"))
        };
        // Who may not write finds out before any lock is given up; and for root, nobody may if that is what the mode says.
        let writable = File::options().read(true).write(true).open(&base.path);
        let meta = writable.and_then(|file| file.metadata());
        if meta.map_err(|error| refuse(&error))?.permissions().readonly() {
            return Err(refuse(&"nobody may: give its owner the right to (chmod u+w)"));
        }
        let end = Instant::now() + USERS_MAX;
        let listed = loop {
            match chain::take_from_list(base) {
                Some(listed) => break listed,
                None if Instant::now() > end => return Err(refuse(&"others of this daemon lie on it, too")),
                // Somebody may be about to leave it.
                None => std::thread::sleep(USERS_LOOK),
            }
        };
        let former = Former::new(base, listed);
        Ok(Self {
            kind: open_unlocked(of, base).map_err(|error| refuse(&error))?,
            growing: Mutex::default(),
            former: Mutex::new(Some(former)),
        })
    }

    /// The image lies on it now.
    pub(super) fn keep(&self) {
        if let Some(former) = lock(&self.former).take() {
            former.keep();
        }
    }

    /// It as a base, as it is now. What was below an image before has the size of then.
    pub(super) fn as_base(&self, path: &Path) -> io::Result<Arc<Base>> {
        match &self.kind {
            Kind::Raw(disk) => Ok(Arc::new(Base {
                size: disk.end()?,
                disk: Arc::clone(disk),
                path: path.to_owned(),
                beside: None,
                header: None,
                below: None,
                tables: OnceLock::new(),
            })),
            Kind::Image(image) => image.as_base(path.to_owned()),
        }
    }

    /// Bytes of its disk.
    pub(super) fn size(&self) -> io::Result<u64> {
        match &self.kind {
            Kind::Raw(disk) => disk.end(),
            Kind::Image(image) => Ok(image.size()),
        }
    }

    /// Makes it as large as a disk of `size` bytes. What is new reads as zeroes.
    pub(super) fn reach(&self, size: u64) -> io::Result<()> {
        let _alone = lock(&self.growing);
        match &self.kind {
            Kind::Image(image) => image.resize(Some(size)).map(drop),
            Kind::Raw(disk) => match disk.end()? {
                end if end >= size => Ok(()),
                end if disk.is_block_device() => Err(io::Error::other(format!(
                    "its base is a device of {end} bytes, too small for {size}"
                ))),
                _ => disk.set_end(size),
            },
        }
    }

    /// The range of which nobody may read anything while a part of it is written, if there is more of it than that part:
    /// other parts change their place then.
    pub(super) fn moves(&self, range: &Range<u64>) -> io::Result<Option<Range<u64>>> {
        let Kind::Image(image) = &self.kind else {
            return Ok(None);
        };
        let whole = image.whole_clusters(range);
        let (tables, mut at) = (image.tables()?, whole.start);
        while at < whole.end {
            match tables.look_up(at, whole.end - at)? {
                (Place::Data { is_own: false, .. } | Place::Packed(_), _) => return Ok(Some(whole)),
                (_, known) => at += known.max(1),
            }
        }
        Ok(None)
    }

    /// Writes.
    pub(super) fn write(&self, at: u64, data: &[u8]) -> io::Result<()> {
        match &self.kind {
            Kind::Raw(disk) => transfer::write(disk, at, data),
            Kind::Image(image) => image.write(&*image.tables()?, at, data),
        }
    }

    /// Zeroes, and gives the space back where that can be done.
    pub(super) fn zero(&self, range: Range<u64>) -> io::Result<()> {
        match &self.kind {
            Kind::Raw(disk) => transfer::zero(disk, range.start, range.end - range.start),
            Kind::Image(image) => zero::run(image, &*image.tables()?, Op::WriteZeroes, Flags::NONE, range),
        }
    }

    /// Makes what was written durable.
    pub(super) fn flush(&self) -> io::Result<()> {
        match &self.kind {
            Kind::Raw(disk) => disk.sync(),
            Kind::Image(image) => image.flush(),
        }
    }

    /// Goes back to what is on the drive, after a flush that has failed. Nobody reads it.
    pub(super) fn revert(&self) -> io::Result<()> {
        match &self.kind {
            Kind::Raw(disk) => {
                disk.forget_cached();
                Ok(())
            }
            Kind::Image(image) => {
                image.own_files().for_each(|file| file.forget_cached());
                image.tables()?.forget_unflushed()
            }
        }
    }

    /// Lets others read it from now on: nobody writes it any more.
    pub(super) fn share(&self) -> io::Result<()> {
        let shared = match &self.kind {
            Kind::Raw(disk) => disk.share_lock(),
            Kind::Image(image) => image.share_locks(),
        };
        shared.map_err(io::Error::other)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if lock(&self.former).is_some() {
            // Before the former one is locked again.
            if let Err(error) = self.share() {
                tracing::error!("a base that was to be written cannot be shared again: {error}");
            }
        }
    }
}

/// A base whose place another description of its file takes; dropped, it has its locks again.
#[derive(Debug)]
struct Former {
    base: Arc<Base>,
    listed: Vec<Listed>,
    is_kept: bool,
}

impl Former {
    fn new(base: &Arc<Base>, listed: Vec<Listed>) -> Self {
        let former = Self {
            base: Arc::clone(base),
            listed,
            is_kept: false,
        };
        former.files().for_each(|file| file.give_up_lock());
        former
    }

    fn files(&self) -> impl Iterator<Item = &Arc<FileDisk>> {
        [&self.base.disk].into_iter().chain(&self.base.beside)
    }

    fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for Former {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        for file in self.files() {
            if let Err(error) = file.take_reader_lock() {
                tracing::error!("the base of an image is not locked any more: {error}");
            }
        }
        chain::put_into_list(std::mem::take(&mut self.listed));
    }
}

/// Opens a base whose locks this process has given up.
fn open_unlocked(of: &Image, base: &Base) -> io::Result<Kind> {
    let config = &of.config;
    let direct = match config.base_cache {
        BaseCache::Page => Direct::Off,
        BaseCache::Direct => Direct::Auto,
    };
    let kind = if base.header.is_none() {
        let file = FileConfig {
            path: base.path.clone(),
            direct,
            unlocked: config.unlocked,
            ..FileConfig::default()
        };
        let disk = FileDisk::open_part(Purpose::Serve, &file).map_err(io::Error::other)?;
        Kind::Raw(Arc::new(disk))
    } else {
        let directories = match &config.directories[..] {
            [] => config
                .path
                .canonicalize()?
                .parent()
                .map(Path::to_owned)
                .into_iter()
                .collect(),
            named => named.to_vec(),
        };
        let image = Qcow2Config {
            path: base.path.clone(),
            direct,
            base_cache: config.base_cache,
            map_cache: 0,
            directories,
            chain_max: config.chain_max,
            unlocked: config.unlocked,
            ..Qcow2Config::default()
        };
        let opened = ImageDisk::open(&image).map_err(io::Error::other)?;
        // It changes without being used as a disk: a backup of it is of another one.
        opened.image.give_bitmaps_up();
        opened.image.tables()?;
        Kind::Image(opened.image)
    };
    let file = match &kind {
        Kind::Raw(disk) => disk,
        Kind::Image(image) => &image.files()[0],
    };
    match file.id == base.disk.id {
        true => Ok(kind),
        false => Err(io::Error::other("another file is there now")),
    }
}

/// How long another image of this process may take to let a base go that it has left.
const USERS_MAX: Duration = Duration::from_secs(1);
const USERS_LOOK: Duration = Duration::from_millis(5);
