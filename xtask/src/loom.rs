//! Runs the loom models of `blkmq-sync`, and sets how deep they are explored.

use anyhow::Result;

use crate::place::{cargo, target_dir};
use crate::steps::Steps;

/// How many preemptions per model are tried; two expose most defects of such code.
#[derive(Clone, Copy)]
pub(crate) enum Depth {
    Short,
    Deep,
}

/// # Errors
/// If a model fails.
pub(crate) fn run(steps: &mut Steps, depth: Depth) -> Result<()> {
    let preemptions = match depth {
        Depth::Short => "2",
        Depth::Deep => "4",
    };
    let mut command = cargo("test --release -p blkmq-sync --tests");
    command
        .env("RUSTFLAGS", "--cfg loom")
        .env("LOOM_MAX_PREEMPTIONS", preemptions)
        // The models take 9 s; what a link-time optimization of their program would save is less than it takes.
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
        // A directory of its own: with these flags cargo would otherwise rebuild everything each
        // time.
        .env("CARGO_TARGET_DIR", target_dir()?.join("loom"));
    steps.run(&format!("loom models, {preemptions} preemptions"), &mut command)
}
