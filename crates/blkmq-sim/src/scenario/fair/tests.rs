//! Asserts what `fair` shows: shares, the bound on the lead after every end, and that neither holds
//! without it.

use super::*;

#[test]
fn four_groups_get_their_due_and_the_drive_loses_little() {
    let case = shares(8, 4, 32, [4096; 2]);
    let (none, bfq) = (measure(case, sched::NONE, 4, 1), measure(case, sched::BFQ, 4, 1));
    assert!(bfq.worst_error < 20_000, "{bfq:?}");
    assert!(bfq.rate * 100 >= none.rate * 97, "{bfq:?} {none:?}");
    let longest_alone = SERVICE + SPREAD;
    assert!(bfq.light_p99 < longest_alone + longest_alone, "{bfq:?}");
}

#[test]
fn latency_target_is_met_by_a_scheduler_that_knows_no_groups() {
    let (free, target) = (isolation(8, 4, 4096), targeted(8, 4, Nanos::from_micros(250)));
    let without = measure(free, sched::MQ_DEADLINE, 1, 1);
    let with = measure(target, sched::MQ_DEADLINE, 1, 1);
    assert!(without.light_p99 > Nanos::from_millis(1), "{without:?}");
    assert!(with.light_p99 < Nanos::from_micros(350), "{with:?}");
    assert!(with.iops * 10 >= without.iops * 9, "{with:?} {without:?}");
}

#[test]
fn light_tenant_never_waits_for_requests_that_capped_ones_hold() {
    let few = crowded(16, 4, 1024, 500, 512);
    let enough = Case {
        requests: None,
        ..few
    };
    for kind in sched::BUILT_IN {
        let (few, enough) = (measure(few, kind, 1, 1), measure(enough, kind, 1, 1));
        assert!(
            few.light_p99.0 <= enough.light_p99.0 * 11 / 10,
            "{kind}: {few:?} {enough:?}"
        );
        assert!(
            few.iops.abs_diff(enough.iops) <= enough.iops / 50,
            "{kind}: {few:?} {enough:?}"
        );
    }
}

/// Groups of which the heaviest has all its bios in flight, so that order alone gives it no more
/// than the others. They run for half a second; from then on leads are counted from zero and
/// checked after every end.
fn shallow(groups: u32, prepare: impl FnOnce(&mut World)) -> World {
    let case = shares(16, groups, 16, [4096; 2]);
    let mut world = World::new(case, sched::BFQ, 1);
    world.light_due = None;
    prepare(&mut world);
    world.run_until(Instant(SECOND / 2));
    world.bytes.fill(0);
    world.lead_max = Some(reach(&world) + in_flight(case));
    world
}

/// The bound: what the drive does in a millisecond, 200 requests, divided by the sum of all
/// weights.
fn reach(world: &World) -> u64 {
    200 * 4096 / world.weights.iter().sum::<u64>()
}

/// Service in flight is not counted yet, and a group's next request may exceed the bound.
fn in_flight(case: Case) -> u64 {
    u64::from(2 * case.depth) * 4096 / 100
}

fn error_over(world: &mut World, seconds: u64) -> u64 {
    let before = world.totals();
    let end = Instant(world.now.0 + seconds * SECOND);
    world.run_until(end);
    world.share_error(&before, &world.totals())
}

#[test]
fn nobody_runs_ahead_of_a_group_that_has_everything_in_flight() {
    let error = error_over(&mut shallow(3, |_| ()), 2);
    assert!(error < 20_000, "{error} millionths off");
}

#[test]
#[should_panic(expected = "bytes a weight ahead")]
fn without_the_bound_they_do() {
    let mut world = shallow(3, |_| ());
    let set = world.queue.queue().set_tunable("slice_idle", 0);
    set.expect("the gate is free").expect("bfq has it");
    world.run_until(Instant(2 * SECOND));
}

#[test]
fn nobody_of_a_thousand_runs_ahead() {
    let mut world = shallow(1000, |_| ());
    let end = Instant(world.now.0 + SECOND / 4);
    world.run_until(end);
    assert!(world.ios > 40_000, "{} I/Os", world.ios);
}

#[test]
fn nobody_runs_ahead_on_a_drive_that_pauses() {
    let pauses = Every {
        period: Nanos::from_millis(50),
        length: Nanos::from_millis(8),
    };
    let mut world = shallow(3, |world| world.clock.borrow_mut().pauses = Some(pauses));
    let error = error_over(&mut world, 2);
    assert!(error < 20_000, "{error} millionths off");
}

#[test]
fn nobody_runs_ahead_on_a_drive_that_becomes_ten_times_slower_and_faster() {
    let mut world = shallow(3, |_| ());
    for slowness in [10, 1] {
        world.clock.borrow_mut().slowness = slowness;
        let error = error_over(&mut world, 1);
        assert!(error < 20_000, "{error} millionths off, {slowness} times slower");
    }
}

#[test]
fn client_that_loses_its_processor_for_moments_keeps_its_share() {
    let absence = Every {
        period: Nanos::from_millis(60),
        length: Nanos::from_millis(6),
    };
    let mut world = shallow(3, |world| world.absences = Some((GroupId(3), absence)));
    // While the client has no CPU the others continue.
    world.lead_max = None;
    let error = error_over(&mut world, 2);
    assert!(error < 10_000, "{error} millionths off");
}

