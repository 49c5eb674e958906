//! The number of tokens of each domain, from histograms of latencies compared with the latency targets.
//! `mod` records every completion here and asks for new numbers at most ten times a second.
//!
//! A histogram counts in quarters of the target, so a percentile is a number from 0 to 7: up to 3 the target
//! is met, from 4 on it is missed. The histograms answer two questions, in this order:
//!
//! - *Is the drive congested?* Yes, if the 90th percentile of any domain's device times misses its target.
//! - *Is the domain served well?* Yes, if the 99th percentile of its times from insertion to end meets its target.
//!
//! A domain that is served badly gets more tokens, in proportion to the miss. A domain that is served well
//! loses some, in the same proportion, but only while the drive is congested: otherwise no domain would gain.

use super::tunables::Tunables;
use super::{DEPTHS_MAX, DOMAINS};
use crate::time::{Instant, Nanos};

/// The latencies of one request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Latency {
    /// From insertion to end.
    pub(super) total: Nanos,
    /// At the driver.
    pub(super) device: Nanos,
}

/// The histograms of the domains that have a target: all except the last.
#[derive(Debug, Default)]
pub(super) struct Scaling {
    domains: [Domain; DOMAINS - 1],
    /// When to scale next.
    due: Instant,
}

#[derive(Debug, Default)]
struct Domain {
    total: Histogram,
    device: Histogram,
    /// The last percentile of `total`, kept until it is used: the two histograms need not fill in the same window.
    p99: Option<u32>,
}

/// Counts of latencies, in quarters of the target; the last bucket is open.
#[derive(Debug, Default)]
struct Histogram {
    counts: [u32; BUCKETS],
    /// When a percentile of these counts was first asked for; none before.
    since: Option<Instant>,
}

impl Scaling {
    /// Counts a request that has ended.
    #[inline]
    pub(super) fn record(&mut self, domain: usize, latency: Latency, tunables: &Tunables) {
        let Some(counts) = self.domains.get_mut(domain) else {
            return;
        };
        let target = [tunables.read_lat, tunables.write_lat, DISCARD_TARGET][domain];
        counts.total.record(latency.total, target);
        counts.device.record(latency.device, target);
    }

    /// Says whether it is time for [`Scaling::scale`].
    #[inline]
    pub(super) fn is_due(&self, now: Instant) -> bool {
        now >= self.due
    }

    /// Changes the depths by the recorded latencies.
    pub(super) fn scale(&mut self, depths: &mut [u32; DOMAINS], now: Instant) {
        self.due = now + WINDOW;
        let congested = self.domains.iter_mut().fold(false, |any, domain| {
            any | domain.device.take_percentile(90, now).is_some_and(misses)
        });
        for ((domain, depth), max) in self.domains.iter_mut().zip(depths).zip(DEPTHS_MAX) {
            domain.p99 = domain.total.take_percentile(99, now).or(domain.p99);
            let Some(p99) = domain.p99 else { continue };
            if misses(p99) {
                // At least one more: the proportion of a small number would be lost in rounding.
                *depth = proportion(*depth, p99).max(*depth + 1).min(max);
                domain.p99 = None;
            } else if congested {
                *depth = proportion(*depth, p99).max(1);
                domain.p99 = None;
            }
        }
    }
}

impl Histogram {
    #[inline]
    fn record(&mut self, latency: Nanos, target: Nanos) {
        let quarters = latency.0.saturating_mul(MISSED.into()) / target.0;
        self.counts[quarters.min(BUCKETS as u64 - 1) as usize] += 1;
    }

    /// The bucket that `percent` of the latencies do not exceed, if there are enough of them or they were
    /// gathered for long enough; then the counting restarts.
    fn take_percentile(&mut self, percent: u64, now: Instant) -> Option<u32> {
        let samples: u64 = self.counts.iter().map(|&count| u64::from(count)).sum();
        if samples == 0 {
            return None;
        }
        let since = *self.since.get_or_insert(now);
        if samples < SAMPLES_MIN && now.since(since) < PATIENCE {
            return None;
        }
        let rank = (samples * percent).div_ceil(100);
        let Self { counts, .. } = std::mem::take(self);
        let mut seen = 0;
        let bucket = counts.iter().position(|&count| {
            seen += u64::from(count);
            seen >= rank
        });
        bucket.map(|bucket| bucket as u32)
    }
}

fn misses(bucket: u32) -> bool {
    bucket >= MISSED
}

/// A bucket stands for up to (its number + 1) quarters of the target.
fn proportion(depth: u32, bucket: u32) -> u32 {
    depth * (bucket + 1) / MISSED
}

const BUCKETS: usize = 8;
/// The first bucket beyond the target; so the target is this many buckets wide.
const MISSED: u32 = 4;
/// Least time between two changes of the depths.
const WINDOW: Nanos = Nanos::from_millis(100);
/// Fewer latencies give no percentile...
const SAMPLES_MIN: u64 = 500;
/// ...unless there are no more in this time.
const PATIENCE: Nanos = Nanos::from_secs(1);
/// Discards are slow, and hardly anybody waits for one.
const DISCARD_TARGET: Nanos = Nanos::from_secs(5);
