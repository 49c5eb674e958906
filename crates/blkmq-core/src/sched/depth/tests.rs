//! The law against drives of known shape, in a closed loop: as many requests as it allows are always in flight.

mod beside_light;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::*;

/// A drive: what a request takes that is issued while `in_flight` are inside, and whether requests wait for units.
struct Drive {
    units: usize,
    /// Time of a request at so many in flight.
    service: fn(u32) -> u64,
    /// Part of the time by which a request's own may be off, in percent.
    spread: u64,
}

struct Loop {
    law: DepthLaw,
    drive: Drive,
    /// When each unit is free.
    units: BinaryHeap<Reverse<u64>>,
    /// When requests end, and when they were issued.
    ends: BinaryHeap<Reverse<(u64, u64)>>,
    now: u64,
    seed: u64,
    demand: u32,
    /// The requests.
    kind: (Direction, u64),
    /// What ends is seen during the first so many of every so many ns; else at the beginning of the next ones.
    awake: (u64, u64),
}

impl Loop {
    fn new(drive: Drive, max: u32, demand: u32) -> Self {
        let mut law = DepthLaw::new(max);
        law.set_contended(true, 0, Instant(0));
        Self {
            law,
            units: (0..drive.units).map(|_| Reverse(0)).collect(),
            drive,
            ends: BinaryHeap::new(),
            now: 0,
            seed: 7,
            demand,
            kind: (Direction::Read, 4096),
            awake: (1, 1),
        }
    }

    /// When a completion is seen.
    fn seen_at(&self, end: u64) -> u64 {
        let (awake, period) = self.awake;
        if end % period < awake {
            end
        } else {
            end.next_multiple_of(period)
        }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed % below.max(1)
    }

    fn issue(&mut self) {
        let base = (self.drive.service)(self.ends.len() as u32 + 1);
        let off = base * self.drive.spread / 100;
        let time = base - off + self.random(2 * off + 1);
        let Reverse(free) = self.units.pop().expect("a drive has units");
        let end = free.max(self.now) + time;
        self.units.push(Reverse(end));
        self.ends.push(Reverse((end, self.now)));
    }

    /// Runs for a time; returns requests per second and their mean time in the drive in ns.
    fn run(&mut self, ms: u64) -> (u64, u64) {
        let (start, mut count, mut occupied) = (self.now, 0u64, 0u64);
        while self.now < start + ms * 1_000_000 {
            while (self.ends.len() as u32) < self.law.limit().min(self.demand) {
                self.issue();
            }
            if (self.ends.len() as u32) < self.demand {
                self.law.note_full();
            }
            let Reverse((end, issued)) = self.ends.pop().expect("something is in flight");
            let end = self.seen_at(end).max(self.now);
            occupied += (self.ends.len() as u64 + 1) * (end - self.now);
            self.now = end;
            count += 1;
            let time = Nanos(end - issued);
            let in_flight = self.ends.len() as u32;
            self.law.completed(
                self.kind.0,
                self.kind.1,
                time,
                in_flight,
                Instant(self.now),
                || true,
            );
        }
        let elapsed = self.now - start;
        (count * 1_000_000_000 / elapsed, occupied / count.max(1))
    }
}

fn flash(units: usize, spread: u64) -> Drive {
    Drive {
        units,
        service: |_| 80_000,
        spread,
    }
}

/// Throughput at the full depth, the law switched off.
fn full(drive: Drive, max: u32, demand: u32) -> u64 {
    let mut free = Loop::new(drive, max, demand);
    free.law.set_contended(false, 0, Instant(0));
    free.run(1000).0
}

/// Requests that add to each other's time: 1/2500 ns of them at most, and less when few are in flight.
fn soft() -> Drive {
    Drive {
        units: 4096,
        service: |n| 20_000 + u64::from(n) * 2_500,
        spread: 30,
    }
}

/// As before, but beyond some depth each more costs all the others.
fn overloaded() -> Drive {
    Drive {
        service: |n| 10_000 + u64::from(n) * 2_500 + u64::from(n) * u64::from(n) * 3,
        ..soft()
    }
}

