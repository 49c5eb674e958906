//! The random numbers of a history: one small seeded generator, split into independent streams. The
//! drives, the CPUs, the clients and the control thread each draw from their own stream, so that a change
//! to one does not change the choices of the others. It does not use `rand`: a history is named by its
//! seed, so no upgrade may change the stream.

/// A probability in parts per million.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ppm(pub u32);

impl Ppm {
    /// Never.
    pub const NEVER: Self = Self(0);

    /// A probability in percent.
    pub const fn percent(percent: u32) -> Self {
        Self(percent * 10_000)
    }
}

/// The generator: xoshiro256** (Blackman and Vigna, "Scrambled linear pseudorandom number
/// generators", 2021), seeded through SplitMix64 (Steele, Lea and Flood, 2014) as its authors
/// recommend.
#[derive(Clone, Debug)]
pub struct Rng([u64; 4]);

impl Rng {
    /// Makes the generator of one stream of one seed.
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut mixer = seed ^ stream.wrapping_mul(0xd1b5_4a32_d192_ed03);
        Self([(); 4].map(|()| split_mix(&mut mixer)))
    }

    /// Returns 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let s = &mut self.0;
        let out = s[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    }

    /// Returns a number below `end`.
    ///
    /// # Panics
    /// If `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        assert!(end > 0, "a number below 0 was asked for");
        // The high half of a product. Its bias is `end` / 2^64, which does not matter here.
        ((u128::from(self.bits()) * u128::from(end)) >> 64) as u64
    }

    /// Returns a number from `low` to `high`, both included.
    pub fn from_to(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// Returns true with probability `p`. Draws even if `p` is 0, so that disabling a fault changes
    /// no other choice.
    pub fn chance(&mut self, p: Ppm) -> bool {
        self.below(1_000_000) < u64::from(p.0)
    }

    /// Returns one of `items`.
    ///
    /// # Panics
    /// If there are no items.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize]
    }

    /// Returns an index with a probability proportional to its weight.
    ///
    /// # Panics
    /// If all weights are 0.
    pub fn weighted(&mut self, weights: &[u32]) -> usize {
        let sum = weights.iter().map(|&w| u64::from(w)).sum();
        let mut at = self.below(sum);
        for (index, &weight) in weights.iter().enumerate() {
            match at.checked_sub(u64::from(weight)) {
                Some(rest) => at = rest,
                None => return index,
            }
        }
        unreachable!("a number below the sum of the weights lies in one of them")
    }

    /// Returns `base` plus up to `percent` of it.
    pub fn spread(&mut self, base: u64, percent: u32) -> u64 {
        base + self.below(base * u64::from(percent) / 100 + 1)
    }
}

fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_and_stream_give_the_same_numbers() {
        let take = |seed, stream| {
            let mut rng = Rng::new(seed, stream);
            [(); 8].map(|()| rng.bits())
        };
        assert_eq!(take(7, 1), take(7, 1));
        assert_ne!(take(7, 1), take(7, 2));
        assert_ne!(take(7, 1), take(8, 1));
    }

    #[test]
    fn numbers_stay_in_their_range_and_reach_its_ends() {
        let mut rng = Rng::new(1, 0);
        let mut seen = [false; 6];
        for _ in 0..1000 {
            let number = rng.from_to(3, 5);
            assert!((3..=5).contains(&number), "{number}");
            seen[number as usize] = true;
        }
        assert_eq!(seen, [false, false, false, true, true, true]);
    }

    #[test]
    fn weights_set_the_proportions() {
        let mut rng = Rng::new(2, 0);
        let mut counts = [0; 3];
        for _ in 0..10_000 {
            counts[rng.weighted(&[1, 0, 3])] += 1;
        }
        assert_eq!(counts[1], 0);
        assert!((2_200..2_800).contains(&counts[0]), "{counts:?}");
    }

    #[test]
    fn chance_comes_about_as_often_as_it_says() {
        let mut rng = Rng::new(3, 0);
        let hits = (0..10_000).filter(|_| rng.chance(Ppm::percent(10))).count();
        assert!((850..1_150).contains(&hits), "{hits}");
        assert!(!(0..1000).any(|_| rng.chance(Ppm::NEVER)));
    }
}
