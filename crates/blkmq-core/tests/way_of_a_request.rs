//! Tests the way of a request through one queue and back, with a driver that the test controls.

mod common;

use blkmq_core::bio::{Bio, Flags, Op, Status};
use blkmq_core::driver::{Done, Issued};
use blkmq_core::group::{GroupTree, ROOT};
use blkmq_core::ids::{DiskId, GroupId};
use blkmq_core::limits::Limits;
use blkmq_core::queue::{QueueConfig, ReactorConfig, TagMode};
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::{Instant, Nanos};
use common::{Bench, bio, config};

const KINDS: [&ElevatorType; sched::BUILT_IN.len()] = sched::BUILT_IN;

#[test]
fn bio_goes_to_the_driver_and_its_end_comes_back() {
    for kind in KINDS {
        let mut bench = Bench::new(blkmq_core::queue::QueueConfig {
            elevator: kind,
            ..config(1)
        });
        bench.submit(0, bio(Op::Write, 5, 1, 42));
        assert!(bench.issued(0).is_empty(), "staged until the plug is flushed");
        bench.unplug(0);
        let seen = bench.issued(0);
        assert_eq!((seen[0].offset, seen[0].len), (5 * 4096, 4096));
        assert_eq!(seen[0].is_ordered, kind != sched::NONE, "{kind}");
        bench.end_all(0, Status::Medium);
        bench.run_until_idle();
        assert_eq!(bench.ended(0), [(42, Status::Medium)]);
        assert_eq!(bench.queue.outstanding(), 0);
    }
}

#[test]
fn neighbours_in_a_plug_become_one_request_and_end_each() {
    let mut bench = Bench::new(config(1));
    for block in [2, 3, 1] {
        bench.submit(0, bio(Op::Read, block, 1, block));
    }
    bench.unplug(0);
    let seen = bench.issued(0);
    assert_eq!(
        (seen.len(), seen[0].offset, seen[0].len, seen[0].bios),
        (1, 4096, 3 * 4096, 3)
    );
    bench.run_dry();
    assert_eq!(
        bench.ended(0),
        [(1, Status::Ok), (2, Status::Ok), (3, Status::Ok)]
    );
    let merged = bench
        .queue
        .group_stats(GroupId(0))
        .of(blkmq_core::bio::Direction::Read)
        .merged;
    assert_eq!(merged, 2);
}

#[test]
fn wait_of_a_bio_merged_in_a_plug_begins_when_the_plug_is_flushed() {
    let mut bench = Bench::new(config(1));
    for _ in 0..3 {
        bench.now = bench.now + Nanos::from_secs(1);
        for block in [2, 3, 1] {
            bench.submit(0, bio(Op::Read, block, 1, block));
        }
        bench.unplug(0);
        bench.run_dry();
    }
    let stats = bench.queue.group_stats(GroupId(0));
    let reads = stats.of(blkmq_core::bio::Direction::Read);
    assert_eq!((reads.ios, reads.merged, reads.wait_ns), (9, 6, 0));
}

/// Five contiguous bios, of which the driver has done two and a half when it reports `status` for
/// the request.
fn done_in_part(kind: &'static ElevatorType, front: bool, status: Status) -> Bench {
    let mut bench = Bench::new(blkmq_core::queue::QueueConfig {
        elevator: kind,
        ..config(1)
    });
    let blocks = if front { [5, 4, 3, 2, 1] } else { [1, 2, 3, 4, 5] };
    for block in blocks {
        bench.submit(0, bio(Op::Write, block, 1, block));
    }
    bench.unplug(0);
    assert_eq!(bench.issued(0).len(), 1, "one request of all");
    bench.sides[0].hand.borrow_mut().done_before = 2 * 4096 + 512;
    bench.end_all(0, status);
    bench.run_until_idle();
    bench.sides[0].hand.borrow_mut().done_before = 0;
    bench
}

#[test]
fn bios_done_before_an_error_end_well() {
    for kind in KINDS {
        for front in [false, true] {
            let mut bench = done_in_part(kind, front, Status::Medium);
            let mut ended = bench.ended(0);
            ended.sort_by_key(|(block, _)| *block);
            let expected = [1, 2, 3, 4, 5].map(|block| {
                let is_done = block <= 2;
                (block, if is_done { Status::Ok } else { Status::Medium })
            });
            assert_eq!(ended, expected, "{kind}");
            assert_eq!(bench.queue.outstanding(), 0);
            let writes = bench.queue.group_stats(GroupId(0));
            let writes = writes.of(blkmq_core::bio::Direction::Write);
            assert_eq!((writes.ios, writes.merged, writes.errors), (5, 4, 3), "{kind}");
        }
    }
}

