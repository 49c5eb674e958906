//! An estimate of how soon a request of one bucket may complete: a low quantile of the device's own
//! times, some of whose samples are censored. There is one `Low` per bucket; `poll` reports each
//! completion to it.
//!
//! The estimate is the smallest of the latest 32 times: of 33 exchangeable times the newest is below the
//! other 32 once in 33 (3 %), whatever their distribution. Two effects would spoil that, and are corrected:
//!
//! - *Survivors.* A request that ended while its reactor slept has only an upper bound. Without such requests
//!   only the slow ones would remain, and the estimate would climb away from the device. So a request that
//!   ended before its predicted end counts as somewhat faster than all known ones. One that was seen late
//!   because the sleeper was late says nothing about the device.
//! - *A step down.* Bounds shrink slowly, so after two of eight requests ended too early, the next [`PROBES`]
//!   requests are not slept for, and their times are exact. A step up needs no correction: after 32 requests
//!   no old time is left.

use super::recent::Recent;
use crate::time::Nanos;

/// The estimate of one bucket.
#[derive(Clone, Debug)]
pub(super) struct Low {
    times: Recent<WINDOW>,
    /// One bit for each of the latest sleeps, the latest in the lowest bit: the sleep was too long.
    history: u8,
    /// Remaining requests to observe without sleeping.
    probes: u8,
}

impl Low {
    pub(super) const fn new() -> Self {
        Self {
            times: Recent::new(),
            history: 0,
            probes: 0,
        }
    }

    /// The time before which hardly any request ends; none while there are too few samples.
    pub(super) fn value(&self) -> Option<Nanos> {
        let is_known = self.times.len() >= SAMPLES_MIN && self.probes == 0;
        is_known.then(|| Nanos(self.times.smallest().into()))
    }

    /// The mean of the times of which `value` is the smallest.
    pub(super) fn mean(&self) -> Nanos {
        Nanos(self.times.mean().into())
    }

    /// Records a request that ended after this time and was seen at once. `slept` says whether its reactor
    /// had slept for it.
    pub(super) fn saw(&mut self, time: Nanos, slept: bool) {
        self.times.push(clamp(time));
        self.probes = self.probes.saturating_sub(1);
        if slept {
            self.history <<= 1;
        }
    }

    /// Records a request that had ended when the reactor awoke, at most `bound` after its issue.
    pub(super) fn overslept(&mut self, bound: Nanos) {
        let bound = clamp(bound);
        let low = self.times.smallest();
        if bound <= low {
            self.times.push(bound - bound / 16);
        }
        self.history = self.history << 1 | 1;
        if self.history.count_ones() >= SUSPICIOUS {
            self.history = 0;
            self.probes = PROBES;
        }
    }
}

fn clamp(time: Nanos) -> u32 {
    u32::try_from(time.0).unwrap_or(u32::MAX)
}

/// Number of times kept: recovery takes at most this many requests, and 1 in 33 is the allowed share of oversleeps.
const WINDOW: usize = 32;
/// With fewer samples there is no estimate.
const SAMPLES_MIN: usize = 8;
/// This many sleeps of eight that were too long make the estimate suspect.
const SUSPICIOUS: u32 = 2;
/// Number of requests then observed without sleeping.
pub(super) const PROBES: u8 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn us(us: u64) -> Nanos {
        Nanos::from_micros(us)
    }

    fn known(us_each: u64) -> Low {
        let mut low = Low::new();
        (0..WINDOW).for_each(|_| low.saw(us(us_each), false));
        low
    }

    #[test]
    fn nothing_is_predicted_from_too_few_samples() {
        let mut low = Low::new();
        for _ in 1..SAMPLES_MIN {
            low.saw(us(50), false);
            assert_eq!(low.value(), None);
        }
        low.saw(us(50), false);
        assert_eq!(low.value(), Some(us(50)));
    }

    #[test]
    fn late_wake_up_says_nothing_of_the_device() {
        let mut low = known(50);
        low.overslept(us(80));
        assert_eq!(low.value(), Some(us(50)));
    }

    #[test]
    fn request_that_ended_too_early_lowers_the_estimate() {
        let mut low = known(50);
        low.overslept(us(45));
        assert!(low.value().is_some_and(|value| value < us(45)), "{low:?}");
    }

    #[test]
    fn two_that_ended_too_early_stop_the_sleeping_and_the_truth_is_learned() {
        let mut low = known(100);
        low.overslept(us(90));
        low.overslept(us(88));
        for _ in 0..PROBES {
            assert_eq!(low.value(), None);
            low.saw(us(20), false);
        }
        assert_eq!(low.value(), Some(us(20)));
    }

    #[test]
    fn one_fast_request_is_forgotten_after_as_many_as_are_remembered() {
        let mut low = known(100);
        low.saw(us(5), false);
        assert_eq!(low.value(), Some(us(5)));
        (0..WINDOW).for_each(|_| low.saw(us(100), false));
        assert_eq!(low.value(), Some(us(100)));
    }
}
