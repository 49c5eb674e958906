//! Chance: a small seeded generator and probabilities that are compared with it, so that faults and
//! latencies of a drive replay from their seed. Used by `null`.

use blkmq_host::value::{self, ConfigError};

/// A probability.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// Of 2^32 draws, how many hit.
    of_2_32: u64,
}

impl Rate {
    /// It never happens.
    pub const NEVER: Self = Self { of_2_32: 0 };

    /// Makes a probability from a number, clamped to the range from 0 to 1.
    pub fn new(probability: f64) -> Self {
        Self {
            of_2_32: (probability.clamp(0.0, 1.0) * 4_294_967_296.0) as u64,
        }
    }

    /// Parses a probability: a number from 0 to 1, or a percentage such as `5%`.
    ///
    /// # Errors
    /// `BadValue` if it is no such number.
    pub fn parse(key: &str, value: &str) -> Result<Self, ConfigError> {
        let (digits, scale) = value.strip_suffix('%').map_or((value, 1.0), |d| (d, 0.01));
        match digits.trim().parse::<f64>() {
            Ok(n) if (0.0..=1.0).contains(&(n * scale)) => Ok(Self::new(n * scale)),
            _ => value::bad(key, value, RATE),
        }
    }

    /// Returns whether it can happen at all.
    pub const fn is_never(self) -> bool {
        self.of_2_32 == 0
    }
}

/// A generator of pseudo-random numbers: a counter with a good mixing function, all of its 2^64 states one cycle.
#[derive(Clone, Debug)]
pub(crate) struct Chance {
    state: u64,
}

impl Chance {
    /// Starts the sequence number `stream` of a seed.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        Self {
            state: mix(seed ^ mix(stream.wrapping_add(1))),
        }
    }

    /// Returns 64 evenly distributed bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(STEP);
        mix(self.state)
    }

    /// Returns whether an event of this probability happens now. Draws nothing if the probability
    /// is 0.
    pub(crate) fn hits(&mut self, rate: Rate) -> bool {
        !rate.is_never() && u64::from(self.bits() as u32) < rate.of_2_32
    }

    /// Returns a number of about normal distribution with mean 0 and a standard deviation of 1024, within ±3548.
    ///
    /// It is the sum of four even 16-bit numbers (Irwin-Hall), which is bell-shaped and needs one draw and no floats.
    pub(crate) fn bell_1024(&mut self) -> i64 {
        let bits = self.bits();
        let sum: i64 = (0..4).map(|i| (bits >> (16 * i) & 0xffff) as i64).sum();
        // The sum's mean is 2 * 65535 and its standard deviation 65536 / sqrt(3) = 37837.
        (sum - 131_070) * 1024 / 37_837
    }
}

/// Spreads every bit of the input over all bits of the output, one to one (two rounds of xor-shift and multiply).
fn mix(mut x: u64) -> u64 {
    x = (x ^ x >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x = (x ^ x >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ x >> 32
}

/// An odd number near 2^64 divided by the golden ratio, so that states are far apart.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const RATE: &str = "a probability such as 0.01 or 1%";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_numbers_or_percentages() {
        assert_eq!(Rate::parse("r", "1%"), Rate::parse("r", "0.01"));
        for wrong in ["", "-0.1", "1.1", "101%", "NaN", "inf"] {
            assert!(Rate::parse("r", wrong).is_err(), "{wrong} was taken");
        }
    }

    #[test]
    fn rate_hits_as_often_as_it_says() {
        let mut chance = Chance::new(7, 0);
        for probability in [0.0, 0.01, 0.5, 1.0] {
            let rate = Rate::new(probability);
            let hits = (0..100_000).filter(|_| chance.hits(rate)).count() as f64;
            assert!(
                (hits - probability * 100_000.0).abs() <= 700.0,
                "{hits} hits at {probability}"
            );
        }
    }

    #[test]
    fn bell_has_its_mean_and_deviation() {
        let mut chance = Chance::new(1, 2);
        let draws: Vec<i64> = (0..100_000).map(|_| chance.bell_1024()).collect();
        let mean = draws.iter().sum::<i64>() as f64 / 100_000.0;
        let variance = draws.iter().map(|x| (*x as f64 - mean).powi(2)).sum::<f64>() / 100_000.0;
        assert!(mean.abs() < 15.0, "mean {mean}");
        assert!(
            (variance.sqrt() - 1024.0).abs() < 15.0,
            "deviation {}",
            variance.sqrt()
        );
        assert!(draws.iter().all(|x| x.abs() <= 3548));
    }

    #[test]
    fn streams_of_one_seed_differ_and_repeat() {
        let draw = |stream| Chance::new(3, stream).bits();
        assert_ne!(draw(0), draw(1));
        assert_eq!(draw(1), draw(1));
    }
}
