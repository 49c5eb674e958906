//! Tests groups that are made, changed and removed, and that hold I/O back, while I/O is under way,
//! with a driver that the test controls.

mod common;

use blkmq_core::bio::{Bio, Direction, Op, Status};
use blkmq_core::driver::Issued;
use blkmq_core::group::{CapKind, Caps, GroupError, GroupTree, ROOT};
use blkmq_core::ids::GroupId;
use blkmq_core::local::InFlight;
use blkmq_core::queue::{QueueConfig, ReactorConfig, TagMode};
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::Nanos;
use common::{Bench, bio, config};

fn with_groups(reactors: u16, capacity: u32, elevator: &'static ElevatorType) -> QueueConfig {
    QueueConfig {
        groups: GroupTree::new(capacity),
        elevator,
        merges: false,
        ..config(reactors)
    }
}

fn of(group: GroupId, cookie: u64) -> Bio {
    Bio {
        group,
        ..bio(Op::Read, cookie * 10, 1, cookie)
    }
}

fn create(bench: &Bench, parent: GroupId) -> GroupId {
    bench
        .queue
        .create_group(parent, 100)
        .expect("not busy")
        .expect("room")
}

fn cap(bench: &Bench, group: GroupId, iops: u64) {
    let caps = Caps::default().with(CapKind::Iops, iops);
    let set = bench.queue.set_group_caps(group, caps, bench.now);
    set.expect("not busy").expect("a sound cap");
}

/// Submits to a side and flushes its plug.
fn send(bench: &mut Bench, side: usize, bios: impl IntoIterator<Item = Bio>) {
    bios.into_iter().for_each(|bio| bench.submit(side, bio));
    bench.unplug(side);
}

fn issued(bench: &Bench) -> usize {
    (0..bench.sides.len()).map(|side| bench.issued(side).len()).sum()
}

/// Lets time pass until the next timer of any reactor.
fn sleep(bench: &mut Bench) -> Nanos {
    let timers = bench.sides.iter().filter_map(|side| side.local.next_wakeup());
    let at = timers.min().expect("somebody has a timer").max(bench.now);
    let slept = at.since(bench.now);
    bench.now = at;
    bench.run_until_idle();
    slept
}

#[test]
fn capped_group_waits_for_its_time_and_nobody_else_does() {
    for kind in sched::BUILT_IN {
        let mut bench = Bench::new(with_groups(1, 4, kind));
        let (capped, free) = (create(&bench, ROOT), create(&bench, ROOT));
        cap(&bench, capped, 100);
        let below = create(&bench, capped);
        let groups = [capped, free, below, free, ROOT, below];
        send(
            &mut bench,
            0,
            groups
                .into_iter()
                .zip(1..)
                .map(|(group, cookie)| of(group, cookie)),
        );
        bench.run_dry();
        let mut ended = bench.ended(0).len();
        assert_eq!(ended, 4, "{kind}: three that are free and one that is allowed");
        for more in 5..=6 {
            assert_eq!(sleep(&mut bench), Nanos::from_millis(10), "{kind}");
            bench.run_dry();
            ended += bench.ended(0).len();
            assert_eq!(ended, more, "{kind}");
        }
        assert_eq!(bench.queue.outstanding(), 0);
    }
}

#[test]
fn caps_of_the_configuration_hold_from_the_start_and_bad_ones_are_refused() {
    let mut config = with_groups(1, 2, sched::NONE);
    let group = config.groups.create(ROOT, 300).unwrap();
    let caps = Caps::default().with(CapKind::ReadIops, 50);
    config.groups.set_caps(group, caps).unwrap();
    let mut bench = Bench::new(config.clone());
    send(&mut bench, 0, [of(group, 1), of(group, 2)]);
    assert_eq!(issued(&bench), 1);
    assert_eq!(bench.queue.group(group).unwrap().unwrap().weight, 300);
    config
        .groups
        .set_caps(group, Caps::default().with(CapKind::Bps, 5))
        .unwrap();
    let refused = blkmq_core::queue::Queue::new(config).err();
    let error = refused.expect("refused").to_string();
    assert!(error.contains("queue q: group 1: bps 5 rejected"), "{error}");
}

