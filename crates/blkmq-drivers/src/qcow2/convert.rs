//! Copies of a disk in another format, or in one image without what it lies on: raw to qcow2, back, and chains made flat.
//! `blkmq image convert` makes them.
//!
//! A copy has another name until all of it is durable, so nobody finds half of one:
//!
//! ```text
//!  make DST.blkmq-new ─► copy what is no hole and no zeroes ─► flush ─► rename it to DST ─► sync the directory
//! ```

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, SeekFrom};

use super::chain::system;
use super::config::Qcow2Config;
use super::create::{BaseFormat, NewImage};
use super::disk::ImageDisk;
use super::error::ImageError;
use super::replace::{beside, directory_of};
use crate::driver::Purpose;
use crate::file::{Direct, FileConfig, FileDisk};

/// A copy that is to be made.
#[derive(Clone, Debug)]
pub struct Conversion {
    /// What is copied. It is locked as by a reader.
    pub source: PathBuf,
    /// Its format, which is never guessed.
    pub source_format: BaseFormat,
    /// The directories below which its bases may be. None: its own.
    pub directories: Vec<PathBuf>,
    /// Where the copy is to be.
    pub target: PathBuf,
    /// Its format.
    pub target_format: BaseFormat,
    /// Bytes of a cluster of a qcow2 copy. Default 64 KiB.
    pub cluster: Option<u32>,
    /// What is there is replaced, if it is a file that nobody has.
    pub replaces: bool,
}

/// How far a copy is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes that are looked at.
    pub done: u64,
    /// Bytes that were written: the others are zeroes.
    pub written: u64,
}

impl Conversion {
    /// Makes the copy. Blocks. `goes_on` is asked after each part, and the copy is given up if it says no: then `None` is returned,
    /// and nothing is left.
    ///
    /// # Errors
    /// One of the files cannot be used, or the target is there and may not be replaced. Nothing has changed then.
    pub fn run(&self, goes_on: impl FnMut(Copied) -> bool) -> Result<Option<Copied>, ImageError> {
        let replaced = self.check_target()?;
        let source = Source::open(self)?;
        let target = Unfinished::make(self, source.size()?)?;
        let copied = copy(&source, &target.content, goes_on)
            .map_err(|source| system(&self.target, "fill it", source))?;
        if copied.is_some() {
            target.finish(replaced.is_some())?;
        }
        Ok(copied)
    }

    /// Returns the file that is to be replaced, if there is one, with its lock.
    fn check_target(&self) -> Result<Option<FileDisk>, ImageError> {
        let refuse = |why: &str| Err(system(&self.target, "make it", io::Error::other(why.to_owned())));
        match std::fs::metadata(&self.target) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(system(&self.target, "look at it", error)),
            Ok(_) if !self.replaces => {
                refuse("there is something already, which is only replaced with --force")
            }
            Ok(meta) if !meta.is_file() => refuse("what is there is no regular file: name another place"),
            // Whoever has it would go on with a file without a name.
            Ok(_) => {
                let config = FileConfig {
                    path: self.target.clone(),
                    direct: Direct::Off,
                    ..FileConfig::default()
                };
                Ok(Some(FileDisk::open_part(Purpose::Serve, &config)?))
            }
        }
    }
}

/// What is copied.
enum Source {
    Image(ImageDisk),
    Raw(Box<FileDisk>),
}

impl Source {
    fn open(of: &Conversion) -> Result<Self, ImageError> {
        Ok(match of.source_format {
            BaseFormat::Qcow2 => Self::Image(ImageDisk::open(&Qcow2Config {
                path: of.source.clone(),
                read_only: true,
                directories: of.directories.clone(),
                chain_max: CHAIN_MAX,
                ..Qcow2Config::default()
            })?),
            BaseFormat::Raw => {
                let config = FileConfig {
                    path: of.source.clone(),
                    read_only: true,
                    direct: Direct::Off,
                    ..FileConfig::default()
                };
                Self::Raw(Box::new(FileDisk::open_part(Purpose::Serve, &config)?))
            }
        })
    }

    /// Bytes of the disk: whole blocks of 512.
    fn size(&self) -> Result<u64, ImageError> {
        match self {
            Self::Image(image) => Ok(image.size()),
            Self::Raw(file) => {
                let end = file.end();
                let end = end.map_err(|source| system(file.path(), "measure it", source))?;
                Ok(end.next_multiple_of(512))
            }
        }
    }

    /// Finds the next bytes from `at` on that may be other than zeroes; what is at the end of the disk may be empty.
    fn next_data(&self, at: u64, size: u64) -> io::Result<Range<u64>> {
        match self {
            Self::Image(image) => {
                let mut at = at;
                while at < size {
                    for extent in image.extents(at, EXTENTS)? {
                        if !extent.zero {
                            return Ok(at..at + extent.len);
                        }
                        at += extent.len;
                    }
                }
                Ok(size..size)
            }
            // A device has no holes.
            Self::Raw(file) if file.is_block_device() => Ok(at..size),
            Self::Raw(file) => {
                let data = match rustix::fs::seek(file.handle(), SeekFrom::Data(at)) {
                    Err(rustix::io::Errno::NXIO) => return Ok(size..size),
                    data => data?.clamp(at, size),
                };
                let hole = match rustix::fs::seek(file.handle(), SeekFrom::Hole(data)) {
                    Err(rustix::io::Errno::NXIO) => size,
                    hole => hole?.min(size),
                };
                Ok(data - data % 512..hole.next_multiple_of(512))
            }
        }
    }

