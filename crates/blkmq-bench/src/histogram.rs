//! A histogram of latencies, in fixed log-linear buckets, so that recording neither allocates nor branches
//! much and two histograms add up exactly. Load generators record into it, `rounds` reads percentiles from
//! it. It does not use `hdrhistogram`: counts are in one array of fixed size, which the request path needs,
//! and cold paths use the same one so that there is one error of 1.6 % to explain.

/// Counts of durations in nanoseconds, each known to within 1.6 %.
///
/// Every power of two is divided into 64 equal buckets; below 64 ns a bucket is 1 ns. Durations
/// longer than 18 minutes count as 18 minutes.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: Box<[u64; BUCKETS]>,
    total: u64,
    max: u64,
}

impl Histogram {
    /// Makes an empty histogram.
    pub fn new() -> Self {
        Self {
            counts: Box::new([0; BUCKETS]),
            total: 0,
            max: 0,
        }
    }

    /// Counts one duration.
    #[inline]
    pub fn record(&mut self, ns: u64) {
        self.record_many(ns, 1);
    }

    /// Counts one duration `times` times, for I/Os that begin and end in the same batches.
    #[inline]
    pub fn record_many(&mut self, ns: u64, times: u64) {
        self.counts[bucket_of(ns)] += times;
        self.total += times;
        self.max = self.max.max(ns);
    }

    /// Adds all counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(other.counts.iter()) {
            *mine += theirs;
        }
        self.total += other.total;
        self.max = self.max.max(other.max);
    }

    /// Drops all counts.
    pub fn clear(&mut self) {
        self.counts.fill(0);
        self.total = 0;
        self.max = 0;
    }

    /// Returns how many durations were counted.
    pub fn len(&self) -> u64 {
        self.total
    }

    /// Says whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        self.total == 0
    }

    /// Returns the longest duration counted, exactly, in nanoseconds.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// Returns the duration in nanoseconds that the share `quantile` (0 to 1) of all does not
    /// exceed; 0 if there is none.
    pub fn quantile(&self, quantile: f64) -> u64 {
        let wanted = ((self.total as f64 * quantile).ceil() as u64).max(1);
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return middle_of(bucket).min(self.max);
            }
        }
        self.max
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

/// The bucket of a duration: its exponent, then the six bits after its leading one. Below 2 * SUB
/// it is the duration.
#[inline]
fn bucket_of(ns: u64) -> usize {
    let ns = ns.min(NS_MAX);
    let shift = (ns | SUB).ilog2() - SUB_BITS;
    (u64::from(shift) * SUB + (ns >> shift)) as usize
}

/// The duration in the middle of a bucket.
fn middle_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    let shift = (bucket / SUB).saturating_sub(1);
    let low = (bucket - shift * SUB) << shift;
    low + ((1 << shift) >> 1)
}

const SUB_BITS: u32 = 6;
const SUB: u64 = 1 << SUB_BITS;
const BITS_MAX: u32 = 40;
const NS_MAX: u64 = (1 << BITS_MAX) - 1;
const BUCKETS: usize = ((BITS_MAX - SUB_BITS + 1) as u64 * SUB) as usize;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_is_known_to_within_one_part_in_64() {
        let mut ns = 1u64;
        while ns < NS_MAX {
            for near in [ns - 1, ns, ns + ns / 3] {
                let back = middle_of(bucket_of(near));
                assert!(back.abs_diff(near) <= near / 64, "{near} came back as {back}");
            }
            ns *= 2;
        }
    }

    #[test]
    fn buckets_grow_with_the_duration_and_none_is_out_of_range() {
        let mut before = 0;
        for ns in (0..100_000).chain([NS_MAX - 1, NS_MAX, u64::MAX]) {
            let bucket = bucket_of(ns);
            assert!(bucket == before || bucket == before + 1 || ns > 100_000);
            assert!(bucket < BUCKETS);
            before = bucket;
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_of_a_known_distribution_are_found() {
        let mut histogram = Histogram::new();
        for ns in 1..=10_000 {
            histogram.record(ns * 100);
        }
        for (quantile, expected) in [(0.5, 500_000), (0.99, 990_000), (0.999, 999_000)] {
            let found = histogram.quantile(quantile);
            assert!(found.abs_diff(expected) <= expected / 60, "p{quantile}: {found}");
        }
        assert_eq!(histogram.max(), 1_000_000);
    }

    #[test]
    fn merged_histograms_count_as_if_recorded_in_one() {
        let (mut a, mut b, mut both) = (Histogram::new(), Histogram::new(), Histogram::new());
        for ns in 0..5_000 {
            a.record(ns);
            b.record_many(ns * 7, 3);
            both.record(ns);
            both.record_many(ns * 7, 3);
        }
        a.merge(&b);
        assert_eq!(a.len(), both.len());
        assert_eq!(*a.counts, *both.counts);
        assert_eq!(a.max(), both.max());
    }

    #[test]
    fn empty_histogram_answers_zero_and_a_cleared_one_is_empty() {
        let mut histogram = Histogram::new();
        assert_eq!(histogram.quantile(0.5), 0);
        histogram.record(123);
        assert_eq!(histogram.quantile(0.5), 123);
        histogram.clear();
        assert!(histogram.is_empty());
        assert_eq!(histogram.quantile(0.999), 0);
    }
}
