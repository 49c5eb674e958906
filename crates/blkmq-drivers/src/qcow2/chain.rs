//! The files of an image: its own, the data file beside it, and the bases below it, each opened once for all
//! images that lie on it. `header` says what an image needs; `rules` which files it may have; `image` uses them.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use blkmq_host::device::FileId;

use super::check;
use super::error::ImageError;
use super::header::{HEADER_BYTES, Header};
use super::rules::Rules;
use super::tables::Tables;
use crate::driver::Purpose;
use crate::file::{Direct, FileConfig, FileDisk};

/// What lies below an image: opened for reading, and shared by all images on it.
#[derive(Debug)]
pub(super) struct Base {
    pub(super) disk: Arc<FileDisk>,
    /// Where it is: what was opened may have been moved since.
    pub(super) path: PathBuf,
    /// The file that has the data of its clusters, if that is another one.
    pub(super) beside: Option<Arc<FileDisk>>,
    /// `None` if it is raw.
    pub(super) header: Option<Header>,
    pub(super) below: Option<Arc<Base>>,
    /// Bytes of its disk.
    pub(super) size: u64,
    pub(super) tables: OnceLock<Arc<Tables>>,
}

/// How the bases of an image are opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Access {
    pub(super) purpose: Purpose,
    /// Through the page cache, or past it.
    pub(super) direct: Direct,
    pub(super) unlocked: bool,
}

impl Base {
    /// Its tables, which are read at the first need; `None` if it is raw. Blocks.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn tables(&self) -> io::Result<Option<&Tables>> {
        let Some(header) = &self.header else {
            return Ok(None);
        };
        if self.tables.get().is_none() {
            let tables = Tables::open(&self.disk, self.beside.as_ref(), header)?;
            // Another thread may have been faster.
            let _ = self.tables.set(Arc::new(tables));
        }
        Ok(self.tables.get().map(|tables| &**tables))
    }

    /// It and all below it.
    pub(super) fn all(self: &Arc<Self>) -> impl Iterator<Item = &Arc<Self>> {
        std::iter::successors(Some(self), |base| base.below.as_ref())
    }
}

/// Reads the header of an open image.
pub(super) fn read_header(disk: &FileDisk) -> Result<Header, ImageError> {
    let mut first = vec![0; HEADER_BYTES];
    let read = check::read(disk, &mut first, 0).map_err(|source| system(disk.path(), "read it", source))?;
    let of_cluster = first
        .get(20..24)
        .map(|bits| u32::from_be_bytes(bits.try_into().unwrap_or_default()));
    let cluster = 1usize << of_cluster.filter(|bits| (9..=16).contains(bits)).unwrap_or(16);
    let header = Header::parse(&first[..read.min(cluster)]);
    header.map_err(|error| ImageError::Header {
        path: disk.path().to_owned(),
        error,
    })
}

/// Opens the file that has the data of an image's clusters, if that is another one.
pub(super) fn open_beside(
    of: &FileDisk,
    header: &Header,
    rules: &Rules,
    config: &FileConfig,
    purpose: Purpose,
) -> Result<Option<Arc<FileDisk>>, ImageError> {
    if !header.has_data_file {
        return Ok(None);
    }
    let Some(name) = &header.data_file else {
        let why =
            "its header has no name of it: give it one with `qemu-img amend -o data_file=NAME`".to_owned();
        return Err(named(of.path(), "data file", "", why));
    };
    let path = rules.resolve(of.path(), "data file", name)?;
    let config = FileConfig {
        path,
        ..config.clone()
    };
    let disk = FileDisk::open_part(purpose, &config)?;
    rules.check_open(&disk, of.path(), "data file", name)?;
    if disk.id == of.id {
        return Err(named(
            of.path(),
            "data file",
            name,
            "it is the image itself".to_owned(),
        ));
    }
    Ok(Some(Arc::new(disk)))
}

