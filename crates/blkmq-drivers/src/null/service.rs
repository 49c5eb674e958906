//! The time that a null drive takes for a request: its own service time, the wait for a free server, and
//! its turn on a link of limited bandwidth. `hctx` asks it once for each request that is completed by
//! timer.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use blkmq_core::time::{Instant, Nanos};

use super::config::NullConfig;
use crate::chance::Chance;
use crate::chance::Rate;

/// The distribution of service times.
#[derive(Clone, Debug)]
pub(super) struct Latency {
    mean: Nanos,
    spread: Nanos,
    slow: Nanos,
    slow_rate: Rate,
}

/// What the hardware contexts of one drive share: its servers and its link.
#[derive(Debug)]
pub(super) struct Capacity {
    /// When each server is free again; `None` if there is no limit.
    servers: Option<Mutex<BinaryHeap<Reverse<Instant>>>>,
    bytes_per_second: u64,
    /// When the link has passed all data put on it, in nanoseconds. A virtual clock: it paces
    /// without a timer.
    link_free_at_ns: AtomicU64,
}

impl Latency {
    pub(super) fn new(config: &NullConfig) -> Self {
        let nameless = config.latency == Nanos::ZERO && config.bandwidth == 0 && config.parallel == 0;
        Self {
            mean: if nameless && config.spread == Nanos::ZERO && config.slow_rate.is_never() {
                TIMER_DEFAULT
            } else {
                config.latency
            },
            spread: config.spread,
            slow: config.slow,
            slow_rate: config.slow_rate,
        }
    }

    /// Draws one service time.
    pub(super) fn draw(&self, chance: &mut Chance) -> Nanos {
        if chance.hits(self.slow_rate) {
            return self.slow;
        }
        if self.spread == Nanos::ZERO {
            return self.mean;
        }
        // A day in nanoseconds times 3548 stays below 2^63.
        let off = self.spread.0 as i64 * chance.bell_1024() / 1024;
        Nanos(self.mean.0.saturating_add_signed(off))
    }
}

impl Capacity {
    pub(super) fn new(config: &NullConfig) -> Self {
        let free = || (0..config.parallel).map(|_| Reverse(Instant(0))).collect();
        Self {
            servers: (config.parallel > 0).then(|| Mutex::new(free())),
            bytes_per_second: config.bandwidth,
            link_free_at_ns: AtomicU64::new(0),
        }
    }

    /// Books one request of `len` bytes that needs a server for `service`, and returns when it ends.
    pub(super) fn book(&self, now: Instant, service: Nanos, len: u64) -> Instant {
        let served = match &self.servers {
            None => now + service,
            Some(servers) => take_server(
                &mut servers.lock().unwrap_or_else(PoisonError::into_inner),
                now,
                service,
            ),
        };
        served.max(self.pass_link(now, len))
    }

    fn pass_link(&self, now: Instant, len: u64) -> Instant {
        if self.bytes_per_second == 0 || len == 0 {
            return now;
        }
        let time_ns = (u128::from(len) * 1_000_000_000 / u128::from(self.bytes_per_second)) as u64;
        let passed = |free_at: u64| free_at.max(now.0).saturating_add(time_ns);
        // Relaxed on both sides: the clock orders only itself.
        let before = self
            .link_free_at_ns
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free_at| {
                Some(passed(free_at))
            });
        Instant(passed(before.unwrap_or(now.0)))
    }
}

/// Gives the request to the server that is free first.
fn take_server(servers: &mut BinaryHeap<Reverse<Instant>>, now: Instant, service: Nanos) -> Instant {
    let Reverse(free_at) = servers.pop().unwrap_or(Reverse(now));
    let end = free_at.max(now) + service;
    servers.push(Reverse(end));
    end
}

/// Service time when completion by timer is the only setting.
const TIMER_DEFAULT: Nanos = Nanos::from_micros(10);

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(config: &NullConfig) -> Vec<u64> {
        let latency = Latency::new(config);
        let mut chance = Chance::new(9, 0);
        (0..20_000).map(|_| latency.draw(&mut chance).0).collect()
    }

    #[test]
    fn spread_lies_around_the_mean_and_never_below_zero() {
        let config = NullConfig {
            latency: Nanos::from_micros(80),
            spread: Nanos::from_micros(20),
            ..NullConfig::default()
        };
        let draws = draws(&config);
        let mean = draws.iter().sum::<u64>() / draws.len() as u64;
        assert!((79_000..81_000).contains(&mean), "mean {mean} ns");
        assert!(draws.iter().any(|ns| *ns < 60_000) && draws.iter().any(|ns| *ns > 100_000));
    }

    #[test]
    fn slow_ones_are_as_many_as_configured() {
        let config = NullConfig {
            latency: Nanos::from_micros(10),
            slow_rate: Rate::new(0.1),
            ..NullConfig::default()
        };
        let slow = draws(&config).into_iter().filter(|ns| *ns == 1_000_000).count();
        assert!((1800..2200).contains(&slow), "{slow} of 20000");
    }

    #[test]
    fn drive_with_two_servers_serves_two_at_a_time() {
        let config = NullConfig {
            parallel: 2,
            ..NullConfig::default()
        };
        let capacity = Capacity::new(&config);
        let ends: Vec<u64> = (0..5)
            .map(|_| capacity.book(Instant(100), Nanos(10), 4096).0)
            .collect();
        assert_eq!(ends, [110, 110, 120, 120, 130]);
        assert_eq!(
            capacity.book(Instant(1000), Nanos(10), 4096),
            Instant(1010),
            "an idle drive owes nothing"
        );
    }

    #[test]
    fn link_passes_its_bandwidth_and_saves_none_up() {
        let config = NullConfig {
            bandwidth: 1_000_000_000,
            ..NullConfig::default()
        };
        let capacity = Capacity::new(&config);
        let ends: Vec<u64> = (0..3)
            .map(|_| capacity.book(Instant(0), Nanos(1), 4096).0)
            .collect();
        assert_eq!(ends, [4096, 8192, 12288]);
        assert_eq!(
            capacity.book(Instant(1_000_000), Nanos(1), 4096),
            Instant(1_004_096)
        );
    }
}
