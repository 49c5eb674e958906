//! The errors of the library: [`Error`] for set-up and control, [`IoError`] for one I/O.

use std::{fmt, io};

use blkmq_core::bio::Status;

use crate::buffer::Buffer;

/// Why an engine does not start, or does not do what it was asked. The text names the object, the value and
/// the next step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A disk, a group, a scheduler or a queue cannot be as it is described.
    #[error("{0}")]
    Configuration(String),
    /// There is no disk of that name.
    #[error("there is no disk {name}; there are: {known}")]
    NoDisk {
        /// The name that was given.
        name: String,
        /// The names of all disks.
        known: String,
    },
    /// No queue has a group of that path.
    #[error("there is no group {path}; there are: {known}")]
    NoGroup {
        /// The path that was given.
        path: String,
        /// The paths of all groups.
        known: String,
    },
    /// The engine cannot start, admit a thread or shut down.
    #[error("{0}")]
    Engine(String),
    /// The engine belongs to the parent of this process.
    #[error("the engine belongs to process {process}, of which this one is a fork: start another engine")]
    Forked {
        /// The process that started it.
        process: u32,
    },
    /// An I/O failed.
    #[error(transparent)]
    Io(#[from] IoError),
}

impl Error {
    pub(crate) fn configuration(error: &anyhow::Error) -> Self {
        Self::Configuration(format!("{error:#}"))
    }
}

impl From<blkmq_host::Error> for Error {
    fn from(error: blkmq_host::Error) -> Self {
        Self::Engine(error.to_string())
    }
}

/// An I/O that failed, with its buffer. After a failed read the buffer's content is undefined.
#[derive(Debug)]
pub struct IoError {
    /// The reason, never [`Status::Ok`].
    pub status: Status,
    /// The buffer of the bio.
    pub buffer: Buffer,
}

/// The result of an I/O.
pub(crate) fn result_of(status: Status, buffer: Buffer) -> Result<Buffer, IoError> {
    if status.is_ok() {
        Ok(buffer)
    } else {
        Err(IoError { status, buffer })
    }
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.status {
            Status::Ok => "no error",
            Status::Io => "an I/O error",
            Status::Medium => "the medium could not be read or written",
            Status::Transport => "the connection to the drive failed",
            Status::NoSpace => "no space is left, or the range is behind the end of the disk",
            Status::NotSupported => "the disk does not support the operation",
            Status::Invalid => "the disk has no such range, or it is not made of whole blocks",
            Status::ReadOnly => "the disk is read-only",
            Status::Timeout => "the drive did not answer in time",
            Status::NoMemory => "out of memory, or no room in the queue",
            Status::Shutdown => "the disk is removed, or the engine is shut down",
            Status::Requeue => "the drive asked to try again",
        };
        f.write_str(text)
    }
}

impl std::error::Error for IoError {}

impl From<IoError> for io::Error {
    /// The error of the same errno.
    fn from(error: IoError) -> Self {
        Self::from_raw_os_error(error.status.errno())
    }
}
