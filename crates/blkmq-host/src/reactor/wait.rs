//! The policy for waiting for events that cannot be predicted: whether a reactor polls (*looks*) for a
//! while before it blocks, and for how long. `reactor::core` asks before each wait and reports the result
//! of a look. For requests in flight it asks `blkmq_core::poll` first.
//!
//! Waking a blocked thread on another, halted core costs about 15 µs of latency and 23 µs of CPU time, and a
//! peer that takes turns with us must also be woken before it sends. So looking for the sum of both pays if
//! the next event often comes within that time. Otherwise it wastes CPU time, or worse: a peer that shares
//! our core cannot send while we look. The length of past waits does not distinguish the two cases; only a
//! look does. So the results of looks decide:
//!
//! ```text
//!   a look finds something      look again at the next wait; the penalty shrinks to a quarter
//!   a look finds nothing        block at once for `penalty` waits, and double it (1 to 1024)
//! ```
//!
//! Where looking pays, it continues; where it never does, it costs `spin_max` once in 1024 waits, and a change
//! for the better is noticed as fast. A reactor that expects nothing blocks at once.

use blkmq_core::poll::Wait;
use blkmq_core::time::{Instant, Nanos};

/// The default of [`WaitPolicy`]'s longest look: about the cost of waking the peer and of being woken by it.
pub const SPIN_MAX: Nanos = Nanos::from_micros(40);
/// About how late a sleep by timer ends.
const LATENESS: Nanos = Nanos::from_micros(20);

/// The event that is likely to end a wait soon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// No known event.
    Nothing,
    /// The end of this thread's I/O, at a drive or at another reactor. That reactor may need the CPU on which we look.
    Io,
    /// A peer's next message; the peer must be woken first.
    Message,
}

/// The waiting policy of one reactor.
#[derive(Clone, Debug)]
pub struct WaitPolicy {
    /// How long to look for a message before blocking; half as long for I/O. Zero never looks. Default 40 µs: about
    /// the cost of two wake-ups.
    /// More saves latency where events come within that time, and costs as much CPU time where they do not.
    spin_max: Nanos,
    /// Number of next waits that block at once.
    skips: u32,
    /// How many waits block at once after the next look without result.
    penalty: u32,
    mode: Wait,
}

impl Default for WaitPolicy {
    fn default() -> Self {
        Self::new(Wait::Auto, SPIN_MAX)
    }
}

impl WaitPolicy {
    /// Makes a policy that looks for at most `spin_max` before it blocks; modes other than auto never look.
    pub fn new(mode: Wait, spin_max: Nanos) -> Self {
        let spin_max = if mode == Wait::Auto { spin_max } else { Nanos::ZERO };
        Self {
            spin_max,
            skips: 0,
            penalty: 1,
            mode,
        }
    }

    /// How long to look for a request whose end is predicted soon. A drive that needs a CPU, and has none while
    /// we look, does not complete it: so looks without result count here too.
    pub fn spin_for_drive(&mut self) -> Nanos {
        match self.mode {
            Wait::Block => Nanos::ZERO,
            Wait::Poll | Wait::Hybrid => SPIN_DRIVE,
            Wait::Auto if self.spin_max == Nanos::ZERO => Nanos::ZERO,
            Wait::Auto if self.skips > 0 => {
                self.skips -= 1;
                Nanos::ZERO
            }
            Wait::Auto => SPIN_DRIVE,
        }
    }

    /// How long to look before blocking; zero to block at once. `alarm` is when the wait ends in any case.
    pub fn spin_for(&mut self, expected: Expected, now: Instant, alarm: Option<Instant>) -> Nanos {
        if alarm.is_some_and(|at| at.since(now) <= self.spin_max.min(LATENESS)) {
            // A sleep by timer would be late by about the time that is left until the alarm.
            return self.spin_max;
        }
        if expected == Expected::Nothing {
            return Nanos::ZERO;
        }
        if self.skips > 0 {
            self.skips -= 1;
            return Nanos::ZERO;
        }
        match expected {
            Expected::Message => self.spin_max,
            _ => Nanos(self.spin_max.0 / 2),
        }
    }

