//! What is known of one member from its probes: its reach, how long its requests may take, and when it is probed next.

use super::probe::{Mark, REACH_MAX};
use super::{LONGER_PART, REACH_HIGH, REACH_LOW};
use crate::time::{Instant, Nanos};

/// What is known of one group or client.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    /// What it has alone over its due, in 1/1024: the mean of so many probes.
    pub(super) reach: u64,
    probes: u64,
    /// How long a request of it may take while it is passed over; zero if that is not known: then as long as it likes.
    pub(super) time_max: Nanos,
    pub(super) is_passed: bool,
    /// When it is probed next, and how long it rests after that; zero until others were held for it once.
    probe_at: Instant,
    rest: Nanos,
    /// What it had been served at the end of its latest probe.
    pub(super) probed: Mark,
}

/// What the end of a probe means for its subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is held for, or passed over, as before.
    Unchanged,
    PassOver,
    CountAgain,
}

impl Member {
    pub(super) const UNKNOWN: Self = Self {
        reach: 0,
        probes: 0,
        time_max: Nanos::ZERO,
        is_passed: false,
        probe_at: Instant(0),
        rest: Nanos::ZERO,
        probed: Mark {
            served: 0,
            at: Instant(0),
        },
    };

    /// Says whether its rest is over, which begins when others are held for it for the first time. One that `is_urgent` is not
    /// waited for.
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

    /// What was found out: the reach, by how many probes, how long a request may take; how long it rests next, and when it is probed.
    pub(super) fn learnt(&self, now: Instant) -> Option<[u64; 5]> {
        let probe_in = self.probe_at.since(now);
        let learnt = [self.reach, self.probes, self.time_max.0, self.rest.0, probe_in.0];
        (self.probes > 0).then_some(learnt)
    }

    /// Goes on with what was found out elsewhere.
    pub(super) fn take_learnt(&mut self, learnt: [u64; 5], served: u64, now: Instant) {
        let [reach, probes, time_max, rest, probe_in] = learnt;
        (self.reach, self.probes) = (reach.min(REACH_MAX), probes.clamp(1, PROBES_KEPT));
        self.time_max = Nanos(time_max).min(TIME_MAX);
        self.rest = Nanos(rest).clamp(REST_FIRST, REST_MAX);
        self.probe_at = now + Nanos(probe_in).min(REST_MAX);
        self.probed = Mark { served, at: now };
    }

    /// What was known counts no more, and the next chance is for a probe.
    pub(super) fn doubt(&mut self) {
        (self.probes, self.rest, self.probe_at) = (0, REST_FIRST, Instant(0));
    }

    /// A probe has found this reach, and that its requests may take so long. Says what is to be done, and whether a member that was
    /// passed over seems to be able to have its due, which is to be known soon.
    pub(super) fn learn(&mut self, reach: u64, time_max: Option<Nanos>) -> (Verdict, bool) {
        let is_another = self.is_passed && reach > REACH_HIGH;
        let kept = if is_another { 2 } else { PROBES_KEPT };
        self.probes = (self.probes + 1).min(kept);
        self.reach = (self.reach * (self.probes - 1) + reach) / self.probes;
        if let Some(time_max) = time_max {
            self.time_max = match self.time_max {
                Nanos::ZERO => time_max,
                mean => Nanos((mean.0 * 3 + time_max.0) / 4),
            };
        }
        if is_another || !self.is_passed && reach < REACH_LOW {
            self.rest = REST_FIRST;
        }
        // To be passed over it is to be seen twice, or clearly.
        let is_low = self.reach < REACH_LOW && self.probes > 1 || reach < REACH_LOW / 2;
        let verdict = match self.is_passed {
            true if self.reach > REACH_HIGH => Verdict::CountAgain,
            false if is_low => Verdict::PassOver,
            _ => Verdict::Unchanged,
        };
        (verdict, is_another)
    }

    /// How much of its weight counts while it is passed over, in 1/1024. A member that has a backlog, also alone, would have the
    /// drive to itself by its whole weight: with this part of it, it has what it has alone, also where all together do a fifth
    /// less.
    pub(super) fn counts(&self, has_backlog: bool) -> u32 {
        match has_backlog {
            true => (self.reach + self.reach / LONGER_PART) as u32,
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

/// A request of whomever takes no longer.
const TIME_MAX: Nanos = Nanos::from_secs(10);
/// The reach is a mean of so many probes.
const PROBES_KEPT: u64 = 4;
/// How long a member rests from one probe to the next: at first, and at most; each rest is so many times the one before.
const REST_FIRST: Nanos = Nanos::from_millis(100);
const REST_MAX: Nanos = Nanos::from_secs(8);
const REST_GROWS: u64 = 4;
