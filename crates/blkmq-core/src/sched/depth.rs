//! Decides how many requests a drive holds at once while groups compete for it: few enough that the drive's
//! own queue cannot undo the elevator's order, and enough to lose no throughput.
//! `bfq` asks for the limit and reports every completion.
//!
//! The depth is found by comparing throughputs, not configured. Between trials the limit is the *operating
//! depth* `o`. In a *trial* the drive works for short windows at a lower and at a higher depth, in the order
//! low, high, high, low, so that a slow drift of the load affects both:
//!
//! ```text
//!   depth
//!   3/2 o          ┌───────┐            high: gains more than GAIN_RAISE over low  ─► o grows
//!       o  ────────┤       ├───────            gains less than GAIN_LOWER          ─► o shrinks
//!   7/8 o      ────┘       └────        low    between them                        ─► o stays
//! ```
//!
//! On a drive that serves `n` requests at once, the throughput grows with the depth up to `n` and not
//! beyond, so `o` settles where 7/8 of it is `n`: at about 1.13 `n`. On a drive whose throughput flattens
//! slowly, `o` settles where a half more gains 1 to 2 %. In both cases the loss against the full depth is a
//! small part of the low windows' time, and at most half as many requests wait inside the drive as the
//! drive works on.
//!
//! A gain counts only as far as both requests and bytes per second have it. Where more depth lets the drive
//! reorder requests, the mix of small and large requests changes, and one rate rises at the other's
//! expense: that is no gain.
//!
//! Shares do not depend on the depth: `bfq` keeps them by a bound on the lead. While that bound holds
//! requests back, it determines how many are in flight, and windows say nothing about the limit.
//!
//! *Why it is stable.* Short of overload, the throughput of a closed system does not fall when depth is
//! added, and its gain from a depth to 12/7 of it falls as the depth grows. So the gain as a function of
//! `o` crosses the band between the two bounds once, from above: below that point `o` grows, above it `o`
//! shrinks, within the band `o` stays. A change of direction halves the next step, and the rests between
//! trials grow while `o` does not move, so noise moves `o` by one small step at a time.
//! The search begins at FIRST: the first trials, after a long time without competition, divide it by four,
//! then by two, as long as that costs no throughput.

use crate::time::{Instant, Nanos};

/// The state of the controller for one drive.
#[derive(Debug)]
pub(super) struct DepthLaw {
    /// The largest depth; a group without competitors gets it.
    max: u32,
    /// The limit between trials while groups compete.
    operating: u32,
    contended: bool,
    /// When competition ended last.
    calm_since: Instant,
    phase: Phase,
    window: Window,
    trial: Trial,
    /// The next change of `operating`, in 1/64 of it.
    step: u32,
    /// Which way the last change went.
    last: Verdict,
    /// Windows at the operating depth between the last trial and the next.
    rest: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Trials of a part of the depth against the whole depth, downwards.
    Descent,
    /// Trials around the operating depth.
    Tracking,
    /// This many more windows at the operating depth, then a trial.
    Resting(u32),
}

/// The measurement under way: the work done between two moments at one limit.
#[derive(Debug, Default)]
struct Window {
    limit: u32,
    /// Completions still to be ignored, since their requests were issued at another limit.
    skip: u32,
    since: Instant,
    /// The latest completion.
    last: Instant,
    /// How often time has passed between completions.
    moments: u32,
    completions: u32,
    bytes: u64,
    /// How often waiting requests were held for another reason than the limit.
    held: u32,
}

/// Pairs of windows, and the gains of the deeper one over the other.
#[derive(Debug, Default)]
struct Trial {
    windows: u32,
    /// The rates of the first window of a pair.
    first: Rates,
    pairs: i64,
    requests: Gains,
    bytes: Gains,
}

/// The rates of a window, per second.
#[derive(Clone, Copy, Debug, Default)]
struct Rates {
    /// In thousandths.
    requests: u64,
    bytes: u64,
}

/// Gains over the pairs of a trial, in millionths.
#[derive(Debug, Default)]
struct Gains {
    sum: i64,
    squares: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Raise,
    Keep,
    Lower,
}

impl DepthLaw {
    /// Makes a controller for a drive with at most `max` requests in flight, at least 1.
    pub(super) fn new(max: u32) -> Self {
        assert!(max > 0, "a drive without depth");
        Self {
            max,
            operating: max.min(FIRST),
            contended: false,
            calm_since: Instant::default(),
            phase: Phase::Descent,
            window: Window::default(),
            trial: Trial::default(),
            step: STEP_FIRST,
            last: Verdict::Keep,
            rest: 0,
        }
    }

    /// How many requests may be in flight now.
    #[inline]
    pub(super) fn limit(&self) -> u32 {
        if self.contended {
            self.window.limit
        } else {
            self.max
        }
    }

