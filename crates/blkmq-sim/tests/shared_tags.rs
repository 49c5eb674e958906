//! Checks that with one tag set a disk of 100 ms does not slow down one of 1 ms beside it. Each
//! has a fair share of the tags while both are active, with `mq-deadline` and without an elevator.

use blkmq_core::sched::{self, ElevatorType};
use blkmq_sim::rng::{Ppm, Rng};
use blkmq_sim::scenario;
use blkmq_sim::world;

/// Returns when the fast disk's client has done all its reads, in nanoseconds.
fn fast_disk_done_at(elevator: &'static ElevatorType, depth: u32, jobs: u64, slow_bios: u64) -> u64 {
    let scenario = scenario::by_name("shared-tags").expect("the scenario exists");
    let mut setup = (scenario.setup)(&mut Rng::new(1, 1));
    setup.elevator = elevator;
    setup.depth = depth;
    setup.requests_per_reactor = 128;
    for client in &mut setup.clients {
        client.bios = 200;
        client.depth = (jobs, jobs);
        client.burst = (200, 200);
        client.mix = [1, 0, 0, 0, 0];
        client.invalid = Ppm::NEVER;
    }
    setup.clients[1].bios = slow_bios;
    let summary = world::run(&setup, 1, false).expect("a history without faults passes");
    summary.finished_at[0].0
}

/// Checks that the fast disk is as fast as alone if its share of the tags suffices for its jobs,
/// and otherwise has its share.
fn check(elevator: &'static ElevatorType, depth: u32, jobs: u64) {
    let alone = fast_disk_done_at(elevator, depth, jobs, 0);
    let beside = fast_disk_done_at(elevator, depth, jobs, 50);
    // With more jobs than its half of the tags it can have half of its throughput alone; no share
    // is below four tags.
    let share = u64::from((depth / 2).max(4).min(depth));
    let due = jobs.min(u64::from(depth)) * 100 / jobs.min(share);
    assert!(
        beside * 100 <= alone * due * 13 / 10,
        "{elevator}, depth {depth}, {jobs} jobs: {alone} ns alone, {beside} ns beside the slow one"
    );
}

#[test]
fn without_an_elevator_a_fast_disk_has_at_least_its_share_beside_a_slow_one() {
    for depth in [8, 32] {
        for jobs in [1, 4, 16, 64] {
            check(sched::NONE, depth, jobs);
        }
    }
    // One tag cannot be shared: the context that has it keeps using it while it has jobs.
    for jobs in [4, 16, 64] {
        check(sched::NONE, 1, jobs);
    }
}

#[test]
fn behind_mq_deadline_a_fast_disk_has_at_least_its_share_beside_a_slow_one() {
    for depth in [8, 32] {
        for jobs in [1, 4, 16, 64] {
            check(sched::MQ_DEADLINE, depth, jobs);
        }
    }
}
