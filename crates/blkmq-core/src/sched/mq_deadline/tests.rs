//! Scenarios of the policy, one sentence each. The comparison with a naive model is in `tests/mq_deadline/`.

use super::*;
use crate::bio::{Bio, Class as PrioClass, Flags, Op, Prio};
use crate::ids::{DiskId, GroupId, ReactorId};
use crate::time::Nanos;

const BLOCK: u64 = 4096;
const MS: u64 = 1_000_000;

/// An elevator that is asked in blocks and milliseconds, and checked after every call.
struct Bench {
    elevator: MqDeadline,
    now: Instant,
}

impl Bench {
    fn new() -> Self {
        Self::with(Limits {
            discard_max: 1 << 30,
            zeroes_max: 1 << 30,
            ..Limits::default()
        })
    }

    fn with(limits: Limits) -> Self {
        Self {
            elevator: MqDeadline::new(limits, 256),
            now: Instant(0),
        }
    }

    fn set(mut self, name: &str, value: u64) -> Self {
        self.elevator.set_tunable(name, value).unwrap();
        self
    }

    fn wait_ms(&mut self, ms: u64) {
        self.now = self.now + Nanos(ms * MS);
    }

    fn insert(&mut self, bio: Bio) -> Inserted {
        let rq = Request::for_test(ReactorId(0), bio, 0);
        let inserted = self.elevator.insert(rq, InsertAt::Ordered, self.now);
        self.elevator.check_invariants();
        inserted
    }

    fn reads(&mut self, blocks: impl IntoIterator<Item = u64>) {
        for block in blocks {
            self.insert(read(block));
        }
    }

    fn writes(&mut self, blocks: impl IntoIterator<Item = u64>) {
        for block in blocks {
            self.insert(write(block));
        }
    }

    fn dispatch(&mut self) -> Option<Box<Request>> {
        let rq = self.elevator.dispatch(self.now);
        self.elevator.check_invariants();
        rq
    }

    /// The blocks at which the next `count` requests begin.
    fn next(&mut self, count: usize) -> Vec<u64> {
        let next = std::iter::from_fn(|| self.dispatch()).take(count);
        next.map(|rq| rq.position() / BLOCK).collect()
    }

    fn all(&mut self) -> Vec<u64> {
        self.next(usize::MAX)
    }
}

fn read(block: u64) -> Bio {
    Bio {
        op: Op::Read,
        offset: block * BLOCK,
        len: BLOCK,
        cookie: block,
        ..Bio::default()
    }
}

fn write(block: u64) -> Bio {
    Bio {
        op: Op::Write,
        ..read(block)
    }
}

fn of_class(class: PrioClass, bio: Bio) -> Bio {
    Bio {
        prio: Prio { class, level: 4 },
        ..bio
    }
}

fn cookies(rq: &Request) -> Vec<u64> {
    let mut cookies = Vec::new();
    rq.for_each_bio(|bio| cookies.push(bio.cookie));
    cookies
}

#[test]
fn batch_leaves_in_ascending_position() {
    let mut bench = Bench::new();
    bench.reads([50, 10, 40, 20, 30]);
    // The first batch begins at the sweep, which stands at 0.
    assert_eq!(bench.all(), [10, 20, 30, 40, 50]);
}

#[test]
fn sweep_goes_on_where_it_stands_and_begins_again_with_the_oldest() {
    let mut bench = Bench::new();
    bench.reads([30, 60]);
    assert_eq!(bench.next(1), [30]);
    bench.reads([20, 10, 40]);
    assert_eq!(bench.all(), [40, 60, 20, 10]);
}

#[test]
fn request_inserted_ahead_of_the_sweep_joins_the_batch() {
    let mut bench = Bench::new();
    bench.writes([10, 30]);
    assert_eq!(bench.next(1), [10]);
    bench.writes([20]);
    bench.reads([5]);
    assert_eq!(bench.all(), [20, 30, 5]);
}

#[test]
fn read_waits_for_one_batch_of_writes_at_most() {
    let mut bench = Bench::new().set("fifo_batch", 4);
    bench.writes((0..10).map(|n| 10 * n));
    assert_eq!(bench.next(2), [0, 10]);
    bench.reads([500]);
    assert_eq!(bench.next(4), [20, 30, 500, 40]);
}

#[test]
fn expired_read_overtakes_reads_of_better_position() {
    let mut bench = Bench::new().set("fifo_batch", 1);
    bench.reads([100]);
    assert_eq!(bench.next(1), [100]);
    bench.reads([50]);
    bench.wait_ms(499);
    bench.reads([200, 300, 400]);
    assert_eq!(bench.next(1), [200], "nothing has expired yet");
    bench.wait_ms(1);
    assert_eq!(bench.all(), [50, 300, 400]);
}

