//! Runs all scenarios of the simulator, with a given number of seeds.

use std::process::Command;

use anyhow::Result;

use crate::steps::Steps;

/// # Errors
/// If a seed breaks an invariant; the simulator prints the command that replays it.
pub(crate) fn run(steps: &mut Steps, seeds: u64) -> Result<()> {
    let mut command = Command::new(steps.program("blkmq-lab")?);
    command.args(["sim", "--scenario", "all", "--seeds", &seeds.to_string()]);
    steps.run(&format!("simulator, {seeds} seeds"), &mut command)
}

/// What CI runs; `cargo xtask sim` has an option for the number.
pub(crate) const SEEDS_SHORT: u64 = 500;
