//! Decides how many requests a drive holds at once while groups compete for it: few enough that its own queue cannot undo the
//! elevator's order, enough that it loses no throughput. `bfq` asks for the limit and reports every completion.
//!
//! It is found by comparing throughputs, not configured. The limit rests at the *operating depth*. In a *trial* the
//! drive works for short windows at a lower and at a higher depth in turn, in the order low, high, high, low, so that a slow
//! drift of the load falls on both:
//!
//! ```text
//!   depth
//!   3/2 o          ┌───────┐            high: gains more than GAIN_RAISE over low  ─► o grows
//!       o  ────────┤       ├───────            gains less than GAIN_LOWER          ─► o shrinks
//!   7/8 o      ────┘       └────        low    between them                        ─► o stays
//! ```
//!
//! On a drive that serves `n` requests at once the throughput grows with the depth up to `n` and not beyond, so `o` settles
//! where 7/8 of it is `n`: at about 1.13 `n`. On a drive whose throughput bends slowly it settles where a half more
//! gains 1 to 2 %. Either way what is lost against the full depth is a small part of the low windows' time, and what
//! waits inside the drive is at most half of what the drive works on.
//!
//! A gain counts only as far as requests and bytes per second both have it. Where more depth takes the order out of the
//! elevator's hands, the mix of small and large requests changes, and one of the two rises at the other's expense: that is no gain.
//!
//! Shares do not depend on it: `bfq` keeps them by a bound on the lead. While that bound holds requests back, it decides what is in
//! flight, and windows say nothing of the limit.
//!
//! *Why it is stable.* Throughput of a closed system does not fall when depth is added, short of overload, and its gain from
//! a depth to 12/7 of it falls as the depth grows; so the gain as a function of `o` crosses the band between the two bounds
//! once, from above: below the band `o` grows, above it shrinks, within it rests. A step that turns back halves the next one, and
//! rests between trials grow while `o` does not move, so noise moves it by one small step at a time around that place.
//! The search begins at FIRST: the first trials, after a long time without competition, divide that by four, then by two, as
//! long as it costs nothing.

use crate::time::{Instant, Nanos};

/// The law's state for one drive.
#[derive(Debug)]
pub(super) struct DepthLaw {
    /// The largest depth, which a group that is alone gets.
    max: u32,
    /// Where the limit rests while groups compete.
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
    /// Trials of a part of the depth against the depth, downwards.
    Descent,
    /// Trials around the operating depth.
    Tracking,
    /// This many more windows at the operating depth, then a trial.
    Resting(u32),
}

/// What is being measured now: the work done between two moments at one limit.
#[derive(Debug, Default)]
struct Window {
    limit: u32,
    /// Completions of requests that were issued at another limit, still to be passed over.
    skip: u32,
    since: Instant,
    /// The latest completion.
    last: Instant,
    /// How often time has passed between completions.
    moments: u32,
    completions: u32,
    bytes: u64,
    /// How often what waited was held for another reason than the limit.
    held: u32,
}

/// Pairs of windows, and what the deeper one gained over the other.
#[derive(Debug, Default)]
struct Trial {
    windows: u32,
    /// What the first window of a pair did.
    first: Rates,
    pairs: i64,
    requests: Gains,
    bytes: Gains,
}

/// What a window did in a second.
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
    QueueRef,
    Lower,
}

impl DepthLaw {
    /// A law for a drive of which `max` requests can be in flight, at least 1.
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
            last: Verdict::QueueRef,
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

    /// Says whether more than one group has work now. A group that is alone gets the largest depth.
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

    /// Counts the end of a request of `bytes`, which leaves so many `in_flight`.
    #[inline]
    pub(super) fn completed(&mut self, bytes: u64, in_flight: u32, now: Instant) {
        if !self.contended {
            return;
        }
        if now > self.window.last {
            // Completions of one moment belong to one window: a drive that works in step would fool the measure else.
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

    /// All that waits is held for another reason than the limit.
    pub(super) fn note_held_back(&mut self) {
        self.window.held += 1;
    }

    /// What is measured now says nothing of the drive: the measurement starts anew.
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
            // What is in flight above the lower limit drains first; what a higher one adds shows when the rest has ended.
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
                self.last = Verdict::QueueRef;
            }
            return;
        }
        let turned = self.last != Verdict::QueueRef && self.last != verdict;
        self.step = if verdict == Verdict::QueueRef || turned {
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
            Verdict::QueueRef => self.operating,
        };
        let moves_on = verdict != Verdict::QueueRef && !turned;
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

    /// Says whether nothing was seen for much longer than usual: the drive paused, or whoever calls us had no processor.
    /// Then all that was in flight ends at once, and more of it looks like a gain that it is not.
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
    /// Says whether the next window is one at the lower depth: low, high, high, low, and again.
    fn is_at_low(&self) -> bool {
        matches!(self.windows % 4, 0 | 3)
    }

    /// Takes in what a window did; decides when the pairs so far are clear enough, or when they are enough.
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
            _ => Verdict::QueueRef,
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

    /// The mean gain, and three times its standard error: two would be right for many pairs.
    fn mean(&self, pairs: i64) -> (i64, i64) {
        let mean = self.sum / pairs;
        let spread = (self.squares / pairs - mean * mean).max(0);
        (mean, 3 * (spread / (pairs - 1)).isqrt())
    }
}

/// The next depth on the way down: quickly first, since trials at a deep queue take long.
fn descended(depth: u32) -> u32 {
    (if depth > 32 { depth / 4 } else { depth / 2 }).max(1)
}

const MILLION: i128 = 1_000_000;
/// A pair of windows counts for no more than this, so that one that was disturbed does not decide a trial.
const GAIN_MAX: i128 = 400_000;
/// A gain of the higher depth, in millionths, from which on the operating depth grows.
const GAIN_RAISE: i64 = 20_000;
/// A gain below which it shrinks.
const GAIN_LOWER: i64 = 10_000;
/// A window in which what waited was held more often than at one in so many completions says nothing of the limit.
const HELD_PART: u32 = 8;
/// A window lasts at least so long, and so many completions.
const WINDOW_MIN: Nanos = Nanos::from_millis(1);
const COMPLETIONS_MIN: u32 = 64;
/// Or, on a slow drive, so long and so many.
const WINDOW_SLOW: Nanos = Nanos::from_millis(5);
const COMPLETIONS_SLOW: u32 = 16;
/// A gap so many times longer than the mean one, of at least so many, interrupts a window.
const INTERRUPTION: u64 = 32;
const MOMENTS_MIN: u32 = 8;
/// Where the search begins. A trial far above what a drive needs lasts as long as the drive takes for so much, many times over;
/// from here up to a thousand it is ten short ones.
const FIRST: u32 = 64;
/// Pairs of windows in a trial.
const PAIRS_MIN: i64 = 3;
const PAIRS_MAX: i64 = 12;
/// Changes of the operating depth, in 1/64.
const STEP_MIN: u32 = 2;
const STEP_FIRST: u32 = 4;
const STEP_MAX: u32 = 32;
/// Windows of rest after a trial that moved nothing, and the most of them.
const REST_MIN: u32 = 2;
const REST_MAX: u32 = 32;
/// What was learnt is kept for so long without competition.
const FORGET: Nanos = Nanos::from_secs(60);

#[cfg(test)]
mod tests;
