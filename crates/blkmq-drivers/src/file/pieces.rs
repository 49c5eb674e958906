//! The size of the pieces in which discards and zeroing of a file go to the kernel. A filesystem holds the file's locks
//! for all of a FALLOCATE, and takes as long as the range has extents, which nobody knows in advance: the size follows
//! the time that the pieces take. `disk` remembers it, `slot` sends the pieces of a request one after the other.

use std::sync::atomic::{AtomicU64, Ordering};

use blkmq_core::time::{Instant, Nanos};

/// The size of the pieces of one disk in bytes, a power of two. Relaxed throughout: it orders nothing.
#[derive(Debug)]
pub(super) struct PieceSize(AtomicU64);

/// A piece that the kernel has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) len: u64,
    /// The size when it was cut; 0 for a range that was not cut, which tells nothing.
    size: u64,
    sent: Instant,
}

impl Piece {
    /// The piece of a request that goes to the kernel whole, whatever it takes.
    pub(super) const fn whole(len: u64) -> Self {
        Self {
            len,
            size: 0,
            sent: Instant(0),
        }
    }
}

impl PieceSize {
    pub(super) const fn new() -> Self {
        Self(AtomicU64::new(FIRST))
    }

    /// Cuts the next piece from the `left` bytes at `offset`. It ends at a multiple of [`LEAST`], so that no block of a
    /// filesystem is cut, unless the request ends before.
    pub(super) fn cut(&self, offset: u64, left: u64, now: Instant) -> Piece {
        let size = self.0.load(Ordering::Relaxed);
        let end = offset.saturating_add(size);
        Piece {
            len: (end - end % LEAST - offset).min(left),
            size,
            sent: now,
        }
    }

    /// Records that the kernel is done with a piece. Of the pieces that were cut at one size the first that changes it
    /// does so alone: one delay that many of them share counts once.
    pub(super) fn record(&self, piece: Piece, now: Instant) {
        let size = piece.size;
        let took = now.since(piece.sent);
        // A request that ends before its piece would have is no sign that the size may grow.
        let is_full = piece.len + LEAST > size;
        let new = match size {
            0 => return,
            _ if took > SLOW => (size / 2).max(LEAST),
            _ if took < QUICK && is_full => size.saturating_mul(2),
            _ => return,
        };
        let _ = self
            .0
            .compare_exchange(size, new, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// The size before anything is known.
const FIRST: u64 = 1 << 20;
/// The least size, and a multiple of every filesystem's blocks.
const LEAST: u64 = 64 << 10;
/// Where a piece took less, the next may be twice as long. It should take much longer than its way through the ring and
/// a thread of the kernel, about 20 µs.
const QUICK: Nanos = Nanos::from_millis(1);
/// Where a piece took longer, the next is half as long: others wait for the file's locks meanwhile.
const SLOW: Nanos = Nanos::from_millis(4);

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends a range in pieces, of which each takes what `time` says. Returns their lengths.
    fn send(size: &PieceSize, range: std::ops::Range<u64>, time: impl Fn(u64) -> Nanos) -> Vec<u64> {
        let (mut now, mut at, mut lens) = (Instant(5), range.start, Vec::new());
        while at < range.end {
            let piece = size.cut(at, range.end - at, now);
            assert!(piece.len > 0 && at + piece.len <= range.end);
            now = now + time(piece.len);
            size.record(piece, now);
            lens.push(piece.len);
            at += piece.len;
        }
        lens
    }

    #[test]
    fn pieces_of_a_terabyte_without_extents_double_and_are_21() {
        let size = PieceSize::new();
        let lens = send(&size, 0..1 << 40, |_| Nanos::from_micros(20));
        assert_eq!(lens.len(), 21);
        assert_eq!(lens[..3], [1 << 20, 2 << 20, 4 << 20]);
    }

    #[test]
    fn pieces_of_a_disk_are_remembered_from_one_request_to_the_next() {
        let size = PieceSize::new();
        let requests = (0..1024).map(|at| at << 30..(at + 1) << 30);
        let pieces = requests.map(|range| send(&size, range, |_| Nanos::from_micros(20)).len());
        assert_eq!(pieces.sum::<usize>(), 11 + 1023);
    }

    #[test]
    fn pieces_of_a_file_with_many_extents_shrink_until_none_takes_long() {
        let size = PieceSize::new();
        // 128 extents in each MiB.
        let time = |len: u64| Nanos::from_micros(10 + (len >> 13) * 75);
        let lens = send(&size, 0..1 << 28, time);
        assert_eq!(lens[..4], [1 << 20, 512 << 10, 256 << 10, 256 << 10]);
        assert!(lens[2..].iter().all(|len| time(*len) <= SLOW));
        assert_eq!(send(&size, 0..1 << 20, |_| SLOW + SLOW).last(), Some(&LEAST));
        assert_eq!(send(&size, 0..1 << 20, |_| SLOW + SLOW), [LEAST; 16]);
    }

    #[test]
    fn pieces_end_at_multiples_of_the_blocks_of_filesystems() {
        let size = PieceSize::new();
        let lens = send(&size, 4096..(3 << 20) + 512, |_| QUICK);
        assert_eq!(lens, [(1 << 20) - 4096, 1 << 20, 1 << 20, 512]);
        let lens = send(&size, 4096..8 << 20, |_| Nanos::ZERO);
        assert_eq!(
            lens[..2],
            [(1 << 20) - 4096, 2 << 20],
            "cut short by an unaligned start"
        );
    }

    #[test]
    fn pieces_shorter_than_the_size_do_not_make_it_larger() {
        let size = PieceSize::new();
        for at in 0..100 {
            send(&size, at << 20..(at << 20) + 4096, |_| Nanos::ZERO);
        }
        assert_eq!(size.cut(0, u64::MAX, Instant(0)).len, FIRST);
    }

    #[test]
    fn pieces_that_one_delay_stops_together_count_once() {
        let size = PieceSize::new();
        let pieces = [0, 1, 2, 3].map(|at| size.cut(at << 30, 1 << 30, Instant(5)));
        for piece in pieces {
            size.record(piece, Instant(5) + Nanos::from_secs(1));
        }
        assert_eq!(size.cut(0, u64::MAX, Instant(5)).len, FIRST / 2);
    }
}