#[test]
fn bios_that_are_done_are_not_repeated_when_their_request_is_requeued() {
    for kind in KINDS {
        for front in [false, true] {
            let mut bench = done_in_part(kind, front, Status::Requeue);
            let mut early = bench.ended(0);
            early.sort_by_key(|(block, _)| *block);
            assert_eq!(early, [(1, Status::Ok), (2, Status::Ok)], "{kind}");
            let again = bench.issued(0);
            assert_eq!(
                (again.len(), again[0].offset, again[0].len, again[0].bios),
                (1, 3 * 4096, 3 * 4096, 3),
                "{kind}"
            );
            bench.run_dry();
            assert_eq!(bench.ended(0).len(), 3, "{kind}");
            assert_eq!(bench.queue.outstanding(), 0);
        }
    }
}

#[test]
fn bio_larger_than_the_drive_takes_is_cut_and_ends_once_with_its_first_error() {
    let mut config = config(1);
    config.limits = Limits {
        transfer_max: 8192,
        ..Limits::default()
    };
    config.merges = false;
    config.requests_per_reactor = 2;
    let mut bench = Bench::new(config);
    bench.submit(0, bio(Op::Read, 0, 7, 9));
    bench.unplug(0);
    assert_eq!(bench.issued(0).len(), 2, "no more parts than there are requests");
    bench.end_all(0, Status::Ok);
    bench.run_until_idle();
    assert_eq!(bench.end_all(0, Status::Io), 2);
    bench.run_until_idle();
    assert_eq!(bench.ended(0), [(9, Status::Io)]);
    assert_eq!(bench.queue.event_stats().split, 1);
}

#[test]
fn huge_bio_goes_in_parts_of_a_turn_and_others_go_between() {
    // The depth that bfq and kyber find is another bound.
    for kind in [sched::NONE, sched::MQ_DEADLINE] {
        let mut groups = GroupTree::new(3);
        let [huge, small] = [0; 2].map(|_| groups.create(ROOT, 100).expect("room was made"));
        let of = |group: GroupId, bio: Bio| Bio { group, ..bio };
        let mut bench = Bench::new(QueueConfig {
            elevator: kind,
            groups,
            ..config(1)
        });
        // Blocks of 4 KiB.
        bench.submit(0, of(huge, bio(Op::Read, 0, 32 << 8, 1)));
        bench.unplug(0);
        let mut turns = 1;
        while bench.issued(0).iter().map(|rq| rq.len).sum::<u64>() < 32 << 20 {
            let before = bench.issued(0).len();
            assert!(
                bench.sides[0].local.has_mail(),
                "{kind}: the rest waits for no event"
            );
            let one = bio(Op::Write, (64 << 8) + 2 * turns, 1, 1 + turns);
            bench.submit(0, of(small, one));
            bench.unplug(0);
            assert_eq!(bench.issued(0).len(), before + 1, "{kind}: the small one");
            let side = &mut bench.sides[0];
            side.local.run(bench.now, &mut side.fx);
            turns += 1;
            let bytes: u64 = bench.issued(0)[before + 1..].iter().map(|rq| rq.len).sum();
            assert!(bytes <= 1 << 20, "{kind}: {bytes} bytes in one turn");
        }
        assert_eq!(turns, 32, "{kind}");
        bench.run_dry();
        assert_eq!(bench.ended(0).len(), 32, "{kind}");
    }
}

#[test]
fn bio_that_the_disk_refuses_ends_at_once() {
    let mut bench = Bench::new(config(1));
    bench.submit(
        0,
        Bio {
            disk: DiskId(7),
            ..bio(Op::Read, 0, 1, 1)
        },
    );
    bench.submit(
        0,
        Bio {
            group: GroupId(7),
            ..bio(Op::Read, 0, 1, 2)
        },
    );
    bench.submit(0, bio(Op::Read, 1 << 30, 1, 3));
    bench.submit(0, bio(Op::Discard, 0, 1, 4));
    let ended = bench.ended(0);
    assert_eq!(
        ended,
        [
            (1, Status::Invalid),
            (2, Status::Invalid),
            (3, Status::Invalid),
            (4, Status::NotSupported)
        ]
    );
}

