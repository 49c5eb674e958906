//! Tests a multipath drive in virtual time: how selectors divide the load, and what happens to
//! requests when paths fail and recover.

mod world;

use blkmq_core::bio::{Op, Status};
use blkmq_core::mapper::multipath::{Config, Detours, Failback, NoPath, PathId, PathState, Selector};
use blkmq_core::time::{Instant, Nanos};
use world::{World, paths};

fn config(count: usize, selector: Selector) -> Config {
    Config {
        selector,
        ..Config::new("m", paths(count))
    }
}

fn second(n: u64) -> Instant {
    Instant(1) + Nanos::from_secs(n)
}

fn percentile_99(mut times: Vec<Nanos>) -> Nanos {
    times.sort();
    times[times.len() * 99 / 100]
}

#[test]
fn service_time_divides_the_load_as_the_paths_are_fast() {
    for (one, other) in [(1, 3), (2, 5), (1, 1)] {
        let mut config = config(2, Selector::ServiceTime);
        (config.paths[0].throughput, config.paths[1].throughput) = (one, other);
        let mut world = World::new(config, &[300 / u64::from(one), 300 / u64::from(other)]);
        world.load(32, second(2));
        let issued = world.take_issued();
        let share = issued[1] as f64 / (issued[0] + issued[1]) as f64;
        let fair = f64::from(other) / f64::from(one + other);
        assert!(
            (share / fair - 1.0).abs() < 0.05,
            "{one}:{other} was divided as {issued:?}"
        );
    }
}

#[test]
fn history_finds_a_path_that_became_fast_within_a_second() {
    let mut world = World::new(config(2, Selector::HistoricalServiceTime), &[100, 5000]);
    world.load(4, second(2));
    let before = world.take_issued();
    assert!(before[1] * 20 < before[0], "the slow path got {before:?}");
    world.models[1].borrow_mut().service = Nanos::from_micros(20);
    world.load(4, second(3));
    world.take_issued();
    world.load(4, second(3) + Nanos::from_millis(100));
    let after = world.take_issued();
    assert!(
        after[1] > 3 * after[0],
        "the path that became fast gets {after:?}"
    );
}

#[test]
fn history_leaves_a_path_that_became_slow() {
    let mut world = World::new(config(2, Selector::HistoricalServiceTime), &[100, 20]);
    world.load(4, second(1));
    world.models[1].borrow_mut().service = Nanos::from_millis(5);
    world.load(4, second(1) + Nanos::from_millis(100));
    world.take_issued();
    world.load(4, second(2));
    let issued = world.take_issued();
    assert!(issued[1] * 20 < issued[0], "{issued:?}");
}

/// Requests arrive at 60 % of the rate that two paths of 100 µs can serve, at random distances.
fn p99_of_the_first_two(selector: Selector, services: &[u64]) -> Nanos {
    let mut world = World::new(config(services.len(), selector), services);
    let mut chance = 12345u64;
    let mut arrival = world.now;
    while world.now < second(2) {
        while world.now < arrival {
            world.step(arrival);
        }
        world.submit(1);
        chance = chance
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        arrival = arrival + Nanos(20_000 + (chance >> 33) % 126_000);
    }
    let times = world.models[..2]
        .iter()
        .flat_map(|model| std::mem::take(&mut model.borrow_mut().times));
    percentile_99(times.collect())
}

#[test]
fn slow_path_does_not_raise_the_p99_of_the_others() {
    for selector in [
        Selector::ServiceTime,
        Selector::QueueLength,
        Selector::HistoricalServiceTime,
    ] {
        let alone = p99_of_the_first_two(selector, &[100, 100]);
        let beside = p99_of_the_first_two(selector, &[100, 100, 5000]);
        assert!(
            beside.0 * 10 <= alone.0 * 11,
            "{selector}: p99 {alone} became {beside}"
        );
    }
}

#[test]
fn busy_path_passes_its_turn_and_all_busy_hold_the_request_back() {
    let mut world = World::new(config(2, Selector::RoundRobin), &[100, 100]);
    world.models[0].borrow_mut().slots = 1;
    world.models[1].borrow_mut().slots = 3;
    world.submit(10);
    assert_eq!(world.take_issued(), [1, 3]);
    world.pass(Nanos::from_millis(10));
    assert_eq!(world.outstanding(), 0);
    assert!(world.ended.iter().all(|status| status.is_ok()));
    assert_eq!(world.states(), [PathState::Active; 2], "busy is no failure");
}

#[test]
fn failed_path_is_probed_and_used_again() {
    let mut world = World::new(config(2, Selector::RoundRobin), &[100, 100]);
    world.models[0].borrow_mut().status = Status::Transport;
    world.submit(8);
    world.pass(Nanos::from_millis(500));
    assert_eq!(world.ended, [Status::Ok; 8], "all went over the other path");
    assert_eq!(world.states(), [PathState::Failed, PathState::Active]);
    let stats = &world.multipath.path_stats()[0];
    assert_eq!(
        (stats.fails, stats.last_error, stats.errors),
        (1, Status::Transport, 4)
    );
    world.models[0].borrow_mut().status = Status::Ok;
    world.pass(Nanos::from_millis(1100));
    assert_eq!(world.states(), [PathState::Active; 2]);
    world.take_issued();
    world.submit(8);
    assert_eq!(world.take_issued(), [4, 4]);
    world.pass(Nanos::from_millis(1));
}

