//! The payload of one request, in memory: in one buffer or, if it is long, in several. A bio is lent the part
//! that it covers. `buffers` decides where the buffers come from; the NBD door keeps a payload for each
//! request (`nbd/door/slots`).

use std::ops::Range;

use blkmq_core::bio::{Data, Lent};

use super::arena::PIECE_BYTES;
use super::sys::Buffer;

/// The memory of one request's payload. All buffers but the last are [`PIECE_BYTES`] long.
#[derive(Debug)]
pub(crate) struct Payload {
    first: Buffer,
    /// Empty except for long requests, so that short ones allocate nothing.
    rest: Vec<Buffer>,
}

impl Payload {
    /// # Panics
    /// A buffer other than the last is shorter than [`PIECE_BYTES`].
    pub(crate) fn new(first: Buffer, rest: Vec<Buffer>) -> Self {
        let lasting = rest.len();
        let before_last = std::iter::once(&first).chain(&rest).take(lasting);
        assert!(
            before_last
                .into_iter()
                .all(|buffer| buffer.capacity() == PIECE_BYTES),
            "a payload with a gap"
        );
        Self { first, rest }
    }

    /// The buffers, to be given back.
    pub(crate) fn into_buffers(self) -> impl Iterator<Item = Buffer> {
        std::iter::once(self.first).chain(self.rest)
    }

    /// Lends a range to a bio, until [`Payload::take_back`].
    pub(crate) fn lend(&mut self, range: Range<usize>) -> Data {
        let mut lent = parts(range).map(|(index, part)| {
            let buffer = self.buffer_mut(index);
            buffer.lend(part.start, part.len() as u32)
        });
        let first = lent.next().expect("a bio with data");
        let Some(second) = lent.next() else {
            return Data::Flat(first);
        };
        let all: Vec<Lent> = [first, second].into_iter().chain(lent).collect();
        Data::List(all.into())
    }

    /// Ends the loan. Call it only when the bio that carried the loan has ended.
    pub(crate) fn take_back(&mut self) {
        std::iter::once(&mut self.first)
            .chain(&mut self.rest)
            .filter(|buffer| buffer.is_lent())
            .for_each(Buffer::take_back);
    }

    /// The end of the buffer that contains the byte at `at`, if nobody had that memory before; else
    /// `usize::MAX`.
    pub(crate) fn end_of_fresh(&self, at: usize) -> usize {
        let index = at / PIECE_BYTES;
        match self.buffer(index).fresh_bytes() {
            0 => usize::MAX,
            _ => (index + 1) * PIECE_BYTES,
        }
    }

    /// The bytes of a range that is not lent, piece by piece.
    pub(crate) fn slices(&self, range: Range<usize>) -> impl Iterator<Item = &[u8]> {
        parts(range).map(|(index, part)| &self.buffer(index).bytes()[part])
    }

    /// The first bytes of a range that is not lent, for writing: as many as lie in one piece.
    pub(crate) fn slice_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        let (index, part) = parts(range).next().unwrap_or((0, 0..0));
        &mut self.buffer_mut(index).bytes_mut()[part]
    }

    fn buffer(&self, index: usize) -> &Buffer {
        match index.checked_sub(1) {
            None => &self.first,
            Some(rest) => &self.rest[rest],
        }
    }

    fn buffer_mut(&mut self, index: usize) -> &mut Buffer {
        match index.checked_sub(1) {
            None => &mut self.first,
            Some(rest) => &mut self.rest[rest],
        }
    }
}

/// The pieces that contain a range, by number, with the part of each.
fn parts(range: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
    let pieces = range.start / PIECE_BYTES..range.end.div_ceil(PIECE_BYTES);
    pieces.map(move |piece| {
        let start = piece * PIECE_BYTES;
        let part = range.start.max(start) - start..range.end.min(start + PIECE_BYTES) - start;
        (piece, part)
    })
}

#[cfg(test)]
mod tests {
    use super::super::sys::Region;
    use super::*;

    fn payload(bytes: usize) -> Payload {
        let buffer = |bytes| Region::new(PIECE_BYTES).unwrap().take(bytes).unwrap();
        let mut buffers: Vec<Buffer> = parts(0..bytes).map(|(_, part)| buffer(part.len())).collect();
        let rest = buffers.split_off(1);
        Payload::new(buffers.pop().unwrap(), rest)
    }

    #[test]
    fn pieces_are_read_in_the_order_in_which_they_were_written() {
        let bytes = 3 * PIECE_BYTES + 5000;
        let mut payload = payload(bytes);
        let (mut filled, mut number) = (0, 0_u8);
        while filled < bytes {
            let slice = payload.slice_mut(filled..bytes.min(filled + 100_000));
            slice.fill(number);
            (filled, number) = (filled + slice.len(), number + 1);
        }
        let read: Vec<u8> = payload.slices(0..bytes).flatten().copied().collect();
        assert_eq!(read.len(), bytes);
        assert!(read.is_sorted(), "in another order than it was written");
        let across = payload
            .slices(PIECE_BYTES - 10..2 * PIECE_BYTES + 10)
            .map(<[u8]>::len);
        assert_eq!(across.collect::<Vec<_>>(), [10, PIECE_BYTES, 10]);
    }

    #[test]
    fn bio_is_lent_one_piece_of_memory_where_that_is_enough() {
        let mut payload = payload(2 * PIECE_BYTES);
        assert!(matches!(payload.lend(4096..8192), Data::Flat(piece) if piece.len() == 4096));
        payload.take_back();
        let Data::List(pieces) = payload.lend(4096..2 * PIECE_BYTES) else {
            panic!("two pieces");
        };
        let lengths: Vec<usize> = pieces.iter().map(|piece| piece.len() as usize).collect();
        assert_eq!(lengths, [PIECE_BYTES - 4096, PIECE_BYTES]);
        payload.take_back();
        assert_eq!(payload.slices(0..2 * PIECE_BYTES).count(), 2);
    }
}
