//! Decides how a chunk's memory is had from the kernel and given back page by page.
//! The parent keeps each [`Pages`] behind its chunk's lock, which is what makes concurrent access sound.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;

/// The memory of one chunk: its own anonymous mapping, which reads as zeroes where it was not written.
///
/// Neighbouring mappings are merged by the kernel, so many chunks cost few map entries.
#[derive(Debug)]
pub(super) struct Pages {
    start: NonNull<u8>,
    len: usize,
}

impl Pages {
    /// Maps `len` bytes of zeroes; no page of it is backed by memory yet.
    pub(super) fn map(len: usize) -> io::Result<Self> {
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

    /// Returns the bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has `len` readable, initialised (zero) bytes, lives as long as `self`, and is written only
        // through `bytes_mut` and `forget`, which need `&mut self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// Returns the bytes for writing.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Zeroes a range and gives its memory back, as far as it consists of whole pages of the kernel.
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

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: `start` and `len` are what mmap gave to `map`, nobody else has them, and no reference outlives `self`.
        let unmapped = unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert_eq!(unmapped, 0, "munmap of a chunk");
    }
}

// SAFETY: `Pages` owns its mapping as a `Box<[u8]>` owns its bytes; the address is valid in every thread.
unsafe impl Send for Pages {}
// SAFETY: shared references give read access only, as those of a `Box<[u8]>`.
unsafe impl Sync for Pages {}

fn page_size() -> usize {
    // SAFETY: sysconf only reads a constant of the system; libc keeps it in memory, so this costs no system call.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(usize::MAX)
}
