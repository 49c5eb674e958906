//! Tests bfq in virtual time, with a drive that serves several requests at once: the share of each
//! group, and how long requests wait.

mod ledger;
mod turns;
mod world;

use blkmq_core::bio::{Class, Flags, Op, Prio};
use blkmq_core::group::{Node, ROOT};
use blkmq_core::ids::GroupId;
use blkmq_core::sched::{Elevator, GroupAware};
use blkmq_core::time::Nanos;

use crate::world::{Drive, Load, World};

/// Asserts that the bytes of the loads have the ratio of these weights, within 2 %, in each window
/// of the given length.
fn assert_shares(world: &mut World, weights: &[u64], window: Nanos, windows: u64) {
    let sum: u64 = weights.iter().sum();
    for n in 0..windows {
        let before = world.served.clone();
        world.run(window);
        let got: Vec<u64> = world
            .served
            .iter()
            .zip(&before)
            .map(|(now, then)| now - then)
            .collect();
        let total: u64 = got.iter().sum();
        for (load, (&got, &weight)) in got.iter().zip(weights).enumerate() {
            let error = (got * sum) as f64 / (total * weight) as f64 - 1.0;
            assert!(
                error.abs() < 0.02,
                "window {n}: load {load} got {:+.1} % off its due",
                error * 100.0
            );
        }
    }
}

fn node(parent: u32, weight: u16) -> Node {
    Node::new(GroupId(parent), weight)
}

/// Starts a load in each group that always has requests queued.
fn flood(world: &mut World, groups: impl IntoIterator<Item = u32>) {
    for group in groups {
        world.start(Load {
            group: GroupId(group),
            client: group,
            ..Load::default()
        });
    }
}

#[test]
fn groups_share_by_weight_in_any_window() {
    let mut world = World::new(Drive::flash(), 4);
    for (group, weight) in [(1, 100), (2, 200), (3, 400)] {
        world.set_group(group, node(0, weight));
    }
    flood(&mut world, 1..4);
    world.run(SETTLED);
    assert_shares(&mut world, &[1, 2, 4], Nanos::from_millis(100), 10);
}

/// Groups of weights 1, 2 and 4 that each keep `depth` requests under way, all of which fit into
/// the drive.
fn shallow(depth: u32) -> World {
    let mut world = World::new(Drive::flash(), 4);
    for (group, weight) in [(1, 100), (2, 200), (3, 400)] {
        world.set_group(group, node(0, weight));
        world.start(Load {
            group: GroupId(group),
            client: group,
            depth,
            ..Load::default()
        });
    }
    world.run(SETTLED);
    world
}

#[test]
fn groups_share_by_weight_although_all_that_the_heaviest_asks_for_is_in_flight() {
    assert_shares(&mut shallow(16), &[1, 2, 4], Nanos::from_millis(250), 4);
}

#[test]
fn drive_that_pauses_or_slows_down_tenfold_changes_no_share() {
    let mut world = shallow(16);
    for factor in [10, 1, 10, 1] {
        world.set_pace(factor);
        world.run(Nanos::from_millis(500));
        assert_shares(&mut world, &[1, 2, 4], Nanos::from_secs(1), 1);
    }
}

#[test]
fn group_that_could_not_be_faster_holds_nobody() {
    // Four for each group: sixteen units serve all twelve at once.
    let mut world = shallow(4);
    // During this time each group in turn is found not to have its share.
    world.run(SETTLED);
    let before: u64 = world.served.iter().sum();
    world.run(Nanos::from_secs(1));
    let got = world.served.iter().sum::<u64>() - before;
    let all = Drive::flash().bytes_per(Nanos::from_secs(1), 4096) * 12 / 16;
    assert!(got * 100 >= all * 97, "{got} of {all}");
}

/// A flood in group 1, and groups of the same weight that read 4 KiB at a time, with a pause of
/// `think` between reads.
fn flood_beside(lights: u32, think: Nanos, settled: Nanos) -> World {
    let mut world = World::new(Drive::flash(), 2 + lights as usize);
    let load = |group| Load {
        group: GroupId(group),
        client: group,
        ..Load::default()
    };
    world.start(Load {
        depth: 64,
        len: 64 << 10,
        ..load(1)
    });
    for light in 0..lights {
        world.start(Load {
            depth: 1,
            think,
            ..load(2 + light)
        });
    }
    world.run(settled);
    world
}

fn part_of_flood(world: &mut World, time: Nanos) -> u64 {
    let before = world.served[0];
    world.run(time);
    (world.served[0] - before) * 100 / Drive::flash().bytes_per(time, 64 << 10)
}

#[test]
fn flood_has_what_light_groups_that_rest_between_two_reads_leave() {
    for lights in [1, 10] {
        let mut world = flood_beside(lights, Nanos::from_micros(500), SETTLED);
        let part = part_of_flood(&mut world, SETTLED);
        assert!(part > 60, "{part} % of the drive beside {lights}");
    }
}

