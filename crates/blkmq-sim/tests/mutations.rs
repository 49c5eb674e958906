//! Checks the oracle itself: it must detect a drive or a harness that does what it must not, each
//! kind with its own setup, and accept the same setups without the fault.

use blkmq_core::sched;
use blkmq_core::time::Nanos;
use blkmq_sim::drive::fault::Mutation;
use blkmq_sim::rng::{Ppm, Rng};
use blkmq_sim::run;
use blkmq_sim::scenario;
use blkmq_sim::setup::{Control, Sabotage, Setup};

const SEEDS: std::ops::Range<u64> = 1..13;

/// A setup in which every fault can show: one reactor or two, flushes and FUA, timeouts if
/// requested.
fn setup(seed: u64) -> Setup {
    let mut rng = Rng::new(seed, 7);
    let mut setup = Setup::base(&mut rng);
    setup.limits.fua = true;
    setup.timeout = Nanos::from_millis(20);
    setup.elevator = rng.pick(&sched::BUILT_IN);
    for client in &mut setup.clients {
        client.bios = 200;
        client.depth = (8, 16);
        client.blocks_max = 4;
        client.mix = [40, 45, 10, 0, 5];
        client.fua = Ppm::percent(20);
        client.sequential = Ppm::percent(10);
    }
    setup.disk_blocks = vec![16, 12];
    setup
}

/// Runs the setup with a change, for several seeds; returns the faults.
fn faults(change: impl Fn(&mut Setup)) -> Vec<String> {
    let run = |seed| {
        let mut setup = setup(seed);
        change(&mut setup);
        run::with_setup(&setup, seed, false).err()
    };
    SEEDS.filter_map(run).collect()
}

/// Asserts that most seeds find the fault, and that one of them reports one of `words`.
#[track_caller]
fn found(faults: &[String], words: &[&str]) {
    let seeds = SEEDS.end - SEEDS.start;
    assert!(
        faults.len() as u64 * 2 > seeds,
        "found by {} of {seeds} seeds: {faults:#?}",
        faults.len()
    );
    let first_lines: Vec<&str> = faults.iter().filter_map(|f| f.lines().next()).collect();
    assert!(
        first_lines
            .iter()
            .any(|line| words.iter().any(|word| line.contains(word))),
        "none says {words:?}: {first_lines:#?}"
    );
}

fn mutated(mutation: Mutation) -> Vec<String> {
    faults(|setup| setup.drive.mutation = Some(mutation))
}

fn with_timeouts(setup: &mut Setup) {
    setup.drive.faults.slow = Ppm::percent(10);
    setup.drive.faults.slow_factor = 2_000;
    setup.timeout = Nanos::from_millis(5);
}

#[test]
fn without_a_misdeed_the_same_histories_pass() {
    assert_eq!(faults(|_| {}), Vec::<String>::new());
    assert_eq!(faults(with_timeouts), Vec::<String>::new());
}

#[test]
fn completion_that_is_dropped_for_ever_is_found() {
    found(&mutated(Mutation::DropsCompletion), &["nothing has ended"]);
}

#[test]
fn flush_that_persists_nothing_is_found_without_a_power_cut() {
    found(&mutated(Mutation::FlushPersistsNothing), &["a power cut now"]);
}

#[test]
fn ignored_fua_is_found() {
    found(&mutated(Mutation::IgnoresFua), &["a power cut now"]);
}

#[test]
fn end_that_names_another_request_is_found() {
    found(
        &mutated(Mutation::EndsAnother),
        &["returned nothing", "a power cut now"],
    );
}

#[test]
fn read_of_old_data_is_found() {
    found(&mutated(Mutation::ReadsOldData), &["returned"]);
}

#[test]
fn dropped_write_is_found() {
    found(&mutated(Mutation::DropsWrite), &["returned", "a power cut now"]);
}

#[test]
fn exchanged_blocks_are_found() {
    found(&mutated(Mutation::SwapsBlocks), &["returned", "a power cut now"]);
}

#[test]
fn buffer_that_is_used_after_the_bio_has_ended_is_found() {
    let faults = faults(|setup| {
        with_timeouts(setup);
        setup.drive.mutation = Some(Mutation::WritesAfterTimeout);
    });
    found(&faults, &["after its end"]);
}

#[test]
fn error_that_is_hidden_is_found() {
    let faults = faults(|setup| {
        setup.drive.faults.bad_blocks = 4..6;
        setup.drive.mutation = Some(Mutation::HidesErrors);
    });
    found(&faults, &["returned"]);
}

#[test]
fn end_that_never_reaches_its_client_is_found() {
    let faults = faults(|setup| setup.sabotage = Some(Sabotage::LosesEnd));
    found(&faults, &["under way"]);
}

