//! A histogram of times: two buckets for each doubling, from half a microsecond to half an hour. One
//! reactor counts, any thread reads.

use blkmq_sync::counter::Counter;

use crate::time::Nanos;

/// One reactor's counts.
#[derive(Debug)]
pub(crate) struct HistogramShard([Counter; BUCKETS]);

/// How many times are in each bucket, counted since the queue was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Histogram([u64; BUCKETS]);

impl Default for HistogramShard {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Counter::new()))
    }
}

impl HistogramShard {
    /// Counts one time. Called by the owning reactor only.
    #[inline]
    pub(crate) fn record(&self, time: Nanos) {
        self.record_many(time, 1);
    }

    /// Counts a time `count` times. Called by the owning reactor only.
    #[inline]
    pub(crate) fn record_many(&self, time: Nanos, count: u64) {
        self.0[bucket(time)].add(count);
    }

    /// Sets all buckets. The caller has made sure that no reactor counts.
    pub(super) fn set(&self, to: &Histogram) {
        let pairs = self.0.iter().zip(to.0);
        pairs.for_each(|(counter, value)| counter.set(value));
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self([0; BUCKETS])
    }
}

impl Histogram {
    pub(super) fn fold(&mut self, shard: &HistogramShard) {
        let pairs = self.0.iter_mut().zip(&shard.0);
        pairs.for_each(|(sum, counter)| *sum += counter.get());
    }

    pub(super) fn add(&mut self, other: &Self) {
        let pairs = self.0.iter_mut().zip(other.0);
        pairs.for_each(|(sum, value)| *sum += value);
    }

    pub(super) fn each(&mut self, visit: &mut dyn FnMut(&mut u64)) {
        self.0.iter_mut().for_each(visit);
    }

    /// How many times were counted.
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The buckets that are not empty: the upper bound of their times, and how many times they hold. The last
    /// bucket is open: its bound is the largest time there is.
    pub fn buckets(&self) -> impl Iterator<Item = (Nanos, u64)> + '_ {
        let counted = self.0.iter().enumerate().filter(|(_, count)| **count > 0);
        counted.map(|(index, &count)| (bound(index), count))
    }

    /// The bound of the bucket of the time that `permille` of 1000 times do not exceed; none if nothing was counted.
    pub fn permille(&self, permille: u64) -> Option<Nanos> {
        let rank = (self.count() * permille).div_ceil(1000).max(1);
        let mut seen = 0;
        self.buckets().find_map(|(bound, count)| {
            seen += count;
            (seen >= rank).then_some(bound)
        })
    }
}

/// The number of the bucket: the position of the highest bit, and the next lower bit.
#[inline]
fn bucket(time: Nanos) -> usize {
    let time = time.0.clamp(SHORTEST, LONGEST);
    let octave = 63 - time.leading_zeros();
    // The mask changes nothing; it shows that the bucket exists.
    ((time >> (octave - 1)) as usize + 2 * (octave - FIRST_OCTAVE) as usize - 2) & (BUCKETS - 1)
}

fn bound(index: usize) -> Nanos {
    if index == BUCKETS - 1 {
        return Nanos(u64::MAX);
    }
    let octave = FIRST_OCTAVE + (index / 2) as u32;
    Nanos((3 + (index % 2) as u64) << (octave - 1))
}

const FIRST_OCTAVE: u32 = 9;
const SHORTEST: u64 = 1 << FIRST_OCTAVE;
const OCTAVES: usize = 32;
const BUCKETS: usize = 2 * OCTAVES;
const LONGEST: u64 = (1 << (FIRST_OCTAVE + OCTAVES as u32)) - 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_lies_below_its_bound_and_not_below_the_one_before() {
        let mut last = 0;
        for time in (0..64).flat_map(|bit| [1u64 << bit, (1 << bit) + (1 << bit >> 1), (1 << bit) - 1]) {
            let at = bucket(Nanos(time));
            assert!(at < BUCKETS && Nanos(time) <= bound(at), "{time}");
            assert!(at == 0 || bound(at - 1) <= Nanos(time), "{time} in bucket {at}");
            last = last.max(at);
        }
        assert_eq!(last, BUCKETS - 1);
    }

    #[test]
    fn percentiles_are_within_half_of_the_truth() {
        let shard = HistogramShard::default();
        (1..=1000u64).for_each(|us| shard.record(Nanos::from_micros(us)));
        let mut sum = Histogram::default();
        assert_eq!(sum.permille(500), None);
        sum.fold(&shard);
        assert_eq!(sum.count(), 1000);
        for (permille, truth) in [(500, 500_000), (990, 990_000)] {
            let found = sum.permille(permille).unwrap().0;
            assert!((truth..=truth * 3 / 2).contains(&found), "{permille}: {found}");
        }
    }
}
