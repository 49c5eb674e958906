//! The errors of a disk in a file that is refused: what is wrong with which file, and what to do about
//! it. `open` and `lock` return it; the caller adds the disk's name.

use std::io;
use std::path::PathBuf;

/// Why a file cannot be served as a disk.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It does not exist, and is not to be created.
    #[error(
        "file {path:?}: not found: if it should be there, mount its filesystem; else create it, or give create=on with size= to have \
         it created"
    )]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// The system refuses.
    #[error("file {path:?}: cannot {action}: {error}{advice}")]
    System {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's error.
        error: io::Error,
        /// What to do about it, with its punctuation, or nothing.
        advice: &'static str,
    },
    /// It is a directory, a socket or the like.
    #[error("file {path:?}: is {kind}: must be a regular file or a block device")]
    Kind {
        /// The file.
        path: PathBuf,
        /// Its type.
        kind: &'static str,
    },
    /// It has no bytes.
    #[error("file {path:?}: is empty: make it as large as the disk, for instance `truncate -s 1G {path:?}`")]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// Its size is no multiple of the block size.
    #[error(
        "file {path:?}: size {size} rejected: must be a multiple of the block size {block}: use a smaller block_size or, for a file, ro=on, or `truncate -s {next} {path:?}`"
    )]
    Ragged {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
        /// The block size in bytes.
        block: u32,
        /// The next size that would do.
        next: u64,
    },
    /// It is smaller than the configured size.
    #[error(
        "file {path:?}: size {size} is less than size={wanted}: leave size= out to serve it as it is, or make it larger (a \
         file: `truncate -s {wanted} {path:?}`)"
    )]
    TooSmall {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
        /// The configured size, in bytes.
        wanted: u64,
    },
    /// Another process uses it.
    #[error("file {path:?}: in use by {holder}: {advice}")]
    Locked {
        /// The file.
        path: PathBuf,
        /// The holder of the lock, if it can be found out.
        holder: String,
        /// What to do about it.
        advice: &'static str,
    },
    /// Direct I/O was demanded and is not possible.
    #[error("file {path:?}: direct=on rejected: {reason}: use direct=auto or off")]
    NotDirect {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The block size is smaller than the device's.
    #[error(
        "file {path:?}: block size {block} rejected: must be at least {least}, the device's sector size: set block_size={least}"
    )]
    BlockTooSmall {
        /// The device.
        path: PathBuf,
        /// The configured block size, in bytes.
        block: u32,
        /// The device's.
        least: u32,
    },
}
