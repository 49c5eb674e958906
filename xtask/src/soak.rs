//! A long run: the simulator and the property tests with new seeds each time, and the real clients
//! against the daemon, again and again.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::place::cargo;
use crate::steps::Steps;
use crate::test::PROPERTY_SEED;

/// Repeats rounds until the time is up; the last round is finished.
///
/// # Errors
/// The first step that fails.
pub(crate) fn run(steps: &mut Steps, minutes: u64) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(minutes * 60);
    let (command, lab) = (steps.program("blkmq")?, steps.program("blkmq-lab")?);
    let mut round = 0;
    while Instant::now() < end {
        round += 1;
        let mut simulate = Command::new(&lab);
        // Each round begins where the last one ended, so that every seed is new.
        simulate
            .args(["sim", "--scenario", "all", "--seeds", &SEEDS_A_ROUND.to_string()])
            .arg("--first-seed")
            .arg((round * SEEDS_A_ROUND).to_string());
        steps.run(&format!("simulator, round {round}"), &mut simulate)?;
        let mut properties = cargo("test --release -p blkmq-core -p blkmq-export");
        properties.env(PROPERTY_SEED, (round + 1).to_string());
        steps.run(&format!("property tests, round {round}"), &mut properties)?;
        let mut clients = cargo("test -p blkmq --tests");
        clients.env("BLKMQ_BIN", &command);
        steps.run(&format!("real clients, round {round}"), &mut clients)?;
    }
    steps.print_summary();
    Ok(())
}

pub(crate) const MINUTES_DEFAULT: u64 = 30;
const SEEDS_A_ROUND: u64 = 5000;
