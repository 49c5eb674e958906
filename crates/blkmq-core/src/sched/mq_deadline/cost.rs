//! What a request costs in this elevator, insertion and dispatch together, at a steady number of queued ones.
//! `cargo test --release -p blkmq-core cost_of -- --ignored --nocapture` measures; the tests' own run only keeps it alive.

use super::*;
use crate::bio::{Bio, Op};
use crate::ids::ReactorId;
use crate::request::State;

/// Positions of the load: scattered, or each behind the one before but not touching it.
#[derive(Clone, Copy, Debug)]
enum Load {
    Random,
    Ascending,
    Merging,
}

/// Keeps `depth` requests queued for `count` requests; returns nanoseconds for each.
fn run(load: Load, depth: usize, count: u64, clock: impl Fn() -> u64) -> f64 {
    let mut elevator: Box<dyn Elevator> = Box::new(MqDeadline::new(Limits::default(), depth.max(64)));
    let mut pool: Vec<_> = (0..depth).map(|_| Request::free(ReactorId(0))).collect();
    let mut seed = 1u64;
    let mut inserted = 0;
    let begin = clock();
    while inserted < count {
        while let Some(mut rq) = pool.pop() {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            let block = match load {
                Load::Random => seed >> 24,
                Load::Ascending => inserted * 2,
                Load::Merging => inserted,
            };
            rq.state = State::Free;
            rq.start(bio(block, seed % 10 < 7), 0);
            inserted += 1;
            elevator.insert(rq, InsertAt::Ordered, Instant(inserted * 100));
        }
        for _ in 0..(depth / 4).max(1) {
            let Some(rq) = elevator.dispatch(Instant(inserted * 100)) else {
                break;
            };
            rq.take_apart(|rq| pool.push(rq));
        }
    }
    (clock() - begin) as f64 / count as f64
}

fn bio(block: u64, is_read: bool) -> Bio {
    Bio {
        op: if is_read { Op::Read } else { Op::Write },
        offset: block * 4096,
        len: 4096,
        ..Bio::default()
    }
}

#[test]
fn the_measurement_itself_works() {
    for load in [Load::Random, Load::Ascending, Load::Merging] {
        assert_eq!(run(load, 8, 1000, || 0), 0.0);
    }
}

#[test]
#[ignore = "a measurement, of use in a release build only"]
#[expect(
    clippy::disallowed_methods,
    reason = "measures real time; nothing here decides by it"
)]
fn cost_of_insert_and_dispatch() {
    let origin = std::time::Instant::now();
    let clock = || origin.elapsed().as_nanos() as u64;
    for load in [Load::Random, Load::Ascending, Load::Merging] {
        for depth in [1, 16, 64, 256, 1024, 4096] {
            let mut rounds: Vec<f64> = (0..5).map(|_| run(load, depth, 2_000_000, clock)).collect();
            rounds.sort_by(f64::total_cmp);
            let (min, median, max) = (rounds[0], rounds[2], rounds[4]);
            println!("{load:?} depth {depth}: {median:.1} ns per request ({min:.1} to {max:.1})");
        }
    }
}
