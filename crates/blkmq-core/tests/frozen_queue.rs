//! Tests what a frozen and a quiesced queue start and issue, and what continues afterwards.

mod common;

use blkmq_core::bio::{Bio, Op, Status};
use blkmq_core::group::GroupTree;
use blkmq_core::ids::GroupId;
use blkmq_core::queue::TagMode;
use blkmq_core::sched::{self, ElevatorType};
use common::{Bench, bio, config};

const KINDS: [&ElevatorType; sched::BUILT_IN.len()] = sched::BUILT_IN;

#[test]
fn frozen_queue_drains_and_starts_nothing_until_it_thaws() {
    for kind in KINDS {
        let mut bench = Bench::new(blkmq_core::queue::QueueConfig {
            elevator: kind,
            ..config(2)
        });
        bench.submit(0, bio(Op::Read, 0, 1, 1));
        bench.unplug(0);
        bench.queue.freeze_begin();
        bench.queue.freeze_begin();
        bench.submit(1, bio(Op::Read, 9, 1, 2));
        bench.unplug(1);
        bench.run_until_idle();
        assert!(!bench.queue.is_drained() && bench.issued(1).is_empty());
        bench.run_dry();
        assert!(bench.queue.is_drained());
        for next in KINDS {
            bench.queue.set_elevator(next).expect("drained");
        }
        bench.queue.freeze_end();
        bench.run_until_idle();
        assert_eq!(bench.issued(1).len(), 0, "freezes nest");
        assert!(bench.queue.set_elevator(kind).is_ok());
        bench.queue.freeze_end();
        bench.run_dry();
        assert_eq!(bench.ended(1), [(2, Status::Ok)]);
        assert!(
            bench.queue.set_elevator(kind).is_err(),
            "not on a queue that runs"
        );
    }
}

#[test]
fn limit_of_an_elevator_ends_with_it() {
    let mut config = config(1);
    config.elevator = sched::Registry::default().get("bfq").expect("there is bfq");
    config.groups = GroupTree::flat(3);
    let mut bench = Bench::new(config);
    for n in 0..32 {
        let group = GroupId(1 + n as u32 % 2);
        bench.submit(
            0,
            Bio {
                group,
                ..bio(Op::Read, 10 * n, 1, n)
            },
        );
    }
    bench.unplug(0);
    bench.run_until_idle();
    let queue = &bench.queue;
    assert!(queue.depth_limit() < queue.depth(), "two groups compete");
    queue.freeze_begin();
    bench.run_dry();
    bench.queue.set_elevator(sched::NONE).expect("drained");
    assert_eq!(bench.queue.depth_limit(), bench.queue.depth());
}

#[test]
fn quiesced_queue_issues_nothing_and_goes_on_afterwards() {
    for kind in KINDS {
        let mut config = config(1);
        config.tags = TagMode::PerHctx(1);
        config.elevator = kind;
        let mut bench = Bench::new(config);
        for i in 0..3 {
            bench.submit(0, bio(Op::Read, 10 * i, 1, i));
        }
        bench.unplug(0);
        bench.queue.quiesce_begin();
        assert!(bench.queue.is_quiesced());
        bench.end_all(0, Status::Ok);
        bench.run_until_idle();
        assert_eq!(bench.ended(0).len(), 1, "completions go on");
        assert!(bench.issued(0).is_empty());
        bench.queue.quiesce_end();
        bench.run_dry();
        assert_eq!(bench.ended(0).len(), 2, "{kind}");
    }
}

#[test]
fn handle_can_be_given_back_and_taken_again() {
    let mut bench = Bench::new(config(1));
    bench.submit(0, bio(Op::Read, 0, 1, 1));
    bench.unplug(0);
    let side = bench.sides.pop().unwrap();
    let Err(local) = side.local.detach() else {
        panic!("not while something is in flight")
    };
    bench.sides.push(common::Side {
        local: *local,
        hand: side.hand,
        fx: side.fx,
    });
    bench.run_dry();
    assert_eq!(bench.ended(0).len(), 1);
    assert!(bench.sides.pop().unwrap().local.detach().is_ok());
}

#[test]
fn bios_held_back_by_a_freeze_are_work_again_when_the_queue_thaws() {
    for kind in KINDS {
        let mut bench = Bench::new(blkmq_core::queue::QueueConfig {
            elevator: kind,
            ..config(1)
        });
        bench.queue.freeze_begin();
        bench.submit(0, bio(Op::Read, 0, 1, 1));
        bench.unplug(0);
        assert!(!bench.sides[0].local.has_mail(), "nothing to do while frozen");
        bench.queue.freeze_end();
        assert!(
            bench.sides[0].local.has_mail(),
            "{kind}: a reactor about to sleep must see it"
        );
        bench.run_dry();
        assert_eq!(bench.ended(0), [(1, Status::Ok)]);
    }
}