    /// Reads; what is behind the end of a raw file is zeroes.
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        match self {
            Self::Image(image) => image.read(at, into),
            Self::Raw(file) => {
                let read = super::check::read(file, into, at)?;
                into[read..].fill(0);
                Ok(())
            }
        }
    }
}

/// What the copy is written to.
enum Content {
    Image(ImageDisk),
    Raw(File),
}

impl Content {
    /// Bytes that are written or left out together.
    fn unit(&self) -> usize {
        match self {
            Self::Image(image) => image.image.header.cluster() as usize,
            Self::Raw(_) => 4096,
        }
    }

    fn write(&self, at: u64, data: &[u8]) -> io::Result<()> {
        match self {
            Self::Image(image) => image.write(at, data),
            Self::Raw(file) => file.write_all_at(data, at),
        }
    }

    fn flush(&self) -> io::Result<()> {
        match self {
            Self::Image(image) => image.flush(),
            Self::Raw(file) => file.sync_all(),
        }
    }
}

/// A copy that has another name yet; dropped, it is gone.
struct Unfinished<'a> {
    content: Content,
    path: PathBuf,
    target: &'a Path,
    is_named: bool,
}

impl<'a> Unfinished<'a> {
    fn make(of: &'a Conversion, size: u64) -> Result<Self, ImageError> {
        let path = beside(&of.target, NEW);
        if path.symlink_metadata().is_ok() {
            let why = "it is there: another conversion is under way, or was killed; remove it then";
            return Err(system(&path, "create it", io::Error::other(why)));
        }
        let content = match of.target_format {
            BaseFormat::Qcow2 => {
                NewImage {
                    path: path.clone(),
                    size: Some(size),
                    cluster: of.cluster,
                    has_subclusters: false,
                    base: None,
                }
                .create()?;
                None
            }
            BaseFormat::Raw => {
                let mut options = File::options();
                let file = options.write(true).create_new(true).mode(0o600).open(&path);
                let file = file.map_err(|source| system(&path, "create it", source))?;
                Some(file)
            }
        };
        // From here on it is removed if something fails.
        let unfinished = |content| Self {
            content,
            path: path.clone(),
            target: &of.target,
            is_named: false,
        };
        match content {
            Some(file) => {
                let made = unfinished(Content::Raw(file));
                let Content::Raw(file) = &made.content else {
                    return Ok(made);
                };
                file.set_len(size)
                    .map_err(|source| system(&path, "enlarge it", source))?;
                Ok(made)
            }
            None => {
                let config = Qcow2Config {
                    path: path.clone(),
                    ..Qcow2Config::default()
                };
                let opened = ImageDisk::open(&config);
                if opened.is_err() {
                    // The first error is the one to report.
                    let _ = std::fs::remove_file(&path);
                }
                Ok(unfinished(Content::Image(opened?)))
            }
        }
    }

    /// Makes it durable, and gives it its name.
    fn finish(mut self, replaces: bool) -> Result<(), ImageError> {
        let cannot = |action| move |source| system(self.target, action, source);
        self.content.flush().map_err(cannot("make it durable"))?;
        let flags = match replaces {
            true => RenameFlags::empty(),
            false => RenameFlags::NOREPLACE,
        };
        let renamed = rustix::fs::renameat_with(CWD, &self.path, CWD, self.target, flags);
        renamed.map_err(|error| cannot("give it its name")(error.into()))?;
        self.is_named = true;
        let directory = File::open(directory_of(self.target)).and_then(|directory| directory.sync_all());
        directory.map_err(cannot("make its name durable"))
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if !self.is_named {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Copies all that may be other than zeroes.
fn copy(
    source: &Source,
    target: &Content,
    mut goes_on: impl FnMut(Copied) -> bool,
) -> io::Result<Option<Copied>> {
    let unit = target.unit();
    let mut buffer = vec![0; PART.max(unit)];
    let size = source.size().map_err(io::Error::other)?;
    let mut copied = Copied {
        size,
        ..Copied::default()
    };
    while copied.done < size {
        let data = source.next_data(copied.done, size)?;
        // Of whole units: one is allocated, and read, once.
        let start = data.start - data.start % unit as u64;
        let end = data.end.next_multiple_of(unit as u64).min(size);
        let mut at = start.max(copied.done);
        while at < end {
            let part = &mut buffer[..(end - at).min(PART.max(unit) as u64) as usize];
            source.read(at, part)?;
            copied.written += write_others(target, at, part, unit)?;
            at += part.len() as u64;
            copied.done = at;
            if !goes_on(copied) {
                return Ok(None);
            }
        }
        copied.done = copied.done.max(data.end).min(size);
    }
    Ok(goes_on(copied).then_some(copied))
}

/// Writes the units that are not all zeroes, those beside each other at once. Returns how many bytes they have.
fn write_others(target: &Content, at: u64, part: &[u8], unit: usize) -> io::Result<u64> {
    let is_zero = |unit: &[u8]| unit.iter().all(|byte| *byte == 0);
    let (mut start, mut written) = (0, 0);
    while start < part.len() {
        let units = part[start..].chunks(unit);
        let run: usize = units.take_while(|unit| !is_zero(unit)).map(<[u8]>::len).sum();
        if run > 0 {
            target.write(at + start as u64, &part[start..start + run])?;
            written += run as u64;
        }
        // And the zeroes behind them, at least one unit.
        start += run + unit;
    }
    Ok(written)
}

/// The end of the name of a copy that is not complete.
const NEW: &str = ".blkmq-new";
/// Bytes that are read at once: whole clusters of all sizes up to this.
const PART: usize = 1 << 20;
/// Extents that are looked up at once.
const EXTENTS: usize = 64;
/// The most that the format's driver takes.
const CHAIN_MAX: u16 = 32;
