//! Statistics of polling: completion times per bucket (direction and size), in windows of 100 ms, as the
//! block layer has always shown them; and how many requests were slept for, and how many of those too
//! long.
//!
//! These are times as the reactor *saw* them, late wake-ups included. The estimate in `low` is of the
//! device's own times.

use std::fmt;

use blkmq_sync::counter::Counter;

use crate::bio::{Direction, Op};
use crate::time::{Instant, Nanos};

/// Number of buckets: reads and writes, by the logarithm of their size from 512 bytes to 64 KiB and more.
pub const BUCKETS: usize = 2 * SIZES;
const SIZES: usize = 8;

/// Requests that are similar enough to predict each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bucket(u8);

impl Bucket {
    /// The bucket of a request of `len` bytes; none for an operation that moves no data.
    #[inline]
    pub fn of(op: Op, len: u64) -> Option<Self> {
        let direction = match op {
            Op::Read => 0,
            Op::Write => SIZES,
            Op::Discard | Op::WriteZeroes | Op::Flush => return None,
        };
        let sectors = (len / 512).max(1);
        let size = (sectors.ilog2() as usize).min(SIZES - 1);
        Some(Self((direction + size) as u8))
    }

    /// All buckets: reads from the smallest to the largest, then writes.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..BUCKETS as u8).map(Self)
    }

    /// Its index in [`Bucket::all`].
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Reads or writes.
    pub const fn direction(self) -> Direction {
        if self.index() < SIZES {
            Direction::Read
        } else {
            Direction::Write
        }
    }

    /// Bytes of its smallest request; the last size contains all larger requests too.
    pub const fn bytes(self) -> u64 {
        512 << (self.index() % SIZES)
    }
}

impl fmt::Display for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direction = if self.direction() == Direction::Read {
            "read"
        } else {
            "write"
        };
        write!(f, "{direction} {}", self.bytes())
    }
}

/// The completion times of one bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BucketStats {
    /// Requests that ended in the latest full window of 100 ms in which any did; in the first window, so far.
    pub samples: u64,
    /// The mean of their times from issue to the observed end.
    pub mean: Nanos,
    /// The shortest.
    pub min: Nanos,
    /// The longest.
    pub max: Nanos,
    /// The estimate of the time before which hardly any request ends; zero while there is none.
    pub low: Nanos,
    /// Requests in flight while their reactor slept, since the queue was made.
    pub slept: u64,
    /// Of these, the ones that had ended when the reactor awoke.
    pub overslept: u64,
}

impl BucketStats {
    /// Adds another reactor's statistics.
    pub fn add(&mut self, other: &Self) {
        let samples = self.samples + other.samples;
        let sum = self.mean.0 * self.samples + other.mean.0 * other.samples;
        self.mean = Nanos(sum.checked_div(samples).unwrap_or(0));
        self.min = smaller(self.min, other.min);
        self.low = smaller(self.low, other.low);
        self.max = self.max.max(other.max);
        self.samples = samples;
        self.slept += other.slept;
        self.overslept += other.overslept;
    }
}

/// The smaller value, where zero stands for none.
fn smaller(a: Nanos, b: Nanos) -> Nanos {
    match (a, b) {
        (Nanos::ZERO, other) | (other, Nanos::ZERO) => other,
        (a, b) => a.min(b),
    }
}

/// One reactor's side of [`BucketStats`], for readers. The owner writes it.
#[derive(Debug, Default)]
pub(crate) struct PollShard([Shown; BUCKETS]);

#[derive(Debug, Default)]
struct Shown {
    samples: Counter,
    mean: Counter,
    min: Counter,
    max: Counter,
    low: Counter,
    slept: Counter,
    overslept: Counter,
}

impl PollShard {
    pub(crate) fn get(&self, bucket: Bucket) -> BucketStats {
        let shown = &self.0[bucket.index()];
        BucketStats {
            samples: shown.samples.get(),
            mean: Nanos(shown.mean.get()),
            min: Nanos(shown.min.get()),
            max: Nanos(shown.max.get()),
            low: Nanos(shown.low.get()),
            slept: shown.slept.get(),
            overslept: shown.overslept.get(),
        }
    }

