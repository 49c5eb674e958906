//! Decides what a subscriber is told, and when: all statistics at once and after each interval, or,
//! after the first time, of the queues only those whose statistics have changed.

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
    /// Of the configuration, when it was told.
    changes: Option<u64>,
}

impl Subscription {
    pub(super) fn new(interval: Duration, is_of_changes: bool) -> Self {
        Self {
            interval,
            next: Instant::now(),
            is_of_changes,
            told: Vec::new(),
            changes: None,
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
        let changes = daemon.running.changes();
        // With other queues there are other readings at the same places.
        let is_partial = self.changes == Some(changes) && self.told.len() == readings.len();
        let before = std::mem::replace(&mut self.told, readings);
        self.changes = Some(changes);
        let is_new =
            |(at, reading): &(usize, &Arc<Reading>)| !is_partial || !Arc::ptr_eq(&before[*at], reading);
        let told = self.told.iter().enumerate().filter(is_new);
        let told: Vec<Arc<Reading>> = told.map(|(_, reading)| Arc::clone(reading)).collect();
        Some(Statistics {
            is_partial,
            ..report::statistics(daemon, &told)
        })
    }
}
