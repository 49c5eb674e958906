//! Maps memory that another process writes: as atomics, because a plain reference would promise that
//! nobody else writes it.

use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A memory file, mapped from its start for reading and writing.
pub(super) struct Mapping {
    start: NonNull<AtomicU64>,
    bytes: usize,
}

impl Mapping {
    /// Maps so many bytes of a file. The file's size must be sealed: after a truncation an access would end the process.
    pub(super) fn new(file: &File, bytes: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, bytes })
    }

    /// The words of the mapping.
    #[inline(always)]
    pub(super) fn words(&self) -> &[AtomicU64] {
        let words = self.bytes / size_of::<AtomicU64>();
        // SAFETY: the mapping begins at a page, has so many words, and lives as long as `self`. Any bytes are a valid `AtomicU64`,
        // and a reference to atomics does not promise that other processes leave the memory alone.
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
