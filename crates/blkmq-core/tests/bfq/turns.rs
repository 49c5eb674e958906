//! Tests turns on a drive that seeks: idling, injection, budgets, time, which queues are favoured,
//! and which are merged.

use blkmq_core::bio::{Class, Prio};
use blkmq_core::group::Node;
use blkmq_core::ids::GroupId;
use blkmq_core::sched::{Elevator, GroupAware};
use blkmq_core::time::Nanos;

use crate::world::{Drive, Load, World};

/// A load that reads sequentially, with a pause after each read.
fn reader(group: u32) -> Load {
    Load {
        group: GroupId(group),
        client: group,
        sequential: true,
        think: Nanos::from_micros(100),
        len: 65_536,
        depth: 1,
        ..Load::default()
    }
}

fn seeker(group: u32) -> Load {
    Load {
        group: GroupId(group),
        client: group,
        depth: 8,
        ..Load::default()
    }
}

fn disk(groups: usize, tunables: &[(&str, u64)]) -> World {
    let mut world = World::new(Drive::disk(), groups);
    for &(name, value) in tunables {
        world.bfq.set_tunable(name, value).expect("a valid tunable");
    }
    world
}

/// The throughput of all loads together, as a percentage of the drive's best.
fn percent_of_best(world: &mut World, time: Nanos) -> u64 {
    let before: u64 = world.served.iter().sum();
    world.run(time);
    let got = world.served.iter().sum::<u64>() - before;
    got * 100 / Drive::disk().bytes_per(time, 65_536)
}

/// How many times in succession the same load was served, on average.
fn run_length(world: &World) -> usize {
    let changes = world.order.windows(2).filter(|pair| pair[0] != pair[1]).count();
    world.order.len() / (changes + 1)
}

#[test]
fn waiting_for_the_next_request_keeps_sequences_together_and_groups_share_the_drive() {
    let mut world = disk(3, &[]);
    world.start(reader(1));
    world.start(reader(2));
    world.run(Nanos::from_secs(1));
    let before = world.served.clone();
    let percent = percent_of_best(&mut world, Nanos::from_secs(20));
    assert!(percent >= 70, "{percent} %");
    let got: Vec<u64> = world
        .served
        .iter()
        .zip(&before)
        .map(|(now, then)| now - then)
        .collect();
    assert!(got[0].abs_diff(got[1]) * 50 <= got[0], "{got:?}");
}

#[test]
fn without_waiting_every_request_is_a_seek() {
    let mut world = disk(3, &[("slice_idle", 0)]);
    world.start(reader(1));
    world.start(reader(2));
    world.run(Nanos::from_secs(1));
    assert!(percent_of_best(&mut world, Nanos::from_secs(10)) <= 20);
}

#[test]
fn wait_ends_after_slice_idle_if_nothing_comes() {
    let mut world = disk(3, &[("low_latency", 0)]);
    let first = world.start(reader(1));
    world.run(Nanos::from_millis(50));
    world.stop(first);
    world.run(Nanos::from_millis(1));
    let second = world.start(reader(2));
    world.run(Nanos::from_millis(40));
    let longest = *world.waits[second].first().expect("it was served");
    assert!(longest <= Nanos::from_millis(8), "waited {longest}");
}

#[test]
fn turn_ends_when_its_time_is_over() {
    // Otherwise it would continue for a budget of 1 GiB, which is eight seconds.
    let mut world = disk(3, &[("max_budget", 1 << 21), ("low_latency", 0)]);
    world.start(reader(1));
    world.run(Nanos::from_millis(10));
    let late = world.start(reader(2));
    world.run(Nanos::from_secs(2));
    let longest = *world.waits[late].iter().max().expect("it was served");
    assert!(longest <= Nanos::from_millis(125 + 10), "waited {longest}");
    assert!(
        longest >= Nanos::from_millis(100),
        "waited {longest}: turns are too short"
    );
}

#[test]
fn small_budget_ends_the_turn_before_its_time() {
    let runs = |sectors| {
        let mut world = disk(3, &[("max_budget", sectors), ("low_latency", 0)]);
        world.start(reader(1));
        world.start(reader(2));
        world.run(Nanos::from_secs(5));
        run_length(&world)
    };
    // 1 MiB and 8 MiB, in pieces of 64 KiB.
    let (small, large) = (runs(2048), runs(16384));
    assert!((8..=16).contains(&small), "{small} pieces");
    assert!(large > 3 * small, "{large} pieces, {small} with a small budget");
}

