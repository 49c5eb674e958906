//! Decides how many lines about single connections an address may write to the log: a client that connects again and again, and breaks
//! the rules each time, must not fill the disk that the log is on. `listener` and `connection` say what they have to say through it.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use blkmq_core::time::{Instant, Nanos};

/// The lines that may still be written; all connections of an address share it.
#[derive(Debug)]
pub(super) struct Log(Mutex<Budget>);

/// A token bucket.
#[derive(Debug)]
struct Budget {
    lines: u32,
    /// When lines were added last.
    filled_at: Instant,
    withheld: u64,
}

impl Default for Log {
    fn default() -> Self {
        Self(Mutex::new(Budget {
            lines: LINES_MAX,
            filled_at: Instant(0),
            withheld: 0,
        }))
    }
}

impl Log {
    /// Writes a warning, unless too many lines were written lately.
    pub(super) fn warn(&self, now: Instant, what: fmt::Arguments<'_>) {
        if let Some(withheld) = self.take(now) {
            tracing::warn!("nbd: {what}{withheld}");
        }
    }

    /// Writes what is no defect of ours or the client's, unless too many lines were written lately.
    pub(super) fn info(&self, now: Instant, what: fmt::Arguments<'_>) {
        if let Some(withheld) = self.take(now) {
            tracing::info!("nbd: {what}{withheld}");
        }
    }

    fn take(&self, now: Instant) -> Option<Withheld> {
        // What a thread that panicked left behind is as good as any other count.
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take(now)
    }
}

impl Budget {
    /// Takes one line. Returns how many were withheld since the last one, or nothing if this one has to be.
    fn take(&mut self, now: Instant) -> Option<Withheld> {
        let earned = now.since(self.filled_at).0 / LINE_EVERY.0;
        if earned > 0 {
            self.lines = earned.saturating_add(self.lines.into()).min(LINES_MAX.into()) as u32;
            self.filled_at = now;
        }
        if self.lines == 0 {
            self.withheld += 1;
            return None;
        }
        self.lines -= 1;
        Some(Withheld(std::mem::take(&mut self.withheld)))
    }
}

/// How many lines were not written; shown behind the next one that is.
#[derive(Debug, PartialEq, Eq)]
struct Withheld(u64);

impl fmt::Display for Withheld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            lines => write!(
                f,
                " ({lines} lines about other connections of this address were withheld)"
            ),
        }
    }
}

/// Lines that are written at once; as many reconnecting clients as an outage of a host brings.
const LINES_MAX: u32 = 64;
/// How often one more may be.
const LINE_EVERY: Nanos = Nanos::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    fn budget() -> Budget {
        Log::default().0.into_inner().unwrap()
    }

    #[test]
    fn a_flood_is_cut_to_a_line_a_second_and_the_rest_is_counted() {
        let mut budget = budget();
        let start = Instant(1) + Nanos::from_secs(100);
        // Ten thousand a second, for ten seconds.
        let written = (0..100_000u64).filter(|at| {
            let now = start + Nanos::from_micros(at * 100);
            budget.take(now).is_some()
        });
        let written = written.count() as u64;
        assert_eq!(written, u64::from(LINES_MAX) + 9);
        let next = budget.take(start + Nanos::from_secs(11)).expect("a second later");
        assert!(
            (9_000..=10_000).contains(&next.0),
            "{next:?}: those since the last line"
        );
        assert_eq!(
            next.to_string(),
            format!(
                " ({} lines about other connections of this address were withheld)",
                next.0
            )
        );
    }

    #[test]
    fn now_and_then_a_line_is_always_written() {
        let mut budget = budget();
        for second in 0..1000 {
            let taken = budget.take(Instant(7) + Nanos::from_secs(second));
            assert_eq!(taken, Some(Withheld(0)), "second {second}");
        }
    }

    #[test]
    fn an_idle_hour_earns_no_more_than_the_bucket_holds() {
        let mut budget = budget();
        let later = Instant(0) + Nanos::from_secs(3600);
        let written = (0..1000).filter(|_| budget.take(later).is_some()).count();
        assert_eq!(written, LINES_MAX as usize);
    }
}