/// Two groups of a path each; writes fail on the first path, and load keeps it busy for this long.
fn write_on_a_path_that_fails_writes(time: Nanos) -> World {
    let mut config = config(2, Selector::ServiceTime);
    config.paths[1].group = 1;
    let mut world = World::new(config, &[100, 100]);
    world.models[0].borrow_mut().write_status = Status::Io;
    let until = world.now + time;
    while world.now < until {
        world.submit_of(Op::Write, 1);
        world.pass(Nanos::from_millis(1));
    }
    assert!(world.ended.iter().all(|status| status.is_ok()));
    world
}

#[test]
fn path_whose_writes_alone_fail_is_returned_to_ever_more_rarely() {
    let world = write_on_a_path_that_fails_writes(Nanos::from_secs(8));
    // After 10, 20, 40 ms and so on.
    let switches = world.multipath.group_stats().switches;
    assert!((10..=22).contains(&switches), "{switches} switches in 8 s");
}

#[test]
fn path_on_probation_carries_what_no_other_can() {
    let mut world = write_on_a_path_that_fails_writes(Nanos::from_secs(8));
    assert_eq!(world.states(), [PathState::Active; 2]);
    world.take_issued();
    world.submit_of(Op::Write, 1);
    world.pass(Nanos::from_millis(1));
    assert_eq!(world.take_issued(), [0, 1], "there is another");
    world.models[0].borrow_mut().write_status = Status::Ok;
    world.models[1].borrow_mut().status = Status::Transport;
    world.ended.clear();
    world.submit_of(Op::Write, 1);
    world.pass(Nanos::from_millis(1));
    assert_eq!(
        (world.take_issued(), &world.ended[..]),
        (vec![1, 1], &[Status::Ok][..])
    );
}

#[test]
fn path_that_an_operator_reinstates_is_on_probation_no_more() {
    let mut world = write_on_a_path_that_fails_writes(Nanos::from_secs(8));
    world.models[0].borrow_mut().write_status = Status::Ok;
    world.multipath.reinstate_path(PathId(0), world.now).unwrap();
    world.pass(Nanos::from_millis(1));
    world.take_issued();
    world.submit_of(Op::Write, 1);
    world.pass(Nanos::from_millis(1));
    assert_eq!(world.take_issued(), [1, 0]);
}

#[test]
fn path_that_was_well_for_a_minute_has_not_relapsed() {
    let mut world = write_on_a_path_that_fails_writes(Nanos::from_secs(8));
    world.models[0].borrow_mut().write_status = Status::Ok;
    world.pass(Nanos::from_secs(130));
    assert_eq!(world.states(), [PathState::Active; 2]);
    world.models[0].borrow_mut().write_status = Status::Io;
    world.submit_of(Op::Write, 1);
    world.pass(Nanos::from_millis(5));
    assert_eq!(world.states(), [PathState::Failed, PathState::Active]);
    world.pass(Nanos::from_millis(10));
    assert_eq!(world.states(), [PathState::Active; 2]);
}

#[test]
fn error_of_the_medium_is_final_and_fails_no_path() {
    let mut world = World::new(config(2, Selector::RoundRobin), &[100, 100]);
    world.models[0].borrow_mut().status = Status::Medium;
    world.submit(2);
    world.pass(Nanos::from_millis(1));
    world.ended.sort_by_key(|status| status.is_ok());
    assert_eq!(world.ended, [Status::Medium, Status::Ok]);
    assert_eq!(world.states(), [PathState::Active; 2]);
}

#[test]
fn request_that_a_path_has_swallowed_goes_over_another_when_its_time_is_up() {
    let mut world = World::new(config(2, Selector::RoundRobin), &[60_000_000, 100]);
    world.submit(2);
    world.pass(Nanos::from_secs(31));
    assert_eq!(world.ended, [Status::Ok; 2]);
    assert_eq!(world.states()[1], PathState::Active);
    assert_eq!(world.multipath.path_stats()[0].fails, 1);
    assert!(
        world
            .multipath
            .path_stats()
            .iter()
            .all(|path| path.in_flight == 0)
    );
}

