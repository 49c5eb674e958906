//! What is at a path, looked at before it is opened: the open of a pipe waits for its other end, and the open of a device may do
//! anything. Drives, keys and headers are opened by it; `blkmq-tls`, which has no other crate, does the same for itself.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
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

/// Opens again what the daemon was given by its parent as a descriptor of this number, to read it: anything. A pipe is read
/// until its writers have closed it, and is empty without any, since its open does not wait for one.
///
/// # Errors
/// The system's error; or the daemon itself holds the pipe's other end, which would never be closed.
pub fn open_inherited(number: u32) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut options = File::options();
    let file = options
        .read(true)
        .custom_flags(flags.bits().cast_signed())
        .open(format!("/proc/self/fd/{number}"))?;
    let is_pipe = file.metadata()?.file_type().is_fifo();
    if is_pipe && is_open_to_write(number)? {
        let what =
            "it is a pipe that the daemon has open to write as well, so it never ends: open it to read alone";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
    Ok(file)
}

/// Whether this process has a descriptor open for writing, by its number, since nobody owns what was inherited.
fn is_open_to_write(number: u32) -> io::Result<bool> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}"))?;
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    Ok(flags.is_some_and(|flags| flags & OFlags::RWMODE.bits() != OFlags::RDONLY.bits()))
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

    #[test]
    fn inherited_pipe_waits_for_no_writer_and_must_not_be_open_to_write() {
        let directory = directory("inherited");
        let mut both = File::options();
        let both = both.read(true).write(true).open(directory.join("pipe")).unwrap();
        let number = |file: &File| file.as_raw_fd().cast_unsigned();
        let refusal = open_inherited(number(&both)).unwrap_err().to_string();
        assert!(refusal.contains("open it to read alone"), "{refusal}");
        let mut given = File::open(directory.join("pipe")).unwrap();
        drop(both);
        let (done, read) = mpsc::channel();
        std::thread::spawn(move || {
            given = open_inherited(number(&given)).unwrap();
            let _ = done.send(io::read_to_string(given).unwrap());
        });
        let content = read.recv_timeout(Duration::from_secs(10));
        fs::remove_dir_all(&directory).unwrap();
        assert_eq!(content.expect("it waits for no writer"), "");
    }
}