    /// Notes whether more than one group has work now. A single group gets the largest depth.
    pub(super) fn set_contended(&mut self, contended: bool, now: Instant) {
        if contended == self.contended {
            return;
        }
        self.contended = contended;
        if !contended {
            self.calm_since = now;
            return;
        }
        if now.since(self.calm_since) >= FORGET {
            self.operating = self.max.min(FIRST);
            self.phase = Phase::Descent;
        }
        self.trial = Trial::default();
        self.open(now);
    }

    /// Counts the end of a request of `bytes`; `in_flight` requests remain.
    #[inline]
    pub(super) fn completed(&mut self, bytes: u64, in_flight: u32, now: Instant) {
        if !self.contended {
            return;
        }
        if now > self.window.last {
            // Completions of one moment belong to one window; otherwise a drive that completes in bursts would
            // distort the measurement.
            if self.window.is_full() && self.window.held > self.window.completions / HELD_PART {
                self.interrupt();
            } else if self.window.is_full() {
                self.close(in_flight, self.window.last);
            } else if self.window.is_interrupted(now) {
                self.interrupt();
            }
            self.window.last = now;
            self.window.moments += u32::from(self.window.skip == 0);
        }
        let window = &mut self.window;
        if window.skip > 0 {
            window.skip -= 1;
            window.since = now;
        } else if now > window.since {
            window.bytes += bytes;
            window.completions += 1;
        }
    }

    /// Notes that all waiting requests are held for another reason than the limit.
    pub(super) fn note_held_back(&mut self) {
        self.window.held += 1;
    }

    /// Restarts the measurement, since it says nothing about the drive.
    pub(super) fn interrupt(&mut self) {
        self.window = Window {
            limit: self.window.limit,
            skip: self.window.limit,
            ..Window::default()
        };
    }

    fn close(&mut self, in_flight: u32, now: Instant) {
        let rates = self.window.rates(now);
        match self.phase {
            Phase::Resting(left) => {
                self.phase = left.checked_sub(1).map_or(Phase::Tracking, Phase::Resting);
            }
            Phase::Descent | Phase::Tracking => {
                if let Some(verdict) = self.trial.take_in(rates) {
                    self.trial = Trial::default();
                    self.obey(verdict);
                }
            }
        }
        let before = self.window.limit;
        self.open(now);
        if self.window.limit != before {
            // Requests in flight above a lower limit drain first; the effect of a higher limit shows when all
            // requests issued before it have ended.
            self.window.skip = in_flight;
        }
    }

    /// Starts the next window at its limit.
    fn open(&mut self, now: Instant) {
        let o = self.operating;
        let limit = match (self.phase, self.trial.is_at_low()) {
            (Phase::Resting(_), _) => o,
            (Phase::Descent, true) => descended(o),
            (Phase::Descent, false) => o,
            (Phase::Tracking, true) => (o - o.div_ceil(8)).max(1),
            (Phase::Tracking, false) => (o + (o / 2).max(1)).min(self.max),
        };
        self.window = Window {
            limit,
            since: now,
            last: now,
            ..Window::default()
        };
    }

    fn obey(&mut self, verdict: Verdict) {
        if self.phase == Phase::Descent {
            if verdict != Verdict::Raise && self.operating > 1 {
                self.operating = descended(self.operating);
            } else {
                self.phase = Phase::Tracking;
                self.step = STEP_FIRST;
                self.last = Verdict::Keep;
            }
            return;
        }
        let turned = self.last != Verdict::Keep && self.last != verdict;
        self.step = if verdict == Verdict::Keep || turned {
            (self.step / 2).max(STEP_MIN)
        } else {
            (self.step * 2).min(STEP_MAX)
        };
        let change = (self.operating * self.step / 64).max(1);
        self.operating = match verdict {
            Verdict::Raise => (self.operating + change).min(self.max),
            Verdict::Lower => self
                .operating
                .saturating_sub(change.min(self.operating / 4).max(1))
                .max(1),
            Verdict::Keep => self.operating,
        };
        let moves_on = verdict != Verdict::Keep && !turned;
        self.rest = if moves_on {
            0
        } else {
            (self.rest * 2).clamp(REST_MIN, REST_MAX)
        };
        self.last = verdict;
        self.phase = if self.rest == 0 {
            Phase::Tracking
        } else {
            Phase::Resting(self.rest)
        };
    }
}

impl Window {
    fn is_full(&self) -> bool {
        let lasts = self.last.since(self.since);
        self.completions >= COMPLETIONS_MIN && lasts >= WINDOW_MIN
            || self.completions >= COMPLETIONS_SLOW && lasts >= WINDOW_SLOW
    }

    /// Says whether no completion was seen for much longer than usual: the drive paused, or the caller had no
    /// CPU. Then all requests in flight end at once, and a larger number of them looks like a gain.
    fn is_interrupted(&self, now: Instant) -> bool {
        let gap = now.since(self.last).0;
        self.moments >= MOMENTS_MIN
            && gap / INTERRUPTION > self.last.since(self.since).0 / u64::from(self.moments)
    }

