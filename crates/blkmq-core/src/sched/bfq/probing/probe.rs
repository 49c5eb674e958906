//! One probe of a member: its phases, how long each lasts, and what it has counted so far. `probing` starts and
//! ends probes.

use super::super::wf2q::EntityId;
use crate::time::{Instant, Nanos};

/// The present probe, or, in the phase `Resting`, the end of the latest one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Probe {
    pub(super) phase: Phase,
    /// The member that is probed.
    pub(super) subject: EntityId,
    pub(super) began: Instant,
    pub(super) phase_began: Instant,
    /// The mark from which this phase counts, and how many requests were dispatched since then.
    pub(super) from: Option<Mark>,
    pub(super) taken: u32,
    /// The latest time at which a request of the subject was dispatched or ended.
    pub(super) seen_at: Instant,
    /// Requests that were in flight when draining began and have not ended.
    pub(super) before: u32,
    /// The subject's due, in bytes per second.
    pub(super) due: u64,
}

/// The phases of a probe, in their order: see the diagram in `probing`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Resting,
    Open,
    Draining,
    Alone,
}

/// How many bytes a member had been served at a given time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mark {
    pub(super) served: u64,
    pub(super) at: Instant,
}

impl Probe {
    pub(super) fn resting(subject: EntityId) -> Self {
        Self {
            phase: Phase::Resting,
            subject,
            began: Instant(0),
            phase_began: Instant(0),
            from: None,
            taken: 0,
            seen_at: Instant(0),
            before: 0,
            due: 1,
        }
    }

    /// Starts a phase.
    pub(super) fn begin(&mut self, phase: Phase, from: Option<Mark>, now: Instant) {
        (self.phase, self.phase_began, self.from, self.taken) = (phase, now, from, 0);
    }

    /// Divides a rate in bytes per second by the subject's due, in 1/1024.
    pub(super) fn of_due(&self, rate: u64) -> u64 {
        (u128::from(rate) * 1024 / u128::from(self.due)).min(REACH_MAX.into()) as u64
    }

    /// When this phase ends, or begins to count.
    pub(super) fn until(&self) -> Instant {
        match (self.phase, self.from) {
            (Phase::Draining, _) => self.phase_began + DRAIN_MAX,
            (_, None) => self.phase_began + SKIP,
            (_, Some(from)) if self.taken >= TAKEN_MANY => from.at + PHASE_SHORT,
            (_, Some(from)) if self.taken >= TAKEN_FEW => from.at + PHASE_LONG,
            (_, Some(from)) => from.at + PHASE_MAX,
        }
    }
}

impl Mark {
    /// The rate since an earlier mark, in bytes per second.
    pub(super) fn since(self, from: Self) -> u64 {
        let elapsed = u128::from(self.at.since(from.at).0.max(1));
        (u128::from(self.served.saturating_sub(from.served)) * 1_000_000_000 / elapsed) as u64
    }
}

/// Largest value of a reach, in 1/1024.
pub(super) const REACH_MAX: u64 = 4 * 1024;
/// A phase starts to count after this time: by then the drive's queue is full.
const SKIP: Nanos = Nanos::from_millis(1);
/// How long a phase counts: shorter if more requests were dispatched in it.
const TAKEN_MANY: u32 = 64;
const PHASE_SHORT: Nanos = Nanos::from_millis(5);
const TAKEN_FEW: u32 = 8;
const PHASE_LONG: Nanos = Nanos::from_millis(12);
const PHASE_MAX: Nanos = Nanos::from_millis(24);
/// Draining ends after this time, even if requests of others are still in flight.
const DRAIN_MAX: Nanos = Nanos::from_millis(50);
