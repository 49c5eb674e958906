//! Measures the cost of a request in each elevator, insertion, dispatch and completion together, at
//! a steady number of queued requests: CPU time of the thread, minus that of the same loop with a
//! plain queue instead of the elevator. `cargo test --release -p blkmq-core --test elevator_cost --
//! --ignored --nocapture` measures; an ordinary run only keeps the code working.

use std::collections::VecDeque;

use blkmq_core::bio::{Bio, Op};
use blkmq_core::group::GroupTree;
use blkmq_core::ids::{GroupId, ReactorId};
use blkmq_core::limits::Limits;
use blkmq_core::request::Request;
use blkmq_core::sched::{self, Elevator, ElevatorType, InsertAt, Inserted, Note, Setup};
use blkmq_core::time::{Instant, Nanos};

/// The load's positions, 70 % of them of reads.
#[derive(Clone, Copy, Debug)]
enum Load {
    /// Random.
    Random,
    /// Each after the previous one, without touching it.
    Ascending,
    /// Each directly after the previous one.
    Merging,
}

/// A plain queue, whose cost, the load's own, is subtracted.
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

/// Keeps up to `depth` requests of some groups queued until at least `count` bios were inserted;
/// returns nanoseconds for each bio.
fn run(
    elevator: &mut dyn Elevator,
    groups: u32,
    load: Load,
    depth: usize,
    count: u64,
    clock: fn() -> u64,
) -> f64 {
    let mut seed = 1u64;
    let (mut inserted, mut now) = (0, Instant(0));
    let begin = clock();
    while inserted < count {
        while elevator.queued() < depth {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            let block = match load {
                Load::Random => seed >> 24,
                Load::Ascending => inserted * 2,
                Load::Merging => inserted,
            };
            let group = GroupId((inserted % u64::from(groups)) as u32);
            let bio = Bio {
                group,
                ..bio(block, seed % 10 < 7)
            };
            let rq = Request::for_test(ReactorId(0), bio, 0);
            inserted += 1;
            now = now + Nanos(100);
            elevator.insert(rq, InsertAt::Ordered, now);
        }
        for _ in 0..(depth / 4).max(1) {
            // It may wait for a group that has just been served; time passes meanwhile.
            now = now + Nanos(100);
            give_out(elevator, now);
        }
    }
    (clock() - begin) as f64 / inserted as f64
}

/// Dispatches a request, which ends at once. Returns whether there was one.
fn give_out(elevator: &mut dyn Elevator, now: Instant) -> bool {
    let rq = elevator.dispatch(now);
    rq.inspect(|rq| elevator.completed(&Note::of(rq, now))).is_some()
}

fn bio(block: u64, is_read: bool) -> Bio {
    Bio {
        op: if is_read { Op::Read } else { Op::Write },
        offset: block * 4096,
        len: 4096,
        ..Bio::default()
    }
}

/// The depths; `DEPTHS=64,256` measures only these.
fn depths() -> Vec<usize> {
    let depths = std::env::var("DEPTHS").unwrap_or("1,16,64,256,1024,4096".to_owned());
    depths
        .split(',')
        .map(|depth| depth.parse().expect("DEPTHS holds numbers"))
        .collect()
}

/// The elevators with the numbers of groups; `KINDS=bfq` measures only that one.
fn cases() -> Vec<(&'static ElevatorType, u32)> {
    let kinds = std::env::var("KINDS").unwrap_or(sched::BUILT_IN.map(|kind| kind.name).join(","));
    let kinds = kinds.split(',').map(|name| {
        sched::Registry::default()
            .get(name)
            .expect("KINDS holds elevators")
    });
    let groups = |kind| {
        if kind == sched::BFQ {
            vec![1, 4, 64]
        } else {
            vec![1]
        }
    };
    kinds
        .flat_map(|kind| groups(kind).into_iter().map(move |groups| (kind, groups)))
        .collect()
}

fn build(kind: &'static ElevatorType, groups: u32, depth: usize) -> Option<Box<dyn Elevator>> {
    kind.build(&Setup {
        limits: &Limits::default(),
        requests_max: 2 * depth,
        groups: &GroupTree::flat(groups),
    })
}

/// CPU time of this thread in nanoseconds, which excludes other load on the machine.
fn cpu_time() -> u64 {
    let line = std::fs::read_to_string("/proc/thread-self/schedstat").expect("schedstat of this thread");
    let first = line.split(' ').next().expect("schedstat has three numbers");
    first.parse().expect("schedstat begins with a number")
}

#[test]
fn measurement_itself_works() {
    for (kind, groups) in cases() {
        let Some(mut elevator) = build(kind, groups, 8) else {
            continue;
        };
        for load in [Load::Random, Load::Ascending, Load::Merging] {
            assert_eq!(run(&mut *elevator, groups, load, 8, 1000, || 0), 0.0);
            while give_out(&mut *elevator, Instant(0)) {}
        }
    }
}

#[test]
#[ignore = "a measurement: cargo test --release -p blkmq-core --test elevator_cost -- --ignored --nocapture"]
fn cost_of_insert_and_dispatch() {
    const ROUNDS: usize = 7;
    let count = std::env::var("COUNT").map_or(2_000_000, |count| count.parse().expect("COUNT is a number"));
    for (kind, groups) in cases() {
        for load in [Load::Random, Load::Ascending, Load::Merging] {
            for depth in depths() {
                let Some(mut elevator) = build(kind, groups, depth) else {
                    continue;
                };
                let mut rounds: Vec<f64> = (0..ROUNDS)
                    .map(|_| {
                        let plain = run(&mut Plain::default(), groups, load, depth, count, cpu_time);
                        run(&mut *elevator, groups, load, depth, count, cpu_time) - plain
                    })
                    .collect();
                rounds.sort_by(f64::total_cmp);
                let (min, median, max) = (rounds[0], rounds[ROUNDS / 2], rounds[ROUNDS - 1]);
                println!(
                    "{kind}, groups {groups}, {load:?}, depth {depth}: {median:.1} ns per bio ({min:.1} to {max:.1})"
                );
            }
        }
    }
}