#[test]
fn one_that_seeks_is_charged_for_its_time_and_leaves_the_other_its_share_of_it() {
    let mut world = disk(3, &[("low_latency", 0)]);
    let sequential = world.start(reader(1));
    let scattered = world.start(seeker(2));
    world.run(Nanos::from_secs(2));
    let before = world.served.clone();
    world.run(Nanos::from_secs(20));
    let got = world.served[sequential] - before[sequential];
    let alone = Drive::disk().bytes_per(Nanos::from_secs(20), 65_536);
    // Charged by bytes, the reader would have as little as the other load, which does 0.5 MiB/s.
    let percent = got * 100 / alone;
    assert!((30..=70).contains(&percent), "{percent} % of what it gets alone");
    assert!(world.served[scattered] > before[scattered]);
}

#[test]
fn while_one_thinks_for_long_another_s_request_goes_out() {
    let wait = |injects: bool| {
        let mut world = disk(
            3,
            &[
                ("low_latency", 0),
                ("slice_idle", 50),
                ("strict_guarantees", u64::from(!injects)),
            ],
        );
        world.start(Load {
            think: Nanos::from_millis(20),
            ..reader(1)
        });
        let other = world.start(Load {
            depth: 1,
            think: Nanos::from_millis(20),
            ..seeker(2)
        });
        world.run(Nanos::from_secs(10));
        world.served[other]
    };
    let (with, without) = (wait(true), wait(false));
    assert!(
        with * 4 >= without * 5,
        "{with} bytes with injection, {without} without"
    );
}

#[test]
fn program_that_was_just_started_is_favoured_for_a_while() {
    let time_of_first_32_mib = |low_latency| {
        let mut world = disk(1, &[("low_latency", low_latency)]);
        for client in 1..6 {
            world.start(Load {
                group: GroupId(0),
                client,
                depth: 4,
                ..reader(0)
            });
        }
        world.run(Nanos::from_secs(10));
        let started = world.start(Load {
            client: 9,
            len: 16384,
            ..reader(0)
        });
        let began = world.now;
        while world.served[started] < 32 << 20 {
            world.run(Nanos::from_millis(10));
        }
        world.now.since(began)
    };
    let (favoured, plain) = (time_of_first_32_mib(1), time_of_first_32_mib(0));
    assert!(favoured.0 * 2 < plain.0, "{favoured}, and {plain} without");
}

#[test]
fn clients_that_read_one_area_in_turn_are_served_as_one() {
    let percent = |levels: [u8; 2]| {
        let mut world = disk(1, &[("low_latency", 0)]);
        for (first, level) in levels.into_iter().enumerate() {
            world.start(Load {
                client: first as u32,
                prio: Prio {
                    class: Class::Be,
                    level,
                },
                len: 16384,
                interleaved: Some((2, first as u64)),
                ..reader(0)
            });
        }
        world.run(Nanos::from_secs(1));
        percent_of_best(&mut world, Nanos::from_secs(5))
    };
    // With different levels they have different weights, and are not merged.
    let (joined, apart) = (percent([4, 4]), percent([4, 5]));
    assert!(joined >= 50 && apart <= 10, "{joined} % joined, {apart} % apart");
}

#[test]
fn strict_guarantees_let_one_request_go_at_a_time_and_keep_the_shares() {
    let mut world = World::new(Drive::flash(), 3);
    world
        .bfq
        .set_tunable("strict_guarantees", 1)
        .expect("a valid tunable");
    world.set_group(2, Node::new(GroupId(0), 300));
    let drive = Drive::flash();
    let loads = [1, 2].map(|group| {
        world.start(Load {
            group: GroupId(group),
            ..Load::default()
        })
    });
    world.run(Nanos::from_secs(1));
    let before = world.served.clone();
    world.run(Nanos::from_secs(10));
    let got = loads.map(|load| world.served[load] - before[load]);
    assert!(got[1].abs_diff(3 * got[0]) * 10 <= got[1], "{got:?}");
    let one_at_a_time = Nanos::from_secs(10).0 / drive.time(4096).0 * 4096;
    assert!(
        got[0] + got[1] <= one_at_a_time,
        "more than one at a time: {got:?}"
    );
}

#[test]
fn time_that_the_drive_idles_is_told_for_whom_it_waited() {
    let mut world = disk(3, &[]);
    let loads = [world.start(reader(1)), world.start(reader(2))];
    world.run(Nanos::from_secs(2));
    let mut idled = [Nanos::ZERO; 3];
    world
        .bfq
        .drain_idled(&mut |group, time| idled[group.index()] = time);
    assert_eq!(idled[0], Nanos::ZERO);
    for (group, load) in [(1, loads[0]), (2, loads[1])] {
        // A client pauses for 100 µs before each request; during the other's turn nobody idles for
        // it.
        let thought = Nanos(world.waits[load].len() as u64 * 100_000);
        let is_sound = idled[group] <= thought && idled[group].0 * 2 >= thought.0;
        assert!(
            is_sound,
            "group {group}: idle for {}, thought for {thought}",
            idled[group]
        );
    }
    world
        .bfq
        .drain_idled(&mut |group, _| panic!("group {group} told twice"));
}
