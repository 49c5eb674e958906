//! The rate of the drive, from completions: it converts the bound on the lead, and the cost
//! of requests that move no data, from time to bytes.

use crate::time::{Instant, Nanos};

/// Moving means over completions.
#[derive(Debug, Default)]
pub(super) struct Rate {
    bytes_per_second: u64,
    since: Instant,
    bytes: u64,
    /// How much a request without data keeps the drive from moving, in bytes.
    kept: u64,
}

impl Rate {
    /// Counts the end of a request; says whether the mean has changed.
    #[inline]
    pub(super) fn completed(&mut self, bytes: u64, now: Instant) -> bool {
        self.bytes += bytes;
        now.since(self.since) >= WINDOW && self.close(now)
    }

    /// Counts the end of a request that moved no data and took the whole drive for `time`, or a part of it for
    /// longer. Returns its cost: how much it kept the drive from moving.
    pub(super) fn learn_cost_without_data(&mut self, time: Nanos) -> u64 {
        let kept = self.bytes_in(time).min(KEPT_MAX);
        self.kept = (self.kept * 7 + kept) / 8;
        self.kept
    }

    /// The cost of a request that moves no data, in bytes.
    #[inline]
    pub(super) fn cost_without_data(&self) -> u64 {
        self.kept
    }

    /// What the drive does, in bytes per second.
    pub(super) fn bytes_per_second(&self) -> u64 {
        self.bytes_per_second
    }

    /// What the drive does in this time, in bytes.
    pub(super) fn bytes_in(&self, time: Nanos) -> u64 {
        (u128::from(self.bytes_per_second) * u128::from(time.0) / 1_000_000_000) as u64
    }

    fn close(&mut self, now: Instant) -> bool {
        let elapsed = now.since(self.since);
        let bytes = std::mem::take(&mut self.bytes);
        self.since = now;
        // A drive that was idle in between gives no measurement.
        if elapsed >= PAUSE {
            return false;
        }
        let rate = (u128::from(bytes) * 1_000_000_000 / u128::from(elapsed.0)) as u64;
        self.bytes_per_second = match self.bytes_per_second {
            0 => rate,
            mean => (mean * 3 + rate) / 4,
        };
        true
    }
}

const WINDOW: Nanos = Nanos::from_millis(4);
const PAUSE: Nanos = Nanos::from_millis(100);
/// Largest cost of a request that moves no data.
const KEPT_MAX: u64 = 16 << 20;
