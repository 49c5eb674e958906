//! One disk in a file: its size and alignment, and the operations that its filesystem does not support.
//! `at_path` looks what others find at its path, `end` where it ends, `extents` has its holes, `health` how its requests end,
//! `losses` what of it is lost. Made by `open`, joined with others by `device`, used by all hardware contexts at once.

mod at_path;
mod end;
mod extents;
mod health;
mod losses;

use std::fs::File;
use std::io;
#[cfg(feature = "qcow2")]
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::SystemTime;

use blkmq_core::time::Instant;
use blkmq_host::LogBudget;
use blkmq_host::device::FileId;
use rustix::fs::SeekFrom;

use super::bounce::BLOCK_BYTES_MAX;
use super::config::FileConfig;
#[cfg(feature = "qcow2")]
use super::error::FileError;
#[cfg(feature = "qcow2")]
use super::lock;
use super::lock::Lock;
use super::open;
use super::pieces::{Piece, PieceSize};
use super::place::Place;
use super::syncs::Syncs;
use blkmq_host::block_locks::BlockLocks;

pub(super) use losses::has_any_loss;

/// One disk in a file or on a block device, open and locked.
#[derive(Debug)]
pub struct FileDisk {
    pub(super) file: File,
    /// The lock that excludes others.
    pub(super) lock: Lock,
    pub(super) path: PathBuf,
    /// What was opened, whatever is at the path now.
    pub(crate) id: Option<FileId>,
    /// When the file was made, where its filesystem says so: with the inode's number, what it is after another mount.
    pub(super) birth: Option<SystemTime>,
    /// How it was opened.
    pub(super) config: FileConfig,
    pub(super) size: AtomicU64,
    pub(super) block_size: u32,
    pub(super) read_only: bool,
    pub(super) device: Backing,
    /// What it lies on: names its queue.
    pub(super) place: Place,
    /// The alignments of direct I/O when the disk was opened; `None` where it uses the page cache.
    direct: Option<Alignment>,
    /// What ranges must be aligned to now, which may grow while the file is served (a clone of it was made); 1 with the
    /// page cache. Relaxed throughout: requests that come too early fail, and are repeated.
    range: AtomicU32,
    /// The blocks that small requests change.
    pub(super) locks: BlockLocks,
    /// Submitting a request may block, whatever the kernel was asked for: see [`may_block`].
    pub(super) may_block: bool,
    /// The kernel says what it knows of the file's size without asking anybody: see [`tells_size`].
    tells_size: bool,
    /// Its data is in memory, so that a read is a copy and never waits: see [`is_in_memory`].
    pub(super) is_in_memory: bool,
    pub(super) lacks: Lacks,
    /// What the block device says of discards; 0 where it has none.
    pub(super) discards: Discards,
    pub(super) piece_size: PieceSize,
    pub(super) syncs: Syncs,
    /// Whether the device can be polled, once that was tried; if not, the reason.
    pub(super) polling: OnceLock<Result<(), String>>,
    /// A flush has failed: the kernel may have dropped the data and would report success for the
    /// next flush, so none succeeds.
    pub(super) flush_failed: AtomicBool,
    /// Where the file ended when it was found to end before the disk: what was behind is lost, though the file may have grown
    /// again since. `u64::MAX` if nothing is lost. Relaxed throughout: the requests that find it out are under way together.
    pub(super) lost_from: AtomicU64,
    /// Where the file ends, if that is inside the disk's last block, which is padded with zeroes: else `u64::MAX`.
    pub(super) content_end: u64,
    /// How often a flush has failed or data was found lost, since the disk was opened again; and how many of these times
    /// a client was told of.
    pub(super) losses: AtomicU64,
    pub(super) seen: AtomicU64,
    /// Until when requests that end look where the file ends, in nanoseconds: it is written. 0 if it was never. See `end`.
    watched_until: AtomicU64,
    /// Another thread is to look, since the look may block.
    is_look_due: AtomicBool,
    /// Whether the last request failed, so that a failure is logged once, and the budget of log
    /// lines.
    pub(super) is_failing: AtomicBool,
    /// Whether the last failure was for lack of room.
    pub(super) is_full: AtomicBool,
    /// What the latest look has found at its path: see `at_path`.
    at_path: AtomicU8,
    log: LogBudget,
    pub(super) errors: AtomicU64,
}