#[test]
fn drive_of_equal_units_is_filled_and_hardly_more() {
    for (units, spread) in [(1, 0), (4, 20), (16, 20), (32, 0), (32, 50), (128, 20)] {
        let mut run = Loop::new(flash(units, spread), 1024, 2048);
        run.run(4000);
        let (rate, time) = run.run(2000);
        let best = full(flash(units, spread), 1024, 2048);
        assert!(rate * 100 >= best * 98, "{units} units: {rate} of {best}");
        // One more than the drive works on, and a quarter.
        let time_max = 80_000 * (units as u64 * 5 / 4 + 1) * 21 / 20 / units as u64;
        assert!(time <= time_max, "{units} units: {time} ns in the drive");
    }
}

#[test]
fn drive_whose_throughput_bends_slowly_keeps_most_of_it() {
    let best = full(soft(), 1024, 2048);
    let mut run = Loop::new(soft(), 1024, 2048);
    run.run(1000);
    let (rate, time) = run.run(4000);
    assert!(rate * 100 >= best * 85, "{rate} of {best}");
    assert!(
        time < 400_000,
        "{time} ns in the drive, against 2.6 ms at the full depth"
    );
}

#[test]
fn overloaded_drive_is_relieved() {
    let best = full(overloaded(), 1024, 2048);
    let mut run = Loop::new(overloaded(), 1024, 2048);
    run.run(1000);
    let (rate, _) = run.run(2000);
    assert!(rate * 10 >= best * 15, "{rate} against {best} at the full depth");
}

#[test]
fn first_descent_takes_a_fraction_of_a_second() {
    let mut run = Loop::new(flash(32, 20), 1024, 2048);
    run.run(200);
    let (_, time) = run.run(50);
    assert!(time < 2 * 80_000, "{time} ns in the drive after 200 ms");
}

#[test]
fn drive_that_becomes_wider_or_narrower_is_followed() {
    for (before, after) in [(16, 64), (64, 16)] {
        let mut run = Loop::new(flash(before, 20), 256, 2048);
        run.run(1000);
        let at = run.now;
        run.units = (0..after).map(|_| Reverse(at)).collect();
        run.drive = flash(after, 20);
        run.run(1000);
        let (rate, time) = run.run(500);
        let best = full(flash(after, 20), 256, 2048);
        assert!(rate * 100 >= best * 96, "{before} to {after}: {rate} of {best}");
        assert!(
            time < 80_000 * 3 / 2,
            "{before} to {after}: {time} ns in the drive"
        );
    }
}

#[test]
fn demand_that_the_drive_can_carry_is_let_through() {
    let mut run = Loop::new(flash(64, 20), 256, 40);
    run.run(1000);
    let (rate, _) = run.run(1000);
    let best = full(flash(64, 20), 256, 40);
    assert!(rate * 100 >= best * 97, "{rate} of {best}");
}

#[test]
fn trials_in_vain_below_the_limit_become_rare_though_the_limit_moves() {
    let mut run = Loop::new(flash(16, 60), 256, 64);
    run.run(1000);
    let mut done = 0;
    for round in 0..300 {
        // For a moment the limit binds, and follows a work that is another each time; then others hold the requests back.
        run.drive.service = if round % 2 == 0 { |_| 200_000 } else { |_| 80_000 };
        run.demand = 64;
        run.run(4);
        run.drive.service = |_| 80_000;
        run.demand = 6;
        done += run.run(20).0;
    }
    let best = full(flash(16, 60), 256, 6);
    let rate = done / 300;
    assert!(rate * 100 >= best * 95, "{rate} of {best}");
}

#[test]
fn group_that_is_alone_gets_all_and_a_short_calm_forgets_nothing() {
    let mut run = Loop::new(flash(16, 20), 256, 2048);
    run.run(1000);
    let learnt = run.law.operating;
    assert!((16..=22).contains(&learnt), "operating depth {learnt}");
    run.law.set_contended(false, 0, Instant(run.now));
    assert_eq!(run.law.limit(), 256);
    run.run(100);
    run.law.set_contended(true, 0, Instant(run.now));
    assert_eq!(run.law.operating, learnt);
    assert!(run.law.limit() <= learnt * 3 / 2, "limit {}", run.law.limit());
}

