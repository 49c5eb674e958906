//! The name of a file in a directory that is open. `mount` looks at a file, mounts over it and unmounts through it: whoever may
//! change the directories of a path must not lead that elsewhere.

use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

/// A file by its name in a directory that is open: no symbolic link leads elsewhere, whenever it is put there.
pub(super) struct Dentry {
    directory: OwnedFd,
    name: OsString,
}

impl Dentry {
    /// The one of a path without symbolic links in it.
    ///
    /// # Errors
    /// The system's error, or there are some by now.
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(ErrorKind::InvalidInput.into());
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = openat2(CWD, parent, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS);
        let directory = opened.map_err(|error| said("its directory cannot be opened", error))?;
        let name = name.to_owned();
        Ok(Self { directory, name })
    }

    /// Makes an empty file, if nothing is there. Returns whether it did.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn make(&self) -> io::Result<bool> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        match openat(&self.directory, &self.name, flags, Mode::RUSR | Mode::WUSR) {
            Ok(_) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            Err(error) => Err(said("the file cannot be made", error)),
        }
    }

    /// The regular file that is there, without access to its content, and its owner.
    ///
    /// # Errors
    /// The system's error, or something else is there.
    pub(super) fn file(&self) -> io::Result<(OwnedFd, (u32, u32))> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let looked = openat(&self.directory, &self.name, flags, Mode::empty())
            .and_then(|file| Ok((fstat(&file)?, file)));
        let (found, file) = looked.map_err(|error| said("the file cannot be looked at", error))?;
        match FileType::from_raw_mode(found.st_mode) {
            FileType::RegularFile => Ok((file, (found.st_uid, found.st_gid))),
            _ => Err(io::Error::other(
                "there is something else than a regular file: choose another path, or move it away",
            )),
        }
    }

    /// Removes the file, if it is a regular and empty one.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn remove_if_empty(&self) -> io::Result<()> {
        let found = statat(&self.directory, &self.name, AtFlags::SYMLINK_NOFOLLOW)?;
        if FileType::from_raw_mode(found.st_mode) == FileType::RegularFile && found.st_size == 0 {
            unlinkat(&self.directory, &self.name, AtFlags::empty())?;
        }
        Ok(())
    }

    /// Unmounts what is mounted there.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn unmount(&self, flags: UnmountFlags) -> rustix::io::Result<()> {
        let path = path_of(&self.directory).join(&self.name);
        unmount(path, UnmountFlags::NOFOLLOW | flags)
    }
}

/// The path that leads to what is open, whatever its name is by now.
pub(super) fn path_of(open: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()))
}

fn said(what: &str, error: Errno) -> io::Error {
    let error = io::Error::from(error);
    io::Error::new(error.kind(), format!("{what}: {error}"))
}