/// What a file is, as the system numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Backing {
    /// The device number of the filesystem that a file lies on.
    Filesystem(u64),
    /// The device number of a block device.
    Block(u64),
}

/// The alignments of direct I/O for memory and for ranges, in bytes, both powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Of the address of each piece of memory.
    pub memory: u32,
    /// Of offset and length on the disk, and of the length of each piece of memory.
    pub range: u32,
}

/// The operations that the filesystem or the device refused once, which are not tried again.
/// Relaxed throughout: a late read costs one more refusal.
#[derive(Debug, Default)]
pub(super) struct Lacks {
    pub(super) discarding: AtomicBool,
    pub(super) punching: AtomicBool,
    pub(super) zeroing: AtomicBool,
    pub(super) polling: AtomicBool,
}

/// What a block device says of discards, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Discards {
    /// The longest one; 0 where it has none.
    pub(super) max: u64,
    /// The smallest one that has an effect, and its alignment.
    pub(super) granularity: u32,
}

impl FileDisk {
    /// Collects what `open` found out.
    pub(super) fn new(file: File, path: PathBuf, size: u64, block_size: u32, device: Backing) -> Self {
        let found = file.metadata().ok();
        Self {
            lock: Lock::None,
            may_block: matches!(device, Backing::Filesystem(_)) && may_block(&file),
            tells_size: tells_size(&file),
            is_in_memory: matches!(device, Backing::Filesystem(_)) && is_in_memory(&file),
            place: Place::of(&file, device),
            id: found.as_ref().map(FileId::of),
            birth: found.and_then(|found| found.created().ok()),
            config: FileConfig::default(),
            file,
            path,
            size: AtomicU64::new(size),
            block_size,
            read_only: false,
            device,
            direct: None,
            range: AtomicU32::new(1),
            locks: BlockLocks::default(),
            lacks: Lacks::default(),
            discards: Discards::default(),
            piece_size: PieceSize::new(),
            syncs: Syncs::new(),
            polling: OnceLock::new(),
            flush_failed: AtomicBool::new(false),
            content_end: u64::MAX,
            lost_from: AtomicU64::new(u64::MAX),
            losses: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            watched_until: AtomicU64::new(0),
            is_look_due: AtomicBool::new(false),
            is_failing: AtomicBool::new(false),
            is_full: AtomicBool::new(false),
            at_path: AtomicU8::default(),
            log: LogBudget::new("it"),
            errors: AtomicU64::new(0),
        }
    }

    /// Returns the path under which it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the size in bytes; 0 of a file of an image, whose end is no end of a disk.
    pub fn size(&self) -> u64 {
        // Relaxed: code that relies on a new size has been told of it.
        self.size.load(Ordering::Relaxed)
    }

