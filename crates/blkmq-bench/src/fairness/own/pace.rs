//! When a client may begin its next I/O: at once, at moments of its rate, or in bursts with pauses between them.
//! `own` asks before each I/O and sleeps until the moment that is named here.

use std::time::{Duration, Instant};

use super::super::scene::Load;

/// A client's pauses.
#[derive(Debug)]
pub(super) struct Pace {
    kind: Kind,
    /// No I/O begins before.
    next: Instant,
}

#[derive(Debug)]
enum Kind {
    /// As soon as fewer than the depth are under way.
    Flood,
    /// At most one in each period. A moment that is missed is not made up for: a late client would otherwise
    /// become a flood.
    Every(Duration),
    /// As many as the depth at once, then a rest from the end of the last of them on.
    Bursts { size: u32, left: u32, rest: Duration },
}

impl Pace {
    /// The pauses of a load that begins at `start`. Clients with other seeds begin in other phases: all of them
    /// at the same moments would measure each other.
    pub(super) fn new(load: &Load, seed: u64, start: Instant) -> Self {
        let (kind, period) = if load.rest_ms > 0 {
            let rest = Duration::from_millis(load.rest_ms.into());
            let (size, left) = (load.depth, load.depth);
            (Kind::Bursts { size, left, rest }, rest)
        } else if load.rate > 0 {
            let period = Duration::from_secs(1) / load.rate;
            (Kind::Every(period), period)
        } else {
            (Kind::Flood, Duration::ZERO)
        };
        let phase = (seed as f64 * GOLDEN).fract();
        Self {
            kind,
            next: start + period.mul_f64(phase),
        }
    }

    /// Whether an I/O may begin now.
    pub(super) fn lets_begin(&self, now: Instant) -> bool {
        now >= self.next && !matches!(self.kind, Kind::Bursts { left: 0, .. })
    }

    /// The moment from which on one may begin; none if others have to end before.
    pub(super) fn next(&self) -> Option<Instant> {
        let waits = matches!(self.kind, Kind::Bursts { left: 0, .. });
        (!waits).then_some(self.next)
    }

    /// Notes that one has begun.
    pub(super) fn began(&mut self, now: Instant) {
        match &mut self.kind {
            Kind::Flood => {}
            Kind::Every(period) => {
                let due = self.next + *period;
                self.next = if due > now { due } else { now + *period };
            }
            Kind::Bursts { left, .. } => *left -= 1,
        }
    }

    /// Notes that some have ended, or that time has passed; `is_idle` if none is under way.
    pub(super) fn ended(&mut self, now: Instant, is_idle: bool) {
        if let Kind::Bursts { size, left, rest } = &mut self.kind
            && *left == 0
            && is_idle
        {
            *left = *size;
            self.next = now + *rest;
        }
    }
}

/// The fractional parts of its multiples are spread evenly.
const GOLDEN: f64 = 0.618_033_988_749_895;

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn late_client_does_not_make_up_for_what_it_missed() {
        let start = Instant::now();
        let mut pace = Pace::new(&Load::reads(4096, 1).at(200), 0, start);
        assert!(pace.lets_begin(start));
        pace.began(start);
        assert!(!pace.lets_begin(start + 4 * MS) && pace.lets_begin(start + 5 * MS));
        // Begun 1 ms late: the next moment stays. Begun 20 ms late: it moves.
        pace.began(start + 6 * MS);
        assert_eq!(pace.next().unwrap(), start + 10 * MS);
        pace.began(start + 30 * MS);
        assert_eq!(pace.next().unwrap(), start + 35 * MS);
    }

    #[test]
    fn clients_of_one_rate_begin_in_different_phases() {
        let start = Instant::now();
        let phase = |seed| {
            Pace::new(&Load::reads(4096, 1).at(200), seed, start)
                .next()
                .unwrap()
                - start
        };
        let mut phases: Vec<Duration> = (0..8).map(phase).collect();
        phases.sort_unstable();
        assert!(
            phases.windows(2).all(|pair| pair[1] - pair[0] > MS / 4),
            "{phases:?}"
        );
        assert!(phases.iter().all(|phase| *phase < 5 * MS));
    }

    #[test]
    fn burst_is_whole_and_its_rest_begins_when_its_last_ends() {
        let start = Instant::now();
        let mut pace = Pace::new(&Load::reads(4096, 2).in_bursts(20), 0, start);
        pace.began(start);
        pace.began(start);
        assert!(!pace.lets_begin(start + 100 * MS));
        pace.ended(start + MS, false);
        assert!(!pace.lets_begin(start + 100 * MS));
        pace.ended(start + 2 * MS, true);
        assert!(!pace.lets_begin(start + 21 * MS) && pace.lets_begin(start + 22 * MS));
        pace.ended(start + 30 * MS, true);
        assert_eq!(pace.next().unwrap(), start + 22 * MS);
    }
}
