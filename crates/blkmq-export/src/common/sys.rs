//! The memory of a request while a driver uses it: a buffer is a run of pages of a region, is lent with a bio
//! and taken back when the bio ends; in between nobody can reach its bytes. `arena` has the pages of small
//! regions; `buffers`, `touched` and the doors take buffers here.

use std::cell::Cell;
use std::io;
use std::ptr::NonNull;
use std::rc::Rc;
use std::slice;

use blkmq_core::bio::Lent;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::arena::{ARENA, PIECE_BYTES};

/// Memory in pages; untouched pages take none. Buffers are taken from a region and go back when
/// they are dropped. Clones are the same region: with the last clone and the last buffer it goes
/// back to the arena, or to the system if it is larger than a piece.
#[derive(Clone, Debug)]
pub(crate) struct Region(Rc<Mapping>);

#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
    /// The piece in which the region lies, if it has no mapping of its own.
    piece: Option<Piece>,
    /// One bit for each page that is part of a buffer. A region of more than 64 pages is one buffer, and has one bit.
    taken: Cell<u64>,
    /// The pages that have ever been part of one, and so take memory, by the same bits.
    touched: Cell<u64>,
}

/// A region that is free and belongs to no thread.
#[derive(Debug)]
pub(crate) struct Chunk(Mapping);

/// A piece of memory aligned for direct I/O. It holds zeroes or old content.
#[derive(Debug)]
pub(crate) struct Buffer {
    region: Region,
    start: NonNull<u8>,
    bytes: usize,
    /// The buffer's bits in the region, and those that no buffer had before.
    bits: u64,
    fresh: u64,
    is_lent: bool,
}

impl Region {
    /// Gets a region of at least `bytes` bytes. It holds zeroes or old content.
    ///
    /// # Errors
    /// The system's error: it has no memory, or no more mappings.
    ///
    /// # Panics
    /// If `bytes` is 0.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        Self::get(bytes, false)
    }

    /// Gets a region that holds zeroes.
    ///
    /// # Errors
    /// As [`Region::new`].
    ///
    /// # Panics
    /// If `bytes` is 0.
    pub(crate) fn new_blank(bytes: usize) -> io::Result<Self> {
        Self::get(bytes, true)
    }

    fn get(bytes: usize, is_blank: bool) -> io::Result<Self> {
        assert!(bytes > 0, "an empty region");
        let bytes = bytes.next_multiple_of(PAGE);
        let piece = (bytes <= PIECE_BYTES).then(|| ARENA.take(is_blank)).transpose()?;
        let start = match &piece {
            Some(piece) => piece.start,
            None => map(bytes)?,
        };
        Ok(Self(Rc::new(Mapping {
            start,
            bytes,
            piece,
            taken: Cell::new(0),
            touched: Cell::new(0),
        })))
    }

    /// Bytes of its pages, touched or not.
    #[cfg(any(test, feature = "fuse", feature = "ublk"))]
    pub(crate) fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// Bytes of the pages that have ever been part of a buffer.
    #[cfg(test)]
    fn touched_bytes(&self) -> usize {
        self.0.touched_bytes()
    }

    /// Returns whether no buffer is taken from it.
    pub(crate) fn is_unused(&self) -> bool {
        self.0.taken.get() == 0
    }

    /// Takes the region off its thread, if there is no clone or buffer of it.
    pub(crate) fn into_chunk(self) -> Option<Chunk> {
        Rc::into_inner(self.0).map(Chunk)
    }

    /// Returns whether the two are the same region.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// Takes a buffer of at least `bytes` bytes, if there is a run of free pages for it.
    ///
    /// # Panics
    /// If `bytes` is 0.
    pub(crate) fn take(&self, bytes: usize) -> Option<Buffer> {
        assert!(bytes > 0, "an empty buffer");
        let (pages, of_all) = (bytes.div_ceil(PAGE), self.0.bytes / PAGE);
        let taken = self.0.taken.get();
        let (first, bits) = if of_all > PAGES_MAX {
            (taken == 0 && pages <= of_all).then_some((0, 1))?
        } else {
            let bits = run_of_zeroes(taken, pages, of_all)?;
            (bits.trailing_zeros() as usize, bits)
        };
        let touched = self.0.touched.get();
        self.0.taken.set(taken | bits);
        self.0.touched.set(touched | bits);
        let bytes = if of_all > PAGES_MAX {
            self.0.bytes
        } else {
            pages * PAGE
        };
        // SAFETY: `first` and the pages behind it are inside the mapping.
        let start = unsafe { self.0.start.add(first * PAGE) };
        Some(Buffer {
            region: self.clone(),
            start,
            bytes,
            bits,
            fresh: bits & !touched,
            is_lent: false,
        })
    }
}