#[test]
fn stalls_of_the_drive_do_not_shut_it() {
    let mut run = Loop::new(flash(16, 80), 256, 2048);
    let mut done = 0;
    for _ in 0..400 {
        done += run.run(10).0 / 100;
        // All units stand still for 3 ms, as in a collection of garbage.
        let until = run.now + 3_000_000;
        run.units = run
            .units
            .drain()
            .map(|Reverse(free)| Reverse(free.max(until)))
            .collect();
    }
    let elapsed_s = run.now / 1_000_000;
    let possible = 16 * 10_000 / 13 * elapsed_s / 1000 * 1000 / 80;
    // The windows after a stall are passed over, so little more than the units themselves is in flight.
    assert!(
        done * 100 >= possible * 88,
        "{done} of {possible}; operating depth {}",
        run.law.operating
    );
}

#[test]
fn lack_of_processor_time_is_not_taken_for_a_deep_drive() {
    let mut run = Loop::new(flash(16, 20), 1024, 192);
    run.awake = (4_000_000, 12_000_000);
    run.run(3000);
    assert!(run.law.operating <= 32, "operating depth {}", run.law.operating);
}

/// A drive of large writes: two of 300 µs at once.
fn slow() -> Drive {
    Drive {
        units: 2,
        service: |_| 300_000,
        spread: 20,
    }
}

#[test]
fn slow_drive_is_not_flooded_for_long_however_much_it_could_hold() {
    let mut run = Loop::new(slow(), 4096, 288);
    run.run(500);
    let limit = run.law.limit();
    assert!(limit <= 6, "{limit} after half a second");
    let (rate, _) = run.run(2000);
    let best = full(slow(), 4096, 288);
    assert!(rate * 100 >= best * 97, "{rate} of {best}");
}

#[test]
fn wide_drive_is_filled_within_a_second() {
    let mut run = Loop::new(flash(512, 20), 4096, 2048);
    run.run(1000);
    let (rate, _) = run.run(1000);
    let best = full(flash(512, 20), 4096, 2048);
    assert!(rate * 100 >= best * 97, "{rate} of {best}");
}

#[test]
fn change_of_sizes_and_of_speed_is_followed_within_50_ms() {
    let mut run = Loop::new(flash(16, 20), 256, 64);
    let mut change = |drive: fn() -> Drive, kind: (Direction, u64)| {
        run.drive = drive();
        run.units = (0..run.drive.units).map(|_| Reverse(run.now)).collect();
        run.kind = kind;
        run.run(50);
        let operating = run.law.operating;
        run.run(3000);
        operating
    };
    let (small, large) = ((Direction::Read, 4096), (Direction::Write, 256 << 10));
    let sixteen: fn() -> Drive = || flash(16, 20);
    let ten_times_slower: fn() -> Drive = || Drive {
        service: |_| 800_000,
        ..flash(16, 20)
    };
    for (drive, kind, limits) in [
        (sixteen, small, 14..32),
        (slow as fn() -> Drive, large, 2..6),
        (sixteen, small, 14..32),
        (ten_times_slower, small, 12..40),
        (sixteen, small, 14..40),
    ] {
        let operating = change(drive, kind);
        assert!(
            limits.contains(&operating),
            "{operating} for {kind:?}, not {limits:?}"
        );
    }
}

/// Small requests that a wide drive takes at once open the limit; then large ones come, of which it takes one.
#[test]
fn kind_first_seen_while_the_limit_grows_is_measured_without_a_queue() {
    let mut law = Loop::new(flash(16, 0), 256, 12);
    while law.law.limit() < 7 {
        law.run(1);
    }
    assert_eq!(law.law.phase, Phase::Growing);
    law.units = [Reverse(law.now)].into();
    law.drive.service = |_| 200_000;
    (law.kind, law.demand) = ((Direction::Read, 64 << 10), 32);
    law.run(50);
    let (_, time) = law.run(20);
    assert!(time < 6 * 200_000, "requests take {time} ns of 200,000");
}
