//! One image that is served: its files, its cached map, and what the threads of `pool` do for it with the
//! library. `hctx` has the way of data that the map knows; `disk` makes one of a file's name; `lookup` finds
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

mod files;
mod lookup;

use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard};

use blkmq_core::bio::{Flags, Op, Status};
use blkmq_core::ids::DiskId;
use blkmq_core::time::Instant;
use imago::io_buffers::IoBuffer;
use imago::qcow2::Qcow2;
use imago::{FormatAccess, Mapping, StorageExt};

use super::chain::{self, Base, Layer};
use super::config::Qcow2Config;
use super::counts::Layout;
use super::guests::Guests;
use super::header::Header;
use super::map::{Entry, Map};
use super::order::Order;
use super::pool::{Job, Lane, Outcome};
use super::sys::{self, LibraryFile, Role};
use super::zero;
use crate::file::FileDisk;

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
    /// The library's image, from the first need on: until then, another daemon may still write.
    library: Mutex<Option<Library>>,
    gate: RwLock<()>,
    /// How often the tables in memory have changed.
    changes: AtomicU64,
    /// How many changes of the tables are in the file, for sure.
    flushed: AtomicU64,
    /// It is about to be replaced.
    is_closing: AtomicBool,
    flushing: Mutex<()>,
    lane: Lane,
    place: OnceLock<(Arc<Guests>, DiskId)>,
    /// The image that has taken its place: jobs go on there.
    next: OnceLock<Arc<Image>>,
}

/// The image as the library has it.
#[derive(Clone)]
pub(super) struct Library {
    pub(super) image: Layer,
    pub(super) order: Arc<Order>,
}