impl Mapping {
    fn touched_bytes(&self) -> usize {
        self.bytes_of(self.touched.get())
    }

    fn bytes_of(&self, bits: u64) -> usize {
        if self.bytes / PAGE > PAGES_MAX {
            return if bits == 0 { 0 } else { self.bytes };
        }
        bits.count_ones() as usize * PAGE
    }
}

impl Chunk {
    /// Makes this thread use the chunk.
    pub(crate) fn into_region(self) -> Region {
        Region(Rc::new(self.0))
    }

    /// Bytes of the pages that have ever been part of a buffer.
    pub(crate) fn touched_bytes(&self) -> usize {
        self.0.touched_bytes()
    }
}

// SAFETY: the mapping has no other owner, so no buffer and no bio reaches its pages; nothing of it belongs to a thread.
unsafe impl Send for Chunk {}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Some(piece) = self.piece.take() {
            ARENA.put(if self.touched.get() == 0 {
                piece
            } else {
                piece.touched()
            });
            return;
        }
        // SAFETY: the mapping is ours, and whoever could reach it had a part in the count that has come to nothing.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "giving back what was mapped: {unmapped:?}");
    }
}

/// A part of a slab, [`PIECE_BYTES`] long, that only its owner reaches. If it is lost, its
/// addresses are lost.
#[derive(Debug)]
pub(crate) struct Piece {
    start: NonNull<u8>,
    is_blank: bool,
}

// SAFETY: nobody else has these addresses, and nothing of them belongs to a thread.
unsafe impl Send for Piece {}

impl Piece {
    /// Returns whether the piece reads as zeroes and takes no memory.
    pub(crate) fn is_blank(&self) -> bool {
        self.is_blank
    }

    /// Records that the piece was written to.
    fn touched(self) -> Self {
        Self {
            is_blank: false,
            ..self
        }
    }

    /// Gives the piece's memory back to the system: then the piece is blank.
    ///
    /// # Errors
    /// The system's error: these addresses are locked in memory.
    pub(crate) fn forget(&mut self) -> io::Result<()> {
        // SAFETY: the range is mapped, private and anonymous, and nobody but the piece's owner reaches it.
        unsafe { madvise(self.start.as_ptr().cast(), PIECE_BYTES, Advice::LinuxDontNeed) }?;
        self.is_blank = true;
        Ok(())
    }

    /// The piece's first byte, for a test.
    #[cfg(test)]
    pub(crate) fn first(&mut self) -> &mut u8 {
        self.is_blank = false;
        // SAFETY: it is mapped, readable and writable, and borrowed exclusively.
        unsafe { self.start.as_mut() }
    }
}

/// Maps a slab of `count` pieces, which stays mapped. No huge pages: they would take memory for
/// untouched pages.
///
/// # Errors
/// The system's error: it has no memory, or no more mappings.
pub(crate) fn map_slab(count: usize) -> io::Result<impl Iterator<Item = Piece>> {
    let start = map(count * PIECE_BYTES)?;
    // SAFETY: the range was mapped just now, and holds nothing that this could change. A system without huge pages refuses.
    let _ = unsafe {
        madvise(
            start.as_ptr().cast(),
            count * PIECE_BYTES,
            Advice::LinuxNoHugepage,
        )
    };
    Ok((0..count).map(move |index| {
        // SAFETY: inside the slab, which is that long.
        let start = unsafe { start.add(index * PIECE_BYTES) };
        Piece {
            start,
            is_blank: true,
        }
    }))
}