#[test]
fn no_more_is_in_flight_than_the_depth_and_the_rest_follows() {
    for kind in KINDS {
        let mut config = config(1);
        config.tags = TagMode::PerHctx(4);
        config.elevator = kind;
        let mut bench = Bench::new(config);
        for i in 0..20 {
            bench.submit(0, bio(Op::Read, i * 100, 1, i));
        }
        bench.unplug(0);
        assert_eq!(bench.issued(0).len(), 4);
        bench.queue.set_depth(2).unwrap();
        bench.end_all(0, Status::Ok);
        bench.run_until_idle();
        assert_eq!(bench.issued(0).len(), 2, "{kind}: a smaller depth holds at once");
        bench.run_dry();
        assert_eq!(bench.ended(0).len(), 20);
    }
}

#[test]
fn depth_to_begin_with_is_no_bound_for_later() {
    for kind in KINDS {
        // From 8 on, bfq keeps a part of it for others.
        for (depth, max) in [(2, 4), (4, 4), (7, 7)] {
            let mut bench = Bench::new(blkmq_core::queue::QueueConfig {
                tags: TagMode::PerHctx(4),
                depth: Some(depth),
                elevator: kind,
                ..config(1)
            });
            let queue = bench.queue.clone();
            assert_eq!(
                (queue.depth(), queue.depth_default(), queue.depth_max()),
                (depth, 4, max)
            );
            for i in 0..40 {
                bench.submit(0, bio(Op::Read, i * 100, 1, i));
            }
            bench.unplug(0);
            assert_eq!(bench.issued(0).len(), depth as usize, "{kind}");
            queue.set_depth(max).expect("within the most");
            assert_eq!(queue.set_depth(max + 1), Err(max));
            bench.run_until_idle();
            assert_eq!(bench.issued(0).len(), max as usize, "{kind}: more goes at once");
            bench.run_dry();
            assert_eq!(bench.ended(0).len(), 40);
        }
    }
}

#[test]
fn driver_without_resources_is_asked_again_after_three_milliseconds() {
    for kind in KINDS {
        let mut bench = Bench::new(blkmq_core::queue::QueueConfig {
            elevator: kind,
            ..config(1)
        });
        bench.sides[0]
            .hand
            .borrow_mut()
            .answers
            .push_back(Issued::Resource);
        bench.submit(0, bio(Op::Read, 0, 1, 1));
        bench.unplug(0);
        bench.run_until_idle();
        assert!(bench.issued(0).is_empty());
        let at = bench.sides[0].local.next_wakeup().expect("a timer");
        assert!(at.since(bench.now) >= Nanos::from_millis(3) && at.since(bench.now) < Nanos::from_millis(4));
        bench.now = at;
        bench.run_until_idle();
        assert_eq!(bench.issued(0).len(), 1);
    }
}

#[test]
fn requeued_request_goes_out_again_and_ends_once() {
    for kind in KINDS {
        let mut bench = Bench::new(blkmq_core::queue::QueueConfig {
            elevator: kind,
            ..config(1)
        });
        bench.submit(0, bio(Op::Read, 0, 1, 1));
        bench.unplug(0);
        for _ in 0..3 {
            bench.end_all(0, Status::Requeue);
            bench.run_until_idle();
            assert_eq!(bench.issued(0).len(), 1, "{kind}");
        }
        bench.run_dry();
        assert_eq!(bench.ended(0), [(1, Status::Ok)]);
    }
}

#[test]
fn request_that_is_always_requeued_ends_with_an_error() {
    for kind in KINDS {
        let mut bench = Bench::new(blkmq_core::queue::QueueConfig {
            elevator: kind,
            ..config(1)
        });
        bench.sides[0].hand.borrow_mut().answers = vec![Issued::Done(Status::Requeue); 200].into();
        bench.submit(0, bio(Op::Read, 0, 1, 1));
        bench.unplug(0);
        bench.run_until_idle();
        assert_eq!(bench.ended(0), [(1, Status::Io)]);
    }
}