/// What an image is made of.
pub(super) struct Parts {
    pub(super) header: Header,
    pub(super) top: Arc<FileDisk>,
    pub(super) beside: Option<Arc<FileDisk>>,
    pub(super) base: Option<Arc<Base>>,
    pub(super) config: Qcow2Config,
    pub(super) block_size: u32,
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
        } = parts;
        let bases = || base.iter().flat_map(Base::all);
        let below = bases()
            .filter_map(|base| base.header.as_ref())
            .map(|header| header.cluster_bits);
        let granule_bits = below
            .chain([header.cluster_bits])
            .min()
            .unwrap_or(header.cluster_bits);
        let lower = bases().flat_map(|base| base.beside.iter().chain([&base.disk]));
        Self {
            size: AtomicU64::new(header.size),
            has_beside: beside.is_some(),
            files: [&top].into_iter().chain(&beside).chain(lower).cloned().collect(),
            map: Map::new(config.map_cache, granule_bits),
            library: Mutex::default(),
            gate: RwLock::default(),
            changes: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            is_closing: AtomicBool::new(false),
            flushing: Mutex::default(),
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
        !self.is_dirty() && !self.is_closing.load(Ordering::SeqCst)
    }

    /// From now on, or not any more, flushes go by the threads: the image is about to be replaced.
    pub(super) fn set_closing(&self, on: bool) {
        self.is_closing.store(on, Ordering::SeqCst);
    }

    /// Tells it under which number a drive has it, and where its requests are announced. Once.
    pub(crate) fn join(&self, guests: &Arc<Guests>, disk: DiskId) {
        let joined = self.place.set((Arc::clone(guests), disk));
        debug_assert!(joined.is_ok(), "an image joins one drive");
    }

    /// The right to use what is there, beside others.
    fn enter(&self) -> io::Result<RwLockReadGuard<'_, ()>> {
        let gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        self.check_place().map(|()| gate)
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
        let library = self.library()?;
        match job.op {
            _ if job.only_map => self.look_up(&library, job.offset, job.len),
            Op::Read => {
                let buffer = self.read(&library, job.offset, job.len)?;
                sys::scatter(&job.pieces, job.skip, buffer.as_ref().into_slice());
                Ok(())
            }
            Op::Write => {
                let mut buffer = IoBuffer::new(job.len as usize, library.image.mem_align())?;
                sys::gather(&job.pieces, job.skip, buffer.as_mut().into_slice());
                self.write(&library, job.offset, &buffer)
            }
            Op::Flush => {
                let _gate = self.enter()?;
                return self.flush();
            }
            Op::Discard | Op::WriteZeroes => {
                let range = job.offset..job.offset + job.len;
                zero::run(self, &library, job.op, job.flags, range)
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

    /// The library's image, which is opened at the first need.
    pub(super) fn library(&self) -> io::Result<Library> {
        let mut library = lock(&self.library);
        if library.is_none() {
            *library = Some(self.open_library()?);
        }
        Ok(library.as_ref().expect("it was just opened").clone())
    }

    fn open_library(&self) -> io::Result<Library> {
        let (top, beside) = (&self.files[0], self.has_beside.then(|| &self.files[1]));
        // Of the file as it is now: another daemon may have written since the header was read.
        let header = chain::read_header(top).map_err(io::Error::other)?;
        let order = Order::new(top, beside, header.cluster_bits)?.with_tables(Layout::of(&header));
        let order = Arc::new(order);
        if !self.read_only {
            order.reach(top.end()?.next_multiple_of(self.header.cluster()))?;
        }
        if let Some(beside) = beside.filter(|beside| !self.read_only && !beside.is_block_device())
            && beside.end()? < self.size()
        {
            // What is behind its end reads as zeroes.
            beside.set_end(self.size())?;
        }
        let role = |role: Role| if self.read_only { Role::Base } else { role };
        let tables = LibraryFile::new(Arc::clone(top), role(Role::Tables(Arc::clone(&order))));
        let mut image = Qcow2::<LibraryFile, Layer>::open_image(tables, !self.read_only)?;
        let data = match beside {
            Some(beside) => LibraryFile::new(Arc::clone(beside), role(Role::DataBeside(Arc::clone(&order)))),
            None => LibraryFile::new(Arc::clone(top), role(Role::Data(Arc::clone(&order)))),
        };
        image.set_data_file(Some(data));
        image.set_backing(self.base.as_ref().map(|base| base.layer()).transpose()?);
        let image = Arc::new(FormatAccess::new(image));
        Ok(Library { image, order })
    }

    /// Reads, whatever the map knows.
    pub(super) fn read(&self, library: &Library, offset: u64, len: u64) -> io::Result<IoBuffer> {
        let _gate = self.enter()?;
        let mut buffer = IoBuffer::new(len as usize, library.image.mem_align())?;
        library.image.read(&mut buffer, offset)?;
        Ok(buffer)
    }

    /// Writes, whatever the map knows.
    pub(super) fn write(&self, library: &Library, offset: u64, buffer: &IoBuffer) -> io::Result<()> {
        let range = offset..offset + buffer.len() as u64;
        if !self.files[usize::from(self.data_file())].is_odd(offset, buffer.len() as u64) {
            let _gate = self.enter()?;
            if !self.replaces(library, range.clone())? {
                return self.write_data(library, offset, buffer);
            }
        }
        self.alone(self.whole_clusters(&range), || {
            self.write_data(library, offset, buffer)
        })
    }

    /// Does something while nobody else changes or uses a range of whole clusters.
    pub(super) fn alone<T>(&self, range: Range<u64>, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let _gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        self.check_place()?;
        let bits = self.map.granule_bits();
        let mut writer = self.map.writer();
        self.map
            .forget(&mut writer, range.start >> bits, range.end.div_ceil(1 << bits));
        writer.version += 1;
        drop(writer);
        if let Some((guests, disk)) = self.place.get() {
            guests.wait_for(*disk, &range);
        }
        work()
    }

    /// The clusters that a range touches.
    pub(super) fn whole_clusters(&self, range: &Range<u64>) -> Range<u64> {
        let cluster = self.header.cluster();
        range.start - range.start % cluster..range.end.next_multiple_of(cluster)
    }

    /// Returns whether a write would give up clusters of the image that others may be reading: those that a snapshot
    /// inside the image shares.
    fn replaces(&self, library: &Library, range: Range<u64>) -> io::Result<bool> {
        let own = &self.files[usize::from(self.data_file())];
        let mut at = range.start;
        while at < range.end {
            let (mapping, len) = library.image.get_mapping(at, range.end - at)?;
            match mapping {
                Mapping::Raw {
                    storage,
                    writable: false,
                    ..
                } if Arc::ptr_eq(storage.disk(), own) => return Ok(true),
                _ => at += len.max(1),
            }
        }
        Ok(false)
    }

    /// Writes, and allocates what is not there: first the data, then the entry of the table.
    pub(super) fn write_data(&self, library: &Library, offset: u64, buffer: &IoBuffer) -> io::Result<()> {
        let len = buffer.len() as u64;
        let mut done = 0;
        while done < len {
            let at = offset + done;
            let place = library.image.prepare_data_mapping(at, len - done, true)?;
            let (host, now) = (place.offset(), place.length().min(len - done));
            if now == 0 {
                return Err(io::Error::other("nothing could be allocated"));
            }
            let part = buffer.as_ref_range(done as usize..(done + now) as usize);
            let cluster = self.header.cluster();
            if !self.has_beside {
                library.order.reach((host + now).next_multiple_of(cluster))?;
            }
            place.storage().write(part, host)?;
            // Who looks up meanwhile finds the old place, where the same is, until this request ends.
            library.image.commit_data_mapping(place)?;
            // Before anybody finds the new one.
            self.note_change();
            let mut writer = self.map.writer();
            writer.version += 1;
            self.enter_in_map(&mut writer, at..at + now, host);
            drop(writer);
            done += now;
        }
        Ok(())
    }

    /// Enters whole clusters into the map, since a part of them is at `host` now.
    fn enter_in_map(&self, writer: &mut super::map::Writer, part: Range<u64>, host: u64) {
        let bits = self.map.granule_bits();
        let all = self.whole_clusters(&part);
        let first = host - (part.start - all.start);
        for granule in all.start >> bits..all.end >> bits {
            let host = first + ((granule << bits) - all.start);
            let entry = Entry::Data {
                file: self.data_file(),
                host,
                is_writable: true,
            };
            self.map.set_entry(writer, granule, entry);
        }
    }

    /// Notes that the tables in memory have changed.
    pub(super) fn note_change(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns whether a change is not in the file, for all that is known: also while a flush is under way.
    fn is_dirty(&self) -> bool {
        // `flushed` first: it never is more than `changes`.
        self.flushed.load(Ordering::SeqCst) != self.changes.load(Ordering::SeqCst)
    }

    /// Makes data durable, and then the tables. Blocks.
    pub(super) fn flush(&self) -> io::Result<()> {
        let library = self.library()?;
        let _one = lock(&self.flushing);
        let changes = self.changes.load(Ordering::SeqCst);
        let flushed =
            library
                .order
                .sync()
                .and_then(|()| match changes == self.flushed.load(Ordering::SeqCst) {
                    true => Ok(()),
                    false => library.image.flush(),
                });
        if flushed.is_ok() {
            // Now, and not before: others ask meanwhile whether a flush of the data is enough.
            self.flushed.store(changes, Ordering::SeqCst);
        }
        flushed
    }

    /// Writes what is only in this process. Blocks.
    pub(crate) fn close(&self) {
        let library = lock(&self.library).clone();
        let is_dirty = self.is_dirty();
        let closed = match library {
            _ if is_dirty => self.flush(),
            Some(library) if !self.read_only => library.order.sync(),
            _ => Ok(()),
        };
        if let Err(error) = closed {
            tracing::error!(
                "image {:?}: what was not flushed may be lost: {error}",
                self.config.path
            );
        }
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
        let library = self.library()?;
        self.alone(self.whole_clusters(&(size..size + 1)), || {
            let image = library.image.inner();
            image.resize_grow(wanted, imago::format::PreallocateMode::None)?;
            self.note_change();
            self.flush()?;
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