/// Maps memory.
fn map(bytes: usize) -> io::Result<NonNull<u8>> {
    // SAFETY: no address is asked for, so nothing that is mapped changes.
    let start = unsafe {
        mmap_anonymous(
            std::ptr::null_mut(),
            bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )
    }?;
    NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory.into())
}

impl Buffer {
    /// Returns the size of the buffer.
    pub(crate) fn capacity(&self) -> usize {
        self.bytes
    }

    /// Bytes of the pages that no buffer had before this one.
    pub(crate) fn fresh_bytes(&self) -> usize {
        self.region.0.bytes_of(self.fresh)
    }

    /// Gives the buffer back as if it had not been taken: nobody has touched it.
    pub(crate) fn untake(self) {
        let touched = &self.region.0.touched;
        touched.set(touched.get() & !self.fresh);
    }

    /// The region that the buffer is taken from.
    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// Returns whether the buffer is lent.
    pub(crate) fn is_lent(&self) -> bool {
        self.is_lent
    }

    /// Lends `len` bytes from `from` on to a bio, until [`Buffer::take_back`].
    ///
    /// # Panics
    /// The buffer is lent already, or shorter.
    pub(crate) fn lend(&mut self, from: usize, len: u32) -> Lent {
        assert!(
            !self.is_lent && from <= self.capacity() && len as usize <= self.capacity() - from,
            "lending {len} bytes from {from} of {self:?}"
        );
        // SAFETY: `from` was found to be inside the mapping, or at its end.
        let start = unsafe { self.start.add(from) };
        self.is_lent = true;
        // SAFETY: the range is inside the mapping. While it is lent nobody reaches the bytes through this value, its pages are
        // no other buffer's, and they are not unmapped: `bytes` and `bytes_mut` refuse, and dropping it leaks the region. The
        // bio's owner takes it back only when the bio has ended.
        unsafe { Lent::new(start, len) }
    }

    /// Ends the loan. Call it only when the bio that carried the loan has ended.
    pub(crate) fn take_back(&mut self) {
        debug_assert!(self.is_lent, "taking back what is not lent");
        self.is_lent = false;
    }

    /// The bytes, while not lent.
    ///
    /// # Panics
    /// The buffer is lent.
    pub(crate) fn bytes(&self) -> &[u8] {
        assert!(!self.is_lent, "reading a lent buffer");
        // SAFETY: the mapping is that long from here, readable, and these pages are nobody else's while it is not lent.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// The bytes, for writing, while not lent.
    ///
    /// # Panics
    /// The buffer is lent.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(!self.is_lent, "writing a lent buffer");
        // SAFETY: as in `bytes`, and `self` is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.is_lent {
            // A driver may still use it: its pages are leaked rather than reused, and the region
            // must stay.
            std::mem::forget(self.region.clone());
            return;
        }
        let taken = &self.region.0.taken;
        taken.set(taken.get() & !self.bits);
    }
}

/// Finds `count` neighbouring zero bits among the low `of` bits. Returns them as ones.
fn run_of_zeroes(taken: u64, count: usize, of: usize) -> Option<u64> {
    if count > of || of > PAGES_MAX {
        return None;
    }
    let free = !taken & ones(of);
    // A bit stays set if `len` bits from it on are free; `len` doubles while it can.
    let (mut starts, mut len) = (free, 1);
    while len < count {
        let more = len.min(count - len);
        starts &= starts >> more;
        len += more;
    }
    (starts != 0).then(|| ones(count) << starts.trailing_zeros())
}

fn ones(count: usize) -> u64 {
    if count >= 64 { u64::MAX } else { (1 << count) - 1 }
}

