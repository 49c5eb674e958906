//! The pace at which an address accepts clients: some at once, and then one after the other. To let a client
//! in and out again takes 60 to 100 µs of the threads that serve; clients that come and go as fast as they
//! can would take all of it, and those that are served would wait behind them. Asked by `listener`.

use blkmq_core::time::{Instant, Nanos};

/// When the next one may come: the generic cell rate algorithm (ITU-T I.371), in virtual scheduling.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// When the next one would come if all came one [`INTERVAL`] behind the other.
    due: Instant,
}

impl Pace {
    /// Returns when the next one may come, if not now.
    pub(crate) fn wait(&self, now: Instant) -> Option<Instant> {
        let is_early = self.due > now + BURST;
        // Never later than `due`, so this detour loses nothing.
        is_early.then(|| now + self.due.since(now + BURST))
    }

    /// A client has come.
    pub(crate) fn note(&mut self, now: Instant) {
        self.due = self.due.max(now) + INTERVAL;
    }
}

/// Interval between clients: 2000 a second, about an eighth of a thread.
const INTERVAL: Nanos = Nanos::from_micros(500);
/// How much earlier a client may come: 64 at once.
const BURST: Nanos = Nanos::from_micros(63 * 500);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixty_four_come_at_once_and_then_two_thousand_a_second() {
        let mut pace = Pace::default();
        let mut now = Instant::default() + Nanos::from_secs(5);
        let start = now;
        let mut come_at_once = 0;
        while pace.wait(now).is_none() {
            pace.note(now);
            come_at_once += 1;
        }
        assert_eq!(come_at_once, 64);
        let mut come = 0;
        while now.since(start) < Nanos::from_secs(1) {
            match pace.wait(now) {
                Some(at) => now = at,
                None => {
                    pace.note(now);
                    come += 1;
                }
            }
        }
        assert!((1990..=2010).contains(&come), "{come} in a second");
        now = now + Nanos::from_millis(16);
        let again = (0..).take_while(|_| pace.wait(now).is_none().then(|| pace.note(now)).is_some());
        let again = again.count();
        assert!(
            (32..=33).contains(&again),
            "half of the burst has come back, not {again}"
        );
    }
}
