//! Programs beside the project that use its crates as anybody's would: each is a workspace of its own in
//! `examples/`, and is run in every test run.

use anyhow::Result;

use crate::place::{cargo, target_dir};
use crate::steps::Steps;

/// # Errors
/// If one is not formatted, is not built, or fails.
pub(crate) fn run(steps: &mut Steps) -> Result<()> {
    for name in EXAMPLES {
        let manifest = format!("--manifest-path examples/{name}/Cargo.toml");
        steps.run(
            &format!("format of examples/{name}"),
            &mut cargo(&format!("fmt {manifest} --check")),
        )?;
        let mut command = cargo(&format!("run --quiet --locked {manifest}"));
        command.args(["--config", PROFILE]);
        steps.run(
            &format!("examples/{name}"),
            command.env("CARGO_TARGET_DIR", target_dir()?),
        )?;
    }
    Ok(())
}

/// The profile of the project's tests, with which most of what they stand on is found built in its directory.
const PROFILE: &str = "examples/profile.toml";
const EXAMPLES: [&str; 4] = [
    "door-outside",
    "elevator-outside",
    "driver-outside",
    "workload-outside",
];
