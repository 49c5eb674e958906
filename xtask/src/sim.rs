//! Decides with how many seeds the simulator's scenarios run.

use anyhow::Result;

use crate::place::cargo;
use crate::steps::Steps;

/// # Errors
/// If a seed breaks an invariant; the simulator prints the command that replays it.
pub(crate) fn run(steps: &mut Steps, seeds: u64) -> Result<()> {
    let mut command = cargo("run --release -p blkmq-sim -- --scenario all --seeds");
    steps.run(
        &format!("simulator, {seeds} seeds"),
        command.arg(seeds.to_string()),
    )
}

/// What CI runs.
pub(crate) const SEEDS_SHORT: u64 = 1000;