#[test]
fn expired_read_overtakes_sequential_writes_and_their_successors() {
    let mut bench = Bench::new();
    bench.writes((0..40).map(|n| 10 * n));
    assert_eq!(bench.next(3), [0, 10, 20]);
    bench.reads([7]);
    bench.wait_ms(500);
    bench.reads([8000, 9000]);
    let order = bench.next(17);
    assert_eq!(order[12], 150, "a batch is not cut short");
    assert_eq!(order[13..], [7, 8000, 9000, 160]);
}

#[test]
fn deadline_is_reached_with_its_last_nanosecond_not_before() {
    for (waited, expected) in [(500 * MS - 1, [20, 10]), (500 * MS, [10, 20])] {
        let mut bench = Bench::new().set("fifo_batch", 1);
        bench.reads([15]);
        assert_eq!(bench.next(1), [15]);
        bench.reads([10]);
        bench.now = Instant(waited);
        bench.reads([20]);
        assert_eq!(bench.all(), expected, "after {waited} ns");
    }
}

#[test]
fn writes_starve_for_two_batches_of_reads() {
    let mut bench = Bench::new().set("fifo_batch", 2);
    bench.reads((0..10).map(|n| 10 * n));
    bench.writes([1000, 1010, 1020]);
    let order = bench.all();
    assert_eq!(order[..7], [0, 10, 20, 30, 1000, 1010, 40]);
    assert_eq!(order[7..], [50, 60, 70, 1020, 80, 90]);
}

#[test]
fn reads_without_waiting_writes_are_not_counted_as_starving_them() {
    let mut bench = Bench::new().set("fifo_batch", 1);
    bench.reads((0..8).map(|n| 10 * n));
    assert_eq!(bench.next(4), [0, 10, 20, 30]);
    bench.writes([1000]);
    assert_eq!(bench.all(), [40, 50, 1000, 60, 70]);
}

#[test]
fn writes_go_first_when_they_may_not_starve_at_all() {
    let mut bench = Bench::new().set("fifo_batch", 1).set("writes_starved", 0);
    bench.reads([10, 20]);
    bench.writes([1000, 1010]);
    assert_eq!(bench.all(), [1000, 1010, 10, 20]);
}

#[test]
fn expired_write_goes_before_writes_of_better_position_but_not_before_reads() {
    let mut bench = Bench::new().set("fifo_batch", 1);
    bench.writes([500]);
    assert_eq!(bench.next(1), [500]);
    bench.writes([20]);
    bench.wait_ms(5000);
    bench.writes([600]);
    bench.reads([5]);
    assert_eq!(bench.all(), [5, 20, 600]);
}

#[test]
fn change_of_a_tunable_works_on_what_is_queued() {
    let mut bench = Bench::new().set("fifo_batch", 1);
    bench.reads([15]);
    assert_eq!(bench.next(1), [15]);
    bench.reads([10, 20]);
    bench.wait_ms(30);
    let mut bench = bench.set("read_expire", 20);
    assert_eq!(bench.all(), [10, 20]);
}

#[test]
fn discards_and_zeroing_wait_with_the_writes() {
    let mut bench = Bench::new().set("fifo_batch", 1);
    let other = |op, block| Bio { op, ..read(block) };
    bench.insert(other(Op::Discard, 10));
    bench.insert(other(Op::WriteZeroes, 20));
    bench.insert(write(30));
    bench.reads([40, 50, 60]);
    assert_eq!(bench.all(), [40, 50, 10, 60, 20, 30]);
}

#[test]
fn higher_class_goes_first() {
    let mut bench = Bench::new();
    bench.insert(of_class(PrioClass::Idle, read(1)));
    bench.insert(of_class(PrioClass::Be, read(10)));
    bench.insert(of_class(PrioClass::Rt, write(1000)));
    bench.insert(of_class(PrioClass::Rt, read(2000)));
    assert_eq!(bench.all(), [2000, 1000, 10, 1]);
}

#[test]
fn aged_class_gets_its_turn_once_and_not_before_its_time() {
    let mut bench = Bench::new();
    let rt = |block| of_class(PrioClass::Rt, read(block));
    bench.insert(of_class(PrioClass::Idle, read(1)));
    bench.wait_ms(1);
    bench.insert(of_class(PrioClass::Be, write(2)));
    bench.insert(of_class(PrioClass::Be, write(500)));
    bench.wait_ms(9998);
    for n in 0..4 {
        bench.insert(rt(10 * n));
    }
    assert_eq!(bench.next(1), [0]);
    bench.wait_ms(1);
    assert_eq!(bench.next(2), [1, 10], "the idle one has aged");
    bench.insert(of_class(PrioClass::Be, write(3)));
    bench.wait_ms(1);
    assert_eq!(bench.next(3), [2, 500, 20], "those of best effort too, merged");
}