    pub(super) fn show(&self, bucket: Bucket, stats: &BucketStats) {
        let shown = &self.0[bucket.index()];
        shown.samples.set(stats.samples);
        shown.mean.set(stats.mean.0);
        shown.min.set(stats.min.0);
        shown.max.set(stats.max.0);
        shown.low.set(stats.low.0);
        shown.slept.set(stats.slept);
        shown.overslept.set(stats.overslept);
    }
}

/// The windows of one bucket.
#[derive(Clone, Debug, Default)]
pub(super) struct Windows {
    open_since: Instant,
    open: Sums,
    closed: Sums,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    samples: u64,
    sum: u64,
    min: u64,
    max: u64,
}

impl Windows {
    /// Adds one time. Says whether the reported figures have changed.
    #[inline]
    pub(super) fn record(&mut self, time: Nanos, now: Instant) -> bool {
        let is_over = now.since(self.open_since) >= WINDOW;
        if is_over {
            self.open_since = now;
            if self.open.samples > 0 {
                self.closed = std::mem::take(&mut self.open);
            }
        }
        let open = &mut self.open;
        open.min = if open.samples == 0 {
            time.0
        } else {
            open.min.min(time.0)
        };
        open.max = open.max.max(time.0);
        open.sum += time.0;
        open.samples += 1;
        is_over || self.closed.samples == 0
    }

    /// Adds the same time as just before, at the same moment.
    #[inline]
    pub(super) fn record_again(&mut self, time: Nanos) {
        self.open.sum += time.0;
        self.open.samples += 1;
    }

    /// The mean of the latest full window; none before the first is full.
    pub(super) fn mean(&self) -> Option<Nanos> {
        self.closed.sum.checked_div(self.closed.samples).map(Nanos)
    }

    pub(super) fn stats(&self) -> BucketStats {
        let sums = if self.closed.samples > 0 {
            &self.closed
        } else {
            &self.open
        };
        BucketStats {
            samples: sums.samples,
            mean: Nanos(sums.sum.checked_div(sums.samples).unwrap_or(0)),
            min: Nanos(sums.min),
            max: Nanos(sums.max),
            ..BucketStats::default()
        }
    }
}

/// How long a window is.
const WINDOW: Nanos = Nanos::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_by_direction_and_doubling_size() {
        let name = |op, len| Bucket::of(op, len).map(|bucket| bucket.to_string());
        assert_eq!(name(Op::Read, 512).as_deref(), Some("read 512"));
        assert_eq!(name(Op::Read, 1023).as_deref(), Some("read 512"));
        assert_eq!(name(Op::Write, 4096).as_deref(), Some("write 4096"));
        assert_eq!(name(Op::Write, 65535).as_deref(), Some("write 32768"));
        assert_eq!(name(Op::Read, 1 << 30).as_deref(), Some("read 65536"));
        assert_eq!(name(Op::Flush, 0), None);
        assert_eq!(Bucket::all().count(), BUCKETS);
    }

    #[test]
    fn window_is_told_of_when_it_is_full_and_stays_until_the_next_one_is() {
        let mut windows = Windows::default();
        let start = Instant(1_000_000_000);
        windows.record(Nanos(1), start);
        for time in [10, 20, 60] {
            windows.record(Nanos(time), start + Nanos::from_millis(1));
        }
        windows.record(Nanos(1000), start + Nanos::from_millis(150));
        let stats = windows.stats();
        assert_eq!((stats.samples, stats.mean), (4, Nanos(22)));
        assert_eq!((stats.min, stats.max), (Nanos(1), Nanos(60)));
        assert_eq!(windows.mean(), Some(Nanos(22)));
        windows.record(Nanos(5), start + Nanos::from_millis(400));
        assert_eq!(windows.mean(), Some(Nanos(1000)));
    }

    #[test]
    fn samples_of_two_reactors_add_up() {
        let mut one = BucketStats {
            samples: 1,
            mean: Nanos(10),
            min: Nanos(10),
            max: Nanos(10),
            ..BucketStats::default()
        };
        one.add(&BucketStats::default());
        assert_eq!(one.min, Nanos(10));
        one.add(&BucketStats {
            samples: 3,
            mean: Nanos(30),
            min: Nanos(5),
            max: Nanos(70),
            slept: 2,
            ..BucketStats::default()
        });
        assert_eq!((one.samples, one.mean), (4, Nanos(25)));
        assert_eq!((one.min, one.max, one.slept), (Nanos(5), Nanos(70), 2));
    }
}
