//! Tests the events that a trace reports of requests, with a driver that the test controls.

mod common;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use blkmq_core::bio::{Bio, Op, Status};
use blkmq_core::driver::Issued;
use blkmq_core::group::{CapKind, Caps, GroupTree, ROOT};
use blkmq_core::queue::QueueConfig;
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::Nanos;
use blkmq_core::trace::{Event, NoEvent, Receiver, Sender, Step, Tracer};
use blkmq_sync::shared_ring::{Memory, words_of};
use common::{Bench, bio, config};

use Step::{Completed, HeldBack, Inserted, Issued as Sent, Merged, Queued, Requeued};

/// Memory of this process only.
struct Words(Vec<AtomicU64>);

impl Memory for Words {
    fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

/// Traces one side of a bench, with room for 64 events.
fn trace(bench: &mut Bench, side: usize) -> Receiver {
    let words = (0..words_of(64)).map(|_| AtomicU64::new(0));
    let memory = Arc::new(Words(words.collect()));
    let tracer = Tracer::new(Rc::new(RefCell::new(Sender::new(memory.clone()))), 7);
    bench.sides[side].local.set_tracer(Some(tracer));
    let mut receiver = Receiver::new(memory);
    let first = drained(&mut receiver);
    assert_eq!((first.len(), first[0].step), (1, Step::Renumbered));
    receiver
}

fn drained(receiver: &mut Receiver) -> Vec<Event> {
    let mut all = Vec::new();
    let keep = |event: Event| {
        all.push(event);
        Ok::<_, NoEvent>(())
    };
    receiver.drain(keep).expect("events");
    all
}

/// The steps, with the block and the number of blocks.
fn steps(receiver: &mut Receiver) -> Vec<(Step, u64, u32)> {
    let all = drained(receiver).into_iter();
    all.map(|event| (event.step, event.offset / 4096, event.len / 4096))
        .collect()
}

fn bench(elevator: &'static ElevatorType) -> Bench {
    Bench::new(QueueConfig {
        elevator,
        ..config(1)
    })
}

fn send(bench: &mut Bench, bios: impl IntoIterator<Item = Bio>) {
    bios.into_iter().for_each(|bio| bench.submit(0, bio));
    bench.unplug(0);
}

#[test]
fn request_of_the_direct_path_is_queued_issued_and_completed() {
    for ends_at_once in [false, true] {
        let mut bench = bench(sched::NONE);
        bench.sides[0].hand.borrow_mut().inline = ends_at_once;
        let mut events = trace(&mut bench, 0);
        send(&mut bench, [bio(Op::Read, 10, 1, 1)]);
        bench.run_dry();
        let way = [Queued, Sent, Completed].map(|step| (step, 10, 1));
        assert_eq!(steps(&mut events), way, "ends at once: {ends_at_once}");
        bench.sides[0].local.set_tracer(None);
        send(&mut bench, [bio(Op::Read, 10, 1, 1)]);
        bench.run_dry();
        assert_eq!(steps(&mut events), []);
    }
}

#[test]
fn bios_that_are_merged_in_the_plug_or_in_the_elevator_are_told_once_each() {
    let mut bench = bench(sched::MQ_DEADLINE);
    bench.queue.set_depth(1).expect("a depth");
    let mut events = trace(&mut bench, 0);
    send(&mut bench, [bio(Op::Write, 500, 1, 0)]);
    send(
        &mut bench,
        [
            bio(Op::Write, 0, 1, 1),
            bio(Op::Write, 1, 2, 2),
            bio(Op::Write, 3, 1, 3),
        ],
    );
    send(&mut bench, [bio(Op::Write, 4, 1, 4)]);
    steps(&mut events);
    bench.end_all(0, Status::Ok);
    bench.run_dry();
    let all = steps(&mut events);
    assert_eq!(
        all,
        [
            (Completed, 500, 1),
            (Merged, 4, 1),
            (Sent, 0, 5),
            (Completed, 0, 5)
        ]
    );
    assert_eq!(bench.ended(0).len(), 5);

    send(
        &mut bench,
        [
            bio(Op::Write, 0, 1, 1),
            bio(Op::Write, 1, 2, 2),
            bio(Op::Write, 3, 1, 3),
        ],
    );
    bench.run_dry();
    let way = [
        (Queued, 0, 1),
        (Queued, 1, 2),
        (Merged, 1, 2),
        (Queued, 3, 1),
        (Merged, 3, 1),
        (Inserted, 0, 4),
        (Sent, 0, 4),
        (Completed, 0, 4),
    ];
    assert_eq!(steps(&mut events), way);
}

#[test]
fn requeue_is_traced_for_a_retry_and_no_issue_for_a_request_pushed_back() {
    let mut bench = bench(sched::NONE);
    let mut events = trace(&mut bench, 0);
    let answers = [Issued::DeviceResource, Issued::Done(Status::Requeue)];
    bench.sides[0].hand.borrow_mut().answers.extend(answers);
    send(&mut bench, [bio(Op::Read, 3, 1, 1)]);
    bench.now = bench.now + Nanos::from_millis(10);
    bench.run_dry();
    let way = [Queued, Sent, Requeued, Sent, Completed].map(|step| (step, 3, 1));
    assert_eq!(steps(&mut events), way);
}

#[test]
fn request_that_waits_for_a_cap_is_held_back() {
    for kind in sched::BUILT_IN {
        let mut bench = Bench::new(QueueConfig {
            groups: GroupTree::new(2),
            elevator: kind,
            merges: false,
            ..config(1)
        });
        let group = bench.queue.create_group(ROOT, 100).unwrap().unwrap();
        let caps = Caps::default().with(CapKind::Iops, 100);
        bench
            .queue
            .set_group_caps(group, caps, bench.now)
            .unwrap()
            .unwrap();
        let mut events = trace(&mut bench, 0);
        let of_group = |block| Bio {
            group,
            ..bio(Op::Read, block, 1, block)
        };
        send(&mut bench, [of_group(1), of_group(5), of_group(9)]);
        let held: Vec<_> = steps(&mut events)
            .into_iter()
            .filter(|step| step.0 == HeldBack)
            .collect();
        assert_eq!(held, [(HeldBack, 5, 1), (HeldBack, 9, 1)], "{kind}");
    }
}

#[test]
fn events_say_whose_they_are_and_those_without_room_are_counted() {
    let mut bench = bench(sched::NONE);
    let mut events = trace(&mut bench, 0);
    let mut failing = bio(Op::Write, 0, 1, 1);
    failing.disk.0 = 1;
    send(&mut bench, [failing]);
    bench.end_all(0, Status::Medium);
    bench.run_until_idle();
    let all = drained(&mut events);
    let last = all.last().expect("three");
    assert_eq!((last.queue, last.disk.0, last.op), (7, 1, Op::Write));
    assert_eq!((last.step, last.status), (Completed, Status::Medium));
    assert_eq!(events.take_dropped(), 0);
    for block in 0..40 {
        send(&mut bench, [bio(Op::Read, 2 * block, 1, block)]);
        bench.run_dry();
    }
    assert_eq!(steps(&mut events).len(), 64);
    assert_eq!((events.take_dropped(), events.take_dropped()), (3 * 40 - 64, 0));
}

#[test]
fn disks_that_may_be_others_are_told_between_events() {
    let mut bench = bench(sched::NONE);
    let mut events = trace(&mut bench, 0);
    send(&mut bench, [bio(Op::Read, 1, 1, 1)]);
    bench.run_dry();
    bench.sides[0].local.refresh_disks().expect("the same disks");
    send(&mut bench, [bio(Op::Read, 2, 1, 2)]);
    bench.run_dry();
    let all: Vec<Step> = steps(&mut events).into_iter().map(|(step, ..)| step).collect();
    let way = [Queued, Sent, Completed];
    assert_eq!(all, [&way[..], &[Step::Renumbered], &way[..]].concat());
}
