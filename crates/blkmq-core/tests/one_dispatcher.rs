//! Tests the one dispatcher of elevators that know no hardware queues: in which order requests are
//! dispatched, by whom, and what waits meanwhile. The earlier ways to dispatch must lose nothing
//! either.

mod common;

use blkmq_core::bio::{Bio, Op, Status};
use blkmq_core::driver::Issued;
use blkmq_core::ids::{DiskId, ReactorSet};
use blkmq_core::queue::{Dispatch, QueueConfig, ReactorConfig, TagMode};
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::Nanos;
use common::{Bench, bio, config, end, in_flight_of};

/// A queue with an elevator for `reactors`, whose requests at even blocks cannot merge.
fn scheduled(reactors: u16, kind: &'static ElevatorType) -> QueueConfig {
    QueueConfig {
        elevator: kind,
        ..config(reactors)
    }
}

/// The elevators that dispatch at once, in the order of insertion; others may idle on purpose.
const AT_ONCE: [&ElevatorType; 1] = [sched::MQ_DEADLINE];

fn elevators() -> impl Iterator<Item = &'static ElevatorType> {
    sched::BUILT_IN.into_iter().filter(|kind| *kind != sched::NONE)
}

fn blocks(bench: &Bench, side: usize) -> Vec<u64> {
    bench.issued(side).iter().map(|seen| seen.offset / 4096).collect()
}

#[test]
fn request_pushed_back_goes_first_through_whichever_context_dispatches_next() {
    for kind in AT_ONCE {
        let mut bench = Bench::new(scheduled(2, kind));
        bench.sides[0].hand.borrow_mut().answers = [Issued::Queued, Issued::DeviceResource].into();
        for block in [0, 2, 4, 6] {
            bench.submit(0, bio(Op::Read, block, 1, block));
        }
        bench.unplug(0);
        assert_eq!(blocks(&bench, 0), [0], "{kind}");
        bench.submit(1, bio(Op::Read, 8, 1, 8));
        bench.unplug(1);
        assert_eq!(blocks(&bench, 1), [2, 4, 6, 8], "{kind}: no 1-3-2-4");
        bench.run_dry();
        assert_eq!(bench.ended(0).len() + bench.ended(1).len(), 5);
    }
}

#[test]
fn dispatcher_stops_at_the_first_request_that_its_driver_does_not_take() {
    for kind in AT_ONCE {
        let mut bench = Bench::new(scheduled(1, kind));
        bench.sides[0].hand.borrow_mut().answers = [Issued::Queued, Issued::DeviceResource].into();
        for block in 0..16 {
            bench.submit(0, bio(Op::Read, block * 2, 1, block));
        }
        bench.unplug(0);
        assert_eq!(blocks(&bench, 0), [0], "{kind}");
        assert_eq!(
            bench.queue.event_stats().pushed_back,
            1,
            "{kind}: asked once more"
        );
        bench.run_dry();
        assert_eq!(bench.ended(0).len(), 16);
    }
}

#[test]
fn request_that_waits_for_depth_merges_with_those_of_other_contexts() {
    for kind in AT_ONCE {
        let mut bench = Bench::new(QueueConfig {
            tags: TagMode::PerHctx(1),
            ..scheduled(3, kind)
        });
        bench.submit(0, bio(Op::Write, 1000, 1, 99));
        bench.unplug(0);
        for side in 0..3 {
            bench.submit(side, bio(Op::Write, side as u64, 1, side as u64));
            bench.unplug(side);
        }
        bench.end_all(0, Status::Ok);
        bench.run_until_idle();
        let seen = bench.issued(0);
        assert_eq!(
            (seen.len(), seen[0].len, seen[0].bios),
            (1, 3 * 4096, 3),
            "{kind}"
        );
        bench.run_dry();
        assert_eq!(
            (bench.ended(0).len(), bench.ended(1).len(), bench.ended(2).len()),
            (2, 1, 1)
        );
    }
}

#[test]
fn context_of_whoever_dispatches_gets_the_requests_and_nobody_else_is_run() {
    for kind in AT_ONCE {
        let mut bench = Bench::new(QueueConfig {
            tags: TagMode::PerHctx(1),
            ..scheduled(4, kind)
        });
        for side in [1, 2, 3] {
            bench.submit(side, bio(Op::Read, side as u64 * 9, 1, 1));
            bench.unplug(side);
        }
        bench.end_all(1, Status::Ok);
        let side = &mut bench.sides[1];
        side.local.run(bench.now, &mut side.fx);
        assert_eq!(bench.issued(1).len(), 1, "{kind}: another's request, at once");
        assert_eq!(bench.queue.event_stats().runs_scheduled, 0, "{kind}");
        bench.run_dry();
    }
}

