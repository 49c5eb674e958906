//! A FUSE filesystem with one file and those that are made beside it, through which the kernel's requests reach a
//! [`Medium`] each, and the control over it. `state` has the files, `journal` their names, `front` the requests.
//!
//! What was written is volatile until it was made durable by fsync or fdatasync, or by the write itself. What FUSE lets the
//! filesystem see of the latter was measured on Linux 6.18 (`tests/what_arrives.rs` measures it again): a write with
//! `RWF_DSYNC`, or through a descriptor with `O_DSYNC`, is
//!
//! | the kernel's page cache is | arrives as |
//! |---|---|
//! | bypassed by the filesystem ([`Cache::Bypassed`]) | a write with `O_DSYNC` among its flags |
//! | written through ([`Cache::Through`]), or passed by with `O_DIRECT` | such a write, and an fsync of the file |
//! | written back ([`Cache::Back`]) | a write without a flag, and an fsync of the file |
//!
//! An fsync makes durable what had arrived before it did; of what arrives while it is under way nothing is promised.

mod front;
mod journal;
mod state;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use fuser::{BackgroundSession, MountOption};

use self::front::Front;
use self::state::Shared;
use crate::medium::Forgotten;
#[cfg(doc)]
use crate::medium::{Medium, SECTOR_BYTES};

/// A mounted filesystem that forgets. It has one file, [`Mount::image`], at first; dropping it unmounts it.
#[derive(Debug)]
pub struct Mount {
    shared: Arc<Shared>,
    session: Option<BackgroundSession>,
    dir: PathBuf,
}

/// What the kernel's page cache does with the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// Nothing: every read and write comes to the filesystem as it is (`FOPEN_DIRECT_IO`).
    Bypassed,
    /// It keeps what was read; writes go through.
    Through,
    /// It keeps what was written, too, until a sync or until it pleases, as on a local filesystem.
    Back,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// The sync that fails, counted from the next one, which is 1. Those behind it succeed, and what had been written is lost.
    pub failing_sync: Option<u64>,
    /// Bytes that may be allocated, of all files together; beyond that writes fail with ENOSPC.
    pub room: Option<usize>,
    /// How long each write, zeroing and sync takes at least.
    pub delay: Duration,
}

/// How many requests have arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Arrived {
    /// Writes, also durable ones.
    pub writes: u64,
    /// Writes that had to be durable.
    pub durable_writes: u64,
    /// Of fsync and fdatasync.
    pub syncs: u64,
    /// Syncs that were made to fail.
    pub failed_syncs: u64,
    /// Holes.
    pub punches: u64,
    /// Ranges of zeroes.
    pub zeroes: u64,
    /// Requests that found no room.
    pub refused: u64,
}

impl Mount {
    /// Mounts on `dir`, an empty directory, a filesystem whose file has `bytes` zeroes; no file can have more.
    ///
    /// # Errors
    /// If there is no /dev/fuse, or we may not mount.
    ///
    /// # Panics
    /// If `bytes` is no multiple of [`SECTOR_BYTES`].
    pub fn new(dir: &Path, bytes: usize, cache: Cache) -> io::Result<Self> {
        let shared = Arc::new(Shared::new(IMAGE, bytes, cache));
        let mut config = fuser::Config::default();
        config.mount_options = vec![MountOption::FSName(NAME.to_owned())];
        config.n_threads = Some(THREADS);
        let session = fuser::spawn_mount(Front(Arc::clone(&shared)), dir, &config)?;
        Ok(Self {
            shared,
            session: Some(session),
            dir: dir.to_owned(),
        })
    }

    /// Returns the path of the file.
    pub fn image(&self) -> PathBuf {
        self.dir.join(IMAGE)
    }

    /// Decides what goes wrong from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.shared.state().faults = faults;
    }

    /// Has reads and writes fail (EINVAL) that are no whole blocks of this many bytes, as direct I/O does on a drive with such
    /// sectors. For [`Cache::Bypassed`].
    pub fn set_block(&self, bytes: u64) {
        self.shared.state().block = bytes;
    }

    /// Truncates the file, as somebody at the server does: the kernel is not told.
    ///
    /// # Errors
    /// There is none, or it would be longer than a file can be.
    pub fn cut(&self, end: u64) -> io::Result<()> {
        let first = self.shared.state().nodes().first().copied();
        let image = first.ok_or(io::ErrorKind::NotFound)?;
        self.shared
            .set_end(image, end)
            .map_err(|error| io::Error::from_raw_os_error(error.code()))
    }

    /// Returns what has arrived since the filesystem was mounted.
    pub fn arrived(&self) -> Arrived {
        self.shared.state().arrived
    }

    /// Returns how many bytes are allocated.
    pub fn allocated_bytes(&self) -> usize {
        self.shared.state().allocated_bytes()
    }

    /// Waits until nobody has a file open: a process that was killed keeps it until the kernel has ended its requests.
    ///
    /// # Errors
    /// `TimedOut` after `limit`.
    pub fn wait_closed(&self, limit: Duration) -> io::Result<()> {
        let state = self.shared.state();
        let waited = self
            .shared
            .closed
            .wait_timeout_while(state, limit, |state| state.open > 0);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match state.open {
            0 => Ok(()),
            open => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("files are still open {open} times after {limit:?}"),
            )),
        }
    }

    /// Cuts the power: what is volatile is kept or dropped as the seed has it. Nobody may have a file open.
    pub fn forget(&self, seed: u64) -> Forgotten {
        let nodes = self.shared.state().nodes();
        if let Some(session) = &self.session {
            // The page cache writes out what is left in it, and keeps nothing. The kernel refuses if it does not
            // know the file, and then it has nothing of it.
            for node in nodes {
                let _ = session.notifier().inval_inode(node, 0, 0);
            }
        }
        self.shared.state().forget(seed)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let Some(session) = self.session.take() else {
            return;
        };
        let deadline = Instant::now() + UNMOUNT_TIME_MAX;
        // A process that was just killed may still hold the file.
        let _ = self.wait_closed(deadline - Instant::now());
        if let Err(error) = session.umount_and_join() {
            eprintln!("{} stays mounted: {error}: umount it by hand", self.dir.display());
        }
    }
}

const NAME: &str = "blkmq-forget";
const IMAGE: &str = "image";
/// Requests that are worked on at a time: one may be slow while others end.
const THREADS: usize = 4;
const UNMOUNT_TIME_MAX: Duration = Duration::from_secs(5);