    /// Notes whether a look found an event. Not called for a look that its alarm ended, nor for one that found
    /// at once what its own submission had completed.
    pub fn looked(&mut self, found: bool) {
        if found {
            self.penalty = (self.penalty / 4).max(1);
        } else {
            self.skips = self.penalty;
            self.penalty = (self.penalty * 2).min(PENALTY_MAX);
        }
    }
}

const PENALTY_MAX: u32 = 1024;
/// How long to look for a drive before a new prediction.
const SPIN_DRIVE: Nanos = Nanos::from_micros(64);

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Instant = Instant(1_000_000_000);

    /// Passes `waits` waits in which each look finds an event, or none does. Returns how many looked.
    fn looks(policy: &mut WaitPolicy, waits: u32, found: bool) -> u32 {
        let mut looks = 0;
        for _ in 0..waits {
            if policy.spin_for(Expected::Message, NOW, None) > Nanos::ZERO {
                looks += 1;
                policy.looked(found);
            }
        }
        looks
    }

    #[test]
    fn reactor_with_nothing_to_expect_blocks_at_once() {
        assert_eq!(
            WaitPolicy::default().spin_for(Expected::Nothing, NOW, None),
            Nanos::ZERO
        );
    }

    #[test]
    fn message_is_looked_for_longer_than_the_end_of_io() {
        // With looks of 40 µs for I/O of another reactor, 8 reactors on 2 cores did 60 % of what they do now.
        let mut policy = WaitPolicy::default();
        let message = policy.spin_for(Expected::Message, NOW, None);
        let io = policy.spin_for(Expected::Io, NOW, None);
        assert_eq!((message, io), (SPIN_MAX, Nanos(SPIN_MAX.0 / 2)));
    }

    #[test]
    fn looking_goes_on_where_it_pays() {
        assert_eq!(looks(&mut WaitPolicy::default(), 1000, true), 1000);
    }

    #[test]
    fn looking_in_vain_becomes_rare_and_recovers_when_it_pays_again() {
        let mut policy = WaitPolicy::default();
        let vain = looks(&mut policy, 10_000, false);
        assert!((10..=20).contains(&vain), "{vain} vain looks in 10000 waits");
        let good = looks(&mut policy, 2_000, true);
        assert!(
            good >= 970,
            "{good} looks in 2000 waits although each found something"
        );
    }

    #[test]
    fn alarm_nearer_than_a_wake_up_is_waited_for_awake() {
        let mut policy = WaitPolicy::default();
        looks(&mut policy, 100, false);
        let near = Some(NOW + Nanos::from_micros(10));
        let far = Some(NOW + Nanos::from_millis(1));
        assert_eq!(policy.spin_for(Expected::Nothing, NOW, near), SPIN_MAX);
        assert_eq!(policy.spin_for(Expected::Message, NOW, far), Nanos::ZERO);
    }

    #[test]
    fn policy_without_spinning_never_looks() {
        for mut policy in [
            WaitPolicy::new(Wait::Auto, Nanos::ZERO),
            WaitPolicy::new(Wait::Block, SPIN_MAX),
        ] {
            assert_eq!(policy.spin_for(Expected::Message, NOW, Some(NOW)), Nanos::ZERO);
            assert_eq!(policy.spin_for_drive(), Nanos::ZERO);
        }
    }

    #[test]
    fn looks_in_vain_for_a_drive_become_rare_unless_looking_is_asked_for() {
        let mut auto = WaitPolicy::default();
        assert!(auto.spin_for_drive() > Nanos::ZERO);
        looks(&mut auto, 100, false);
        assert_eq!(auto.spin_for_drive(), Nanos::ZERO);
        let mut poll = WaitPolicy::new(Wait::Poll, SPIN_MAX);
        (0..100).for_each(|_| poll.looked(false));
        assert!(poll.spin_for_drive() > Nanos::ZERO);
    }
}