#[test]
fn passed_over_group_that_begins_to_flood_gets_its_share() {
    let mut world = flood_beside(1, Nanos::from_micros(900), SETTLED);
    world.stop(1);
    world.run(Nanos::from_millis(1));
    world.start(Load {
        group: GroupId(2),
        client: 2,
        depth: 64,
        len: 64 << 10,
        ..Load::default()
    });
    world.run(SETTLED);
    let before = world.served.clone();
    world.run(Nanos::from_secs(1));
    let got: Vec<u64> = world
        .served
        .iter()
        .zip(&before)
        .map(|(now, before)| now - before)
        .collect();
    let (old, new) = (got[0], got[2]);
    assert!(old.abs_diff(new) * 20 < old + new, "{got:?}");
}

#[test]
fn group_that_is_removed_while_it_is_probed_changes_nothing_for_the_others() {
    for step in 0..10 {
        // The first probe begins after 100 ms.
        let settled = Nanos::from_millis(98 + 3 * step);
        let mut world = flood_beside(1, Nanos::from_micros(900), settled);
        world.stop(1);
        world.run(Nanos::from_millis(1));
        world.bfq.group_gone(GroupId(2));
        let part = part_of_flood(&mut world, Nanos::from_millis(50));
        assert!(part > 85, "{part} % of the drive after {settled}");
    }
}

#[test]
fn light_group_that_turns_heavy_has_its_part_without_waits() {
    let mut world = flood_beside(1, Nanos::from_micros(500), SETTLED);
    world.stop(1);
    world.bfq.set_tunable("slice_idle", 0).expect("bfq has it");
    world.start(Load {
        group: GroupId(2),
        client: 2,
        depth: 64,
        len: 64 << 10,
        ..Load::default()
    });
    let part = part_of_flood(&mut world, SETTLED);
    assert!((45..56).contains(&part), "{part} % of the drive");
}

#[test]
fn nested_groups_share_what_their_parents_have() {
    let mut world = World::new(Drive::flash(), 7);
    for (group, parent, weight) in [
        (1, 0, 100),
        (2, 0, 300),
        (3, 1, 100),
        (4, 1, 200),
        (5, 2, 1000),
        (6, 2, 500),
    ] {
        world.set_group(group, node(parent, weight));
    }
    flood(&mut world, 3..7);
    world.run(SETTLED);
    assert_shares(&mut world, &[1, 2, 6, 3], Nanos::from_millis(250), 4);
}

#[test]
fn large_and_small_requests_and_writes_share_bytes_by_weight() {
    let mut world = World::new(Drive::flash(), 4);
    for (group, op, len) in [
        (1, Op::Read, 4096),
        (2, Op::Read, 262_144),
        (3, Op::Write, 65_536),
    ] {
        world.start(Load {
            group: GroupId(group),
            op,
            len,
            depth: 64,
            ..Load::default()
        });
    }
    world.run(Nanos::from_millis(50));
    assert_shares(&mut world, &[1, 1, 1], Nanos::from_secs(1), 3);
}

/// Half of what they move is written.
#[test]
fn copies_share_what_they_read_and_write_by_weight() {
    let mut world = World::new(Drive::flash(), 3);
    for (group, flags) in [(1, Flags::NONE), (2, Flags::TASK)] {
        world.start(Load {
            group: GroupId(group),
            flags,
            len: 262_144,
            depth: 64,
            ..Load::default()
        });
    }
    world.run(Nanos::from_millis(50));
    assert_shares(&mut world, &[2, 1], Nanos::from_secs(1), 2);
}

/// With a cost of 60 KiB for each request, 4 KiB count as 64 KiB and 64 KiB as 124 KiB.
#[test]
fn request_may_be_said_to_cost_more_than_its_bytes() {
    let mut world = World::new(Drive::flash(), 3);
    let set = world.bfq.set_tunable("request_cost", 60);
    set.expect("bfq has it");
    for (group, len) in [(1, 4096), (2, 65_536)] {
        world.start(Load {
            group: GroupId(group),
            len,
            depth: 64,
            ..Load::default()
        });
    }
    world.run(Nanos::from_millis(50));
    assert_shares(&mut world, &[4 * 124, 64 * 64], Nanos::from_secs(1), 2);
}