#[test]
fn requests_are_held_without_a_path_and_no_longer_than_they_may() {
    let limit = Nanos::from_millis(50);
    let mut world = World::new(
        Config {
            no_path: NoPath::QueueFor(limit),
            ..config(1, Selector::RoundRobin)
        },
        &[100],
    );
    world.multipath.fail_path(PathId(0), world.now).unwrap();
    world.submit(4);
    world.pass(Nanos::from_millis(40));
    assert_eq!((world.ended.len(), world.outstanding()), (0, 4));
    world.pass(Nanos::from_millis(20));
    assert_eq!(world.ended, [Status::Transport; 4]);
    assert!(world.multipath.group_stats().gave_up);
    // A path that recovers starts anew.
    world.multipath.reinstate_path(PathId(0), world.now).unwrap();
    world.submit(1);
    world.pass(Nanos::from_millis(1));
    assert_eq!(world.ended[4..], [Status::Ok]);
    world.multipath.fail_path(PathId(0), world.now).unwrap();
    world.submit(1);
    world.pass(Nanos::from_millis(20));
    assert_eq!(world.outstanding(), 1, "held again");
    world.multipath.set_no_path(NoPath::Fail, world.now);
    world.pass(Nanos::from_millis(4));
    assert_eq!(world.ended[5..], [Status::Transport]);
}

/// A request that was at the worker when detours were switched off returns to a drive without
/// detours.
#[test]
fn detours_are_switched_off_while_requests_are_with_the_worker() {
    for (no_path, issue) in [(false, false), (true, false), (false, true), (true, true)] {
        let insert = Detours {
            insert: true,
            issue,
            ..Detours::default()
        };
        let mut world = World::new(config(1, Selector::RoundRobin), &[100]);
        world.multipath.set_no_path(NoPath::Queue, world.now);
        world.models[0].borrow_mut().slots = 1;
        world.multipath.set_detours(insert, world.now);
        world.run();
        world.submit(4);
        assert_eq!(world.take_issued(), [0], "all are with the worker");
        world.multipath.set_detours(Detours::default(), world.now);
        if no_path {
            world.multipath.fail_path(PathId(0), world.now).unwrap();
        }
        world.worker.borrow_mut().is_awake = true;
        world.run();
        if no_path {
            world.multipath.reinstate_path(PathId(0), world.now).unwrap();
        }
        world.pass(Nanos::from_millis(50));
        assert_eq!(world.ended, [Status::Ok; 4]);
        assert_eq!(world.outstanding(), 0);
    }
}

#[test]
fn end_of_a_request_that_the_worker_issued_is_judged_as_its_paths_own() {
    for (answer, expected) in [(Status::Ok, Status::Ok), (Status::Medium, Status::Medium)] {
        let mut world = World::new(config(2, Selector::RoundRobin), &[100, 100]);
        world.multipath.set_detours(Detours::ALL, world.now);
        world.run();
        world.worker.borrow_mut().answer = Some(answer);
        world.submit(4);
        assert_eq!(world.take_issued(), [0, 0], "the worker issues by itself");
        world.worker.borrow_mut().is_awake = true;
        world.pass(Nanos::from_millis(50));
        assert_eq!(world.ended, [expected; 4]);
        let errors: u64 = world.multipath.path_stats().iter().map(|path| path.errors).sum();
        assert_eq!(errors, if answer.is_ok() { 0 } else { 4 });
        assert_eq!(world.outstanding(), 0);
    }
}

#[test]
fn path_that_fails_a_request_of_the_workers_is_failed_and_another_carries_it() {
    let mut world = World::new(config(2, Selector::RoundRobin), &[100, 100]);
    world.multipath.set_detours(Detours::ALL, world.now);
    world.run();
    world.worker.borrow_mut().answer = Some(Status::Transport);
    world.submit(1);
    world.multipath.set_detours(Detours::default(), world.now);
    world.worker.borrow_mut().is_awake = true;
    world.run();
    world.pass(Nanos::from_millis(50));
    assert_eq!(world.ended, [Status::Ok]);
    let stats = world.multipath.path_stats();
    assert_eq!(stats.iter().map(|path| path.errors).sum::<u64>(), 1, "{stats:?}");
}

#[test]
fn first_group_is_returned_to_as_failback_says() {
    for (failback, at_once, later) in [
        (Failback::Immediate, 0, 0),
        (Failback::Manual, 1, 1),
        (Failback::After(Nanos::from_millis(100)), 1, 0),
    ] {
        let mut config = config(3, Selector::ServiceTime);
        (config.paths[1].group, config.paths[2].group) = (1, 1);
        let mut world = World::new(Config { failback, ..config }, &[100, 100, 100]);
        world.submit(4);
        assert_eq!(world.take_issued(), [4, 0, 0], "the first group alone");
        world.pass(Nanos::from_millis(1));
        world.multipath.fail_path(PathId(0), world.now).unwrap();
        world.submit(4);
        assert_eq!(world.take_issued(), [0, 2, 2]);
        world.pass(Nanos::from_millis(1));
        world.multipath.reinstate_path(PathId(0), world.now).unwrap();
        assert_eq!(world.multipath.group_stats().current, at_once, "{failback:?}");
        world.pass(Nanos::from_millis(200));
        assert_eq!(world.multipath.group_stats().current, later, "{failback:?}");
        world.multipath.switch_group(1, world.now).unwrap();
        world.submit(4);
        assert_eq!(world.take_issued(), [0, 2, 2], "switched by message");
        assert!(world.multipath.switch_group(7, world.now).is_err());
        world.pass(Nanos::from_millis(1));
    }
}
