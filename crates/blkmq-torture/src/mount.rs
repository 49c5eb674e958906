//! A FUSE filesystem with one file, through which the kernel's requests reach a [`Medium`], and the
//! control over it.
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

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};

use crate::medium::{Forgotten, Full, Medium, SECTOR_BYTES};

/// A mounted filesystem that forgets. It has one file, [`Mount::image`]; dropping it unmounts it.
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
    /// Bytes that may be allocated; beyond that writes fail with ENOSPC.
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
    /// Mounts on `dir`, an empty directory, a filesystem whose file has `bytes` zeroes.
    ///
    /// # Errors
    /// If there is no /dev/fuse, or we may not mount.
    ///
    /// # Panics
    /// If `bytes` is no multiple of [`SECTOR_BYTES`].
    pub fn new(dir: &Path, bytes: usize, cache: Cache) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                medium: Medium::new(bytes),
                faults: Faults::default(),
                arrived: Arrived::default(),
                open: 0,
                file: FIRST_FILE,
                block: 1,
            }),
            closed: Condvar::new(),
            bytes: bytes as u64,
            cache,
        });
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
        let mut state = self.shared.state();
        state.medium.set_room(faults.room);
        state.faults = faults;
    }

    /// Has reads and writes fail (EINVAL) that are no whole blocks of this many bytes, as direct I/O does on a drive with such
    /// sectors. For [`Cache::Bypassed`].
    pub fn set_block(&self, bytes: u64) {
        self.shared.state().block = bytes;
    }

    /// Returns what has arrived since the filesystem was mounted.
    pub fn arrived(&self) -> Arrived {
        self.shared.state().arrived
    }

    /// Returns how many bytes are allocated.
    pub fn allocated_bytes(&self) -> usize {
        self.shared.state().medium.allocated_bytes()
    }

    /// Waits until nobody has the file open: a process that was killed keeps it until the kernel has ended its requests.
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
                format!("the file is still open {open} times after {limit:?}"),
            )),
        }
    }

    /// Cuts the power: what is volatile is kept or dropped as the seed has it. Nobody may have the file open.
    pub fn forget(&self, seed: u64) -> Forgotten {
        let file = self.shared.state().file;
        if let Some(session) = &self.session {
            // The page cache writes out what is left in it, and keeps nothing. The kernel refuses if it does not
            // know the file, and then it has nothing of it.
            let _ = session.notifier().inval_inode(file, 0, 0);
        }
        let mut state = self.shared.state();
        debug_assert_eq!(state.open, 0, "the file is open");
        // A new inode: a computer that has just started knows of no failed write-back that nobody was told of.
        state.file = INodeNo(file.0 + 1);
        state.medium.forget(seed)
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

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    closed: Condvar,
    bytes: u64,
    cache: Cache,
}

#[derive(Debug)]
struct State {
    medium: Medium,
    faults: Faults,
    arrived: Arrived,
    /// How many times the file is open.
    open: u64,
    /// What the kernel knows the file by.
    file: INodeNo,
    /// What reads and writes must be multiples of, in bytes.
    block: u64,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the time that a request is to take. Nobody waits for the state meanwhile.
    fn pause(&self) {
        let delay = self.state().faults.delay;
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
    }

    fn write(&self, offset: u64, data: &[u8], is_durable: bool) -> Result<(), Errno> {
        self.state().refuse_part_of_block(offset, data.len() as u64)?;
        let offset = self.range(offset, data.len() as u64)?.0;
        self.pause();
        let mut state = self.state();
        state.arrived.writes += 1;
        state.arrived.durable_writes += u64::from(is_durable);
        let written = state.medium.write(offset, data);
        state.admit(written)?;
        if is_durable {
            state.medium.sync_range(offset, data.len());
        }
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64, as_hole: bool) -> Result<(), Errno> {
        let (offset, len) = self.range(offset, len)?;
        if !offset.is_multiple_of(SECTOR_BYTES) || !len.is_multiple_of(SECTOR_BYTES) {
            return Err(Errno::EINVAL);
        }
        self.pause();
        let mut state = self.state();
        match as_hole {
            true => state.arrived.punches += 1,
            false => state.arrived.zeroes += 1,
        }
        let zeroed = state.medium.zero(offset, len, as_hole);
        state.admit(zeroed)
    }

    fn sync(&self) -> Result<(), Errno> {
        let last = self.state().medium.latest();
        self.pause();
        let mut state = self.state();
        state.arrived.syncs += 1;
        let left = state.faults.failing_sync.as_mut().map(|left| {
            *left = left.saturating_sub(1);
            *left
        });
        if left == Some(0) {
            state.faults.failing_sync = None;
            state.arrived.failed_syncs += 1;
            state.medium.lose(last);
            return Err(Errno::EIO);
        }
        state.medium.sync(last);
        Ok(())
    }