    /// Reads the present size, after setting it to `wanted` bytes if that is asked for and it is a
    /// file.
    ///
    /// # Errors
    /// The system's error, or the size of a block device cannot be set.
    pub(super) fn resize(&self, wanted: Option<u64>) -> io::Result<u64> {
        // Before the file's size: another call may make both larger.
        let known = self.content();
        let size = rustix::fs::seek(&self.file, SeekFrom::End(0))?;
        if self.content_end < u64::MAX {
            return self.look_at_content_end(size);
        }
        let new = wanted.unwrap_or(0).max(size);
        for (what, block) in [
            ("block size", self.block_size),
            ("blocks that direct I/O needs here,", self.range()),
        ] {
            if new > self.size() && !new.is_multiple_of(block.into()) {
                let what = format!("size {new} is no multiple of the {what} {block}");
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
        }
        if i64::try_from(new).is_err() {
            return Err(io::Error::other(format!(
                "size {new} is more than a file can have"
            )));
        }
        let size = match wanted {
            // What was cut off is lost; the caller says so, and nothing hides it.
            _ if size < known => {
                self.note_end(size, known, Instant(0));
                return Ok(size);
            }
            Some(wanted) if wanted > size && self.is_block_device() => {
                return Err(io::Error::other(format!("the block device has {size} bytes")));
            }
            Some(wanted) if wanted > size => {
                self.file.set_len(wanted)?;
                wanted
            }
            _ => size,
        };
        if size > self.size() {
            self.size.store(size, Ordering::Relaxed);
        }
        Ok(size)
    }

    /// What a resize says of a disk whose last block is padded, and whose file has `size` bytes now.
    fn look_at_content_end(&self, size: u64) -> io::Result<u64> {
        if size > self.content_end {
            let what = "its last block is padded with zeroes, so it cannot grow: remove the disk and add it";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        self.note_end(size, self.content(), Instant(0));
        Ok(if size < self.content_end {
            size
        } else {
            self.size()
        })
    }

    /// Returns the logical block size in bytes.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Returns whether it was opened for reading only.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the alignments of direct I/O, if requests bypass the page cache.
    pub fn direct(&self) -> Option<Alignment> {
        let range = self.range();
        self.direct.map(|found| Alignment { range, ..found })
    }

    /// Sets how requests bypass the page cache, if they do.
    pub(super) fn set_alignment(&mut self, direct: Option<Alignment>) {
        self.direct = direct;
        *self.range.get_mut() = direct.map_or(1, |needs| needs.range);
    }

    /// Returns whether another process has handed its lock over.
    #[cfg(feature = "qcow2")]
    pub(crate) fn has_inherited_lock(&self) -> bool {
        matches!(self.lock, Lock::Inherited(_))
    }

    /// Returns whether requests bypass the page cache.
    #[inline]
    pub(crate) fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// What offsets and lengths must be multiples of, in bytes: a power of two.
    #[inline]
    pub(crate) fn range(&self) -> u32 {
        self.range.load(Ordering::Relaxed)
    }

    /// Sets what offsets and lengths must be multiples of.
    pub(super) fn set_range(&self, range: u32) {
        self.range.store(range, Ordering::Relaxed);
    }

    /// Returns whether a range has to be widened to whole blocks of direct I/O, or has to be padded.
    #[inline]
    pub(crate) fn is_odd(&self, offset: u64, len: u64) -> bool {
        (offset | len) & (u64::from(self.range()) - 1) != 0 || offset + len > self.content_end
    }

    /// Where the file ends, if its last block is padded with zeroes: otherwise where no file does.
    pub(super) fn content_end(&self) -> u64 {
        self.content_end
    }

    /// Makes the disk end with a whole block, although its file ends before. It can only be read.
    pub(super) fn pad_to(&mut self, block: u32) {
        self.content_end = self.size();
        *self.size.get_mut() = self.size().next_multiple_of(block.into());
    }

    /// Asks what direct I/O needs now. Blocks beyond the end of the disk would lengthen the file, so what its size is no
    /// multiple of is not adopted.
    pub(super) fn look_at_alignment(&self) {
        let found = self.direct.and_then(|_| open::announced_alignment(&self.file));
        let Some(range) = found.map(|found| found.range) else {
            return;
        };
        if range > self.range() && range <= BLOCK_BYTES_MAX && self.size().is_multiple_of(range.into()) {
            self.set_range(range);
            tracing::info!(
                source = %self.path.display(),
                "file {:?}: direct I/O needs blocks of {range} bytes from now on, as after a clone; smaller requests read \
                 and write whole ones",
                self.path
            );
        }
    }

    /// The open file, for calls that may block.
    #[cfg(feature = "qcow2")]
    pub(crate) fn handle(&self) -> &File {
        &self.file
    }

    /// Writes a range on a thread that may block, while no small request changes blocks of it.
    #[cfg(feature = "qcow2")]
    pub(crate) fn write_in_turn<T>(&self, range: &Range<u64>, write: impl FnOnce() -> T) -> T {
        match self.is_direct() {
            true => self.locks.in_turn(range, write),
            false => write(),
        }
    }

    /// Finds out where the file ends now, in bytes.
    #[cfg(feature = "qcow2")]
    pub(crate) fn end(&self) -> io::Result<u64> {
        Ok(rustix::fs::seek(&self.file, SeekFrom::End(0))?)
    }

    /// Makes the file end at `end`, in bytes.
    #[cfg(feature = "qcow2")]
    pub(crate) fn set_end(&self, end: u64) -> io::Result<()> {
        self.file.set_len(end)
    }

    /// Makes what was written durable, as a flush does. Blocks.
    ///
    /// # Errors
    /// This or an earlier flush has failed, or one that overlapped it.
    #[cfg(feature = "qcow2")]
    pub(crate) fn sync(&self) -> io::Result<()> {
        let failed = || io::Error::other("a flush has failed before");
        // Relaxed, as all of its uses.
        if self.flush_failed.load(Ordering::Relaxed) {
            return Err(failed());
        }
        let begun = self.syncs.begin();
        let synced = rustix::fs::fdatasync(&self.file);
        if synced.is_err() {
            self.note_failed_flush();
        }
        let fence = self.syncs.end(begun);
        while !self.syncs.is_past(fence) {
            std::thread::sleep(OVERLAP_LOOK);
        }
        synced?;
        match self.flush_failed.load(Ordering::Relaxed) {
            true => Err(failed()),
            false => Ok(()),
        }
    }

    /// Has what is read from now on come from the drive, and not from the page cache: after a failed sync, pages may have what
    /// the drive has not.
    #[cfg(feature = "qcow2")]
    pub(crate) fn forget_cached(&self) {
        // Advice: what it does not do is told by no sync any more.
        let _ = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed);
    }

    /// Has all syncs fail, as after one that has failed; or no more.
    #[cfg(all(test, feature = "qcow2"))]
    pub(crate) fn fail_syncs(&self, on: bool) {
        self.flush_failed.store(on, Ordering::Relaxed);
    }

    /// Has all syncs wait for one that overlaps them, until the result is called.
    #[cfg(all(test, feature = "qcow2"))]
    pub(crate) fn hold_syncs(&self) -> impl FnOnce() + use<'_> {
        let begun = self.syncs.begin();
        move || {
            self.syncs.end(begun);
        }
    }

