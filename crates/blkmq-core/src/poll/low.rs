//! Decides how soon a request of one bucket may end: a low quantile of the device's own time, of samples some of which are censored.
//! One `Low` per bucket; `poll` feeds it with what each completion tells.
//!
//! The estimate is the smallest of the latest 32 times: of 33 exchangeable times the newest is below the other 32 once in 33 (3 %),
//! whatever their distribution. Two things would spoil that, and are met here:
//!
//! - *Survivors.* A request that ended while its reactor slept shows only an upper bound. Leaving such requests out would keep the slow
//!   ones alone, and the estimate would climb away from the device. So one that ended before its predicted end counts as somewhat
//!   faster than all that are known. One that was seen late because the sleeper was late says nothing of the device.
//! - *A step down.* Bounds shrink slowly, so two requests in eight that ended too early stop sleeping for [`PROBES`] requests, and
//!   these are seen exactly. A step up needs no care: after 32 requests nothing of the past is left.

use super::recent::Recent;
use crate::time::Nanos;

/// The estimate of one bucket.
#[derive(Clone, Debug)]
pub(super) struct Low {
    times: Recent<WINDOW>,
    /// One bit for each of the latest sleeps, the latest lowest: it was too long.
    history: u8,
    /// Requests still to be seen without sleeping.
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

    /// The time before which hardly any request ends; none while too little is known.
    pub(super) fn value(&self) -> Option<Nanos> {
        let is_known = self.times.len() >= SAMPLES_MIN && self.probes == 0;
        is_known.then(|| Nanos(self.times.smallest().into()))
    }

    /// The mean of what `value` is the lowest of.
    pub(super) fn mean(&self) -> Nanos {
        Nanos(self.times.mean().into())
    }

    /// A request ended after this time, and was seen at once. `slept` says that its reactor had slept for it.
    pub(super) fn saw(&mut self, time: Nanos, slept: bool) {
        self.times.push(clamp(time));
        self.probes = self.probes.saturating_sub(1);
        if slept {
            self.history <<= 1;
        }
    }

    /// A request that was slept for had ended when the reactor awoke, at most `bound` after its issue.
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

/// Times that are remembered: recovery takes so many requests at most, and 1 in 33 is the share of oversleeps that they allow.
const WINDOW: usize = 32;
/// Without so many there is no estimate.
const SAMPLES_MIN: usize = 8;
/// Sleeps that were too long, of eight, that make the estimate suspect.
const SUSPICIOUS: u32 = 2;
/// Requests seen without sleeping then.
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
    fn a_late_wake_up_says_nothing_of_the_device() {
        let mut low = known(50);
        low.overslept(us(80));
        assert_eq!(low.value(), Some(us(50)));
    }

    #[test]
    fn a_request_that_ended_too_early_lowers_the_estimate() {
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
