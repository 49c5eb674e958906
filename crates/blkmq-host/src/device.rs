//! The interface of a drive: its limits, a driver for each hardware context, allocation, and losses.
//! `blkmq-drivers` has the drives; `engine` opens their hardware contexts on the reactors.

use std::any::Any;
use std::fs::Metadata;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blkmq_core::driver::HctxDriver;
use blkmq_core::ids::{DiskId, HctxId};
use blkmq_core::limits::Limits;

use crate::runner::Runner;
use crate::uring::ring::RingHandle;

/// Whether a drive can be polled for completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// No.
    Impossible,
    /// Yes, if configured.
    Possible,
    /// Yes, unless it is switched off.
    Usual,
}

/// How a disk is, for operators; the worst last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// The latest requests succeeded.
    #[default]
    Ok,
    /// The latest request failed.
    Failing,
    /// The latest request found no room on the drive.
    Full,
    /// Nothing is at the path of its file any more.
    Missing,
    /// Another file is at the path of its file.
    Replaced,
    /// An encrypted disk without its key.
    Locked,
    /// Somebody else has taken the lock that this process had: nothing is written any more.
    LockLost,
    /// The drive ends before the disk does: what is behind is lost until the disk is opened again.
    Truncated,
    /// The drive does not answer.
    Gone,
}

impl State {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Ok,
        Self::Failing,
        Self::Full,
        Self::Missing,
        Self::Replaced,
        Self::Locked,
        Self::LockLost,
        Self::Truncated,
        Self::Gone,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Failing => "failing",
            Self::Full => "full",
            Self::Missing => "missing",
            Self::Replaced => "replaced",
            Self::Locked => "locked",
            Self::LockLost => "lock_lost",
            Self::Truncated => "truncated",
            Self::Gone => "gone",
        }
    }
}

/// A drive: what all hardware contexts of one queue share.
pub trait Device: Allocation + Any {
    /// The limits of one request.
    fn limits(&self) -> Limits;

    /// Says whether its hardware contexts can be polled (`io_poll`).
    fn polling(&self) -> Polling {
        Polling::Impossible
    }

    /// A text that says how completions are found when its contexts are polled, if there is more than one way. A
    /// call before the first poll finds out, and may block for a small read of each disk.
    fn describe_polling(&self) -> Option<String> {
        None
    }

    /// The number of hardware contexts: `wanted`, or at most `reactors` if the drive has fewer queues. Called
    /// once, before any context is opened.
    fn hctxs(&self, wanted: u16, _reactors: u16) -> u16 {
        wanted
    }

    /// Passes a [`Runner`], with which other threads can run its contexts. Called before these are opened.
    fn set_runner(&self, _runner: Runner) {}

    /// The largest number of disks while its queue is in use, if it begins with `disks`. Called once.
    fn disks_max(&self, disks: usize) -> usize {
        disks
    }

