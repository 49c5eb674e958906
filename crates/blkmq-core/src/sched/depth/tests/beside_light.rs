//! A flood beside tenants who pause: the law against a drive of one link, where small reads arrive by themselves, and
//! the host answers late.

use super::super::*;

/// 300 MB/s, and 100 µs for each request beside.
const LATENCY: u64 = 100_000;
const RATE: u64 = 300_000_000;
const LARGE: u64 = 64 << 10;
const SMALL: u64 = 4 << 10;

struct Host {
    law: DepthLaw,
    now: u64,
    seed: u64,
    link_free: u64,
    units: [u64; 4],
    /// When each request in flight is seen to end, when it was issued, and its size.
    in_flight: Vec<(u64, u64, u64)>,
    light_waits: u32,
    light_next: u64,
    /// Light reads a second, of all tenants together.
    light_rate: u64,
    /// How late the host may see an end.
    late_ns: u64,
}

impl Host {
    fn new(light_rate: u64, late_ns: u64) -> Self {
        let mut law = DepthLaw::new(256);
        law.set_contended(true, 0, Instant(0));
        Self {
            law,
            now: 0,
            seed: 7,
            link_free: 0,
            units: [0; 4],
            in_flight: Vec::new(),
            light_waits: 0,
            light_next: 1,
            light_rate,
            late_ns,
        }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed % below.max(1)
    }

    fn issue(&mut self, bytes: u64) {
        let unit = (0..4).min_by_key(|unit| self.units[*unit]).expect("four");
        let begin = self.units[unit].max(self.now);
        self.link_free = self.link_free.max(begin) + bytes * 1_000_000_000 / RATE;
        let end = self.link_free.max(begin + LATENCY);
        self.units[unit] = end;
        let seen = end + self.random(2 * self.late_ns);
        self.in_flight.push((seen, self.now, bytes));
    }

    fn dispatch(&mut self) {
        while self.light_next <= self.now {
            self.light_waits += 1;
            self.light_next += self.random(2_000_000_000 / self.light_rate);
        }
        loop {
            let (n, limit) = (self.in_flight.len() as u32, self.law.limit());
            let urgent = limit + (limit / 4).max(1);
            if self.light_waits > 0 && n < urgent {
                self.light_waits -= 1;
                self.issue(SMALL);
            } else if n < limit {
                self.issue(LARGE);
            } else {
                break;
            }
        }
        self.law.note_full();
    }

    /// The flood's bytes as a part of what the link could carry, in percent.
    fn run(&mut self, ms: u64) -> u64 {
        let (start, mut bytes, mut light) = (self.now, 0, 0);
        while self.now < start + ms * 1_000_000 {
            self.dispatch();
            let at = (0..self.in_flight.len()).min_by_key(|at| self.in_flight[*at].0);
            let at = at.expect("a flood");
            if self.light_next < self.in_flight[at].0 {
                self.now = self.now.max(self.light_next);
                continue;
            }
            let (seen, issued, size) = self.in_flight.swap_remove(at);
            self.now = self.now.max(seen);
            if size == LARGE {
                bytes += size
            } else {
                light += size
            }
            let n = self.in_flight.len() as u32;
            self.law.completed(
                Direction::Read,
                size,
                Nanos(self.now - issued),
                n,
                Instant(self.now),
                || size == LARGE,
            );
        }
        let carried = u128::from(RATE) * u128::from(self.now - start) / 1_000_000_000;
        (u128::from(bytes) * 100 / (carried - u128::from(light))) as u64
    }
}

/// The least part of the link that the flood has in any half second.
fn worst_part(light_rate: u64, late_us: u64) -> u64 {
    let mut host = Host::new(light_rate, late_us * 1000);
    host.run(2000);
    (0..8).map(|_| host.run(500)).min().expect("eight")
}

/// What light tenants send does not grow with the limit: if it counts, chance hides the gain of the flood.
#[test]
fn trials_beside_many_light_tenants_find_what_a_flood_gains_on_a_late_host() {
    for (light_rate, late_us, least) in [(1600, 50, 95), (1600, 100, 97), (3600, 100, 93), (3600, 200, 92)] {
        let part = worst_part(light_rate, late_us);
        assert!(
            part >= least,
            "{light_rate} light reads a second, {late_us} us late: {part} %"
        );
    }
}

#[test]
fn trials_beside_light_tenants_alone_end_without_a_verdict() {
    let mut host = Host::new(1600, 20);
    host.run(500);
    host.law.begin_trial(2, true);
    host.law.open(0, Instant(host.now));
    let mut completions = 0;
    while matches!(host.law.phase, Phase::Trial { .. }) {
        host.now += 600_000;
        let now = Instant(host.now);
        host.law
            .completed(Direction::Read, SMALL, Nanos(LATENCY), 0, now, || false);
        completions += 1;
        assert!(
            completions < 2 * COMPLETIONS_TRIAL * INELASTIC_TIMES,
            "a trial without end"
        );
    }
    assert_eq!((host.law.phase, host.law.slack), (Phase::Resting, SLACK_MIN));
}
