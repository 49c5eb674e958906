//! Memory that a driver may read or write. It is made in an `unsafe` constructor, whose caller promises
//! that the memory stays valid until the bio is complete. Its neighbours are `blkmq_core::bio`, which
//! carries it, and the drivers, which pass its address to the kernel.

use std::ptr::NonNull;

/// A piece of the caller's memory, lent to the engine until the bio that carries it ends.
///
/// It is a plain address and length: copying it copies no data. Drivers turn it into a slice or an `iovec`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lent {
    start: NonNull<u8>,
    len: u32,
}

impl Lent {
    /// Lends `len` bytes from `start`.
    ///
    /// # Safety
    /// From now until the bio that carries this value has ended, the whole range must be valid for reads (a
    /// write bio) or for writes (a read bio) from any thread, and nothing else may write to it or, for a read
    /// bio, read it.
    pub const unsafe fn new(start: NonNull<u8>, len: u32) -> Self {
        Self { start, len }
    }

    /// Returns the first byte's address.
    pub const fn start(self) -> NonNull<u8> {
        self.start
    }

    /// Returns the length in bytes.
    pub const fn len(self) -> u32 {
        self.len
    }

    /// Says whether the piece has no bytes.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Returns the part from `skip` on, at most `len` bytes long.
    ///
    /// # Panics
    /// If `skip` lies beyond the end.
    pub fn part(self, skip: u32, len: u32) -> Self {
        assert!(
            skip <= self.len,
            "part of a lent piece: skip {skip} of {} bytes",
            self.len
        );
        // SAFETY: `skip` is at most `len`, so the result stays inside the lent range or one past its end.
        let start = unsafe { self.start.add(skip as usize) };
        Self {
            start,
            len: len.min(self.len - skip),
        }
    }
}

// SAFETY: the constructor's contract says that the memory may be used from any thread until the bio ends.
unsafe impl Send for Lent {}
// SAFETY: as above; `Lent` itself gives out only the address, by value.
unsafe impl Sync for Lent {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_stays_inside_its_piece() {
        let mut bytes = [0u8; 16];
        // SAFETY: `bytes` outlives `lent`, and nothing uses it meanwhile.
        let lent = unsafe { Lent::new(NonNull::from(&mut bytes).cast(), 16) };
        let part = lent.part(10, 100);
        assert_eq!(part.len(), 6);
        assert_eq!(
            part.start().as_ptr() as usize - lent.start().as_ptr() as usize,
            10
        );
    }
}
