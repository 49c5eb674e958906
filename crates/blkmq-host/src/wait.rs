//! Decides how a reactor waits: whether to look for a while before it blocks, and for how long.
//! `place` asks before each wait and tells afterwards how it went.
//!
//! Waking a blocked thread on another, halted core costs about 15 µs of latency and 23 µs of processor time,
//! so looking for about that long pays if the next event often comes within it, and is waste if it does not.
//! What happened is the evidence: a score rises when an event came within the time we would have looked
//! (whether we looked or had blocked) and falls when it did not. We look while the score is above one half. A
//! reactor whose events come rarely, or whose peer needs this very core to send its next one, blocks at once;
//! and so does one with nothing to expect.

use blkmq_core::time::{Instant, Nanos};

/// The waiting policy of one reactor.
#[derive(Clone, Debug)]
pub struct WaitPolicy {
    /// How long to look before blocking, at most. Zero never looks. Default 20 µs: about what a wake-up
    /// costs. More saves latency where events come at that distance and costs as much processor time where
    /// they do not.
    spin_max: Nanos,
    /// Share of the recent waits, of 1024, that ended, or would have, within `spin_max`.
    score: u32,
}

impl Default for WaitPolicy {
    fn default() -> Self {
        Self::new(SPIN_MAX)
    }
}

impl WaitPolicy {
    /// Makes a policy that looks for at most `spin_max` before it blocks.
    pub const fn new(spin_max: Nanos) -> Self {
        Self {
            spin_max,
            score: SCORE_ONE / 2,
        }
    }

    /// Says how long to look before blocking; zero to block at once. `expects` says that something is under
    /// way whose end, or a peer is there whose next message, may come soon; `alarm` is when the wait ends in
    /// any case.
    pub fn spin_for(&self, expects: bool, now: Instant, alarm: Option<Instant>) -> Nanos {
        let worth_it = expects && self.score >= SCORE_ONE / 2;
        if alarm.is_some_and(|at| at.since(now) <= self.spin_max) {
            // Sleeping by timer is late by as much as the rest of the time to the alarm.
            return self.spin_max;
        }
        if worth_it { self.spin_max } else { Nanos::ZERO }
    }

    /// Is told how long a wait lasted that something was expected of, from its start to the first event, and
    /// whether it blocked. A wait that ended by its alarm is not told.
    pub fn learn(&mut self, lasted: Nanos, blocked: bool) {
        let wake_cost = if blocked { WAKE_COST } else { Nanos::ZERO };
        let came_soon = lasted.0 <= self.spin_max.0 + wake_cost.0;
        let target = if came_soon { SCORE_ONE } else { 0 };
        self.score = (self.score * (WEIGHT - 1) + target)
            .div_ceil(WEIGHT)
            .min(SCORE_ONE);
    }
}

/// The default of [`WaitPolicy`]'s longest look: about what a wake-up costs.
pub const SPIN_MAX: Nanos = Nanos::from_micros(20);
/// What a wake-up adds to the length of a wait that blocked.
const WAKE_COST: Nanos = Nanos::from_micros(15);
const SCORE_ONE: u32 = 1024;
/// The latest wait counts for one part in so many.
const WEIGHT: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Instant = Instant(1_000_000_000);

    #[test]
    fn a_reactor_with_nothing_to_expect_blocks_at_once() {
        assert_eq!(WaitPolicy::default().spin_for(false, NOW, None), Nanos::ZERO);
    }

    #[test]
    fn looking_stops_when_it_does_not_pay_and_starts_again_when_it_would_have() {
        let mut policy = WaitPolicy::default();
        assert_eq!(policy.spin_for(true, NOW, None), SPIN_MAX);
        for _ in 0..4 {
            policy.learn(Nanos::from_micros(500), true);
        }
        assert_eq!(policy.spin_for(true, NOW, None), Nanos::ZERO);
        for _ in 0..8 {
            policy.learn(Nanos::from_micros(30), true);
        }
        assert_eq!(policy.spin_for(true, NOW, None), SPIN_MAX);
    }

    #[test]
    fn an_alarm_nearer_than_a_wake_up_is_waited_for_awake() {
        let mut policy = WaitPolicy::default();
        (0..10).for_each(|_| policy.learn(Nanos::from_millis(5), true));
        let near = Some(NOW + Nanos::from_micros(10));
        let far = Some(NOW + Nanos::from_millis(1));
        assert_eq!(policy.spin_for(false, NOW, near), SPIN_MAX);
        assert_eq!(policy.spin_for(true, NOW, far), Nanos::ZERO);
    }

    #[test]
    fn a_policy_without_spinning_never_looks() {
        let policy = WaitPolicy::new(Nanos::ZERO);
        assert_eq!(policy.spin_for(true, NOW, Some(NOW)), Nanos::ZERO);
    }
}
