//! The cost of a path for `historical-service-time`: a moving average of the time that its requests took
//! one after another. An old average gives way to the first new time. `choice` keeps one for each path.

use crate::time::{Instant, Nanos};

/// One context's history of one path for `historical-service-time`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct History {
    /// Moving average of the serialised service time, in 1/16 ns; none before the first end.
    average: Option<u64>,
    finished: Instant,
    chosen: Instant,
    /// The average is too old: the next end replaces it.
    renews: bool,
}

impl History {
    /// Notes that `count` requests, the first of them started at `start`, have ended together: the time since
    /// then, or since the previous end, is the time that they took one after another. Returns the average.
    pub(super) fn ended(&mut self, start: Instant, count: u64, now: Instant) -> Nanos {
        let each = now.since(start.max(self.finished)).0.saturating_mul(SCALE) / count;
        self.finished = now;
        let weight = (2 * count).min(SCALE);
        let average = match self.average {
            Some(average) if !self.renews => {
                (average * (SCALE - weight)).saturating_add(each.saturating_mul(weight)) / SCALE
            }
            _ => each,
        };
        self.renews = false;
        self.average = Some(average);
        Nanos(average / SCALE)
    }

    /// The cost of one more request; without a history, the first request costs nothing, and further ones
    /// wait for its end.
    #[inline]
    pub(super) fn cost(&self, in_flight: u32) -> u64 {
        match self.average {
            Some(average) => average.saturating_mul(u64::from(in_flight) + 1),
            None if in_flight == 0 => 0,
            None => u64::MAX,
        }
    }

    pub(super) fn is_stale(&self, in_flight: u32, now: Instant) -> bool {
        in_flight == 0 && now.since(self.chosen) >= STALE
    }

    pub(super) fn choose(&mut self, is_stale: bool, now: Instant) {
        self.renews |= is_stale;
        self.chosen = now;
    }
}

const SCALE: u64 = 16;
/// A path that was not chosen for this long is tried.
const STALE: Nanos = Nanos::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_average_gives_way_to_the_first_new_time() {
        let mut history = History::default();
        let mut now = Instant(0);
        for _ in 0..50 {
            let start = now;
            now = now + Nanos::from_micros(800);
            history.ended(start, 1, now);
        }
        assert_eq!(history.average, Some(800_000 * SCALE));
        history.choose(true, now + STALE);
        let end = now + STALE + Nanos::from_micros(20);
        assert_eq!(history.ended(now + STALE, 1, end), Nanos::from_micros(20));
    }

    #[test]
    fn requests_served_side_by_side_share_the_time() {
        let mut history = History::default();
        assert_eq!(history.ended(Instant(0), 8, Instant(800)), Nanos(100));
        assert_eq!(history.ended(Instant(100), 8, Instant(1600)), Nanos(100));
    }
}
