//! A subscription to statistics: all statistics at once and after each interval, or, after the first time, of
//! the queues only those whose statistics have changed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::readings::Reading;
use super::report;
use super::server::Daemon;
use super::statistics::Statistics;

/// A client's wish to be told.
pub(super) struct Subscription {
    interval: Duration,
    pub(super) next: Instant,
    /// Whether queues are left out that it has been told of.
    is_of_changes: bool,
    /// What it knows.
    told: Vec<Arc<Reading>>,
}

impl Subscription {
    pub(super) fn new(interval: Duration, is_of_changes: bool) -> Self {
        Self {
            interval,
            next: Instant::now(),
            is_of_changes,
            told: Vec::new(),
        }
    }

    /// What the client is to be told now, if it is time.
    pub(super) fn tick(&mut self, daemon: &Daemon) -> Option<Statistics> {
        let now = Instant::now();
        if self.next > now {
            return None;
        }
        // What was missed is not made up for.
        self.next = (self.next + self.interval).max(now);
        let readings = daemon.readings.take(daemon);
        if !self.is_of_changes {
            return Some(report::statistics(daemon, &readings));
        }
        let before = std::mem::replace(&mut self.told, readings);
        if !has_same_queues(&before, &self.told) {
            return Some(report::statistics(daemon, &self.told));
        }
        let pairs = before.iter().zip(&self.told);
        let changed = pairs.filter(|(before, now)| !Arc::ptr_eq(before, now));
        let changed: Vec<Arc<Reading>> = changed.map(|(_, now)| Arc::clone(now)).collect();
        Some(Statistics {
            is_partial: true,
            ..report::statistics(daemon, &changed)
        })
    }
}

/// Whether both have the same queues at the same places.
fn has_same_queues(before: &[Arc<Reading>], now: &[Arc<Reading>]) -> bool {
    let mut pairs = before.iter().zip(now);
    before.len() == now.len() && pairs.all(|(before, now)| before.name == now.name)
}