    /// Adds a disk under a number that none of its disks has, or, while nothing is under way, in place of one for which
    /// [`Self::reopen`] has returned it. Its contexts are notified afterwards
    /// ([`HctxDriver::refresh_disks`]), and then the disk is used. The driver knows the type of `disk`.
    ///
    /// # Errors
    /// If the drive cannot have it, and why.
    fn add_disk(&self, _id: DiskId, _disk: Box<dyn Any + Send>) -> io::Result<()> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "its driver has the disks that it began with",
        ))
    }

    /// Removes a disk without users, as soon as its contexts have been notified.
    fn remove_disk(&self, _id: DiskId) {}

    /// Returns a disk's present size in bytes, after it has resized the disk to `wanted` bytes, if given. The
    /// result holds for its contexts from then on. May block.
    ///
    /// # Errors
    /// If its disks cannot be resized while they are used, or the operating system's error;
    /// [`io::ErrorKind::InvalidData`] if no disk can have the size that the drive has.
    fn resize(&self, _disk: DiskId, _wanted: Option<u64>) -> io::Result<u64> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "its driver has disks of one size",
        ))
    }

    /// Serves a disk again whose drive was full or gone, although data that was not durable then may be lost: its users
    /// are told of that once, as of all [`Losses`]. Returns what has to take its place, if that is something else now
    /// ([`Self::add_disk`]). May block.
    ///
    /// # Errors
    /// Why it cannot be served as before, and what to do.
    fn reopen(&self, _disk: DiskId) -> io::Result<Option<Box<dyn Any + Send>>> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "its driver serves it again by itself, as soon as the drive does",
        ))
    }

    /// Replaces what is below some disks, of all at one moment: requests wait meanwhile. `refresh` has all contexts read
    /// the list of disks ([`HctxDriver::refresh_disks`]). May block.
    ///
    /// # Errors
    /// Why not; nothing has changed then.
    fn replace(
        &self,
        _disks: &[(DiskId, Replacement)],
        _refresh: &dyn Fn() -> io::Result<()>,
    ) -> io::Result<()> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "it is no image: only those of qcow2= can be replaced",
        ))
    }

    /// Adds a bitmap to a disk, in which all changes from now on are noted, in units of so many bytes; by default, of a size
    /// that suits. It is kept with the disk. May block.
    ///
    /// # Errors
    /// The disk cannot have one, and why.
    fn add_bitmap(&self, _disk: DiskId, _name: &str, _granularity: Option<u64>) -> io::Result<()> {
        Err(no_bitmaps())
    }

    /// Removes a bitmap of a disk. May block.
    ///
    /// # Errors
    /// There is none of that name, or the system's.
    fn remove_bitmap(&self, _disk: DiskId, _name: &str) -> io::Result<()> {
        Err(no_bitmaps())
    }

    /// The bitmaps of a disk. May block.
    ///
    /// # Errors
    /// They cannot be read.
    fn bitmaps(&self, _disk: DiskId) -> io::Result<Vec<BitmapInfo>> {
        Ok(Vec::new())
    }

    /// Another process is about to go on with a disk that has been flushed, and no request is under way: what that process
    /// has to find on the drive is written. If it comes to nothing, this one goes on as before. May block.
    fn prepare_handover(&self, _disk: DiskId) {}

    /// Says whether the drive has left a question unanswered for too long. Does not block.
    fn is_silent(&self) -> bool {
        false
    }

    /// Says whether its contexts can be closed while the engine continues.
    fn is_removable(&self) -> bool {
        false
    }

    /// The engine shuts down: requests that the drive holds back must end, with an error if necessary.
    fn abort_queued(&self) {}

    /// The engine has stopped: what is only in this process is written. Also when another process continues with the
    /// disks, after a flush. May block.
    fn close(&self) {}

    /// A disk's state that is only in this process, for another process that continues with the disk. No request
    /// is in flight then.
    ///
    /// # Errors
    /// If a descriptor cannot be made.
    fn handover_state(&self, _disk: DiskId) -> io::Result<HandoverState> {
        Ok(HandoverState {
            must_flush: true,
            ..HandoverState::default()
        })
    }

    /// The files of this host that contain a disk, as they were opened; those of all its paths.
    fn files(&self, _disk: DiskId) -> Vec<FileId> {
        Vec::new()
    }

    /// Those that [`Replacement::BeginCommit`] opens for writing: what a disk's image lies on.
    fn files_of_base(&self, _disk: DiskId) -> Vec<FileId> {
        Vec::new()
    }

    /// The drives of this host that hold the disks, by number or name, some more than once; none if they are unknown.
    fn drives(&self) -> Vec<String> {
        Vec::new()
    }

    /// Makes the driver's side of one hardware context. Called on the reactor that owns the context; `ring`
    /// is that reactor's.
    ///
    /// # Errors
    /// The operating system's error, with the object named.
    fn open_hctx(&self, ring: &RingHandle, hctx: HctxId) -> io::Result<Box<dyn HctxDriver>>;
}

/// What is put below a disk in the place of its image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replacement {
    /// An empty image on the present one, which is kept at this path.
    Snapshot(PathBuf),
    /// An empty image on what the present one lies on; the present one is deleted.
    Reset,
    /// Nothing: only says whether [`Replacement::Flat`] makes sense.
    BeginFlat,
    /// Nothing: makes sure that all of what the image lies on was copied, by reads with
    /// [`Flags::TASK`](blkmq_core::bio::Flags::TASK), and that the copies are durable. May take long, unless it is given up.
    SettleFlat(GivenUp),
    /// The same image without what it lies on, after [`Replacement::SettleFlat`].
    Flat,
    /// The same image on what it lies on, which nobody else uses and is opened for writing: reads with
    /// [`Flags::TASK`](blkmq_core::bio::Flags::TASK) copy parts of the image into it.
    BeginCommit,
    /// Nothing: makes sure that what was copied is durable, and that all was or has changed since. May take long.
    SettleCommit(GivenUp),
    /// An empty image on what the present one lies on, which has all that was in the present one, after
    /// [`Replacement::SettleCommit`].
    Commit,
    /// Nothing: what it lies on is not written any more.
    LeaveCommit,
}

/// Says whether work that takes long is given up. Clones are of the same work.
#[derive(Clone, Debug, Default)]
pub struct GivenUp(Arc<AtomicBool>);