/// A group of weight 100 that reads, beside one of weight 200 that only discards; returns how many
/// requests of each end in a second.
fn beside_discards(depth: u32) -> [u64; 2] {
    let case = shares(16, 2, depth, [4096; 2]);
    let mut world = World::new(case, sched::BFQ, 1);
    world.light_due = None;
    world.only = Some((2..3, Op::Discard));
    world.run_until(Instant(SECOND));
    let before = world.totals();
    world.run_until(Instant(2 * SECOND));
    let bytes = [0, 1].map(|group| world.totals()[group] - before[group]);
    [bytes[0] / 4096, bytes[1] / DISCARD]
}

#[test]
fn discards_take_their_part_of_the_drives_time() {
    let [reads, discards] = beside_discards(64);
    let time = discards * DISCARD_TIMES;
    let part = reads * 100 / (reads + time);
    assert!(
        (29..38).contains(&part),
        "{part} % of the time for {reads} reads, the rest for {discards} discards"
    );
    let all = 16 * SECOND / SERVICE.0;
    assert!(
        reads + time > all * 4 / 5,
        "{reads} reads and {discards} discards"
    );
}

#[test]
fn nobody_is_held_at_the_pace_of_discards_on_a_drive_that_has_room() {
    let [reads, discards] = beside_discards(4);
    let alone = 4 * SECOND / SERVICE.0;
    assert!(
        reads > alone * 4 / 5,
        "{reads} of {alone} reads beside {discards} discards"
    );
}

/// Two groups of the same weight: one has requests of 256 KiB, the other has `depth` requests of 4
/// KiB, which the drive serves in the same time, so it can never have half of the bytes. Returns
/// how many of each end in a second.
fn large_beside_small(depth: u32, small: Pace) -> [u64; 2] {
    let case = shares(16, 2, depth, [256 << 10, 4096]);
    let mut world = World::new(case, sched::BFQ, 1);
    world.light_due = None;
    world.absences = match small {
        Pace::AtOnce => None,
        Pace::Pauses => Some((GroupId(2), PAUSES)),
    };
    world.weights = vec![100; 2];
    world.run_until(Instant(SECOND));
    let before = world.totals();
    world.run_until(Instant(3 * SECOND));
    let bytes = [0, 1].map(|group| world.totals()[group] - before[group]);
    [bytes[0] / (256 << 10) / 2, bytes[1] / 4096 / 2]
}

enum Pace {
    AtOnce,
    Pauses,
}

/// 0.1 ms of work, 1 ms of pause.
const PAUSES: Every = Every {
    period: Nanos::from_micros(1100),
    length: Nanos::from_micros(1000),
};

#[test]
fn nobody_is_held_at_the_pace_of_many_small_requests() {
    let [large, small] = large_beside_small(32, Pace::AtOnce);
    let alone = 16 * SECOND / SERVICE.0;
    assert!(small > alone * 6 / 10, "{small} small ones of {alone}");
    // By its weight it has half of the other's bytes.
    assert!(
        large * 64 * 2 > small * 9 / 10,
        "{large} large ones, {small} small ones"
    );
    assert!(large + small > alone * 9 / 10, "{large} and {small} of {alone}");
}

#[test]
fn nobody_is_held_at_the_pace_of_one_that_pauses() {
    let [large, small] = large_beside_small(4, Pace::Pauses);
    let alone = 4 * SECOND / SERVICE.0;
    assert!(
        large > alone * 9 / 10,
        "{large} large ones of {alone} beside {small}"
    );
}

#[test]
fn without_an_elevator_weights_mean_nothing() {
    let case = shares(8, 4, 32, [4096; 2]);
    assert!(measure(case, sched::NONE, 1, 1).worst_error > 300_000);
}

/// A flood beside a reader that rests for 5 ms between two reads.
fn beside_a_flood(units: u32, bytes: u64, weight: u16) -> Case {
    Case {
        weights: [weight; 3],
        ..shares(units, 1, 32, [bytes; 2])
    }
}

#[test]
fn light_tenant_that_pauses_finds_no_queue_and_costs_a_flood_nothing() {
    // The light one has a weight of 100: as much as the flood, and a hundred times as much.
    for (units, weight) in [(1, 100), (1, 1), (4, 100), (16, 100)] {
        let case = beside_a_flood(units, 256 << 10, weight);
        let (none, bfq) = (measure(case, sched::NONE, 2, 1), measure(case, sched::BFQ, 2, 1));
        let flood = SERVICE.0 / u64::from(units);
        let (p50_max, p99_max) = (2 * SERVICE.0 + flood, 2 * (SERVICE + SPREAD).0 + 2 * flood);
        assert!(
            bfq.light_p50.0 <= p50_max,
            "{units} units, {weight}: {bfq:?} {none:?}"
        );
        assert!(
            bfq.light_p99.0 <= p99_max,
            "{units} units, {weight}: {bfq:?} {none:?}"
        );
        assert!(
            bfq.rate * 100 >= none.rate * 95,
            "{units} units, {weight}: {bfq:?} {none:?}"
        );
    }
}
