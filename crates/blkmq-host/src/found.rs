//! What is at a path, looked at before it is opened: the open of a pipe waits for its other end, and the open of a device may do
//! anything. Drives, keys and headers are opened by it; `blkmq-tls`, which has no other crate, does the same for itself.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};

/// What is at a path, without access to its content.
#[derive(Debug)]
pub struct Found {
    held: OwnedFd,
    kind: FileType,
}

impl Found {
    /// Looks. Symbolic links are followed.
    ///
    /// # Errors
    /// The system's error.
    pub fn at(path: &Path) -> io::Result<Self> {
        let held = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&held)?.st_mode);
        Ok(Self { held, kind })
    }

    /// A path that leads to what was found while this is held, whatever is put at its own path meanwhile.
    pub fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.held.as_raw_fd())
    }

    /// Returns whether it is a regular file.
    pub fn is_file(&self) -> bool {
        self.kind == FileType::RegularFile
    }

    /// Returns whether it is a block device.
    pub fn is_block_device(&self) -> bool {
        self.kind == FileType::BlockDevice
    }

    /// What it is, for messages.
    pub fn kind(&self) -> &'static str {
        match self.kind {
            FileType::RegularFile => "a regular file",
            FileType::BlockDevice => "a block device",
            FileType::Directory => "a directory",
            FileType::CharacterDevice => "a character device",
            FileType::Fifo => "a pipe",
            _ => "a socket",
        }
    }
}

/// Opens a regular file to read it.
///
/// # Errors
/// The system's error, or what it is instead.
pub fn open_file(path: &Path) -> io::Result<File> {
    let found = Found::at(path)?;
    match found.is_file() {
        true => File::open(found.path()),
        false => Err(refused(&found, "a regular file")),
    }
}

/// Opens a regular file or a block device to read it.
///
/// # Errors
/// The system's error, or what it is instead.
pub fn open_file_or_device(path: &Path) -> io::Result<File> {
    let found = Found::at(path)?;
    match found.is_file() || found.is_block_device() {
        true => File::open(found.path()),
        false => Err(refused(&found, "a regular file or a block device")),
    }
}

fn refused(found: &Found, needed: &str) -> io::Error {
    let what = format!("it is {}, and must be {needed}", found.kind());
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// A directory with a file and a pipe, named for a test.
    fn directory(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("blkmq-found-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("file"), "content").unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, path.join("pipe"), Mode::RUSR | Mode::WUSR).unwrap();
        path
    }

    #[test]
    fn open_of_anything_but_a_file_is_refused_at_once() {
        let directory = directory("refused");
        let paths = [directory.join("pipe"), "/dev/null".into(), directory.clone()];
        let (done, all) = mpsc::channel();
        std::thread::spawn(move || {
            for path in paths {
                for open in [open_file, open_file_or_device] {
                    let _ = done.send(open(&path).unwrap_err().to_string());
                }
            }
        });
        for what in ["a pipe", "a character device", "a directory"] {
            for needed in ["a regular file", "a regular file or a block device"] {
                let said = all.recv_timeout(Duration::from_secs(20)).unwrap();
                assert_eq!(said, format!("it is {what}, and must be {needed}"));
            }
        }
        assert_eq!(
            io::read_to_string(open_file(&directory.join("file")).unwrap()).unwrap(),
            "content"
        );
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn open_of_what_was_found_is_not_that_of_what_is_there_since() {
        let directory = directory("since");
        let path = directory.join("file");
        let found = Found::at(&path).unwrap();
        fs::rename(directory.join("pipe"), &path).unwrap();
        assert_eq!(fs::read_to_string(found.path()).unwrap(), "content");
        fs::remove_dir_all(directory).unwrap();
    }
}
