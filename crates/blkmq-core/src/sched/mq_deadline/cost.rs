//! What a request costs in this elevator, insertion and dispatch together, at a steady number of queued ones: CPU time
//! of the thread, less what the same loop costs with a plain queue in the elevator's place.
//! `cargo test --release -p blkmq-core cost_of -- --ignored --nocapture` measures; the tests' own run only keeps it alive.

use std::collections::VecDeque;

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

/// What is subtracted: the load's own cost.
#[derive(Default)]
struct Plain(VecDeque<Box<Request>>);

impl Elevator for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn insert(&mut self, rq: Box<Request>, _at: InsertAt, _now: Instant) -> Inserted {
        self.0.push_back(rq);
        Inserted::Queued
    }

    fn dispatch(&mut self, _now: Instant) -> Option<Box<Request>> {
        self.0.pop_front()
    }

    fn queued(&self) -> usize {
        self.0.len()
    }
}

fn mq_deadline(depth: usize) -> Box<dyn Elevator> {
    Box::new(MqDeadline::new(Limits::default(), depth))
}

/// Keeps `depth` requests queued for `count` requests; returns nanoseconds for each.
fn run(elevator: &mut dyn Elevator, load: Load, depth: usize, count: u64, clock: fn() -> u64) -> f64 {
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

/// The time this thread has had a CPU for, in nanoseconds: other load on the machine is not counted.
fn cpu_time() -> u64 {
    let line = std::fs::read_to_string("/proc/thread-self/schedstat").expect("schedstat of this thread");
    let first = line.split(' ').next().expect("schedstat has three numbers");
    first.parse().expect("schedstat begins with a number")
}

#[test]
fn the_measurement_itself_works() {
    for load in [Load::Random, Load::Ascending, Load::Merging] {
        assert_eq!(run(&mut *mq_deadline(8), load, 8, 1000, || 0), 0.0);
    }
}

#[test]
#[ignore = "a measurement, of use in a release build only"]
fn cost_of_insert_and_dispatch() {
    const COUNT: u64 = 500_000;
    for load in [Load::Random, Load::Ascending, Load::Merging] {
        for depth in [1, 16, 64, 256, 1024, 4096] {
            let mut rounds: Vec<f64> = (0..9)
                .map(|_| {
                    let plain = run(&mut Plain::default(), load, depth, COUNT, cpu_time);
                    run(&mut *mq_deadline(depth), load, depth, COUNT, cpu_time) - plain
                })
                .collect();
            rounds.sort_by(f64::total_cmp);
            let (min, median, max) = (rounds[0], rounds[4], rounds[8]);
            println!("{load:?} depth {depth}: {median:.1} ns per request ({min:.1} to {max:.1})");
        }
    }
}
