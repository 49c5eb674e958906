//! Runs a few seeds of every scenario, and checks that a seed replays exactly.

use blkmq_sim::run;
use blkmq_sim::scenario::{self, Scenario};
use blkmq_sim::setup::Setup;
use blkmq_sim::world::PowerCuts;

const SEEDS: std::ops::RangeInclusive<u64> = 1..=6;

#[track_caller]
fn passes(name: &str) {
    let scenario: &Scenario = scenario::by_name(name).expect("the scenario exists");
    for seed in SEEDS {
        if let Err(fault) = run::one(scenario, seed, false) {
            panic!("{name} seed {seed}: {fault}");
        }
    }
}

macro_rules! scenarios {
    ($($test:ident: $name:literal,)*) => {
        $(#[test] fn $test() { passes($name); })*

        #[test]
        fn every_scenario_has_its_test() {
            let tested = [$($name),*];
            let all: Vec<&str> = scenario::ALL.iter().map(|scenario| scenario.name).collect();
            assert_eq!(all, tested);
        }
    };
}

scenarios! {
    direct_passes: "direct",
    deadline_passes: "deadline",
    flush_storm_passes: "flush-storm",
    power_cut_passes: "power-cut",
    switch_passes: "switch",
    one_tag_passes: "one-tag",
    timeouts_passes: "timeouts",
    requeues_passes: "requeues",
    slow_requests_passes: "slow-requests",
    shared_tags_passes: "shared-tags",
    attached_passes: "attached",
    few_hctx_passes: "few-hctx",
    seek_disk_passes: "seek-disk",
    depth_change_passes: "depth-change",
    groups_passes: "groups",
    quiesce_passes: "quiesce",
    every_context_passes: "every-context",
    multipath_passes: "multipath",
    mapped_passes: "mapped",
    mapped_faults_passes: "mapped-faults",
    mapped_power_cut_passes: "mapped-power-cut",
    everything_passes: "everything",
}

#[test]
fn same_seed_gives_the_same_history_and_another_seed_another() {
    for scenario in scenario::ALL {
        let digest = |seed| run::one(scenario, seed, false).expect("it passes").digest;
        assert_eq!(digest(3), digest(3), "{}", scenario.name);
        assert_ne!(digest(3), digest(4), "{}", scenario.name);
    }
}

/// A scenario that never causes the events that it is about would prove nothing.
#[test]
fn scenarios_reach_what_they_are_about() {
    let sum = |name: &str, of: fn(&blkmq_sim::world::Summary) -> u64| -> u64 {
        let scenario = scenario::by_name(name).expect("the scenario exists");
        let one = |seed| of(&run::one(scenario, seed, false).expect("it passes"));
        SEEDS.map(one).sum()
    };
    assert!(sum("direct", |s| s.counts.merged) > 20, "merges");
    assert!(sum("flush-storm", |s| s.counts.flushes) > 50, "flushes");
    assert!(sum("mapped", |s| s.counts.flushes) > 50, "flushes of members");
    assert!(
        sum("mapped-faults", |s| s.counts.errors) > 50,
        "errors of members"
    );
    assert!(
        sum("mapped-faults", |s| s.counts.timeouts) > 5,
        "timeouts of members"
    );
    assert!(
        sum("mapped-faults", |s| s.counts.requeues) > 20,
        "requeues of members"
    );
    assert!(sum("switch", |s| s.controls) > 6, "switches");
    assert!(sum("slow-requests", |s| s.time.0 / 1_000_000_000) > 30, "hangs");
    assert!(sum("slow-requests", |s| s.counts.timeouts) > 0, "hangs for ever");
    assert!(sum("timeouts", |s| s.counts.timeouts) > 200, "timeouts");
    assert!(sum("timeouts", |s| s.counts.stale) > 10, "stale ends");
    assert!(sum("requeues", |s| s.counts.requeues) > 25, "requeues");
    assert!(sum("deadline", |s| s.gate_skipped) > 2, "a held gate");
    assert!(sum("quiesce", |s| s.controls) > 20, "quiesces");
    assert!(sum("groups", |s| s.controls) > 100, "changes of groups");
    assert!(sum("one-tag", |s| s.counts.in_flight_max) <= 2 * 6, "one tag");
}

/// Adds up what the power cuts of a scenario met and left, after `change` of each seed's setup.
fn power_cuts(name: &str, change: fn(&mut Setup)) -> PowerCuts {
    let scenario = scenario::by_name(name).expect("the scenario exists");
    let mut sum = PowerCuts::default();
    for seed in SEEDS {
        let mut setup = scenario.setup_of(seed);
        change(&mut setup);
        let cuts = run::with_setup(&setup, seed, false)
            .expect("it passes")
            .power_cuts;
        sum.count += cuts.count;
        sum.in_flight += cuts.in_flight;
        sum.lost += cuts.lost;
        sum.torn_bios += cuts.torn_bios;
        sum.torn_blocks += cuts.torn_blocks;
    }
    sum
}

#[test]
fn power_cuts_meet_requests_at_drives_and_lose_what_was_cached() {
    for name in ["power-cut", "mapped-power-cut"] {
        let cuts = power_cuts(name, |_| {});
        assert!(cuts.count >= 6, "{name}: {cuts:?}");
        assert!(cuts.in_flight > cuts.count / 2, "{name}: {cuts:?}");
        assert!(cuts.lost > cuts.count / 4, "{name}: {cuts:?}");
    }
    let cuts = power_cuts("mapped-power-cut", |_| {});
    assert!(cuts.torn_bios > 0 && cuts.torn_blocks > 0, "{cuts:?}");
}

/// The counts of the test above are those of what happened, not of what was requested.
#[test]
fn power_cuts_that_meet_nothing_or_lose_nothing_are_not_counted() {
    let none = power_cuts("power-cut", |setup| setup.power_cuts = 0);
    assert_eq!((none.count, none.in_flight, none.lost), (0, 0, 0), "{none:?}");
    let idle = power_cuts("mapped-power-cut", |setup| {
        setup.clients.iter_mut().for_each(|client| client.bios = 0);
    });
    assert!(idle.count > 0, "{idle:?}");
    assert_eq!((idle.in_flight, idle.lost), (0, 0), "{idle:?}");
    let reads = power_cuts("mapped-power-cut", |setup| {
        let clients = setup.clients.iter_mut();
        clients.for_each(|client| client.mix = [1, 0, 0, 0, 0]);
    });
    assert!(reads.in_flight > 0, "{reads:?}");
    assert_eq!(
        (reads.lost, reads.torn_bios, reads.torn_blocks),
        (0, 0, 0),
        "{reads:?}"
    );
}
