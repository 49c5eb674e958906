//! The next I/O's offset: random or sequential. Load generators call it once per I/O, so it costs about a
//! nanosecond.

/// A stream of offsets on a disk, each a whole number of blocks.
#[derive(Clone, Debug)]
pub(crate) struct Offsets {
    blocks: u64,
    block_bytes: u64,
    random: bool,
    state: u64,
}

impl Offsets {
    /// Makes offsets for a disk of `size` bytes and I/Os of `block_bytes`. Equal seeds give equal
    /// streams.
    ///
    /// # Panics
    /// If the disk is smaller than one block.
    pub(crate) fn new(size: u64, block_bytes: u64, random: bool, seed: u64) -> Self {
        let blocks = size / block_bytes;
        assert!(blocks > 0, "a disk of {size} bytes has no block of {block_bytes}");
        // The multiplication spreads small seeds; the state must not be zero.
        let state = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Self {
            blocks,
            block_bytes,
            random,
            state: if random { state } else { state % blocks },
        }
    }

    /// Returns the next offset in bytes.
    #[inline]
    pub(crate) fn next(&mut self) -> u64 {
        if self.random {
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
            // The upper half of the product scales the state to the number of blocks without a
            // division.
            let block = (u128::from(self.state) * u128::from(self.blocks)) >> 64;
            block as u64 * self.block_bytes
        } else {
            let block = self.state;
            self.state = if block + 1 == self.blocks { 0 } else { block + 1 };
            block * self.block_bytes
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_offsets_cover_the_disk_and_stay_on_it() {
        let mut offsets = Offsets::new(10 * 4096 + 100, 4096, true, 7);
        let mut seen = [0u32; 10];
        for _ in 0..10_000 {
            let offset = offsets.next();
            assert_eq!(offset % 4096, 0);
            seen[(offset / 4096) as usize] += 1;
        }
        assert!(seen.iter().all(|&count| (800..1200).contains(&count)), "{seen:?}");
    }

    #[test]
    fn sequential_offsets_wrap_at_the_last_whole_block() {
        let mut offsets = Offsets::new(3 * 512, 512, false, 0);
        let first = offsets.next();
        let stream: Vec<u64> = (0..3).map(|_| offsets.next()).collect();
        assert_eq!(stream[2], first);
        assert!(stream.iter().all(|offset| *offset < 3 * 512));
    }

    #[test]
    fn equal_seeds_give_equal_streams_and_others_differ() {
        let stream = |seed| {
            let mut offsets = Offsets::new(1 << 40, 4096, true, seed);
            [offsets.next(), offsets.next(), offsets.next()]
        };
        assert_eq!(stream(3), stream(3));
        assert_ne!(stream(3), stream(4));
    }
}