impl GivenUp {
    /// Gives the work up: it ends soon, with an error.
    pub fn give_up(&self) {
        // Relaxed: it says nothing of other memory.
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns whether the work is given up.
    pub fn is_given_up(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Clones are equal, and no others.
impl PartialEq for GivenUp {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for GivenUp {}

/// The identity of a file, whatever its path is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileId {
    /// The device of its filesystem; of a block device, its own number.
    pub device: u64,
    /// Its inode number; 0 of a block device, which may have several inodes.
    pub inode: u64,
}

impl FileId {
    /// The identity of the file of which the system says this.
    pub fn of(found: &Metadata) -> Self {
        match found.file_type().is_block_device() {
            true => Self {
                device: found.rdev(),
                inode: 0,
            },
            false => Self {
                device: found.dev(),
                inode: found.ino(),
            },
        }
    }
}

/// A disk's state that is only in this process.
#[derive(Debug, Default)]
pub struct HandoverState {
    /// Descriptors that hold locks: a process that has one of them has the lock.
    pub locks: Vec<OwnedFd>,
    /// Written data must be flushed, since only this process knows of it.
    pub must_flush: bool,
    /// Why no other process can continue with the disk.
    pub obstacle: Option<String>,
    /// No other process can even open the disk while this one has it.
    pub is_exclusive: bool,
}

/// A run of bytes of a disk of which all are stored in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes, at least 1.
    pub len: u64,
    /// Nothing is allocated for these bytes.
    pub hole: bool,
    /// These bytes are known to read as zeroes.
    pub zero: bool,
}

impl Extent {
    /// Makes an extent of `len` stored bytes.
    pub const fn data(len: u64) -> Self {
        Self {
            len,
            hole: false,
            zero: false,
        }
    }

    /// Makes an extent of `len` bytes that are not stored and read as zeroes.
    pub const fn hole(len: u64) -> Self {
        Self {
            len,
            hole: true,
            zero: true,
        }
    }
}

/// A dirty bitmap of a disk, for operators: which parts have changed since it was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapInfo {
    /// Its name.
    pub name: String,
    /// Bytes that each of its bits stands for.
    pub granularity: u64,
    /// Changes of the disk are noted in it.
    pub is_enabled: bool,
    /// Bytes of the disk that have changed; `None` if it cannot be used, since its last writer has not stored it.
    pub changed: Option<u64>,
}

/// A run of bytes of a disk of which all have changed, or none, as far as a bitmap says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed {
    /// Bytes, at least 1.
    pub len: u64,
    /// They may have changed.
    pub is_changed: bool,
}

/// How often completed writes may have been lost before a flush covered them. Each user's flush must fail once
/// for each of these times, so a user compares this with the count that was reported to it last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// How often.
    pub count: u64,
    /// How many of these times were reported to at least one user. A new user begins here: an unreported loss may
    /// concern writes that it, or the client behind it, made over a former connection.
    pub seen: u64,
}

impl Losses {
    /// The sum for both disks.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            count: self.count + other.count,
            seen: self.seen + other.seen,
        }
    }
}

/// Queries of a drive's disks beside I/O: allocation, for a door's block status, and losses.
pub trait Allocation: Send + Sync {
    /// Appends the extents from `offset` on, in order and without gaps: at most `max` extents, which together
    /// cover at least 1 and at most `len` bytes. May be called from any thread; may block for as long as the
    /// filesystem needs to look up its extents.
    ///
    /// # Errors
    /// The operating system's error, or `InvalidInput` for a disk or a range that does not exist.
    fn extents(
        &self,
        disk: DiskId,
        offset: u64,
        len: u64,
        max: usize,
        out: &mut Vec<Extent>,
    ) -> io::Result<()>;

    /// The same with what work in the background ([`Flags::TASK`](blkmq_core::bio::Flags::TASK)) has still to do as data.
    ///
    /// # Errors
    /// As of [`Self::extents`].
    fn left(&self, disk: DiskId, offset: u64, len: u64, max: usize, out: &mut Vec<Extent>) -> io::Result<()> {
        self.extents(disk, offset, len, max, out)
    }

    /// The names of a disk's bitmaps that clients can ask for. Does not block.
    fn bitmap_names(&self, _disk: DiskId) -> Vec<String> {
        Vec::new()
    }

    /// Appends what has changed from `offset` on, as a bitmap says: as of [`Self::extents`], in whole blocks of the disk. May
    /// block.
    ///
    /// # Errors
    /// There is no such bitmap (any more), the operating system's error, or `InvalidInput` for a disk or a range that does
    /// not exist.
    fn changed(
        &self,
        _disk: DiskId,
        _bitmap: &str,
        _range: Range<u64>,
        _max: usize,
        _out: &mut Vec<Changed>,
    ) -> io::Result<()> {
        Err(no_bitmaps())
    }

    /// The limits that clients of a disk are told, of a queue with these: the disk may have narrower ones of its own.
    fn limits_of(&self, _disk: DiskId, queue: &Limits) -> Limits {
        queue.clone()
    }

    /// Says how often completed writes may have been lost.
    fn losses(&self, _disk: DiskId) -> Losses {
        Losses::default()
    }

    /// Notes that all present losses were reported to a user.
    fn mark_losses_seen(&self, _disk: DiskId) {}

    /// Looks at what no request of a disk shows, and [`Self::state`] tells from then on: whether its file is still at its
    /// path. May block for as long as a local filesystem takes to look a name up. A disk on others has none of its own.
    fn look(&self, _disk: DiskId) {}

    /// How a disk is, as far as its requests and looks have shown; of a disk on others, the worst of theirs. Does not block.
    fn state(&self, _disk: DiskId) -> State {
        State::Ok
    }
}

fn no_bitmaps() -> io::Error {
    io::Error::new(
        io::ErrorKind::Unsupported,
        "it has no bitmaps: only images of qcow2= can have them",
    )
}
