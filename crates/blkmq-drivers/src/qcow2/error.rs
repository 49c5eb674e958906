//! The errors of an image that is refused: what is wrong with which file, and what to do about it. `chain` and
//! `check` return it; the caller adds the disk's name.

use std::io;
use std::path::PathBuf;

use super::header::HeaderError;
use crate::file::FileError;

/// Why an image cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// Its header is none, or asks for what there is not.
    #[error("image {path:?}: {error}")]
    Header {
        /// The image.
        path: PathBuf,
        /// What is wrong.
        error: HeaderError,
    },
    /// Its tables contradict each other or the size of the file.
    #[error("image {path:?}: {problem}: repair it with `qemu-img check -r all`, or restore it")]
    Tables {
        /// The image.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The system refuses.
    #[error("image {path:?}: cannot {action}: {error}")]
    System {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's error.
        error: io::Error,
    },
    /// The files that it names cannot be used.
    #[error("image {path:?}: its {what} {name:?} is refused: {why}")]
    Named {
        /// The image.
        path: PathBuf,
        /// Which of its files.
        what: &'static str,
        /// Its name, as the image has it.
        name: String,
        /// Why, and what to do.
        why: String,
    },
    /// The size of its disk is no number of blocks.
    #[error(
        "image {path:?}: its disk of {size} bytes is no multiple of {block}: make it larger with `qemu-img resize`"
    )]
    Ragged {
        /// The image.
        path: PathBuf,
        /// Bytes.
        size: u64,
        /// Bytes.
        block: u32,
    },
}
