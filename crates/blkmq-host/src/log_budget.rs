//! A limit on the lines that one source may write to the log: neither a disk that alternately fails and
//! succeeds, nor a client that connects repeatedly and violates the protocol each time, may fill the
//! log's disk. Drivers ask before they log single requests, front doors before they log connections;
//! withheld lines are counted, and the next line states their number.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use blkmq_core::time::{Instant, Nanos};

/// The lines that one source may still write: `LINES_MAX` at once, and one more every `LINE_EVERY`.
#[derive(Debug)]
pub struct LogBudget {
    /// The subject of the lines, for people.
    about: &'static str,
    bucket: Mutex<Bucket>,
}

/// A token bucket.
#[derive(Debug)]
struct Bucket {
    lines: u32,
    /// When lines were last added.
    filled_at: Instant,
    withheld: u64,
}

/// How many lines were not written; shown after the next one that is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Withheld {
    about: &'static str,
    lines: u64,
}

impl LogBudget {
    /// Makes the budget of one source whose lines have this subject: for example, `other connections of this
    /// address`.
    pub fn new(about: &'static str) -> Self {
        let bucket = Mutex::new(Bucket {
            lines: LINES_MAX,
            filled_at: Instant(0),
            withheld: 0,
        });
        Self { about, bucket }
    }

    /// Takes one line. Returns how many were withheld since the last one, or none if this one must be withheld.
    pub fn take(&self, now: Instant) -> Option<Withheld> {
        // The count that a panicked thread left is as good as any other.
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let lines = bucket.take(now)?;
        let about = self.about;
        Some(Withheld { about, lines })
    }
}

impl Bucket {
    fn take(&mut self, now: Instant) -> Option<u64> {
        // Time that is not enough for a line yet is kept.
        let earned = now.since(self.filled_at).0 / LINE_EVERY.0;
        if earned > 0 {
            self.lines = earned.saturating_add(self.lines.into()).min(LINES_MAX.into()) as u32;
            self.filled_at = self.filled_at + Nanos(earned * LINE_EVERY.0);
        }
        if self.lines == 0 {
            self.withheld += 1;
            return None;
        }
        self.lines -= 1;
        Some(std::mem::take(&mut self.withheld))
    }
}

impl fmt::Display for Withheld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.lines {
            0 => Ok(()),
            lines => write!(f, " ({lines} lines about {} were withheld)", self.about),
        }
    }
}

/// Number of lines that may be written at once.
const LINES_MAX: u32 = 64;
/// How often one more line may be written.
const LINE_EVERY: Nanos = Nanos::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flood_is_cut_to_a_line_a_second_and_the_rest_is_counted() {
        let budget = LogBudget::new("it");
        let start = Instant(1) + Nanos::from_secs(100);
        // Ten thousand a second, for ten seconds.
        let written = (0..100_000u64).filter(|at| {
            let now = start + Nanos::from_micros(at * 100);
            budget.take(now).is_some()
        });
        let written = written.count() as u64;
        let most = u64::from(LINES_MAX);
        assert!((most + 9..=most + 10).contains(&written), "{written} lines");
        let next = budget.take(start + Nanos::from_secs(12)).expect("a second later");
        assert!(
            (9_000..=10_000).contains(&next.lines),
            "{next:?}: those since the last line"
        );
        let said = format!(" ({} lines about it were withheld)", next.lines);
        assert_eq!(next.to_string(), said);
    }

    #[test]
    fn now_and_then_a_line_is_always_written() {
        let budget = LogBudget::new("it");
        for second in 0..1000 {
            let taken = budget.take(Instant(7) + Nanos::from_secs(second));
            assert_eq!(taken.map(|withheld| withheld.lines), Some(0), "second {second}");
        }
    }

    #[test]
    fn idle_hour_earns_no_more_than_the_bucket_holds() {
        let budget = LogBudget::new("it");
        let later = Instant(0) + Nanos::from_secs(3600);
        let written = (0..1000).filter(|_| budget.take(later).is_some()).count();
        assert_eq!(written, LINES_MAX as usize);
    }
}
