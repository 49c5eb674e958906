//! The content of a disk in memory: sparse, in chunks with a lock each, page by page. `ram` adds little
//! to it; `null` puts one behind its drive with `memory=on`.
//!
//! Clients may read and write the same bytes at the same time, from several reactors. On a drive
//! the outcome is then one of the possible orders; in Rust, unordered access would be a data race.
//! So each chunk has a lock, shared for reads, that is held for one copy of at most a chunk.
//! Uncontended it costs about 10 ns beside a copy of 4 KiB that costs 60 to 400. Considered
//! instead: copying by relaxed atomic words needs no lock, but takes twice as long per copy and
//! prevents giving pages back under a reader.

mod sys;

use std::io;
use std::ops::Range;
use std::sync::{OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use blkmq_core::bio::Status;
use blkmq_core::request::Request;
use blkmq_host::device::Extent;

use self::sys::Pages;
use super::sys::{Sink, Source, for_each_sink, for_each_source};

/// The content of one disk, shared by all references to it.
#[derive(Debug)]
pub(crate) struct Store {
    size: u64,
    /// Tables of chunks, made at the first write into one of them.
    groups: Box<[OnceLock<Group>]>,
    huge: bool,
}

/// A table of chunks, whose memory is one region.
type Group = Box<[Locked]>;

/// A chunk and its lock, in a cache line of its own, so that neighbours' locks do not disturb each other.
#[derive(Debug)]
#[repr(align(64))]
struct Locked(RwLock<Chunk>);

/// A chunk of a disk. Pages that are not present read as zeroes, and so does their memory.
#[derive(Debug)]
struct Chunk {
    /// Pages that were written and not discarded since, a bit each.
    present: u64,
    memory: Pages,
}

/// A part of a disk that lies in one chunk.
struct Part {
    chunk: u64,
    /// In the chunk.
    bytes: Range<usize>,
}

impl Store {
    /// Makes an empty store of `size` bytes. It reads as zeroes and takes 24 bytes for every 32
    /// MiB.
    ///
    /// With `huge` its memory consists of huge pages where the system has any.
    pub(crate) fn new(size: u64, huge: bool) -> Self {
        let groups = size.div_ceil(GROUP_BYTES) as usize;
        Self {
            size,
            huge,
            groups: (0..groups).map(|_| OnceLock::new()).collect(),
        }
    }

    /// Returns the size in bytes.
    #[cfg(any(feature = "null", test))]
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Copies `len` bytes from `offset` on into `sink`.
    ///
    /// # Panics
    /// The range is not on the disk or the sink has less room.
    pub(crate) fn read(&self, offset: u64, len: u64, sink: &mut Sink<'_>) {
        for part in self.parts(offset, len) {
            match self.chunk(part.chunk) {
                Some(chunk) => read_chunk(&chunk.read(), part.bytes, sink),
                None => sink.put_zeroes(part.bytes.len()),
            }
        }
    }

    /// Copies all of `source` to the disk from `offset` on.
    ///
    /// # Errors
    /// The kernel has no memory to map; part of the data may be stored then.
    ///
    /// # Panics
    /// The range is not on the disk.
    pub(crate) fn write(&self, offset: u64, source: &mut Source<'_>) -> io::Result<()> {
        for part in self.parts(offset, source.left() as u64) {
            let mut chunk = self.chunk_made(part.chunk)?.write();
            chunk.present |= touched_pages(&part.bytes);
            source.take(&mut chunk.memory.bytes_mut()[part.bytes]);
        }
        Ok(())
    }

    /// Copies bytes of the caller's to the disk from `offset` on.
    ///
    /// # Errors
    /// As [`Self::write`].
    #[cfg(any(feature = "null", test))]
    pub(crate) fn write_bytes(&self, offset: u64, mut bytes: &[u8]) -> io::Result<()> {
        for part in self.parts(offset, bytes.len() as u64) {
            let mut chunk = self.chunk_made(part.chunk)?.write();
            chunk.present |= touched_pages(&part.bytes);
            let (now, later) = bytes.split_at(part.bytes.len());
            chunk.memory.bytes_mut()[part.bytes].copy_from_slice(now);
            bytes = later;
        }
        Ok(())
    }

    /// Makes a range read as zeroes and gives the memory of its whole pages back.
    pub(crate) fn discard(&self, offset: u64, len: u64) {
        for part in self.parts(offset, len) {
            if let Some(chunk) = self.chunk(part.chunk) {
                discard_in_chunk(&mut chunk.write(), part.bytes);
            }
        }
    }

    /// Makes a range read as zeroes with memory behind all of it.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub(crate) fn write_zeroes(&self, offset: u64, len: u64) -> io::Result<()> {
        for part in self.parts(offset, len) {
            let mut chunk = self.chunk_made(part.chunk)?.write();
            chunk.present |= touched_pages(&part.bytes);
            chunk.memory.bytes_mut()[part.bytes].fill(0);
        }
        Ok(())
    }

    /// Appends what is present from `offset` on; see [`blkmq_host::device::Allocation`].
    ///
    /// # Errors
    /// `InvalidInput` if the range has no byte on the disk, or `max` is 0.
    pub(crate) fn extents(&self, offset: u64, len: u64, max: usize, out: &mut Vec<Extent>) -> io::Result<()> {
        let len = len.min(self.size.saturating_sub(offset));
        if len == 0 || max == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let limit = out.len() + max;
        let mut at = offset;
        let mut last: Option<bool> = None;
        while at < offset + len {
            let (is_present, end) = self.run_from(at, offset + len);
            if last == Some(is_present) {
                out.last_mut().expect("an extent was appended").len += end - at;
            } else if out.len() == limit {
                return Ok(());
            } else if is_present {
                out.push(Extent::data(end - at));
            } else {
                out.push(Extent::hole(end - at));
            }
            last = Some(is_present);
            at = end;
        }
        Ok(())
    }

    /// Returns how many bytes are backed by memory. Visits every chunk: for tests and reports.
    #[cfg(any(feature = "ram", test))]
    pub(crate) fn present_bytes(&self) -> u64 {
        let chunks = self.groups.iter().filter_map(OnceLock::get).flatten();
        let pages: u32 = chunks.map(|chunk| chunk.read().present.count_ones()).sum();
        u64::from(pages) * PAGE as u64
    }

    /// Returns whether the page at `at` is present, and where the run of equal pages around it
    /// ends: at `limit`, or before.
    fn run_from(&self, at: u64, limit: u64) -> (bool, u64) {
        let Some(chunk) = self.chunk(at / CHUNK_BYTES) else {
            return (false, ((at / GROUP_BYTES + 1) * GROUP_BYTES).min(limit));
        };
        let present = chunk.read().present;
        let page = (at % CHUNK_BYTES) / PAGE as u64;
        let is_present = present >> page & 1 == 1;
        let alike = if is_present { !present } else { present } >> page;
        let pages = u64::from(alike.trailing_zeros()).min(PAGES_PER_CHUNK - page);
        let end = (at / PAGE as u64 + pages) * PAGE as u64;
        (is_present, end.min(limit))
    }

    fn parts(&self, offset: u64, len: u64) -> impl Iterator<Item = Part> + use<> {
        assert!(
            offset <= self.size && len <= self.size - offset,
            "{len} bytes at {offset} of a store of {}",
            self.size
        );
        let mut at = offset;
        let end = offset + len;
        std::iter::from_fn(move || {
            let chunk = at / CHUNK_BYTES;
            let until = end.min((chunk + 1) * CHUNK_BYTES);
            let bytes = (at - chunk * CHUNK_BYTES) as usize..(until - chunk * CHUNK_BYTES) as usize;
            at = until;
            (!bytes.is_empty()).then_some(Part { chunk, bytes })
        })
    }

    fn chunk(&self, chunk: u64) -> Option<&Locked> {
        let group = self.groups[(chunk / CHUNKS_PER_GROUP) as usize].get()?;
        Some(&group[(chunk % CHUNKS_PER_GROUP) as usize])
    }

    fn chunk_made(&self, chunk: u64) -> io::Result<&Locked> {
        let place = &self.groups[(chunk / CHUNKS_PER_GROUP) as usize];
        if place.get().is_none() {
            let pages = Pages::map(CHUNKS_PER_GROUP as usize, CHUNK_BYTES as u32, self.huge)?;
            let group = pages.into_iter().map(Locked::new).collect();
            // If another reactor was faster, its table is used and this one is unmapped.
            let _ = place.set(group);
        }
        let group = place.get().expect("the group was set here or by another");
        Ok(&group[(chunk % CHUNKS_PER_GROUP) as usize])
    }
}

