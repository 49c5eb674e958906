//! One image that is served: its files, its cached map, and what the threads of `pool` do for it with its
//! tables. `hctx` has the way of data that the map knows; `disk` makes one of a file's name; `lookup` finds
//! where data is.
//!
//! Changes of the tables and the map, and who may make them at the same time:
//!
//! ```text
//!  look up, read, allocate and write      several at once (`gate` for reading)
//!  free, zero, grow; replace a cluster    alone (`gate` for writing), after the range is forgotten in the map
//!  that was readable; unaligned writes    and nobody's request is in it (`guests`)
//!  enter into the map                     under its writer's lock, if nothing was allocated since the look-up
//! ```

pub(crate) mod commit;
mod files;
pub(crate) mod flatten;
mod lookup;
mod tracked;
mod write;

use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, TryLockError};

use blkmq_core::bio::{Flags, Op, Status};
use blkmq_core::ids::DiskId;
use blkmq_core::time::Instant;

use super::chain::{self, Base};
use super::config::Qcow2Config;
use super::guests::Guests;
use super::header::{Header, SIZE_FIELD};
use super::layers;
use super::map::{Entry, Map};
use super::pool::{Job, Lane, Outcome};
use super::sys;
use super::tables::{Claim, Tables};
use super::transfer::Buffer;
use super::zero;
use crate::file::{FileDisk, is_taking_over};

/// An image that is served.
pub(crate) struct Image {
    pub(super) config: Qcow2Config,
    pub(super) header: Header,
    pub(super) read_only: bool,
    pub(super) block_size: u32,
    /// Bytes of the disk.
    size: AtomicU64,
    /// The files, by their numbers in the map: its own, the data file beside it if there is one, those of its bases.
    files: Vec<Arc<FileDisk>>,
    has_beside: bool,
    base: Option<Arc<Base>>,
    map: Map,
    /// Its tables, from the first need on: until then, another daemon may still write. `opening` is held meanwhile.
    tables: OnceLock<Arc<Tables>>,
    opening: Mutex<()>,
    gate: RwLock<()>,
    /// The names of its bitmaps, as they were when it was opened.
    found_bitmaps: Vec<String>,
    /// Those that it has are not kept, if it is written.
    gives_bitmaps_up: AtomicBool,
    /// It is about to be replaced.
    is_closing: AtomicBool,
    /// Nothing is read from below, and that is durable.
    is_flat: AtomicBool,
    /// It has taken another's place, and that is not durable yet.
    unsettled: Mutex<Option<files::Unsettled>>,
    is_settled: AtomicBool,
    /// What was written to new clusters may be lost.
    has_lost: AtomicBool,
    /// It is being committed into its base.
    commit: Option<commit::Commit>,
    lane: Lane,
    place: OnceLock<(Arc<Guests>, DiskId)>,
    /// The image that has taken its place: jobs go on there.
    next: OnceLock<Arc<Image>>,
}

/// What an image is made of.
pub(super) struct Parts {
    pub(super) header: Header,
    pub(super) top: Arc<FileDisk>,
    pub(super) beside: Option<Arc<FileDisk>>,
    pub(super) base: Option<Arc<Base>>,
    pub(super) config: Qcow2Config,
    pub(super) block_size: u32,
    /// The names of its bitmaps, for those who ask before its tables are read.
    pub(super) found_bitmaps: Vec<String>,
}

impl Image {
    pub(super) fn new(parts: Parts) -> Self {
        let Parts {
            header,
            top,
            beside,
            base,
            config,
            block_size,
            found_bitmaps,
        } = parts;
        let bases = || base.iter().flat_map(Base::all);
        let below = bases()
            .filter_map(|base| base.header.as_ref())
            .map(Header::unit_bits);
        let granule_bits = below
            .chain([header.unit_bits()])
            .min()
            .unwrap_or(header.unit_bits());
        let lower = bases().flat_map(|base| base.beside.iter().chain([&base.disk]));
        Self {
            size: AtomicU64::new(header.size),
            has_beside: beside.is_some(),
            files: [&top].into_iter().chain(&beside).chain(lower).cloned().collect(),
            map: Map::new(config.map_cache, granule_bits),
            tables: OnceLock::new(),
            opening: Mutex::default(),
            gate: RwLock::default(),
            found_bitmaps,
            gives_bitmaps_up: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
            is_flat: AtomicBool::new(false),
            unsettled: Mutex::default(),
            is_settled: AtomicBool::new(true),
            has_lost: AtomicBool::new(false),
            commit: None,
            lane: Lane::default(),
            place: OnceLock::new(),
            next: OnceLock::new(),
            header,
            read_only: config.read_only,
            block_size,
            config,
            base,
        }
    }

