//! The errors of a disk in a Ceph cluster that is refused: what is wrong with which image, and what to do
//! about it. The caller adds the disk's name.

use std::borrow::Cow;
use std::io;
use std::time::Duration;

/// Why an image cannot be served as a disk.
#[derive(Debug, thiserror::Error)]
pub enum RbdError {
    /// librbd, or one of its functions, does not exist.
    #[error(
        "rbd {image}: librbd cannot be used: {problem}; install it: apt-get install librbd1 (Ceph 15 or later)"
    )]
    Library {
        /// The image.
        image: String,
        /// The loader's error.
        problem: String,
    },
    /// The program is static.
    #[error(
        "rbd {image}: librbd cannot be used: this program is static and can load no library; use the one of the Debian package, or of `cargo build`"
    )]
    Static {
        /// The image.
        image: String,
    },
    /// Ceph refuses something.
    #[error("rbd {image}: cannot {action}: {error}{advice}")]
    Call {
        /// The image.
        image: String,
        /// What was tried.
        action: Cow<'static, str>,
        /// Ceph's error.
        error: io::Error,
        /// What to do about it, with its punctuation, or nothing.
        advice: Cow<'static, str>,
    },
    /// The cluster does not answer.
    #[error(
        "rbd {image}: no answer from the cluster in {limit:?}: see whether its monitors and OSDs run (ceph -s), or raise open_timeout="
    )]
    Late {
        /// The image.
        image: String,
        /// How long the caller waited.
        limit: Duration,
    },
    /// Another client, which is alive, has the image's lock.
    #[error(
        "rbd {image}: in use by the client at {owner}, which has its exclusive lock: stop that one, give read_only=on, or raise lock_wait="
    )]
    Locked {
        /// The image.
        image: String,
        /// The address of the lock's owner.
        owner: String,
    },
    /// It cannot be locked.
    #[error(
        "rbd {image}: has no exclusive lock to take: run `rbd feature enable {image} exclusive-lock`, or give lock=off if nobody else can write to it"
    )]
    NoLock {
        /// The image.
        image: String,
    },
    /// It has no bytes.
    #[error(
        "rbd {image}: is empty: make it as large as the disk, for instance `rbd resize --size 1G {image}`"
    )]
    Empty {
        /// The image.
        image: String,
    },
}

impl RbdError {
    /// Returns whether the cluster has barred the connection over which it was tried.
    pub(super) fn is_barred(&self) -> bool {
        matches!(self, Self::Call { error, .. } if error.raw_os_error() == Some(libc::ESHUTDOWN))
    }
}
