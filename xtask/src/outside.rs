//! Programs beside the project that use its crates as anybody's would: each is a workspace of its own in
//! `examples/`, and is run in every test run.

use std::path::PathBuf;

use anyhow::Result;

use crate::place::{cargo, target_dir};
use crate::steps::Steps;

/// # Errors
/// If one is not built, or fails.
pub(crate) fn run(steps: &mut Steps) -> Result<()> {
    for name in EXAMPLES {
        let mut command = cargo(&format!(
            "run --quiet --locked --manifest-path examples/{name}/Cargo.toml"
        ));
        steps.run(
            &format!("examples/{name}"),
            command.env("CARGO_TARGET_DIR", dir()?),
        )?;
    }
    Ok(())
}

/// The build directory of all workspaces beside the project's: what they share is built once.
///
/// # Errors
/// If the project's build directory is not found.
pub(crate) fn dir() -> Result<PathBuf> {
    Ok(target_dir()?.join("outside"))
}

/// The folders of the programs.
pub(crate) const EXAMPLES: [&str; 4] = [
    "elevator-outside",
    "driver-outside",
    "door-outside",
    "workload-outside",
];
