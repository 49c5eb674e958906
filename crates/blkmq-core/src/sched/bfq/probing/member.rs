//! The results of one member's probes: its reach, and when it is probed next.

use super::probe::{Mark, REACH_MAX};
use super::{REACH_HIGH, REACH_LOW, SPARE_PART};
use crate::time::{Instant, Nanos};

/// The results of one group's or client's probes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    /// Its service alone divided by its due, in 1/1024: the mean of `probes` probes.
    pub(super) reach: u64,
    probes: u64,
    pub(super) is_passed: bool,
    /// When it is probed next, and how long it rests after that; zero until others were first held for it.
    probe_at: Instant,
    rest: Nanos,
    /// How many bytes it had been served at the end of its latest probe.
    pub(super) probed: Mark,
}

/// What the end of a probe means for its subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It stays as it is: others are held for it, or it is passed over.
    Unchanged,
    PassOver,
    CountAgain,
}

impl Member {
    pub(super) const UNKNOWN: Self = Self {
        reach: 0,
        probes: 0,
        is_passed: false,
        probe_at: Instant(0),
        rest: Nanos::ZERO,
        probed: Mark {
            served: 0,
            at: Instant(0),
        },
    };

    /// Says whether its rest is over; the first rest begins when others are first held for it. An urgent
    /// member (`is_urgent`) need not rest.
    pub(super) fn is_due(&mut self, served: u64, is_urgent: bool, now: Instant) -> bool {
        if self.rest == Nanos::ZERO {
            self.rest = REST_FIRST;
            self.rest_from(served, now);
        }
        if is_urgent {
            self.rest = REST_FIRST;
        }
        is_urgent || now >= self.probe_at
    }

    /// The results: the reach, the number of probes; how long it rests next, and the time until its next probe.
    pub(super) fn learnt(&self, now: Instant) -> Option<[u64; 4]> {
        let probe_in = self.probe_at.since(now);
        let learnt = [self.reach, self.probes, self.rest.0, probe_in.0];
        (self.probes > 0).then_some(learnt)
    }

    /// Continues with the results of another elevator.
    pub(super) fn take_learnt(&mut self, learnt: [u64; 4], served: u64, now: Instant) {
        let [reach, probes, rest, probe_in] = learnt;
        (self.reach, self.probes) = (reach.min(REACH_MAX), probes.clamp(1, PROBES_KEPT));
        self.rest = Nanos(rest).clamp(REST_FIRST, REST_MAX);
        self.probe_at = now + Nanos(probe_in).min(REST_MAX);
        self.probed = Mark { served, at: now };
    }

    /// Drops the old results, and makes a probe due at once.
    pub(super) fn doubt(&mut self) {
        (self.probes, self.rest, self.probe_at) = (0, REST_FIRST, Instant(0));
    }

    /// Adds the result of a probe. Returns the verdict, and whether a passed-over member seems able to use its due,
    /// which is to be verified soon.
    pub(super) fn learn(&mut self, reach: u64) -> (Verdict, bool) {
        let is_another = self.is_passed && reach > REACH_HIGH;
        let kept = if is_another { 2 } else { PROBES_KEPT };
        self.probes = (self.probes + 1).min(kept);
        self.reach = (self.reach * (self.probes - 1) + reach) / self.probes;
        if is_another || !self.is_passed && reach < REACH_LOW {
            self.rest = REST_FIRST;
        }
        // To be passed over, a member must be found low twice, or clearly.
        let is_low = self.reach < REACH_LOW && self.probes > 1 || reach < REACH_LOW / 2;
        let verdict = match self.is_passed {
            true if self.reach > REACH_HIGH => Verdict::CountAgain,
            false if is_low => Verdict::PassOver,
            _ => Verdict::Unchanged,
        };
        (verdict, is_another)
    }

    /// How much of its weight counts while it is passed over, in 1/1024. A member that has a backlog even
    /// when alone would, with its whole weight, have the drive to itself: with this part of its weight it is
    /// served as much as alone, even if all members together are served a fifth less.
    pub(super) fn counts(&self, has_backlog: bool) -> u32 {
        match has_backlog {
            true => (self.reach + self.reach / SPARE_PART) as u32,
            false => 1024,
        }
    }

    /// It rests from now on.
    pub(super) fn rest_from(&mut self, served: u64, now: Instant) {
        self.probe_at = now + self.rest;
        self.rest = Nanos(self.rest.0 * REST_GROWS).min(REST_MAX);
        self.probed = Mark { served, at: now };
    }
}

/// The reach is a mean of at most this many probes.
const PROBES_KEPT: u64 = 4;
/// How long a member rests between probes: at first, and at most; each rest is `REST_GROWS` times the one before.
const REST_FIRST: Nanos = Nanos::from_millis(100);
const REST_MAX: Nanos = Nanos::from_secs(8);
const REST_GROWS: u64 = 4;