#[test]
fn lifted_caps_hold_nothing_back_and_are_paid_for_when_they_hold_again() {
    for kind in [sched::NONE, sched::MQ_DEADLINE] {
        let mut bench = Bench::new(with_groups(2, 2, kind));
        let group = create(&bench, ROOT);
        cap(&bench, group, 1);
        for side in 0..2 {
            send(&mut bench, side, (1..=3).map(|cookie| of(group, cookie)));
        }
        bench.run_until_idle();
        assert_eq!(issued(&bench), 1);
        bench.queue.lift_caps(true);
        bench.run_until_idle();
        assert_eq!(issued(&bench), 6, "{kind}: all that waits");
        send(&mut bench, 0, [of(group, 4)]);
        bench.run_until_idle();
        assert_eq!(issued(&bench), 7, "{kind}: and what comes");
        let owed = bench
            .queue
            .group_debts(group, bench.now)
            .expect("nobody is inside");
        assert_eq!(owed[CapKind::Iops as usize], 7);
        bench.queue.lift_caps(false);
        send(&mut bench, 0, [of(group, 5)]);
        bench.run_until_idle();
        assert_eq!(issued(&bench), 7, "{kind}: the cap holds again");
    }
}

#[test]
fn freeze_lets_go_what_has_started_and_a_switch_finds_nothing_left() {
    for (from, to) in [
        (sched::NONE, sched::MQ_DEADLINE),
        (sched::MQ_DEADLINE, sched::NONE),
    ] {
        let mut bench = Bench::new(with_groups(2, 2, from));
        let group = create(&bench, ROOT);
        cap(&bench, group, 1);
        for side in 0..2 {
            send(&mut bench, side, (1..=3).map(|cookie| of(group, cookie)));
        }
        bench.run_until_idle();
        assert_eq!(issued(&bench), 1);
        bench.queue.freeze_begin();
        send(&mut bench, 0, [of(group, 4)]);
        bench.run_until_idle();
        assert_eq!(issued(&bench), 6, "{from}: all that have started, not the fourth");
        bench.end_all(0, Status::Ok);
        bench.end_all(1, Status::Ok);
        bench.run_until_idle();
        assert!(bench.queue.is_drained());
        bench.queue.set_elevator(to).expect("drained");
        bench.queue.freeze_end();
        bench.run_until_idle();
        assert_eq!(
            issued(&bench),
            0,
            "{to}: what passed in the freeze is still to be paid"
        );
        assert_eq!(sleep(&mut bench), Nanos::from_secs(6));
        assert_eq!(issued(&bench), 1);
        bench.run_dry();
        assert_eq!((bench.ended(0).len(), bench.ended(1).len()), (4, 3));
    }
}

#[test]
fn quiesced_queue_keeps_what_waits_for_its_caps() {
    let mut bench = Bench::new(with_groups(1, 2, sched::NONE));
    let group = create(&bench, ROOT);
    cap(&bench, group, 1000);
    send(&mut bench, 0, (1..=4).map(|cookie| of(group, cookie)));
    bench.queue.quiesce_begin();
    bench.run_until_idle();
    bench.now = bench.now + Nanos::from_millis(1);
    bench.run_until_idle();
    assert_eq!(issued(&bench), 1, "the time has come, but the queue is quiesced");
    bench.queue.quiesce_end();
    bench.run_until_idle();
    assert_eq!(issued(&bench), 2, "what the cap allows by now");
    while issued(&bench) < 4 {
        sleep(&mut bench);
    }
    bench.run_dry();
    assert_eq!(bench.ended(0).len(), 4);
}

#[test]
fn bios_of_a_removed_group_are_its_ancestors_and_its_number_is_free_after_them() {
    for kind in sched::BUILT_IN {
        let mut bench = Bench::new(with_groups(2, 3, kind));
        let parent = create(&bench, ROOT);
        let child = create(&bench, parent);
        send(&mut bench, 0, [of(child, 1)]);
        bench.queue.remove_group(child).unwrap().unwrap();
        bench.run_until_idle();
        let full = bench.queue.create_group(ROOT, 7).unwrap().unwrap_err();
        assert_eq!(
            full,
            GroupError::Full {
                capacity: 3,
                leaving: 1
            }
        );
        send(&mut bench, 1, [of(child, 2)]);
        bench.run_dry();
        let parents = bench.sides[1].fx.ended[0].group;
        assert_eq!(parents, parent, "{kind}: taken by the parent");
        let again = create(&bench, ROOT);
        assert_eq!(again, child, "{kind}: its number is given away");
        let reads = |group| bench.queue.group_stats(group).of(Direction::Read).ios;
        assert_eq!((reads(again), reads(parent)), (0, 1));
        let gone = bench.queue.group_stats_of_the_gone(parent);
        assert_eq!(gone.of(Direction::Read).ios, 1);
    }
}