impl Locked {
    fn new(memory: Pages) -> Self {
        Self(RwLock::new(Chunk { present: 0, memory }))
    }

    /// A panic while a chunk is locked leaves it unchanged or with part of a copy: nothing needs
    /// repair.
    fn read(&self) -> RwLockReadGuard<'_, Chunk> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Chunk> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Carries out a read: fills its buffers. `Invalid` if they are not as long as the request.
pub(crate) fn read_request(store: &Store, rq: &Request) -> Status {
    let mut at = rq.offset();
    for_each_sink(rq, |mut sink| {
        let len = sink.left() as u64;
        store.read(at, len, &mut sink);
        at += len;
    });
    complete_at(at, rq)
}

/// Carries out a write: stores its buffers. `Invalid` if they are not as long as the request.
pub(crate) fn write_request(store: &Store, rq: &Request) -> Status {
    let mut at = rq.offset();
    let mut stored = Ok(());
    for_each_source(rq, |mut source| {
        let len = source.left() as u64;
        if stored.is_ok() {
            stored = store.write(at, &mut source);
        }
        at += len;
    });
    status(stored).and(complete_at(at, rq))
}

/// Turns a store's answer into a request's.
pub(crate) fn status(result: io::Result<()>) -> Status {
    match result {
        Ok(()) => Status::Ok,
        Err(error) => error.raw_os_error().map_or(Status::NoMemory, Status::from_errno),
    }
}

fn complete_at(at: u64, rq: &Request) -> Status {
    if at == rq.offset() + rq.len() {
        Status::Ok
    } else {
        Status::Invalid
    }
}

fn read_chunk(chunk: &Chunk, bytes: Range<usize>, sink: &mut Sink<'_>) {
    let memory = &chunk.memory;
    let wanted = touched_pages(&bytes);
    if chunk.present & wanted == wanted {
        return sink.put(&memory.bytes()[bytes]);
    }
    // Pages that are not present are not read, so that the kernel need not map its zero page for them.
    let mut at = bytes.start;
    while at < bytes.end {
        let until = bytes.end.min((at / PAGE + 1) * PAGE);
        if chunk.present >> (at / PAGE) & 1 == 1 {
            sink.put(&memory.bytes()[at..until]);
        } else {
            sink.put_zeroes(until - at);
        }
        at = until;
    }
}

fn discard_in_chunk(chunk: &mut Chunk, bytes: Range<usize>) {
    if chunk.present & touched_pages(&bytes) == 0 {
        return;
    }
    let memory = &mut chunk.memory;
    let whole = bytes.start.next_multiple_of(PAGE)..bytes.end / PAGE * PAGE;
    if whole.start >= whole.end {
        return memory.bytes_mut()[bytes].fill(0);
    }
    memory.bytes_mut()[bytes.start..whole.start].fill(0);
    memory.bytes_mut()[whole.end..bytes.end].fill(0);
    chunk.present &= !touched_pages(&whole);
    memory.forget(whole);
}

/// Returns the pages that a range of a chunk touches, a bit each. The range is not empty.
fn touched_pages(bytes: &Range<usize>) -> u64 {
    let first = bytes.start / PAGE;
    let count = bytes.end.div_ceil(PAGE) - first;
    (u64::MAX >> (PAGES_PER_CHUNK as usize - count)) << first
}

/// The unit of presence, in bytes.
const PAGE: usize = 4096;
/// As many as a `u64` has bits.
const PAGES_PER_CHUNK: u64 = 64;
const CHUNK_BYTES: u64 = PAGES_PER_CHUNK * PAGE as u64;
const CHUNKS_PER_GROUP: u64 = 128;
const GROUP_BYTES: u64 = CHUNKS_PER_GROUP * CHUNK_BYTES;

#[cfg(test)]
mod tests;
