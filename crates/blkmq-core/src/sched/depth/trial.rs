//! A trial: windows at a lower and at a higher depth in turn, and whether the higher depth has more throughput.
//! `depth` runs one now and then.
//!
//! The order low, high, high, low lets a slow drift of the load affect both sides. A gain counts only as far as
//! both requests and bytes per second have it: where more depth lets the drive reorder requests, the mix of
//! small and large requests changes, and one rate rises at the other's expense.

/// Pairs of windows, and the gains of the deeper one over the other.
#[derive(Debug, Default)]
pub(super) struct Trial {
    windows: u32,
    /// The rates of the first window of a pair.
    first: Rates,
    pairs: i64,
    requests: Gains,
    bytes: Gains,
}

/// The rates of a window, per second.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rates {
    /// In thousandths.
    pub(super) requests: u64,
    pub(super) bytes: u64,
}

/// Gains over the pairs of a trial, in millionths.
#[derive(Debug, Default)]
struct Gains {
    sum: i64,
    squares: i64,
}

/// What a trial says of the higher depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Raise,
    Keep,
    Lower,
}

impl Trial {
    /// Says whether the next window is at the lower depth: low, high, high, low, and so on.
    pub(super) fn is_at_low(&self) -> bool {
        matches!(self.windows % 4, 0 | 3)
    }

    /// Adds the rates of a window. Decides when the pairs so far are clear enough, or when there are enough pairs.
    pub(super) fn add(&mut self, rates: Rates) -> Option<Verdict> {
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
        self.requests.add(low.requests, high.requests);
        self.bytes.add(low.bytes, high.bytes);
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
    fn add(&mut self, low: u64, high: u64) {
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

const MILLION: i128 = 1_000_000;
/// The gain of one pair is limited to this, so that a disturbed pair does not decide a trial.
const GAIN_MAX: i128 = 400_000;
/// The depth grows if the higher one gains at least this, in millionths.
const GAIN_RAISE: i64 = 60_000;
/// The depth may shrink if the gain is below this.
const GAIN_LOWER: i64 = 20_000;
/// Pairs of windows in a trial.
const PAIRS_MIN: i64 = 3;
const PAIRS_MAX: i64 = 6;
