//! The memory of chunks: it is mapped, and given back to the kernel page by page. The parent keeps each
//! [`Pages`] behind its chunk's lock, which makes concurrent access sound.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// A piece of a region: memory that reads as zeroes until it is written, and belongs to this value
/// alone.
#[derive(Debug)]
pub(super) struct Pages {
    start: NonNull<u8>,
    len: u32,
    /// Keeps the mapping alive.
    _region: Arc<Region>,
}

/// An anonymous mapping.
#[derive(Debug)]
struct Region {
    start: NonNull<u8>,
    len: usize,
}

impl Pages {
    /// Maps a region and cuts it into `count` pieces of `len` bytes. No page of it is backed by memory yet.
    ///
    /// With `huge` the system is asked to back it by huge pages, aligned to them; without, not to.
    pub(super) fn map(count: usize, len: u32, huge: bool) -> io::Result<Vec<Self>> {
        let wanted = count * len as usize;
        let region = Arc::new(Region::map(if huge { wanted + HUGE } else { wanted })?);
        let skip = if huge { region.start.align_offset(HUGE) } else { 0 };
        let advice = if huge {
            libc::MADV_HUGEPAGE
        } else {
            libc::MADV_NOHUGEPAGE
        };
        // SAFETY: this advice changes how the region is backed, not what it reads as. If it is refused (a kernel without
        // huge pages), the region is backed by ordinary ones.
        unsafe { libc::madvise(region.start.as_ptr().cast(), region.len, advice) };
        let piece = |index: usize| {
            // SAFETY: `skip` is less than HUGE, which was added to what is wanted, so each piece is inside the region.
            let start = unsafe { region.start.add(skip + index * len as usize) };
            Self {
                start,
                len,
                _region: Arc::clone(&region),
            }
        };
        Ok((0..count).map(piece).collect())
    }

    /// Returns the bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the piece has `len` readable, initialised (zero) bytes, its region lives as long as `self`, no other
        // piece overlaps it, and it is written only through `bytes_mut` and `forget`, which need `&mut self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len as usize) }
    }

    /// Returns the bytes for writing.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len as usize) }
    }

    /// Zeroes a range and gives the memory of its whole kernel pages back.
    pub(super) fn forget(&mut self, range: Range<usize>) {
        let part = &mut self.bytes_mut()[range];
        let page = page_size();
        let is_whole = (part.as_ptr().addr() | part.len()).is_multiple_of(page) && !part.is_empty();
        // SAFETY: `part` is whole pages of our own private anonymous mapping, which `&mut self` gives us alone;
        // after MADV_DONTNEED they are still mapped and read as zeroes, which are valid bytes.
        let forgotten = is_whole
            && unsafe { libc::madvise(part.as_mut_ptr().cast(), part.len(), libc::MADV_DONTNEED) } == 0;
        if !forgotten {
            part.fill(0);
        }
    }
}

impl Region {
    fn map(len: usize) -> io::Result<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no memory of ours.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `start` and `len` are what mmap gave to `map`, and the last piece of the region is gone.
        let unmapped = unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert_eq!(unmapped, 0, "munmap of a region");
    }
}

// SAFETY: a region is an address range that its last owner unmaps; that may be done from any thread.
unsafe impl Send for Region {}
// SAFETY: a shared region gives no access to its memory: only its pieces do, each to its own part.
unsafe impl Sync for Region {}
// SAFETY: `Pages` owns its piece as a `Box<[u8]>` owns its bytes; the address is valid in every thread.
unsafe impl Send for Pages {}
// SAFETY: shared references give read access only, as those of a `Box<[u8]>`.
unsafe impl Sync for Pages {}

fn page_size() -> usize {
    // SAFETY: sysconf only reads a constant of the system; libc keeps it in memory, so this costs no system call.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(usize::MAX)
}

/// The size of a huge page on most machines, in bytes.
const HUGE: usize = 2 << 20;
