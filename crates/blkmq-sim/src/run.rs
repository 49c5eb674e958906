//! Runs a scenario with one seed or many, and reports a failure so that one command replays it.

use std::panic::{self, AssertUnwindSafe};

use crate::scenario::Scenario;
use crate::setup::Setup;
use crate::world::{self, Summary};

/// Runs one seed of a scenario; `trace` prints every fact.
///
/// # Errors
/// The failure, and the command that replays it. A panic of the core is also a failure.
pub fn one(scenario: &Scenario, seed: u64, trace: bool) -> Result<Summary, String> {
    with_setup(&scenario.setup_of(seed), seed, trace)
        .map_err(|fault| format!("{fault}\nreplay: {}", replay(scenario, seed)))
}

/// Runs one seed of the caller's setup.
///
/// # Errors
/// The failure.
pub fn with_setup(setup: &Setup, seed: u64, trace: bool) -> Result<Summary, String> {
    let run = AssertUnwindSafe(|| world::run(setup, seed, trace));
    match panic::catch_unwind(run) {
        Ok(Ok(summary)) => Ok(summary),
        Ok(Err(failure)) => Err(format!("{}\nlast facts:\n{}", failure.fault, failure.tail)),
        Err(cause) => Err(format!("the core panicked: {}", message(cause.as_ref()))),
    }
}

/// Returns the command that replays one seed.
pub fn replay(scenario: &Scenario, seed: u64) -> String {
    format!(
        "cargo run -p blkmq-lab -- sim --scenario {} --seed {seed} --trace",
        scenario.name
    )
}

fn message(cause: &(dyn std::any::Any + Send)) -> &str {
    cause
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| cause.downcast_ref::<&str>().copied())
        .unwrap_or("for a reason that is no text")
}