/// The unit of buffers, and what direct I/O needs at most.
const PAGE: usize = 4096;
/// Pages of a region that many buffers share.
const PAGES_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lent_buffer_is_out_of_reach_until_it_is_taken_back() {
        let region = Region::new(8192).unwrap();
        let mut buffer = region.take(8192).unwrap();
        buffer.bytes_mut()[0] = 7;
        let lent = buffer.lend(0, 4096);
        assert_eq!((lent.len(), lent.start().as_ptr() as usize % PAGE), (4096, 0));
        let reading = std::panic::AssertUnwindSafe(move || buffer.bytes()[0]);
        assert!(std::panic::catch_unwind(reading).is_err());
        assert!(
            region.take(1).is_none(),
            "what is dropped while it is lent stays taken"
        );
        let region = Region::new(4096).unwrap();
        let mut buffer = region.take(4096).unwrap();
        buffer.lend(0, 4096);
        buffer.take_back();
        assert_eq!(buffer.bytes()[4095], 0);
    }

    #[test]
    fn buffers_of_a_region_never_overlap_and_come_back() {
        let region = Region::new(PAGES_MAX * PAGE).unwrap();
        let mut buffers: Vec<Buffer> = Vec::new();
        let mut dice = 12345_u64;
        for round in 0..20_000_u32 {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let bytes = 1 + (dice >> 40) as usize % (20 * PAGE);
            if dice >> 63 == 0 && !buffers.is_empty() {
                let buffer = buffers.swap_remove((dice >> 20) as usize % buffers.len());
                let mark = buffer.bytes()[0];
                assert!(buffer.bytes().iter().all(|byte| *byte == mark), "round {round}");
            } else if let Some(mut buffer) = region.take(bytes) {
                assert!(buffer.capacity() >= bytes && buffer.capacity() < bytes + PAGE);
                buffer.bytes_mut().fill(round as u8);
                buffers.push(buffer);
            }
        }
        buffers.clear();
        assert!(region.is_unused() && region.take(PAGES_MAX * PAGE).is_some());
    }

    #[test]
    fn pages_count_from_the_first_buffer_that_has_them() {
        let region = Region::new(PAGES_MAX * PAGE).unwrap();
        let first = region.take(3 * PAGE).unwrap();
        assert_eq!(
            (first.fresh_bytes(), region.touched_bytes()),
            (3 * PAGE, 3 * PAGE)
        );
        drop(first);
        let larger = region.take(5 * PAGE).unwrap();
        assert_eq!(
            (larger.fresh_bytes(), region.touched_bytes()),
            (2 * PAGE, 5 * PAGE)
        );
        region.take(PAGE).unwrap().untake();
        drop(larger);
        assert_eq!(region.touched_bytes(), 5 * PAGE);
    }

    #[test]
    fn large_region_is_one_buffer() {
        let region = Region::new(100 * PAGE + 1).unwrap();
        let buffer = region.take(90 * PAGE).unwrap();
        assert_eq!((buffer.capacity(), region.bytes()), (101 * PAGE, 101 * PAGE));
        assert!(region.take(1).is_none());
        assert_eq!(region.touched_bytes(), region.bytes());
        drop(buffer);
        assert!(region.take(101 * PAGE + 1).is_none() && region.take(101 * PAGE).is_some());
    }

    #[test]
    fn region_goes_to_another_thread_with_what_was_touched_when_nobody_has_a_part_in_it() {
        let region = Region::new(4 * PAGE).unwrap();
        let buffer = region.take(3 * PAGE).unwrap();
        assert!(buffer.region().clone().into_chunk().is_none(), "it is used");
        drop(buffer);
        let chunk = region.into_chunk().unwrap();
        let touched = std::thread::spawn(move || {
            let region = chunk.into_region();
            region.take(4 * PAGE).unwrap().bytes_mut()[4 * PAGE - 1] = 1;
            region.touched_bytes()
        });
        assert_eq!(touched.join().unwrap(), 4 * PAGE);
    }

    #[test]
    fn runs_are_found_where_there_are_any() {
        for taken in [
            0,
            u64::MAX,
            1,
            0xf0f0_f0f0_f0f0_f0f0,
            0x8000_0000_0000_0001,
            0x0000_ffff_0000_00ff,
        ] {
            for of in [1, 7, 63, 64] {
                for count in 1..=64 {
                    let fits = |from: usize| from + count <= of && taken & (ones(count) << from) == 0;
                    let expected = (0..of).find(|&from| fits(from)).map(|from| ones(count) << from);
                    assert_eq!(
                        run_of_zeroes(taken, count, of),
                        expected,
                        "{taken:#x} {count} {of}"
                    );
                }
            }
        }
    }
}