    /// Bytes of the disk.
    pub(crate) fn size(&self) -> u64 {
        // Relaxed: code that relies on a new size has been told of it.
        self.size.load(Ordering::Relaxed)
    }

    /// The files, by their numbers in the map.
    pub(crate) fn files(&self) -> &[Arc<FileDisk>] {
        &self.files
    }

    /// The number of the file that a flush of data concerns.
    pub(super) fn data_file(&self) -> u8 {
        self.has_beside.into()
    }

    pub(super) fn map(&self) -> &Map {
        &self.map
    }

    pub(super) fn lane(&self) -> &Lane {
        &self.lane
    }

    /// Returns whether the tables in memory are those of the file. Acquire: who has found a place in the map sees that
    /// it was not in the file then.
    pub(super) fn is_clean(&self) -> bool {
        let is_settled = self.is_settled.load(Ordering::SeqCst);
        is_settled && !self.is_dirty() && !self.is_closing.load(Ordering::SeqCst)
    }

    /// Returns whether another image takes its place, or has taken it.
    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::SeqCst)
    }

    /// From now on, or not any more, flushes go by the threads: the image is about to be replaced.
    pub(crate) fn set_closing(&self, on: bool) {
        self.is_closing.store(on, Ordering::SeqCst);
    }

    /// Tells it under which number a drive has it, and where its requests are announced; once more if its successor could
    /// not stay.
    pub(crate) fn join(&self, guests: &Arc<Guests>, disk: DiskId) {
        let (_, joined) = self.place.get_or_init(|| (Arc::clone(guests), disk));
        debug_assert_eq!(*joined, disk, "an image joins one drive");
    }

    /// The right to use what is there, beside others.
    fn enter(&self) -> io::Result<RwLockReadGuard<'_, ()>> {
        let gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        self.check_place().map(|()| gate)
    }

    /// The same, for who must not wait: `None` if somebody changes what is there, or another image is in its place.
    pub(super) fn try_enter(&self) -> Option<RwLockReadGuard<'_, ()>> {
        let gate = match self.gate.try_read() {
            Ok(gate) => gate,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        self.check_place().ok().map(|()| gate)
    }

    /// Fails if another image has taken its place, before anything is done.
    fn check_place(&self) -> io::Result<()> {
        match self.next.get() {
            None => Ok(()),
            Some(_) => Err(io::Error::other("another image is in its place")),
        }
    }

    /// Another image takes its place. Nobody uses this one.
    pub(super) fn follow(&self, next: Arc<Self>) {
        let is_first = self.next.set(next);
        debug_assert!(is_first.is_ok(), "an image is replaced once");
    }

    /// Does a job. Blocks.
    pub(super) fn run(&self, job: &Job) -> Outcome {
        let outcome = self.run_here(job);
        match self.next.get() {
            // It was too late for this one.
            Some(next) if outcome != Outcome::Done(Status::Ok) => next.run(job),
            _ => outcome,
        }
    }

    fn run_here(&self, job: &Job) -> Outcome {
        // A defect of the library must cost this request, and no thread.
        let done = catch_unwind(AssertUnwindSafe(|| self.try_run(job)));
        match done.unwrap_or_else(|_| Err(io::Error::other("the library failed"))) {
            Ok(()) if job.only_map => Outcome::Mapped,
            Ok(()) => Outcome::Done(Status::Ok),
            Err(_) if self.next.get().is_some() => Outcome::Done(Status::Io),
            Err(error) => Outcome::Done(self.failed(job, &error)),
        }
    }

    fn try_run(&self, job: &Job) -> io::Result<()> {
        let tables = self.tables()?;
        if job.op.is_write() && self.tables.get().is_none() {
            return Err(io::Error::other("another daemon still writes to it"));
        }
        match job.op {
            _ if job.only_map => self.look_up(&tables, job.offset, job.len),
            _ if job.flags.has(Flags::TASK) => {
                let range = job.offset..job.offset + job.len;
                match self.commit() {
                    Some(commit) => commit::copy_down(self, &tables, commit, &range),
                    None => flatten::copy_up(self, &tables, range),
                }
            }
            Op::Read => {
                let mut buffer = Buffer::new(job.len as usize)?;
                self.read(&tables, job.offset, &mut buffer)?;
                sys::scatter(&job.pieces, job.skip, &buffer);
                Ok(())
            }
            Op::Write => {
                let mut buffer = Buffer::new(job.len as usize)?;
                sys::gather(&job.pieces, job.skip, &mut buffer);
                self.write(&tables, job.offset, &buffer)
            }
            // Not at the gate: who replaces the image waits there, and flushes it, too.
            Op::Flush => return self.flush().and_then(|()| self.check_place()),
            Op::Discard | Op::WriteZeroes => {
                let range = job.offset..job.offset + job.len;
                zero::run(self, &tables, job.op, job.flags, range)
            }
        }?;
        match job.flags.has(Flags::FUA) {
            true if job.op.is_write() && !job.only_map => self.flush(),
            _ => Ok(()),
        }
    }

    fn failed(&self, job: &Job, error: &io::Error) -> Status {
        let errno = error.raw_os_error();
        let what = match job.op {
            Op::Read => "read",
            Op::Write => "write",
            Op::Flush => "flush",
            Op::Discard => "discard",
            Op::WriteZeroes => "zeroing",
        };
        if error.kind() == io::ErrorKind::Unsupported && errno.is_none() {
            return Status::NotSupported;
        }
        if errno.is_none() {
            tracing::error!(
                "image {:?}: {what} of {} bytes at {} failed: {error}",
                self.config.path,
                job.len,
                job.offset
            );
        }
        let errno = errno.unwrap_or(libc::EIO);
        self.files[0].note_failure(Instant(0), what, job.offset, job.len, errno);
        match errno {
            libc::EFBIG => Status::NoSpace,
            errno => Status::from_errno(errno),
        }
    }

    /// Its tables, which are read at the first need. Blocks.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn tables(&self) -> io::Result<Arc<Tables>> {
        if let Some(tables) = self.tables.get() {
            return Ok(Arc::clone(tables));
        }
        if is_taking_over() {
            // Another daemon still writes: what it has not written yet is found next time.
            return Ok(Arc::new(self.read_tables()?.0));
        }
        let _opening = lock(&self.opening);
        if self.tables.get().is_none() {
            let _ = self.tables.set(Arc::new(self.open_tables()?));
        }
        Ok(Arc::clone(self.tables.get().expect("they were just read")))
    }

    fn read_tables(&self) -> io::Result<(Tables, Header)> {
        // Of the file as it is now: another daemon may have written since the header was read.
        let header = chain::read_header(&self.files[0]).map_err(io::Error::other)?;
        let tables = Tables::open(&self.files[0], self.beside(), &header)?;
        Ok((tables, header))
    }

    /// Reads the tables, and prepares the image for being written.
    fn open_tables(&self) -> io::Result<Tables> {
        let (tables, header) = self.read_tables()?;
        if self.read_only {
            self.load_bitmaps(&tables, &header)?;
            return Ok(tables);
        }
        let top = &self.files[0];
        tables
            .space
            .reach(top.end()?.next_multiple_of(header.cluster()))?;
        self.load_bitmaps(&tables, &header)?;
        self.lengthen_beside(self.size())?;
        Ok(tables)
    }

    /// Makes the file beside it as long as the disk: what is behind its end reads as zeroes.
    fn lengthen_beside(&self, size: u64) -> io::Result<()> {
        match self.beside().filter(|beside| !beside.is_block_device()) {
            Some(beside) if beside.end()? < size => beside.set_end(size),
            _ => Ok(()),
        }
    }

    /// The file that has its data, if that is another one.
    fn beside(&self) -> Option<&Arc<FileDisk>> {
        self.files.get(1).filter(|_| self.has_beside)
    }

    /// Reads, whatever the map knows.
    pub(super) fn read(&self, tables: &Tables, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let _gate = self.enter()?;
        let _held = tables.hold();
        layers::read_by(offset, into, |at, len| self.mapping(tables, at, len))
    }

    /// Does something while nobody else changes or uses a range of whole clusters.
    pub(super) fn alone<T>(&self, range: Range<u64>, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let _gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        self.check_place()?;
        self.forget(&range);
        if let Some((guests, disk)) = self.place.get() {
            guests.wait_for(*disk, &range);
            // Those that were under way may have entered new clusters.
            self.forget(&range);
        }
        work()
    }

    fn forget(&self, range: &Range<u64>) {
        let bits = self.map.granule_bits();
        let mut writer = self.map.writer();
        self.map
            .forget(&mut writer, range.start >> bits, range.end.div_ceil(1 << bits));
        writer.version += 1;
    }

    /// Its tables, if they are in memory and may be changed.
    pub(super) fn writable_tables(&self) -> Option<&Tables> {
        self.tables
            .get()
            .filter(|_| !self.read_only)
            .map(|tables| &**tables)
    }

    /// Ends a claim of clusters for a write of `range`: from now on all find them, or it is given up.
    pub(super) fn end_claim(&self, claim: Claim, range: Range<u64>, is_written: bool) {
        let Some(tables) = self.tables.get() else { return };
        let host = claim.host + range.start % tables.cluster();
        tables.land(claim, is_written);
        if is_written {
            let mut writer = self.map.writer();
            writer.version += 1;
            self.enter_in_map(&mut writer, range, host);
        }
    }

    /// The clusters that a range touches.
    pub(super) fn whole_clusters(&self, range: &Range<u64>) -> Range<u64> {
        let cluster = self.header.cluster();
        range.start - range.start % cluster..range.end.next_multiple_of(cluster)
    }

    /// Where what is written of new clusters ends: a data file may end with the disk, inside the last one.
    pub(super) fn end_of_clusters(&self, range: &Range<u64>) -> u64 {
        match self.has_beside {
            true => range.end.min(self.size()),
            false => range.end,
        }
    }

    /// The same, by their numbers.
    pub(super) fn clusters(&self, range: &Range<u64>) -> Range<u64> {
        let bits = self.header.cluster_bits;
        range.start >> bits..range.end.div_ceil(1 << bits)
    }

    /// Enters whole clusters (or subclusters) into the map, since a part of them is at `host` now.
    fn enter_in_map(&self, writer: &mut super::map::Writer, part: Range<u64>, host: u64) {
        let bits = self.map.granule_bits();
        let unit = 1u64 << self.header.unit_bits();
        let all = part.start - part.start % unit..part.end.next_multiple_of(unit);
        let first = host - (part.start - all.start);
        for granule in all.start >> bits..all.end >> bits {
            let host = first + ((granule << bits) - all.start);
            let bytes = granule << bits..(granule + 1) << bits;
            let entry = Entry::Data {
                file: self.data_file(),
                host,
                is_writable: !self.is_protected(&bytes),
            };
            self.map.set_entry(writer, granule, entry);
        }
    }

    /// Returns whether a change is not in the file, for all that is known: also while a flush is under way.
    fn is_dirty(&self) -> bool {
        self.tables.get().is_some_and(|tables| tables.is_dirty())
    }

    /// Makes data durable, and then the tables. Blocks.
    pub(super) fn flush(&self) -> io::Result<()> {
        self.settle()?;
        self.tables()?.flush()
    }

    /// Writes what is only in this process. Blocks.
    pub(crate) fn close(&self) {
        if self.is_closing.load(Ordering::SeqCst) {
            // Its successor has it written.
            return;
        }
        let closed = match self.tables.get() {
            _ if self.is_dirty() || !self.is_settled.load(Ordering::SeqCst) => self.flush(),
            Some(tables) if !self.read_only => tables.sync_data(),
            _ => Ok(()),
        };
        if let Err(error) = closed {
            tracing::error!(
                "image {:?}: what was not flushed may be lost: {error}",
                self.config.path
            );
        }
        self.rest();
    }

    /// Returns its size, after it has grown to `wanted` bytes if that is more. Blocks.
    pub(crate) fn resize(&self, wanted: Option<u64>) -> io::Result<u64> {
        let size = self.size();
        let Some(wanted) = wanted.filter(|wanted| *wanted > size) else {
            return Ok(size);
        };
        if !wanted.is_multiple_of(self.block_size.into()) {
            let what = format!(
                "size {wanted} is no multiple of the block size {}",
                self.block_size
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        if self.header.l1_needed(wanted) > super::header::L1_ENTRIES_MAX {
            let what = format!(
                "clusters of {} bytes are too small for {wanted} bytes",
                self.header.cluster()
            );
            return Err(io::Error::other(what));
        }
        let tables = self.tables()?;
        let range = match tables.bitmaps.list().is_empty() {
            true => self.whole_clusters(&(size..wanted)),
            // They get longer while nobody sets bits.
            false => 0..u64::MAX,
        };
        self.alone(range, || {
            self.track(&tables, &(size..size))?;
            tables.grow(wanted)?;
            self.lengthen_beside(wanted)?;
            // Before the disk has it: what is below may be longer than the disk was.
            zero::hide(self, &tables, size..wanted)?;
            self.flush()?;
            tables.write_header(SIZE_FIELD, &wanted.to_be_bytes())?;
            tables.bitmaps.grow(wanted);
            self.size.store(wanted, Ordering::Relaxed);
            Ok(wanted)
        })
    }
}

impl Drop for Image {
    /// Who stops using an image has closed it; this is for those that failed.
    fn drop(&mut self) {
        if self.is_dirty() {
            self.close();
        }
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Image")
            .field("path", &self.config.path)
            .finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
