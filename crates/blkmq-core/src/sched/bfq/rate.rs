//! Decides what the drive is taken to do in a second, from what has ended: the bound on the lead is measured in its time, and
//! so is the cost of requests that move no data.

use crate::time::{Instant, Nanos};

/// Moving means of what ends.
#[derive(Debug, Default)]
pub(super) struct Rate {
    bytes_per_second: u64,
    since: Instant,
    bytes: u64,
    /// What one that moves no data keeps the drive from moving, in bytes.
    kept: u64,
}

impl Rate {
    /// Counts the end of a request; says whether the mean is a new one.
    #[inline]
    pub(super) fn completed(&mut self, bytes: u64, now: Instant) -> bool {
        self.bytes += bytes;
        now.since(self.since) >= WINDOW && self.close(now)
    }

    /// A request that moved no data has ended. The drive had it for `time`, as one of `in_flight`. Returns what it kept the drive
    /// from moving: it counts as that.
    pub(super) fn learn_cost_without_data(&mut self, time: Nanos, in_flight: u32) -> u64 {
        let kept = (self.bytes_in(time) / u64::from(in_flight)).min(KEPT_MAX);
        self.kept = (self.kept * 7 + kept) / 8;
        self.kept
    }

    /// What a request that moves no data counts as, in bytes.
    #[inline]
    pub(super) fn cost_without_data(&self) -> u64 {
        self.kept
    }

    /// What the drive does in this time, in bytes.
    pub(super) fn bytes_in(&self, time: Nanos) -> u64 {
        (u128::from(self.bytes_per_second) * u128::from(time.0) / 1_000_000_000) as u64
    }

    fn close(&mut self, now: Instant) -> bool {
        let elapsed = now.since(self.since);
        let bytes = std::mem::take(&mut self.bytes);
        self.since = now;
        // Who was idle in between says nothing.
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
/// A request that took so long counts for no more.
const KEPT_MAX: u64 = 16 << 20;