#[test]
fn requeued_requests_go_before_others_of_their_class_in_the_order_of_their_return() {
    let mut bench = Bench::new();
    bench.writes([10, 20, 30]);
    let back = [bench.dispatch().unwrap(), bench.dispatch().unwrap()];
    bench.reads([5]);
    for rq in back {
        assert_eq!(
            bench.elevator.insert(rq, InsertAt::Head, bench.now),
            Inserted::Queued
        );
        bench.elevator.check_invariants();
    }
    bench.insert(of_class(PrioClass::Rt, read(1)));
    assert_eq!(bench.elevator.queued(), 5);
    assert_eq!(bench.next(3), [1, 10, 20]);
    assert_eq!(bench.all(), [30, 5], "the batch of writes goes on");
}

#[test]
fn neighbours_become_one_request_at_the_back_the_front_and_across_a_gap() {
    let mut bench = Bench::new();
    assert_eq!(bench.insert(read(10)), Inserted::Queued);
    assert_eq!(bench.insert(read(11)), Inserted::Merged);
    assert_eq!(bench.insert(read(9)), Inserted::Merged);
    assert_eq!(bench.insert(read(13)), Inserted::Queued);
    assert_eq!(bench.insert(read(14)), Inserted::Merged);
    assert_eq!(bench.elevator.queued(), 2);
    assert_eq!(bench.insert(read(12)), Inserted::Merged);
    assert_eq!(bench.elevator.queued(), 1);
    let rq = bench.dispatch().unwrap();
    assert_eq!((rq.position(), rq.len()), (9 * BLOCK, 6 * BLOCK));
    assert_eq!(cookies(&rq), [9, 10, 11, 12, 13, 14]);
    assert!(bench.dispatch().is_none());
}

#[test]
fn front_merges_can_be_switched_off_and_the_gap_still_closes() {
    let mut bench = Bench::new().set("front_merges", 0);
    bench.reads([10, 8]);
    assert_eq!(bench.elevator.queued(), 2);
    assert_eq!(bench.insert(read(7)), Inserted::Queued);
    assert_eq!(bench.insert(read(9)), Inserted::Merged);
    assert_eq!(bench.elevator.queued(), 2, "7 alone, then 8 to 10");
    assert_eq!(bench.all(), [7, 8]);
}

#[test]
fn request_that_closes_a_gap_keeps_the_earlier_deadline() {
    let mut bench = Bench::new().set("fifo_batch", 1);
    bench.reads([50]);
    assert_eq!(bench.next(1), [50]);
    bench.reads([12]);
    bench.wait_ms(400);
    bench.reads([10, 60, 70]);
    bench.reads([11]);
    bench.wait_ms(100);
    assert_eq!(bench.all(), [10, 60, 70], "10 to 12 has the deadline of 12");
}

#[test]
fn gap_stays_open_where_limits_say_so() {
    let mut bench = Bench::with(Limits {
        transfer_max: 2 * BLOCK as u32,
        ..Limits::default()
    });
    bench.reads([10, 12, 11]);
    assert_eq!(bench.elevator.queued(), 2);
    let first = bench.dispatch().unwrap();
    assert_eq!(cookies(&first), [10, 11]);
    assert_eq!(bench.all(), [12]);
}

#[test]
fn front_merge_moves_the_place_of_the_request() {
    let mut bench = Bench::new();
    bench.reads((0..100).map(|n| 10 * n + 5));
    bench.reads((0..100).rev().map(|n| 10 * n + 4));
    assert_eq!(bench.elevator.queued(), 100);
    let expected: Vec<u64> = (0..100).map(|n| 10 * n + 4).collect();
    assert_eq!(bench.all(), expected);
}

#[test]
fn requests_that_differ_in_kind_are_not_merged() {
    let mut bench = Bench::new();
    bench.insert(read(10));
    let next = read(11);
    let others = [
        write(11),
        of_class(PrioClass::Rt, next.clone()),
        Bio {
            group: GroupId(1),
            ..next.clone()
        },
        Bio {
            disk: DiskId(1),
            ..next.clone()
        },
        Bio {
            flags: Flags::NO_MERGE,
            ..next
        },
    ];
    for other in others {
        assert_eq!(bench.insert(other), Inserted::Queued);
    }
    assert_eq!(bench.elevator.queued(), 6);
}

#[test]
fn clock_that_differs_between_reactors_does_no_harm() {
    let mut bench = Bench::new();
    bench.wait_ms(1000);
    bench.reads([10]);
    bench.now = Instant(999 * MS);
    bench.reads([20, 30]);
    assert_eq!(bench.all(), [10, 20, 30]);
}

#[test]
#[should_panic(expected = "slots by arrival and by position")]
fn check_sees_a_request_that_is_missing_in_one_order() {
    let mut bench = Bench::new();
    bench.reads([10, 20, 30]);
    let MqDeadline { classes, held, .. } = &mut bench.elevator;
    classes[PrioClass::Be as usize].lose_one_by_arrival(held);
    bench.elevator.check_invariants();
}

#[test]
#[should_panic(expected = "kind of slot")]
fn check_sees_a_request_in_the_wrong_class() {
    let mut bench = Bench::new();
    bench.reads([10]);
    bench.elevator.classes.swap(0, 1);
    bench.elevator.check_invariants();
}
