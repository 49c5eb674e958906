//! Decides how memory that another process writes, too, is mapped: as atomics, since a plain reference would promise that it does not.

use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A file in memory, mapped from its start on, to be read and written.
pub(super) struct Mapping {
    start: NonNull<AtomicU64>,
    bytes: usize,
}

impl Mapping {
    /// Maps so many bytes of a file whose size is sealed: of another one they could be cut off, and an access would end the process.
    pub(super) fn new(file: &File, bytes: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, bytes })
    }

    /// The whole words of it.
    #[inline(always)]
    pub(super) fn words(&self) -> &[AtomicU64] {
        let words = self.bytes / size_of::<AtomicU64>();
        // SAFETY: the mapping begins at a page, has so many words, and lives as long as `self`. Any bytes are an `AtomicU64`, and all
        // who share the memory access it as such, or beyond what a reference to atomics promises.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), words) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `start` and `bytes` are those of the mapping that `new` made, and no reference outlives `self`.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
    }
}

// SAFETY: `Mapping` owns its memory as a `Box<[AtomicU64]>` does; the address is valid in every thread.
unsafe impl Send for Mapping {}
// SAFETY: shared references give out atomics alone.
unsafe impl Sync for Mapping {}
