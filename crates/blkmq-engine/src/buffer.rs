//! Memory for one I/O at a time, aligned as direct I/O needs it. A `bio` owns it while the I/O is under way.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::sys::RawBuffer;

/// Bytes that begin at a page, so that no driver copies them. Read and changed as a slice.
///
/// Its length does not change. The length of a read or write is that of its buffer.
#[derive(Default)]
pub struct Buffer(RawBuffer);

impl Buffer {
    /// The most bytes of one buffer: 1 GiB.
    pub const LEN_MAX: usize = 1 << 30;

    /// Makes a buffer of `len` bytes, all 0.
    ///
    /// # Panics
    /// If `len` is more than [`Self::LEN_MAX`].
    pub fn new(len: usize) -> Self {
        let max = Self::LEN_MAX;
        assert!(len <= max, "a buffer of {len} bytes: at most {max} are possible");
        Self(RawBuffer::zeroed(len as u32))
    }

    #[inline]
    pub(crate) fn from_raw_buffer(memory: RawBuffer) -> Self {
        Self(memory)
    }

    /// What makes it again; no reference is made.
    #[inline]
    pub(crate) fn parts(&self) -> (NonNull<u8>, u32, u16) {
        self.0.parts()
    }

    /// The place of its first byte, and its length; no reference is made.
    #[inline]
    pub(crate) fn place(&self) -> (NonNull<u8>, u32) {
        (self.0.start(), self.0.len())
    }
}

impl From<&[u8]> for Buffer {
    /// Copies the bytes.
    fn from(bytes: &[u8]) -> Self {
        let mut buffer = Self::new(bytes.len());
        buffer.copy_from_slice(bytes);
        buffer
    }
}

impl Deref for Buffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl DerefMut for Buffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer of {} bytes", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::PAGE;

    #[test]
    fn buffer_begins_at_a_page_and_stays_there_when_it_is_moved() {
        for len in [1, 512, 4096, 1 << 20] {
            let buffer = Buffer::from(&vec![3; len][..]);
            let at = buffer.as_ptr();
            let moved = Box::new(buffer);
            assert_eq!((moved.as_ptr(), at as usize % PAGE), (at, 0));
            assert_eq!(moved.len(), len);
        }
        assert!(Buffer::new(0).is_empty());
    }
}