    fn rates(&self, end: Instant) -> Rates {
        let elapsed = u128::from(end.since(self.since).0.max(1));
        let per_second = |count: u64| (u128::from(count) * 1_000_000_000 / elapsed) as u64;
        Rates {
            requests: per_second(u64::from(self.completions) * 1000),
            bytes: per_second(self.bytes),
        }
    }
}

impl Trial {
    /// Says whether the next window is at the lower depth: low, high, high, low, and so on.
    fn is_at_low(&self) -> bool {
        matches!(self.windows % 4, 0 | 3)
    }

    /// Adds the rates of a window; decides when the pairs so far are clear enough, or when there are enough pairs.
    fn take_in(&mut self, rates: Rates) -> Option<Verdict> {
        let is_low = self.is_at_low();
        self.windows += 1;
        if self.windows % 2 == 1 {
            self.first = rates;
            return None;
        }
        let (low, high) = if is_low {
            (rates, self.first)
        } else {
            (self.first, rates)
        };
        self.pairs += 1;
        self.requests.take_in(low.requests, high.requests);
        self.bytes.take_in(low.bytes, high.bytes);
        self.verdict()
    }

    fn verdict(&self) -> Option<Verdict> {
        if self.pairs < PAIRS_MIN {
            return None;
        }
        let (requests, bytes) = (self.requests.mean(self.pairs), self.bytes.mean(self.pairs));
        let (mean, doubt) = requests.min(bytes);
        if mean - doubt > GAIN_RAISE {
            return Some(Verdict::Raise);
        }
        if mean + doubt < GAIN_LOWER {
            return Some(Verdict::Lower);
        }
        if self.pairs < PAIRS_MAX {
            return None;
        }
        Some(match mean {
            gain if gain - doubt / 2 > GAIN_RAISE => Verdict::Raise,
            gain if gain < GAIN_LOWER => Verdict::Lower,
            _ => Verdict::Keep,
        })
    }
}

impl Gains {
    fn take_in(&mut self, low: u64, high: u64) {
        let gain = i128::from(high) * MILLION / i128::from(low.max(1)) - MILLION;
        let gain = gain.clamp(-GAIN_MAX, GAIN_MAX) as i64;
        self.sum += gain;
        self.squares += gain * gain;
    }

    /// The mean gain, and three times its standard error; twice would be right for many pairs.
    fn mean(&self, pairs: i64) -> (i64, i64) {
        let mean = self.sum / pairs;
        let spread = (self.squares / pairs - mean * mean).max(0);
        (mean, 3 * (spread / (pairs - 1)).isqrt())
    }
}

/// The next depth of the descent: the first step is large, since trials at a deep queue take long.
fn descended(depth: u32) -> u32 {
    (if depth > 32 { depth / 4 } else { depth / 2 }).max(1)
}

const MILLION: i128 = 1_000_000;
/// The gain of one pair is limited to this, so that a disturbed pair does not decide a trial.
const GAIN_MAX: i128 = 400_000;
/// The operating depth grows if the higher depth gains at least this, in millionths.
const GAIN_RAISE: i64 = 20_000;
/// The operating depth shrinks if the gain is below this.
const GAIN_LOWER: i64 = 10_000;
/// A window in which waiting requests were held more often than at one in this many completions says
/// nothing about the limit.
const HELD_PART: u32 = 8;
/// Least duration of a window, and its least number of completions.
const WINDOW_MIN: Nanos = Nanos::from_millis(1);
const COMPLETIONS_MIN: u32 = 64;
/// The same for a slow drive.
const WINDOW_SLOW: Nanos = Nanos::from_millis(5);
const COMPLETIONS_SLOW: u32 = 16;
/// A gap this many times longer than the mean gap, taken over at least so many gaps, interrupts a window.
const INTERRUPTION: u64 = 32;
const MOMENTS_MIN: u32 = 8;
/// The first depth of the search. A trial far above the depth that a drive needs takes long, since the drive
/// must complete that many requests many times; from here, ten short trials reach a thousand.
const FIRST: u32 = 64;
/// Pairs of windows in a trial.
const PAIRS_MIN: i64 = 3;
const PAIRS_MAX: i64 = 12;
/// Changes of the operating depth, in 1/64.
const STEP_MIN: u32 = 2;
const STEP_FIRST: u32 = 4;
const STEP_MAX: u32 = 32;
/// Windows of rest after a trial that changed nothing, and their maximum.
const REST_MIN: u32 = 2;
const REST_MAX: u32 = 32;
/// How long the depth is kept without competition.
const FORGET: Nanos = Nanos::from_secs(60);

#[cfg(test)]
mod tests;
