//! The lateness to expect of a sleeper of this reactor, and whether a sleep is worth its cost.
//! The host measures (it has the clock) and reports its observations; `poll` subtracts the result from
//! its predictions.
//!
//! Late sleepers come in clusters: of the sleepers after one of the latest-waking fiftieth, one in three to
//! five is again one of them (docs/design/0012). So after a sleeper that was later than allowed for, a
//! reactor that polls does so for some requests without sleeping.

use super::recent::Recent;
use crate::time::{Instant, Nanos};

/// The observed lateness of one reactor's sleeps.
#[derive(Clone, Debug)]
pub struct WakeLatency {
    late: Recent<WINDOW>,
    /// Processor time that one sleep costs.
    cost: Nanos,
    /// Sleeps that were skipped because a sleeper would wake too late, since the last observation.
    refused: u32,
    /// The lateness that the latest sleep of a polled queue allows for.
    allowed: Option<Allowed>,
    /// Number of requests that are not slept for from here on, since a sleeper was too late.
    rests: u32,
}

/// How late a sleeper may be, and for how many requests there is no sleep if it is later.
#[derive(Clone, Copy, Debug)]
struct Allowed {
    late: Nanos,
    rests: u32,
}

impl WakeLatency {
    /// Starts with the measurements made at set-up: how late sleepers woke, and the processor time that one
    /// sleep costs. Without observations there are no sleeps.
    pub fn new(cost: Nanos, observed: &[Nanos]) -> Self {
        let mut oversleep = Self {
            late: Recent::new(),
            cost,
            refused: 0,
            allowed: None,
            rests: 0,
        };
        observed.iter().for_each(|late| oversleep.observe(*late));
        oversleep
    }

    /// Records a sleep that ended by time, `late` after the requested time.
    pub fn observe(&mut self, late: Nanos) {
        self.late.push(u32::try_from(late.0).unwrap_or(u32::MAX));
        self.refused = 0;
        if let Some(allowed) = self.allowed.take()
            && late > allowed.late
        {
            self.rests = allowed.rests;
        }
    }

    /// Hardly any sleeper wakes later than this: all but 1 in 42 of the latest 512. Those may be disturbances
    /// of the host.
    pub fn high(&self) -> Nanos {
        Nanos(self.late.largest(self.late.len() / ACCIDENTS).into())
    }

    /// The median lateness of a sleeper.
    pub fn typical(&self) -> Nanos {
        Nanos(self.late.middle().into())
    }

    /// Processor time that one sleep costs.
    pub fn cost(&self) -> Nanos {
        self.cost
    }

    /// When to wake for an event at `at`: very likely early enough, and late enough to be worth a sleep. None
    /// if there is no such time any more.
    pub fn wake_for(&self, at: Instant, now: Instant) -> Option<Instant> {
        let wake = at - self.high();
        if self.late.len() < OBSERVED_MIN || wake <= now {
            return None;
        }
        // The time slept, with the lateness, must be well above the cost of falling asleep and waking: every
        // sleep is a risk.
        let away = wake.since(now) + self.typical();
        (away.0 > self.cost.0 + self.cost.0 / 2).then_some(wake)
    }

    /// The same for a queue whose completions are polled for, so that skipping a sleep costs no latency: uses
    /// the most cautious of several allowances that leaves time to sleep; of more cautious ones if
    /// `is_cautious`. After a sleeper that was later than allowed for, none for some requests.
    pub(super) fn wake_for_polled(
        &mut self,
        at: Instant,
        is_cautious: bool,
        now: Instant,
    ) -> Option<Instant> {
        if self.late.len() < OBSERVED_MIN || self.rests > 0 {
            return None;
        }
        let allowances: &[_] = if is_cautious { &CAUTIOUS } else { &ALLOWANCES };
        for &(permille, rests) in allowances {
            let late = Nanos(self.late.largest(self.late.len() * permille / 1000).into());
            let wake = at - late;
            if wake > now && (wake.since(now) + self.typical()).0 > self.cost.0 {
                let margin = Nanos(at.since(now).0 / MARGIN);
                self.allowed = Some(Allowed {
                    late: late + margin,
                    rests,
                });
                return Some(wake);
            }
        }
        None
    }

    /// Records a skipped sleep. A host that was disturbed for a while must not keep its reactors awake for
    /// ever, and only sleeping shows how late a sleeper wakes: so observations age until a sleep is tried.
    /// Outliers age fast, typical values slowly.
    pub(super) fn refuse(&mut self) {
        if self.rests > 0 {
            self.rests -= 1;
            return;
        }
        self.refused += 1;
        let typical = self.late.middle();
        let rare = self.late.largest(self.late.len() / RARE);
        let has_accidents = u64::from(rare) > u64::from(typical) * 2;
        if self.refused.is_multiple_of(REFUSED_PER_STEP) {
            self.late.push(typical - typical / 8);
        } else if has_accidents && self.refused.is_multiple_of(REFUSED_PER_ACCIDENT) {
            self.late.push(typical);
        }
    }
}