#[test]
fn request_is_not_left_with_a_thread_that_promises_no_further_call() {
    for kind in AT_ONCE {
        let mut bench = Bench::new(QueueConfig {
            reactors: vec![
                ReactorConfig { is_event_loop: true },
                ReactorConfig { is_event_loop: false },
            ],
            ..scheduled(2, kind)
        });
        bench.sides[1].hand.borrow_mut().answers = [Issued::Resource].into();
        bench.submit(1, bio(Op::Read, 0, 1, 1));
        bench.unplug(1);
        let side = &mut bench.sides[1];
        assert!(side.fx.kicks.contains(Bench::id(0)), "{kind}");
        // Thread 1 stops polling.
        let side = &mut bench.sides[0];
        side.local.run(bench.now, &mut side.fx);
        assert_eq!(bench.issued(0).len(), 1, "{kind}");
        bench.run_dry();
        assert_eq!(bench.ended(1), [(1, Status::Ok)]);
    }
}

#[test]
fn slow_disk_leaves_a_fast_one_its_share_of_shared_tags_while_both_are_active() {
    let mut bench = Bench::new(QueueConfig {
        tags: TagMode::Shared(8),
        ..scheduled(2, sched::MQ_DEADLINE)
    });
    let read = |disk, block| Bio {
        disk: DiskId(disk),
        ..bio(Op::Read, block * 2, 1, block)
    };
    for block in 0..32 {
        bench.submit(0, read(SLOW, block));
    }
    bench.unplug(0);
    assert_eq!(counts(&bench), (8, 0), "alone it has all tags");
    for block in 0..16 {
        bench.submit(1, read(FAST, block));
    }
    bench.unplug(1);
    end(&mut bench, DiskId(SLOW), 4);
    for round in 0..4 {
        assert_eq!(counts(&bench), (4, 4), "round {round}");
        end(&mut bench, DiskId(FAST), 4);
    }
    assert_eq!(counts(&bench), (4, 0), "the fast one may come back soon");
    bench.now = bench.now + Nanos::from_millis(11);
    end(&mut bench, DiskId(SLOW), 1);
    assert_eq!(counts(&bench), (8, 0), "or not");
    bench.run_dry();
    assert_eq!((bench.ended(0).len(), bench.ended(1).len()), (32, 16));
}

const SLOW: u32 = 0;
const FAST: u32 = 1;

/// How many requests of each disk are at the drivers.
fn counts(bench: &Bench) -> (usize, usize) {
    (
        in_flight_of(bench, DiskId(SLOW)),
        in_flight_of(bench, DiskId(FAST)),
    )
}

fn for_itself(reactors: u16, kind: &'static ElevatorType, dispatch: Dispatch) -> Bench {
    Bench::new(QueueConfig {
        dispatch,
        tags: TagMode::PerHctx(2),
        ..scheduled(reactors, kind)
    })
}

#[test]
fn baseline_runs_its_own_context_on_insertion_and_every_one_on_completion() {
    let ways = [(Dispatch::EveryContext, 3), (Dispatch::OwnContext, 0)];
    for (kind, (dispatch, after_end)) in elevators().flat_map(|kind| ways.map(|way| (kind, way))) {
        let mut bench = for_itself(4, kind, dispatch);
        let others = |kicks: &mut ReactorSet| std::iter::from_fn(|| kicks.pop()).count();
        bench.submit(0, bio(Op::Read, 0, 1, 1));
        bench.unplug(0);
        assert_eq!(others(&mut bench.sides[0].fx.kicks), 0, "{kind}");
        bench.run_until_idle();
        bench.end_all(0, Status::Ok);
        let side = &mut bench.sides[0];
        side.local.run(bench.now, &mut side.fx);
        assert_eq!(others(&mut side.fx.kicks), after_end, "{kind}");
        bench.run_dry();
        assert_eq!(bench.ended(0), [(1, Status::Ok)]);
    }
}

#[test]
fn before_every_context_took_requests_for_itself_and_none_was_lost() {
    for kind in elevators() {
        for (hctxs, dispatch) in [1, 2, 4].into_iter().flat_map(|hctxs| {
            [Dispatch::EveryContext, Dispatch::OwnContext].map(|dispatch| (hctxs, dispatch))
        }) {
            let mut config = QueueConfig {
                dispatch,
                tags: TagMode::PerHctx(2),
                ..scheduled(4, kind)
            };
            config.hctxs = hctxs;
            let mut bench = Bench::new(config);
            for round in 0..20 {
                let side = round as usize % 4;
                let hand = std::rc::Rc::clone(&bench.sides[side % usize::from(hctxs)].hand);
                if round % 3 == 0 {
                    hand.borrow_mut().answers.push_back(Issued::Resource);
                }
                hand.borrow_mut().inline = round % 5 == 0;
                bench.submit(side, bio(Op::Read, round * 2, 1, round));
                bench.unplug(side);
                bench.run_until_idle();
                assert!((0..4).map(|side| bench.issued(side).len()).sum::<usize>() <= 2);
            }
            for _ in 0..8 {
                bench.now = bench.now + Nanos::from_millis(4);
                bench.run_dry();
            }
            let ended: usize = (0..4).map(|side| bench.ended(side).len()).sum();
            assert_eq!(ended, 20, "{kind}, {hctxs} contexts, {dispatch:?}");
        }
    }
}
