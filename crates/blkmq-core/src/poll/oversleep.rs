//! Decides how late a sleeper of this reactor must be expected to wake, and whether a sleep is worth what it costs.
//! The host measures (it has the clock) and passes its observations in; `poll` subtracts the result from what it predicts.

use super::recent::Recent;
use crate::time::{Instant, Nanos};

/// What one reactor knows of its own sleeping.
#[derive(Clone, Debug)]
pub struct Oversleep {
    late: Recent<WINDOW>,
    /// Processor time that one sleep costs.
    cost: Nanos,
    /// Sleeps that were not made because a sleeper would wake too late, since the last observation.
    refused: u32,
}

impl Oversleep {
    /// Begins with what was measured at set-up: how late sleepers woke, and the processor time that one sleep costs. Without an
    /// observation nobody sleeps.
    pub fn new(cost: Nanos, observed: &[Nanos]) -> Self {
        let mut oversleep = Self {
            late: Recent::new(),
            cost,
            refused: 0,
        };
        observed.iter().for_each(|late| oversleep.observe(*late));
        oversleep
    }

    /// A sleep ended by time, so much after the time that was asked for.
    pub fn observe(&mut self, late: Nanos) {
        self.late.push(u32::try_from(late.0).unwrap_or(u32::MAX));
        self.refused = 0;
    }

    /// Hardly any sleeper wakes later than that: all but 1 in 42 of the latest 512. Those may be accidents of the host's.
    pub fn high(&self) -> Nanos {
        Nanos(self.late.largest(self.late.len() / ACCIDENTS).into())
    }

    /// How late a sleeper wakes in the middle.
    pub fn typical(&self) -> Nanos {
        Nanos(self.late.middle().into())
    }

    /// Processor time that one sleep costs.
    pub fn cost(&self) -> Nanos {
        self.cost
    }

    /// Says when to wake for something that happens at `at`: early enough in all likelihood, and late enough to be worth a sleep. None if
    /// there is no such moment any more.
    pub fn wake_for(&self, at: Instant, now: Instant) -> Option<Instant> {
        let wake = at - self.high();
        if self.late.len() < OBSERVED_MIN || wake <= now {
            return None;
        }
        // What is slept away, with the lateness, must be well above what falling asleep and waking costs: every sleep is a risk.
        let away = wake.since(now) + self.typical();
        (away.0 > self.cost.0 + self.cost.0 / 2).then_some(wake)
    }

    /// A sleep was not made. A host that was disturbed for a while must not keep its reactors awake for ever, and only sleeping
    /// shows how late a sleeper wakes: so what is known ages until somebody tries. Accidents do fast, what is typical does slowly.
    pub(super) fn refuse(&mut self) {
        self.refused += 1;
        let typical = self.late.middle();
        let has_accidents = self.high().0 > u64::from(typical) * 2;
        if self.refused.is_multiple_of(REFUSED_PER_STEP) {
            self.late.push(typical - typical / 8);
        } else if has_accidents && self.refused.is_multiple_of(REFUSED_PER_ACCIDENT) {
            self.late.push(typical);
        }
    }
}

/// Accidents come in bursts: among fewer, a burst of four would keep a reactor awake until as many sleeps have been refused.
const WINDOW: usize = 512;
/// The share that is not counted: 13 of 513 exchangeable ones, 3 %, are at least as late as the next.
const ACCIDENTS: usize = 42;
const OBSERVED_MIN: usize = 8;
/// So many sleeps not made take the oldest observation out.
const REFUSED_PER_STEP: u32 = 256;
/// The same, while the host seems to be, or to have been, disturbed.
const REFUSED_PER_ACCIDENT: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn us(us: u64) -> Nanos {
        Nanos::from_micros(us)
    }

    #[test]
    fn nobody_sleeps_without_a_measurement() {
        let oversleep = Oversleep::new(us(1), &[]);
        assert_eq!(oversleep.wake_for(Instant(0) + us(1000), Instant(0)), None);
    }

    #[test]
    fn a_sleep_ends_before_the_event_by_what_sleepers_are_late() {
        let oversleep = Oversleep::new(us(14), &[us(20); WINDOW]);
        let wake = oversleep.wake_for(Instant(0) + us(100), Instant(0));
        assert_eq!(wake, Some(Instant(0) + us(80)));
    }

    #[test]
    fn what_is_nearer_than_a_sleeper_is_late_is_not_slept_for() {
        let oversleep = Oversleep::new(us(1), &[us(20); WINDOW]);
        assert_eq!(oversleep.wake_for(Instant(0) + us(20), Instant(0)), None);
        assert_eq!(oversleep.wake_for(Instant(0) + us(5), Instant(0)), None);
    }

    #[test]
    fn a_sleep_that_costs_more_than_it_saves_is_not_made() {
        let oversleep = Oversleep::new(us(30), &[us(20); WINDOW]);
        assert_eq!(oversleep.wake_for(Instant(0) + us(30), Instant(0)), None);
        assert!(oversleep.wake_for(Instant(0) + us(50), Instant(0)).is_some());
    }

    #[test]
    fn a_burst_of_accidents_changes_nothing_and_a_disturbed_time_is_forgotten_without_sleeping() {
        let mut oversleep = Oversleep::new(us(14), &[us(20); WINDOW]);
        (0..12).for_each(|_| oversleep.observe(us(5_000)));
        assert_eq!(oversleep.high(), us(20));
        oversleep.observe(us(5_000));
        assert_eq!(oversleep.high(), us(5_000));
        (0..REFUSED_PER_ACCIDENT * WINDOW as u32).for_each(|_| oversleep.refuse());
        assert!((us(15)..=us(20)).contains(&oversleep.high()));
    }

    #[test]
    fn a_host_that_was_slow_for_long_is_tried_again_in_the_end() {
        let mut oversleep = Oversleep::new(us(14), &[us(100); WINDOW]);
        let at = Instant(0) + us(50);
        let mut refused = 0;
        while oversleep.wake_for(at, Instant(0)).is_none() {
            oversleep.refuse();
            refused += 1;
            assert!(refused < 2_000_000);
        }
    }
}
