//! Runs a database's load through each scheduler in virtual time: `cargo run -- SEEDS`, 5 by default. The same seed
//! is the same history, on every machine.
//!
//! One reactor has a log that writes small blocks in sequence, half of them with FUA; another has readers at random
//! places. The oracle of the simulator checks every history: each bio ends once, nothing is lost in a power cut.

use blkmq_core::sched;
use blkmq_sim::rng::{Ppm, Rng};
use blkmq_sim::run;
use blkmq_sim::setup::Setup;
use blkmq_sim::workload::Workload;

fn main() -> Result<(), String> {
    let given = std::env::args().nth(1).and_then(|arg| arg.parse().ok());
    for elevator in sched::BUILT_IN {
        let (mut merged, mut requests, mut flushes) = (0, 0, 0);
        for seed in 1..=given.unwrap_or(5) {
            let mut setup = database(seed);
            setup.elevator = elevator;
            let summary = run::with_setup(&setup, seed, false)?;
            merged += summary.counts.merged;
            requests += summary.counts.requests;
            flushes += summary.counts.flushes;
        }
        println!(
            "{:12} {requests} requests, {merged} bios merged, {flushes} flushes",
            elevator.name
        );
    }
    Ok(())
}

/// Two reactors, a flash drive with a cache, and a power cut somewhere.
fn database(seed: u64) -> Setup {
    let mut rng = Rng::new(seed, 0);
    let reads = Workload {
        bios: 400,
        depth: (8, 32),
        mix: [100, 0, 0, 0, 0],
        sequential: Ppm::NEVER,
        blocks_max: 4,
        ..Workload::mixed(&mut rng)
    };
    let log = Workload {
        bios: 200,
        depth: (1, 4),
        mix: [0, 95, 5, 0, 0],
        fua: Ppm::percent(50),
        sequential: Ppm::percent(90),
        blocks_max: 2,
        ..Workload::mixed(&mut rng)
    };
    Setup {
        is_event_loop: vec![true; 2],
        clients: vec![log, reads],
        power_cuts: 1,
        ..Setup::base(&mut rng)
    }
}