#[test]
fn reader_that_asks_for_less_than_its_share_waits_for_a_place_in_the_drive_only() {
    const FLOODERS: u32 = 63;
    let drive = Drive::flash();
    let mut world = World::new(drive, FLOODERS as usize + 2);
    flood(&mut world, 1..=FLOODERS);
    let reader = Load {
        group: GroupId(FLOODERS + 1),
        depth: 1,
        think: Nanos::from_micros(400),
        ..Load::default()
    };
    world.run(SETTLED);
    let reader = world.start(reader);
    world.run(Nanos::from_secs(1));
    let mut waits = std::mem::take(&mut world.waits[reader]);
    waits.sort_unstable();
    assert!(waits.len() > 1000, "{} requests", waits.len());
    let p99 = waits[waits.len() * 99 / 100];
    assert!(
        p99 <= drive.time(4096),
        "waited {p99} of a time of {}",
        drive.time(4096)
    );
}

#[test]
fn reader_that_asks_for_all_it_can_get_has_its_share_with_one_request_at_a_time() {
    let mut world = World::new(Drive::flash(), 34);
    flood(&mut world, 1..=32);
    world.start(Load {
        group: GroupId(33),
        depth: 1,
        ..Load::default()
    });
    world.run(SETTLED);
    assert_shares(&mut world, &[1; 33], Nanos::from_secs(1), 1);
}

#[test]
fn change_of_weight_counts_at_once() {
    let mut world = World::new(Drive::flash(), 3);
    world.set_group(1, node(0, 1));
    world.set_group(2, node(0, 1000));
    flood(&mut world, 1..3);
    world.run(Nanos::from_millis(200));
    world.set_group(1, node(0, 1000));
    world.run(Nanos::from_millis(5));
    assert_shares(&mut world, &[1, 1], Nanos::from_millis(50), 4);
}

#[test]
fn share_that_an_idle_group_leaves_is_the_others_at_once() {
    let mut world = World::new(Drive::flash(), 3);
    flood(&mut world, 1..3);
    world.run(Nanos::from_millis(100));
    world.stop(0);
    world.run(Nanos::from_millis(2));
    let before = world.served[1];
    world.run(Nanos::from_millis(10));
    let alone = Drive::flash().bytes_per(Nanos::from_millis(10), 4096);
    assert!(
        (world.served[1] - before) * 100 >= alone * 97,
        "{} of {alone}",
        world.served[1] - before
    );
}

#[test]
fn groups_that_compete_get_together_nearly_what_the_drive_can_do() {
    let mut world = World::new(Drive::flash(), 9);
    flood(&mut world, 1..9);
    world.run(Nanos::from_secs(1));
    let before: u64 = world.served.iter().sum();
    world.run(Nanos::from_secs(2));
    let got = world.served.iter().sum::<u64>() - before;
    let percent = got * 100 / Drive::flash().bytes_per(Nanos::from_secs(2), 4096);
    assert!(percent >= 97, "{percent} %");
}

#[test]
fn real_time_goes_before_best_effort_and_that_before_idle_which_is_not_forgotten() {
    let mut world = World::new(Drive::flash(), 1);
    let prio = |class| Prio { class, level: 4 };
    let load = |client, class| Load {
        group: ROOT,
        client,
        prio: prio(class),
        depth: 64,
        ..Load::default()
    };
    let idle = world.start(load(1, Class::Idle));
    let best = world.start(load(2, Class::Be));
    world.run(Nanos::from_secs(1));
    assert!(world.served[idle] > 0, "the idle class is forgotten");
    assert!(world.served[idle] * 50 < world.served[best]);
    let real = world.start(load(3, Class::Rt));
    world.run(Nanos::from_millis(100));
    let before = world.served.clone();
    world.run(Nanos::from_secs(1));
    assert_eq!(
        world.served[best], before[best],
        "best effort beside a real-time flood"
    );
    assert!(world.served[real] > before[real] && world.served[idle] > before[idle]);
}

#[test]
fn levels_of_a_class_share_by_their_weights() {
    let mut world = World::new(Drive::flash(), 1);
    for level in [0, 4, 7] {
        let prio = Prio {
            class: Class::Be,
            level,
        };
        world.start(Load {
            client: level.into(),
            prio,
            depth: 64,
            ..Load::default()
        });
    }
    world.run(Nanos::from_millis(50));
    assert_shares(&mut world, &[8, 4, 1], Nanos::from_secs(1), 2);
}

#[test]
fn thousand_groups_share_by_weight() {
    let mut world = World::new(Drive::flash(), 1001);
    let weights: Vec<u64> = (0..1000).map(|n| 100 + n % 7 * 50).collect();
    for (n, &weight) in weights.iter().enumerate() {
        world.set_group(1 + n as u32, node(0, weight as u16));
        world.start(Load {
            group: GroupId(1 + n as u32),
            depth: 4,
            ..Load::default()
        });
    }
    world.run(Nanos::from_millis(100));
    assert_shares(&mut world, &weights, Nanos::from_secs(3), 1);
}

/// Enough for the operating depth to settle.
const SETTLED: Nanos = Nanos::from_millis(500);
