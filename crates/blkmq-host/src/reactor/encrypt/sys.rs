//! Copies between submitters' memory and this thread's, and the memory of areas. Submitters' memory is
//! touched through addresses alone, since it may be a guest's.

use std::cell::Cell;
use std::ops::Range;
use std::ptr::NonNull;

use blkmq_core::bio::{Bio, Lent};

/// Memory that is lent to the drives.
pub(crate) struct BounceMemory {
    /// Keeps it alive.
    _bytes: Vec<u8>,
    start: NonNull<u8>,
    len: usize,
}

impl BounceMemory {
    /// Takes `len` zero bytes, aligned to a page. The system backs them when they are used for the first time.
    pub(crate) fn new(len: usize) -> Self {
        let mut bytes = vec![0; len + PAGE];
        let start = NonNull::from(&mut bytes[..]).cast::<u8>();
        let skip = start.align_offset(PAGE);
        assert!(skip <= PAGE, "{skip}");
        // SAFETY: the vector has a page more than `len`, and `skip` is at most a page.
        let start = unsafe { start.add(skip) };
        Self {
            _bytes: bytes,
            start,
            len,
        }
    }

    /// The bytes of a range that is not lent.
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} of {}",
            self.len
        );
        // SAFETY: the start of the range is inside, or one past the end.
        let start = unsafe { self.start.add(range.start) };
        // SAFETY: the range is inside, its bytes are initialised, and `&mut self` makes this the only reference: nothing
        // is read or written by a drive, since the range is not lent.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), range.len()) }
    }

    /// Lends a range.
    pub(crate) fn lend(&self, range: Range<usize>) -> Lent {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} of {}",
            self.len
        );
        // SAFETY: the start of the range is inside, or one past the end.
        let start = unsafe { self.start.add(range.start) };
        // SAFETY: an area belongs to one bio, which does not write to it until its end; the memory is kept (or leaked) until
        // the last bio that names it has ended.
        unsafe { Lent::new(start, range.len() as u32) }
    }
}

// SAFETY: `BounceMemory` owns its bytes as a `Vec<u8>` does; the address is valid in every thread.
unsafe impl Send for BounceMemory {}

/// Copies a write's bytes from `at` on.
pub(super) fn gather(bio: &Bio, at: u64, into: &mut [u8]) {
    for_each_part(bio, at, into.len(), |piece, range| {
        let into = &mut into[range];
        // SAFETY: the lender of the piece promised that it can be read until its bio ends, which it has not; `into` is this
        // thread's and as long as the piece.
        unsafe { std::ptr::copy_nonoverlapping(piece.start().as_ptr(), into.as_mut_ptr(), into.len()) };
    });
}

/// Copies bytes to a read's memory, from `at` on.
pub(super) fn scatter(bio: &Bio, at: u64, from: &[u8]) {
    for_each_part(bio, at, from.len(), |piece, range| {
        let from = &from[range];
        // SAFETY: the lender of the piece promised that it can be written until its bio ends, which it has not; `from` is
        // this thread's and as long as the piece.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), piece.start().as_ptr(), from.len()) };
    });
}

/// Lends `len` bytes of a bio's memory from `at` on to a function, if they lie together there. Says whether they do.
pub(super) fn with_flat(bio: &Bio, at: u64, len: usize, call: impl FnOnce(&[Cell<u8>])) -> bool {
    let mut skip = at;
    for piece in bio.pieces() {
        if skip >= u64::from(piece.len()) {
            skip -= u64::from(piece.len());
            continue;
        }
        if u64::from(piece.len()) - skip < len as u64 {
            return false;
        }
        let part = piece.part(skip as u32, len as u32);
        // SAFETY: the lender of the piece promised that it can be read, and of a read's written, until its bio ends, which it
        // has not; cells are no promise that nobody else writes.
        call(unsafe { std::slice::from_raw_parts(part.start().as_ptr().cast::<Cell<u8>>(), len) });
        return true;
    }
    false
}

/// Visits the pieces of memory of `len` bytes from `at` on, each with its place among these.
fn for_each_part(bio: &Bio, at: u64, len: usize, mut visit: impl FnMut(Lent, Range<usize>)) {
    let (mut skip, mut done) = (at, 0);
    for piece in bio.pieces() {
        if skip >= u64::from(piece.len()) {
            skip -= u64::from(piece.len());
            continue;
        }
        let part = piece.part(skip as u32, (len - done) as u32);
        skip = 0;
        let end = done + part.len() as usize;
        visit(part, done..end);
        done = end;
        if done == len {
            return;
        }
    }
}

const PAGE: usize = 4096;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use blkmq_core::bio::Data;

    use super::*;

    #[test]
    fn slices_of_scattered_memory_are_copied_in_order() {
        let mut memory = BounceMemory::new(4096);
        memory
            .bytes_mut(0..4096)
            .iter_mut()
            .zip(0_u16..)
            .for_each(|(byte, at)| *byte = at as u8);
        let list: Arc<[Lent]> = [memory.lend(100..110), memory.lend(0..5), memory.lend(200..260)].into();
        let bio = Bio {
            len: 75,
            data: Data::List(list),
            ..Bio::default()
        };
        let mut slice = [0; 10];
        gather(&bio, 8, &mut slice);
        assert_eq!(slice, [108, 109, 0, 1, 2, 3, 4, 200, 201, 202]);
        let first = |at, len| {
            let mut first = None;
            let is_flat = with_flat(&bio, at, len, |cells| first = Some((cells[0].get(), cells.len())));
            assert_eq!(is_flat, first.is_some());
            first
        };
        assert_eq!(first(0, 10), Some((100, 10)));
        assert_eq!(first(12, 3), Some((2, 3)));
        assert_eq!(first(15, 60), Some((200, 60)));
        assert_eq!((first(8, 3), first(0, 11), first(14, 2)), (None, None, None));
        scatter(&bio, 8, &[9; 10]);
        assert_eq!(memory.bytes_mut(0..6), [9, 9, 9, 9, 9, 5]);
        assert_eq!(memory.bytes_mut(107..111), [107, 9, 9, 110]);
        assert_eq!(memory.bytes_mut(199..204), [199, 9, 9, 9, 203]);
    }
}
