//! Padding that keeps two values which different threads write 128 bytes apart.
//!
//! A cache line is 64 bytes on x86-64, but the prefetcher fetches lines in pairs; on aarch64 servers lines of
//! 128 bytes exist. A distance of 128 is enough on both.

use std::ops::{Deref, DerefMut};

/// A value that shares its cache line (and the line's prefetched neighbour) with nothing else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(align(128))]
pub struct CachePadded<T>(T);

impl<T> CachePadded<T> {
    /// Pads `value` to a multiple of 128 bytes.
    pub const fn new(value: T) -> Self {
        Self(value)
    }

    /// Returns the value.
    pub fn into_inner(self) -> T {
        self.0
    }
}

impl<T> Deref for CachePadded<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for CachePadded<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn neighbours_in_a_slice_lie_128_bytes_apart() {
        let pair = [CachePadded::new(1_u8), CachePadded::new(2)];
        let apart = (&raw const pair[1]).addr() - (&raw const pair[0]).addr();
        assert_eq!(apart, 128);
        assert_eq!(*pair[0] + *pair[1], 3);
    }
}