    /// Returns what the file is.
    pub fn device(&self) -> Backing {
        self.device
    }

    /// Returns how many requests have failed.
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// Returns whether zeroes have to be written, as far as is known: no holes can be made.
    pub(super) fn writes_zeroes(&self) -> bool {
        self.lacks.punching.load(Ordering::Relaxed)
    }

    /// Returns whether a block device can be told to forget a range, as far as is known.
    pub(super) fn may_discard(&self) -> bool {
        self.discards.max > 0 && !self.lacks.discarding.load(Ordering::Relaxed)
    }

    /// Returns whether a discard has an effect, as far as is known.
    pub(super) fn gives_back(&self) -> bool {
        match self.is_block_device() {
            true => self.may_discard() || self.discards.max > 0 && !self.writes_zeroes(),
            false => !self.writes_zeroes(),
        }
    }

    pub(crate) fn is_block_device(&self) -> bool {
        matches!(self.device, Backing::Block(_))
    }

    /// The file that holds the lock of a writer, if one is held.
    pub(super) fn locking_file(&self) -> Option<&File> {
        match &self.lock {
            Lock::None | Lock::Reader => None,
            Lock::Writer => Some(&self.file),
            Lock::Inherited(file) => Some(file),
        }
    }

    /// Lets others read the file, if it is locked: nobody writes to it any more.
    #[cfg(feature = "qcow2")]
    pub(crate) fn share_lock(&self) -> Result<(), FileError> {
        self.locking_file()
            .map_or(Ok(()), |file| lock::share(file, &self.path))
    }

    /// Takes the writer's lock again.
    #[cfg(feature = "qcow2")]
    pub(crate) fn take_lock_back(&self) -> Result<(), FileError> {
        self.locking_file()
            .map_or(Ok(()), |file| lock::take_back(file, &self.path))
    }

    /// Gives the lock up, whichever it is: for another description of the file, which this process opens.
    #[cfg(feature = "qcow2")]
    pub(crate) fn give_up_lock(&self) {
        self.any_lock().into_iter().for_each(lock::give_up);
    }