#[test]
fn second_end_is_found() {
    let faults = faults(|setup| setup.sabotage = Some(Sabotage::RepeatsEnd));
    found(&faults, &["but is not under way"]);
}

#[test]
fn lost_interrupt_is_found_at_once_although_a_timer_would_make_up_for_it() {
    let faults = faults(|setup| {
        setup.sabotage = Some(Sabotage::LosesInterrupt);
        setup.drive.interrupts = true;
        setup.is_event_loop = vec![true];
        setup.clients[0].depth = (1, 2);
    });
    found(&faults, &["a wake-up was lost"]);
}

#[test]
fn lost_kick_is_found() {
    let faults = faults(|setup| {
        setup.sabotage = Some(Sabotage::LosesKick);
        setup.is_event_loop = vec![true; 2];
        setup.hctxs = 1;
        setup.clients[0].depth = (1, 2);
    });
    found(&faults, &["a wake-up was lost"]);
}

#[test]
fn issue_while_the_queue_is_said_to_be_still_is_found() {
    let faults = faults(|setup| {
        setup.sabotage = Some(Sabotage::QuiescesNothing);
        setup.control = Control {
            quiesce: 1,
            ..Control::every_us(300)
        };
    });
    found(&faults, &["while quiesced"]);
}

/// A stripe over several drives that all have a cache.
fn stripe(setup: &mut Setup) {
    setup.control = Control::none();
    setup.limits.cache = true;
    setup.drive.cache = true;
    for (limits, drive) in &mut setup.more_drives {
        (limits.cache, drive.cache) = (true, true);
    }
    for client in &mut setup.clients {
        client.bios = 200;
        client.disks = vec![0];
        client.blocks_max = 8;
        client.mix = [30, 50, 15, 0, 5];
    }
}

/// Runs stripes with a change; returns the faults of as many seeds as `faults` runs.
fn stripe_faults(change: impl Fn(&mut Setup)) -> Vec<String> {
    let scenario = scenario::by_name("mapped").expect("the scenario exists");
    let setups = (1..).map(|seed| (seed, scenario.setup_of(seed)));
    let several = setups.filter(|(_, setup)| !setup.more_drives.is_empty());
    let run = |(seed, mut setup): (u64, Setup)| {
        stripe(&mut setup);
        change(&mut setup);
        run::with_setup(&setup, seed, false).err()
    };
    several.take(SEEDS.count()).filter_map(run).collect()
}

fn one_member_fails(setup: &mut Setup) {
    let last = setup.more_drives.last_mut().expect("there are several drives");
    last.1.faults.transport = Ppm::percent(10);
}

/// Members fail in two ways, under one reactor, so that it is known which error comes first.
fn two_members_fail(setup: &mut Setup) {
    setup.is_event_loop = vec![true];
    setup.drive.faults.bad_blocks = 0..1000;
    one_member_fails(setup);
}

#[test]
fn without_a_misdeed_the_same_stripes_pass() {
    assert_eq!(stripe_faults(|_| {}), Vec::<String>::new());
    assert_eq!(stripe_faults(one_member_fails), Vec::<String>::new());
    assert_eq!(stripe_faults(two_members_fail), Vec::<String>::new());
}

#[test]
fn flush_of_a_mapped_disk_that_leaves_out_a_member_is_found_without_a_power_cut() {
    let faults = stripe_faults(|setup| setup.sabotage = Some(Sabotage::FlushLeavesOutMember));
    found(&faults, &["a power cut now"]);
}

#[test]
fn bio_of_a_mapped_disk_that_ends_before_its_last_part_is_found() {
    let faults = stripe_faults(|setup| setup.sabotage = Some(Sabotage::EndsBeforeLastPart));
    found(&faults, &["bytes at the drive"]);
}

#[test]
fn error_of_a_part_that_is_lost_is_found() {
    let faults = stripe_faults(|setup| {
        one_member_fails(setup);
        setup.sabotage = Some(Sabotage::LosesError);
    });
    found(&faults, &["ended with Ok"]);
}

#[test]
fn later_error_in_place_of_the_first_is_found() {
    let faults = stripe_faults(|setup| {
        two_members_fail(setup);
        setup.sabotage = Some(Sabotage::EndsWithAnotherError);
    });
    found(&faults, &["the first error of its parts was"]);
}

#[test]
fn address_one_chunk_off_is_found() {
    let faults = stripe_faults(|setup| setup.sabotage = Some(Sabotage::AddressesNextChunk));
    found(&faults, &["which is no part of"]);
}

#[test]
fn every_scenario_names_itself_in_the_command_that_replays_it() {
    for scenario in scenario::ALL {
        let command = run::replay(scenario, 17);
        assert!(
            command.contains(scenario.name) && command.contains("--seed 17"),
            "{command}"
        );
    }
}