#[test]
fn lost_request_times_out_once_and_its_late_end_touches_nothing() {
    for kind in KINDS {
        let mut bench = Bench::new(blkmq_core::queue::QueueConfig {
            elevator: kind,
            ..config(1)
        });
        bench.sides[0].hand.borrow_mut().lets_go = true;
        bench.submit(0, bio(Op::Read, 0, 1, 1));
        bench.unplug(0);
        let late = bench.issued(0)[0].cookie;
        bench.now = bench.sides[0].local.next_wakeup().expect("the time limit");
        assert!(bench.now.since(Instant(1_000)) >= Nanos::from_secs(30));
        bench.run_until_idle();
        assert_eq!(bench.ended(0), [(1, Status::Timeout)]);
        bench.sides[0].hand.borrow_mut().issued.clear();
        bench.submit(0, bio(Op::Read, 1, 1, 2));
        bench.unplug(0);
        bench.sides[0].hand.borrow_mut().done.push(Done {
            cookie: late,
            status: Status::Ok,
        });
        bench.run_until_idle();
        assert_eq!(bench.ended(0), [], "{kind}: the late end is not the second bio's");
        bench.run_dry();
        assert_eq!(bench.ended(0), [(2, Status::Ok)]);
    }
}

#[test]
fn requests_that_are_issued_while_others_time_out_have_all_of_their_time() {
    for kind in KINDS {
        let mut bench = Bench::new(blkmq_core::queue::QueueConfig {
            elevator: kind,
            merges: false,
            tags: TagMode::PerHctx(4),
            ..config(1)
        });
        bench.sides[0].hand.borrow_mut().lets_go = true;
        // Two waves that use all tags, and one that does not.
        (0..10).for_each(|n| bench.submit(0, bio(Op::Read, 2 * n, 1, n)));
        bench.unplug(0);
        for wave in [4, 4, 2] {
            bench.run_until_idle();
            assert_eq!(bench.issued(0).len(), wave, "{kind}");
            bench.sides[0].hand.borrow_mut().issued.clear();
            let limit = bench.sides[0].local.next_wakeup().expect("the time limit");
            assert_eq!(limit.since(bench.now), Nanos::from_secs(30), "{kind}");
            bench.now = limit;
            bench.run_until_idle();
            let ended = bench.ended(0);
            assert_eq!(ended.len(), wave, "{kind}: {ended:?}");
            assert!(
                ended.iter().all(|(_, status)| *status == Status::Timeout),
                "{kind}"
            );
        }
        assert_eq!(bench.sides[0].local.outstanding(), 0);
    }
}

#[test]
fn flush_after_a_write_with_fua_keeps_the_order() {
    let mut config = config(1);
    config.limits.cache = true;
    let mut bench = Bench::new(config);
    bench.submit(
        0,
        Bio {
            flags: Flags::FUA,
            ..bio(Op::Write, 0, 1, 1)
        },
    );
    bench.unplug(0);
    assert_eq!(
        bench.issued(0).iter().map(|s| s.op).collect::<Vec<_>>(),
        [Op::Write]
    );
    bench.end_all(0, Status::Ok);
    bench.run_until_idle();
    assert_eq!(
        bench.issued(0).iter().map(|s| s.op).collect::<Vec<_>>(),
        [Op::Flush]
    );
    assert!(bench.ended(0).is_empty(), "not before it is durable");
    bench.end_all(0, Status::Ok);
    bench.run_until_idle();
    assert_eq!(bench.ended(0), [(1, Status::Ok)]);
}

#[test]
fn reactor_without_context_reaches_the_driver_through_its_owner() {
    for kind in KINDS {
        let mut config = config(3);
        config.hctxs = 1;
        config.elevator = kind;
        let mut bench = Bench::new(config);
        bench.submit(2, bio(Op::Read, 0, 1, 1));
        bench.unplug(2);
        assert!(bench.sides[2].fx.kicks.contains(Bench::id(0)));
        bench.run_until_idle();
        assert_eq!(bench.issued(0).len(), 1);
        bench.run_dry();
        assert_eq!(bench.ended(2), [(1, Status::Ok)]);
    }
}

#[test]
fn shared_tag_that_is_freed_runs_the_context_that_waits_for_it() {
    for kind in KINDS {
        let mut config = config(2);
        config.tags = TagMode::Shared(1);
        config.elevator = kind;
        let mut bench = Bench::new(config);
        bench.submit(0, bio(Op::Read, 0, 1, 1));
        bench.unplug(0);
        bench.submit(1, bio(Op::Read, 9, 1, 2));
        bench.unplug(1);
        assert_eq!(bench.issued(0).len() + bench.issued(1).len(), 1);
        bench.run_dry();
        assert_eq!(
            (bench.ended(0), bench.ended(1)),
            (vec![(1, Status::Ok)], vec![(2, Status::Ok)])
        );
    }
}

