//! Decides who owns the memory of a request while a driver uses it: a buffer is lent with a bio and taken back with its
//! end; in between nobody can reach its bytes. Used by `slots`.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::slice;

use blkmq_core::bio::Lent;

/// A piece of memory aligned for direct I/O, zeroed when made.
#[derive(Debug)]
pub(super) struct Buffer {
    start: NonNull<u8>,
    layout: Layout,
    is_lent: bool,
}

impl Buffer {
    /// Makes a buffer of `bytes` bytes.
    ///
    /// # Panics
    /// If `bytes` is 0 or too large for an address space.
    pub(super) fn new(bytes: usize) -> Self {
        assert!(bytes > 0, "an empty buffer");
        let layout = Layout::from_size_align(bytes, ALIGN).expect("a buffer that fits the address space");
        // SAFETY: the layout's size is not 0.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else {
            std::alloc::handle_alloc_error(layout)
        };
        Self {
            start,
            layout,
            is_lent: false,
        }
    }

    /// Returns its size.
    pub(super) fn capacity(&self) -> usize {
        self.layout.size()
    }

    /// Lends the first `len` bytes to a bio, until [`Buffer::take_back`].
    ///
    /// # Panics
    /// If it is lent already, or shorter.
    pub(super) fn lend(&mut self, len: u32) -> Lent {
        assert!(
            !self.is_lent && len as usize <= self.capacity(),
            "lending {len} bytes of {self:?}"
        );
        self.is_lent = true;
        // SAFETY: the range is inside the allocation. While it is lent nobody reaches the bytes through this value, and it
        // is not freed: `bytes` and `bytes_mut` refuse, and dropping it leaks. The bio's owner takes it back only when
        // the bio has ended.
        unsafe { Lent::new(self.start, len) }
    }

    /// Ends the loan. To be called when the bio that carried it has ended, and not before.
    pub(super) fn take_back(&mut self) {
        debug_assert!(self.is_lent, "taking back what is not lent");
        self.is_lent = false;
    }

    /// The bytes, while not lent.
    ///
    /// # Panics
    /// If it is lent.
    pub(super) fn bytes(&self) -> &[u8] {
        assert!(!self.is_lent, "reading a lent buffer");
        // SAFETY: the allocation is that long, was zeroed, and nobody else has access while it is not lent.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.layout.size()) }
    }

    /// The bytes, for writing, while not lent.
    ///
    /// # Panics
    /// If it is lent.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(!self.is_lent, "writing a lent buffer");
        // SAFETY: as in `bytes`, and `self` is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.is_lent {
            // A driver may still use it: better lost than reused.
            return;
        }
        // SAFETY: allocated with this layout, and nobody uses it any more.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Owns the descriptor that an accept completed with.
pub(super) fn accepted(fd: RawFd) -> OwnedFd {
    // SAFETY: the kernel made this descriptor for us, and nobody else has it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// What direct I/O needs at most.
const ALIGN: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lent_buffer_is_out_of_reach_until_it_is_taken_back() {
        let mut buffer = Buffer::new(8192);
        buffer.bytes_mut()[0] = 7;
        let lent = buffer.lend(4096);
        assert_eq!((lent.len(), lent.start().as_ptr() as usize % ALIGN), (4096, 0));
        let buffer = std::panic::catch_unwind(move || buffer.bytes()[0]);
        assert!(buffer.is_err());
        let mut buffer = Buffer::new(4096);
        buffer.lend(4096);
        buffer.take_back();
        assert_eq!(buffer.bytes()[4095], 0);
    }
}