/// Opens the base of an image, and all below it, unless they are open.
///
/// `above` has the files of the images above, `of` last.
///
/// # Errors
/// One of them cannot be used, or there are too many.
pub(super) fn open_base(
    of: &FileDisk,
    header: &Header,
    rules: &Rules,
    access: Access,
    above: &mut Vec<FileId>,
) -> Result<Option<Arc<Base>>, ImageError> {
    let Some(name) = &header.backing else {
        return Ok(None);
    };
    let refuse = |why: String| named(of.path(), BACKING, name, why);
    let is_raw = match header.backing_format.as_deref() {
        Some("raw") => true,
        Some("qcow2") => false,
        Some(other) => {
            return Err(refuse(format!(
                "its format {other:?} is not supported: convert it to raw or qcow2"
            )));
        }
        None => {
            let why = "its format is not named, and is never guessed: name it with `qemu-img rebase -u -F raw` or `-F qcow2`";
            return Err(refuse(why.to_owned()));
        }
    };
    if above.len() >= rules.chain_max {
        return Err(refuse(format!(
            "the chain has more than {} images: set chain=",
            rules.chain_max
        )));
    }
    let path = rules.resolve(of.path(), BACKING, name)?;
    // Before it is opened: its lock is held above.
    let there = std::fs::metadata(&path).ok().as_ref().map(FileId::of);
    if there.is_some_and(|id| above.contains(&id)) {
        return Err(refuse("it is in its own chain".to_owned()));
    }
    let config = FileConfig {
        path,
        read_only: true,
        direct: access.direct,
        unlocked: access.unlocked,
        ..FileConfig::default()
    };
    let disk = FileDisk::open_part(access.purpose, &config)?;
    rules.check_open(&disk, of.path(), BACKING, name)?;
    let id = disk.id.ok_or_else(|| refuse("it has no identity".to_owned()))?;
    if above.contains(&id) {
        return Err(refuse("it is in its own chain".to_owned()));
    }
    if let Some(base) = find_open(id, is_raw, access) {
        // Its chain is as long as it was; its files may be others' elsewhere.
        return match above.len() + base.all().count() > rules.chain_max {
            true => Err(refuse(format!(
                "the chain has more than {} images: set chain=",
                rules.chain_max
            ))),
            false => Ok(Some(base)),
        };
    }
    above.push(id);
    let end = disk
        .end()
        .map_err(|source| system(disk.path(), "measure it", source))?;
    let mut base = Base {
        path: disk.path().to_owned(),
        disk: Arc::new(disk),
        beside: None,
        header: None,
        below: None,
        size: end,
        tables: OnceLock::new(),
    };
    if !is_raw {
        let header = read_header(&base.disk)?;
        check::tables(&base.disk, &header)?;
        base.beside = open_beside(&base.disk, &header, rules, &config, access.purpose)?;
        base.below = open_base(&base.disk, &header, rules, access, above)?;
        base.size = header.size;
        base.header = Some(header);
    }
    let base = Arc::new(base);
    open_bases().push((Key { id, is_raw, access }, Arc::downgrade(&base)));
    Ok(Some(base))
}

fn find_open(id: FileId, is_raw: bool, access: Access) -> Option<Arc<Base>> {
    let mut bases = open_bases();
    bases.retain(|(_, base)| base.strong_count() > 0);
    let key = Key { id, is_raw, access };
    bases
        .iter()
        .find(|(other, _)| *other == key)
        .and_then(|(_, base)| base.upgrade())
}

/// A base of the list of all.
pub(super) type Listed = (Key, Weak<Base>);

/// Takes a base that one image alone has from the list: nobody finds it there any more. `None` if others have it.
pub(super) fn take_from_list(base: &Arc<Base>) -> Option<Vec<Listed>> {
    let mut bases = open_bases();
    // Nobody gets another one while the list is held.
    if Arc::strong_count(base) > 1 {
        return None;
    }
    let is_it = |listed: &mut Listed| listed.1.as_ptr() == Arc::as_ptr(base);
    Some(bases.extract_if(.., is_it).collect())
}

/// Puts it there again.
pub(super) fn put_into_list(listed: Vec<Listed>) {
    open_bases().extend(listed);
}

/// What makes two bases the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    id: FileId,
    is_raw: bool,
    access: Access,
}

fn open_bases() -> MutexGuard<'static, Vec<Listed>> {
    /// The bases of all images of this process.
    static BASES: Mutex<Vec<Listed>> = Mutex::new(Vec::new());
    BASES.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn named(path: &Path, what: &'static str, name: &str, why: String) -> ImageError {
    ImageError::Named {
        path: path.to_owned(),
        what,
        name: name.to_owned(),
        why,
    }
}

pub(super) fn system(path: &Path, action: &'static str, error: io::Error) -> ImageError {
    ImageError::System {
        path: PathBuf::from(path),
        action,
        error,
    }
}

const BACKING: &str = "backing file";