#[test]
fn bios_that_wait_for_a_request_are_given_to_the_ancestor_before_the_number_is_free() {
    let mut config = with_groups(1, 2, sched::NONE);
    config.requests_per_reactor = 1;
    let mut bench = Bench::new(config);
    let group = create(&bench, ROOT);
    send(&mut bench, 0, [of(group, 1)]);
    bench.submit(0, of(group, 2));
    bench.queue.remove_group(group).unwrap().unwrap();
    bench.run_until_idle();
    bench.end_all(0, Status::Ok);
    bench.run_until_idle();
    assert_eq!(
        bench.queue.retire_groups(),
        Ok(0),
        "the second waits under another number"
    );
    bench.run_dry();
    let groups: Vec<GroupId> = bench.sides[0].fx.ended.iter().map(|bio| bio.group).collect();
    assert_eq!(groups, [group, ROOT]);
}

#[test]
fn handle_that_nobody_takes_holds_up_no_removal_and_a_thread_that_looks_away_does() {
    let mut config = with_groups(2, 2, sched::NONE);
    config.reactors[1] = ReactorConfig { is_event_loop: false };
    let mut bench = Bench::new(config);
    let away = bench.sides.pop().unwrap();
    let group = create(&bench, ROOT);
    bench.queue.remove_group(group).unwrap().unwrap();
    bench.run_until_idle();
    assert_eq!(
        bench.queue.retire_groups(),
        Ok(1),
        "the other thread has not looked"
    );
    let handle = away.local.detach().map_err(|_| "at rest").unwrap();
    assert_eq!(bench.queue.retire_groups(), Ok(0));
    drop(handle);
}

#[test]
fn parent_of_living_children_stays_and_nothing_is_changed() {
    let bench = Bench::new(with_groups(1, 4, sched::NONE));
    let parent = create(&bench, ROOT);
    let child = create(&bench, parent);
    let refused = bench.queue.remove_group(parent).unwrap();
    assert_eq!(refused, Err(GroupError::HasChildren { id: parent, child }));
    assert!(bench.queue.group(parent).unwrap().is_some());
    let caps = Caps::default().with(CapKind::WriteBps, 1);
    let refused = bench.queue.set_group_caps(child, caps, bench.now).unwrap();
    assert!(matches!(refused, Err(GroupError::Cap { .. })));
    assert!(bench.queue.group(child).unwrap().unwrap().caps.is_none());
    bench.queue.move_group(child, ROOT).unwrap().unwrap();
    bench.queue.remove_group(parent).unwrap().unwrap();
}

#[test]
fn requests_that_the_caps_let_pass_need_no_context_of_their_own() {
    let mut config = with_groups(3, 2, sched::NONE);
    config.hctxs = 1;
    config.tags = TagMode::PerHctx(2);
    let mut bench = Bench::new(config);
    let group = create(&bench, ROOT);
    cap(&bench, group, 1_000_000);
    bench.sides[0].hand.borrow_mut().answers = [
        Issued::Queued,
        Issued::DeviceResource,
        Issued::Done(Status::Requeue),
    ]
    .into();
    for side in 0..3 {
        send(&mut bench, side, (1..=9).map(|cookie| of(group, cookie)));
    }
    for _ in 0..200 {
        bench.now = bench.now + Nanos::from_micros(1);
        bench.run_until_idle();
        bench.end_all(0, Status::Ok);
        bench.run_until_idle();
    }
    for side in 0..3 {
        assert_eq!(bench.ended(side).len(), 9, "reactor {side}");
    }
    assert_eq!(bench.queue.outstanding(), 0);
    assert_eq!(bench.queue.event_stats().requeued, 1);
}

#[test]
fn requests_at_the_driver_are_counted_for_their_groups_with_the_age_of_the_oldest() {
    // Bfq would hold some of them back.
    for kind in [sched::NONE, sched::MQ_DEADLINE] {
        let mut bench = Bench::new(with_groups(1, 4, kind));
        let (a, b, idle) = (create(&bench, ROOT), create(&bench, ROOT), create(&bench, ROOT));
        let begun = bench.now;
        send(&mut bench, 0, [of(a, 1), of(a, 2)]);
        bench.now = begun + Nanos::from_secs(3);
        send(&mut bench, 0, [of(a, 3), of(b, 4)]);
        let now = begun + Nanos::from_secs(5);
        let found = |bench: &Bench| bench.sides[0].local.in_flight_of_groups(now);
        let has = |requests, seconds| InFlight {
            requests,
            oldest: Nanos::from_secs(seconds),
        };
        let all = found(&bench);
        assert_eq!((all[&a], all[&b]), (has(3, 5), has(1, 2)), "{kind}");
        assert!(!all.contains_key(&idle));
        bench.run_dry();
        assert!(found(&bench).is_empty(), "{kind}");
    }
}