    /// Takes a reader's lock, where there was one.
    #[cfg(feature = "qcow2")]
    pub(crate) fn take_reader_lock(&self) -> Result<(), FileError> {
        self.any_lock()
            .map_or(Ok(()), |file| lock::take_as_reader(file, &self.path))
    }

    /// The file that holds a lock of any kind.
    #[cfg(feature = "qcow2")]
    fn any_lock(&self) -> Option<&File> {
        match &self.lock {
            Lock::None => None,
            Lock::Reader | Lock::Writer => Some(&self.file),
            Lock::Inherited(file) => Some(file),
        }
    }

    pub(super) fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }

    /// Cuts the next piece of a discard or a zeroing. A block device gets them whole: it has no extents, others do not
    /// wait for it, and it may be able to free large blocks alone.
    pub(super) fn cut(&self, offset: u64, left: u64, now: Instant) -> Piece {
        match self.is_block_device() {
            true => Piece::whole(left),
            false => self.piece_size.cut(offset, left, now),
        }
    }
}

/// Returns whether the file's filesystem may block the thread that submits a request. io_uring
/// first tries each request on that thread, and asks the filesystem not to wait; FUSE nevertheless
/// waits until its server has answered a write (seen on Linux 6.18), and network filesystems may do
/// the same. Only filesystems that are known not to block are trusted.
fn may_block(file: &File) -> bool {
    !is_local(file)
}

/// Returns whether the kernel tells the size of a file at once if it is asked not to synchronize. Others ask a server all the
/// same (SMB, 9P), or wait for a lock of all hosts (GFS2, OCFS2).
fn tells_size(file: &File) -> bool {
    is_local(file) || TELLS_SIZE.contains(&filesystem(file))
}

/// Returns whether a file is on a filesystem that is known to be of this host alone.
pub(super) fn is_local(file: &File) -> bool {
    NEVER_BLOCK.contains(&filesystem(file))
}

/// Returns whether the file is on tmpfs, on a host without swap. io_uring leaves all requests for
/// such a file to the kernel's threads, since tmpfs does not say that it can do without waiting.
fn is_in_memory(file: &File) -> bool {
    filesystem(file) == TMPFS && rustix::system::sysinfo().totalswap == 0
}

/// The kind of a file's filesystem.
pub(super) fn filesystem(file: &File) -> u64 {
    rustix::fs::fstatfs(file).map_or(0, |found| found.f_type as u64 & 0xffff_ffff)
}

/// How often a sync looks whether those that overlapped it have ended.
#[cfg(feature = "qcow2")]
const OVERLAP_LOOK: std::time::Duration = std::time::Duration::from_micros(100);
/// The magic numbers of ext2 to ext4, XFS, btrfs, F2FS and tmpfs, as in statfs(2).
const NEVER_BLOCK: [u64; 5] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, TMPFS];
/// The same of NFS, FUSE, overlayfs and ZFS.
const TELLS_SIZE: [u64; 4] = [0x6969, 0x6573_5546, 0x794c_7630, 0x2fc1_2fc1];
const TMPFS: u64 = 0x0102_1994;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::scratch_file;
    use blkmq_host::device::Device;

    #[test]
    fn where_no_holes_can_be_made_zeroing_is_charged_as_writing() {
        let path = scratch_file("punching", 4096);
        let config = crate::file::FileConfig {
            path: path.to_path_buf(),
            ..Default::default()
        };
        let limits = |disk| crate::file::FileDevice::new(vec![disk], 8).unwrap().limits();
        let disk = FileDisk::open(&config).unwrap();
        assert!(!disk.writes_zeroes(), "filesystems that tests run on can");
        assert_eq!(
            std::fs::metadata(&*path).unwrap().len(),
            4096,
            "trying has changed nothing"
        );
        disk.lacks.punching.store(true, Ordering::Relaxed);
        assert!(limits(disk).zeroes_are_written);
        assert!(!limits(FileDisk::open(&config).unwrap()).zeroes_are_written);
    }
}