#[test]
fn thread_that_does_not_promise_never_issues_for_others() {
    let mut config = config(2);
    config.reactors[1] = ReactorConfig { is_event_loop: false };
    config.elevator = sched::MQ_DEADLINE;
    config.tags = TagMode::PerHctx(1);
    let mut bench = Bench::new(config);
    bench.submit(1, bio(Op::Read, 0, 1, 1));
    bench.unplug(1);
    bench.submit(0, bio(Op::Read, 9, 1, 2));
    bench.unplug(0);
    assert_eq!((bench.issued(0).len(), bench.issued(1).len()), (0, 1));
    bench.end_all(1, Status::Ok);
    let side = &mut bench.sides[1];
    side.local.run(bench.now, &mut side.fx);
    assert_eq!(bench.issued(1).len(), 0, "handed to its owner instead");
    assert!(bench.sides[1].fx.kicks.contains(Bench::id(0)));
    bench.run_dry();
    assert_eq!(
        (bench.ended(0), bench.ended(1)),
        (vec![(2, Status::Ok)], vec![(1, Status::Ok)])
    );
}

#[test]
fn more_bios_than_may_wait_come_back_to_the_submitter() {
    let mut config = config(1);
    config.requests_per_reactor = 4;
    config.tags = TagMode::PerHctx(1);
    let mut bench = Bench::new(config);
    let side = &mut bench.sides[0];
    let taken = (0..100)
        .take_while(|&i| {
            side.local
                .submit(bio(Op::Read, 10 * i, 1, i), bench.now, &mut side.fx)
                .is_ok()
        })
        .count();
    assert_eq!(taken, 8, "four with requests, four waiting");
    bench.run_dry();
    assert_eq!(bench.ended(0).len(), 8);
}

#[test]
fn queue_without_merging_merges_neither_in_the_plug_nor_in_the_elevator() {
    for kind in KINDS {
        let mut bench = Bench::new(blkmq_core::queue::QueueConfig {
            elevator: kind,
            merges: false,
            ..config(1)
        });
        (0..4).for_each(|block| bench.submit(0, bio(Op::Read, block, 1, block)));
        bench.unplug(0);
        assert_eq!(bench.issued(0).len(), 4, "{kind}");
    }
}

#[test]
fn driver_that_must_be_looked_at_after_polling_was_switched_off_is_until_it_says_no() {
    let mut bench = Bench::new(config(1));
    bench.queue.set_polled(true);
    bench.run_until_idle();
    bench.submit(0, bio(Op::Read, 1, 1, 1));
    bench.unplug(0);
    bench.sides[0].hand.borrow_mut().must_be_polled = true;
    bench.queue.set_polled(false);
    for _ in 0..3 {
        bench.run_until_idle();
        assert!(
            bench.sides[0].local.must_poll(),
            "nothing else shows what is in flight"
        );
    }
    bench.sides[0].hand.borrow_mut().must_be_polled = false;
    bench.run_until_idle();
    assert!(!bench.sides[0].local.must_poll());
    let told = bench.sides[0].hand.borrow().polled.clone();
    assert!(
        told[0] && told.len() > 3 && told[1..].iter().all(|on| !on),
        "{told:?}"
    );
    bench.run_until_idle();
    assert_eq!(
        bench.sides[0].hand.borrow().polled.len(),
        told.len(),
        "it is asked no more"
    );
    bench.run_dry();
    assert_eq!(bench.ended(0), [(1, Status::Ok)]);
}

#[test]
fn drive_that_has_been_silent_is_not_expected_to_end_something_at_any_moment() {
    let mut bench = Bench::new(config(1));
    let expects = |bench: &mut Bench, ms| {
        let at = bench.now + Nanos::from_millis(ms);
        bench.sides[0].local.expects_end(at)
    };
    assert!(!expects(&mut bench, 0), "nothing is under way");
    bench.submit(0, bio(Op::Read, 0, 1, 1));
    bench.unplug(0);
    assert!(expects(&mut bench, 0));
    assert!(!expects(&mut bench, 2), "two milliseconds later it still has it");
    bench.submit(0, bio(Op::Read, 8, 1, 2));
    bench.unplug(0);
    assert!(expects(&mut bench, 2), "it has been given another");
    assert!(!expects(&mut bench, 4));
    bench.end_all(0, Status::Ok);
    bench.run_until_idle();
    assert!(!expects(&mut bench, 4));
}