    fn range(&self, offset: u64, len: u64) -> Result<(usize, usize), Errno> {
        match offset.checked_add(len) {
            Some(end) if end <= self.bytes => Ok((offset as usize, len as usize)),
            _ => Err(Errno::EFBIG),
        }
    }

    fn attributes(&self, node: INodeNo) -> Option<FileAttr> {
        let state = self.state();
        let (kind, perm, size) = match node {
            INodeNo::ROOT => (FileType::Directory, 0o755, 0),
            node if node == state.file => (FileType::RegularFile, 0o600, self.bytes),
            _ => return None,
        };
        Some(FileAttr {
            ino: node,
            size,
            blocks: state.medium.allocated_bytes() as u64 / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

impl State {
    fn refuse_part_of_block(&self, offset: u64, len: u64) -> Result<(), Errno> {
        match offset.is_multiple_of(self.block) && len.is_multiple_of(self.block) {
            true => Ok(()),
            false => Err(Errno::EINVAL),
        }
    }

    fn admit<T>(&mut self, outcome: Result<T, Full>) -> Result<(), Errno> {
        outcome.map(drop).map_err(|Full| {
            self.arrived.refused += 1;
            Errno::ENOSPC
        })
    }
}

/// The filesystem as the kernel meets it.
struct Front(Arc<Shared>);

impl Filesystem for Front {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        if self.0.cache == Cache::Back {
            let added = config.add_capabilities(InitFlags::FUSE_WRITEBACK_CACHE);
            added.map_err(|_| io::Error::new(io::ErrorKind::Unsupported, "FUSE has no write-back here"))?;
        }
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let file = self.0.state().file;
        match self.0.attributes(file) {
            // The name is looked up each time, since it may mean another inode by then.
            Some(attributes) if parent == INodeNo::ROOT && name == IMAGE => {
                reply.entry_with_ttls(&KNOWN_FOR, &Duration::ZERO, &attributes, Generation(0));
            }
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, node: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.0.attributes(node) {
            Some(attributes) => reply.attr(&KNOWN_FOR, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    /// Takes new times, which nobody looks at. The file keeps its size.
    fn setattr(
        &self,
        request: &Request,
        node: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<std::time::SystemTime>,
        handle: Option<FileHandle>,
        _crtime: Option<std::time::SystemTime>,
        _chgtime: Option<std::time::SystemTime>,
        _bkuptime: Option<std::time::SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        match size {
            Some(size) if size != self.0.bytes => reply.error(Errno::EPERM),
            _ => self.getattr(request, node, handle, reply),
        }
    }

    fn open(&self, _: &Request, node: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let mut state = self.0.state();
        if node != state.file {
            return reply.error(Errno::ESTALE);
        }
        state.open += 1;
        drop(state);
        // Without FOPEN_KEEP_CACHE the kernel drops what it has of the file.
        reply.opened(
            FileHandle(0),
            match self.0.cache {
                Cache::Bypassed => FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES,
                Cache::Through | Cache::Back => FopenFlags::empty(),
            },
        );
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.0.state().open -= 1;
        self.0.closed.notify_all();
        reply.ok();
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        bytes: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let state = self.0.state();
        if let Err(error) = state.refuse_part_of_block(offset, bytes.into()) {
            return reply.error(error);
        }
        let data = state
            .medium
            .read(offset.min(self.0.bytes) as usize, bytes as usize);
        drop(state);
        reply.data(&data);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        // O_SYNC has the bit of O_DSYNC in it.
        match self.0.write(offset, data, flags.0 & libc::O_DSYNC != 0) {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error),
        }
    }

    /// The end of a descriptor makes nothing durable.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        answer(self.0.sync(), reply);
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        len: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        answer(
            match mode & !libc::FALLOC_FL_KEEP_SIZE {
                libc::FALLOC_FL_PUNCH_HOLE => self.0.zero(offset, len, true),
                libc::FALLOC_FL_ZERO_RANGE => self.0.zero(offset, len, false),
                _ => Err(Errno::EOPNOTSUPP),
            },
            reply,
        );
    }
}

fn answer(result: Result<(), Errno>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

const NAME: &str = "blkmq-forget";
const IMAGE: &str = "image";
const FIRST_FILE: INodeNo = INodeNo(2);
/// Requests that are worked on at a time: one may be slow while others end.
const THREADS: usize = 4;
/// How long the kernel may believe what it was told of the file, which does not change.
const KNOWN_FOR: Duration = Duration::from_secs(60);
const UNMOUNT_TIME_MAX: Duration = Duration::from_secs(5);