/// Outliers come in bursts: in a smaller window, a burst of four would keep a reactor awake until as many
/// sleeps have been skipped.
const WINDOW: usize = 512;
/// The part that is ignored: of 513 exchangeable values, 13 (3 %) are at least as late as the next.
const ACCIDENTS: usize = 42;
/// For a polled queue, the most cautious first: how many sleepers in a thousand are later than allowed for,
/// and for how many requests there is no sleep after that. If there is little time to sleep, as for a device
/// of 50 µs, late sleepers are more frequent, and rests longer.
const ALLOWANCES: [(usize, u32); 3] = [(10, 8), (20, 32), (40, 32)];
/// Outliers that even the least cautious of these counts are forgotten while they prevent sleeps: 1 in 100.
const RARE: usize = 100;
/// Used when tail latency counts more than processor time.
const CAUTIOUS: [(usize, u32); 2] = [(4, 32), (10, 32)];
/// A sleeper is too late if its lateness exceeds the allowance plus this part of the time that is waited.
const MARGIN: u64 = 16;
const OBSERVED_MIN: usize = 8;
/// This many skipped sleeps remove the oldest observation.
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
        let oversleep = WakeLatency::new(us(1), &[]);
        assert_eq!(oversleep.wake_for(Instant(0) + us(1000), Instant(0)), None);
    }

    #[test]
    fn sleep_ends_before_the_event_by_what_sleepers_are_late() {
        let oversleep = WakeLatency::new(us(14), &[us(20); WINDOW]);
        let wake = oversleep.wake_for(Instant(0) + us(100), Instant(0));
        assert_eq!(wake, Some(Instant(0) + us(80)));
    }

    #[test]
    fn sleep_shorter_than_its_lateness_is_left_out() {
        let oversleep = WakeLatency::new(us(1), &[us(20); WINDOW]);
        assert_eq!(oversleep.wake_for(Instant(0) + us(20), Instant(0)), None);
        assert_eq!(oversleep.wake_for(Instant(0) + us(5), Instant(0)), None);
    }

    #[test]
    fn sleep_that_costs_more_than_it_saves_is_not_made() {
        let oversleep = WakeLatency::new(us(30), &[us(20); WINDOW]);
        assert_eq!(oversleep.wake_for(Instant(0) + us(30), Instant(0)), None);
        assert!(oversleep.wake_for(Instant(0) + us(50), Instant(0)).is_some());
    }

    #[test]
    fn burst_of_accidents_changes_nothing_and_disturbed_times_are_forgotten() {
        let mut oversleep = WakeLatency::new(us(14), &[us(20); WINDOW]);
        (0..12).for_each(|_| oversleep.observe(us(5_000)));
        assert_eq!(oversleep.high(), us(20));
        oversleep.observe(us(5_000));
        assert_eq!(oversleep.high(), us(5_000));
        (0..REFUSED_PER_ACCIDENT * WINDOW as u32).for_each(|_| oversleep.refuse());
        assert!((us(15)..=us(20)).contains(&oversleep.high()));
    }

    #[test]
    fn polled_requests_are_not_slept_for_after_a_sleeper_was_too_late() {
        let mut oversleep = WakeLatency::new(us(14), &[us(20); WINDOW]);
        let at = Instant(0) + us(100);
        let wake = |oversleep: &mut WakeLatency| oversleep.wake_for_polled(at, false, Instant(0));
        assert_eq!(wake(&mut oversleep), Some(Instant(0) + us(80)));
        oversleep.observe(us(22));
        assert!(
            wake(&mut oversleep).is_some(),
            "hardly later than was allowed for"
        );
        oversleep.observe(us(40));
        let mut rests = 0;
        while wake(&mut oversleep).is_none() {
            oversleep.refuse();
            rests += 1;
        }
        assert_eq!(rests, ALLOWANCES[0].1);
    }

    #[test]
    fn two_accidents_at_set_up_do_not_keep_a_cautious_reactor_awake_for_long() {
        let mut late = vec![us(20); 128];
        (late[0], late[1]) = (us(900), us(700));
        let mut oversleep = WakeLatency::new(us(14), &late);
        let at = Instant(0) + us(200);
        let mut refused = 0;
        while oversleep.wake_for_polled(at, true, Instant(0)).is_none() {
            oversleep.refuse();
            refused += 1;
            assert!(refused < 8 * WINDOW as u32, "after {refused} reads");
        }
    }

    #[test]
    fn sleeper_of_a_polled_queue_is_allowed_to_be_as_late_as_leaves_something_to_sleep() {
        let late: Vec<Nanos> = (0..WINDOW)
            .map(|at| us(if at % 64 == 0 { 90 } else { 20 }))
            .collect();
        let mut oversleep = WakeLatency::new(us(14), &late);
        let mut wake_if =
            |away, is_cautious| oversleep.wake_for_polled(Instant(0) + us(away), is_cautious, Instant(0));
        assert_eq!(
            (wake_if(80, true), wake_if(200, true)),
            (None, Some(Instant(0) + us(110)))
        );
        let mut wake = |away| wake_if(away, false);
        assert_eq!(wake(200), Some(Instant(0) + us(110)), "all but 1 in 100");
        assert_eq!(wake(80), Some(Instant(0) + us(60)), "all but 1 in 50");
        assert_eq!(wake(15), None);
    }

    #[test]
    fn host_that_was_slow_for_long_is_tried_again_in_the_end() {
        let mut oversleep = WakeLatency::new(us(14), &[us(100); WINDOW]);
        let at = Instant(0) + us(50);
        let mut refused = 0;
        while oversleep.wake_for(at, Instant(0)).is_none() {
            oversleep.refuse();
            refused += 1;
            assert!(refused < 2_000_000);
        }
    }
}
