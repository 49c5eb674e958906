//! Maps memory for I/O past the page cache, and lends it to the kernel. `file` keeps its bounce buffers
//! in it, `multipath` the buffers of its probes.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;

use blkmq_core::bio::Lent;

/// Anonymous memory with the alignment of a page, for I/O past the page cache. Reads as zeroes until it is written.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes. The system backs them with memory when they are used for the first time.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
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

    /// Returns the bytes. The mapping must not be lent to the kernel.
    #[cfg(feature = "file")]
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has `len` initialised bytes, lives as long as `self`, and `&mut self` makes this the only
        // reference of this process.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Returns the bytes. The mapping must not be lent to the kernel.
    #[cfg(feature = "qcow2")]
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has `len` initialised bytes and lives as long as `self`; they are written only through
        // `bytes_mut`, which needs `&mut self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// Lends a range to entries of the ring.
    ///
    /// # Panics
    /// The range is not inside.
    pub(crate) fn lend(&self, range: Range<usize>) -> Lent {
        assert!(
            range.end <= self.len && range.len() <= u32::MAX as usize,
            "{range:?} of {} bytes",
            self.len
        );
        // SAFETY: the start of the range is inside the mapping or one past its end.
        let start = unsafe { self.start.add(range.start) };
        // SAFETY: the hardware context lends each area to one request at a time, and keeps the mapping (or leaks it)
        // until the last entry that names it has completed.
        unsafe { Lent::new(start, range.len() as u32) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `start` and `len` are what mmap gave to `new`, and no reference outlives `self`.
        let unmapped = unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert_eq!(unmapped, 0, "munmap");
    }
}

// SAFETY: `Mapping` owns its memory as a `Box<[u8]>` does; the address is valid in every thread.
unsafe impl Send for Mapping {}
// SAFETY: shared references give out addresses only.
unsafe impl Sync for Mapping {}
