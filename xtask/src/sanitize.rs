//! Decides what runs under the compiler's sanitizers: the crates with threads or `unsafe`.
//!
//! The standard library is not rebuilt, so ThreadSanitizer cannot see inside it; `xtask/tsan.supp` names what it then reports.

use anyhow::Result;

use crate::place::{cargo, root, target_dir};
use crate::steps::Steps;

#[derive(Clone, Copy)]
pub(crate) enum Sanitizer {
    Thread,
    Address,
}

/// # Errors
/// If a test fails or the sanitizer reports something.
pub(crate) fn run(steps: &mut Steps, sanitizer: Sanitizer) -> Result<()> {
    let name = match sanitizer {
        Sanitizer::Thread => "thread",
        Sanitizer::Address => "address",
    };
    // A target is named so that the flags do not reach build scripts and procedural macros.
    let mut command = cargo("test --target x86_64-unknown-linux-gnu --tests -p blkmq-sync -p blkmq-host");
    command
        .env("RUSTC_BOOTSTRAP", "1")
        .env(
            "RUSTFLAGS",
            format!("-Zsanitizer={name} -Cunsafe-allow-abi-mismatch=sanitizer"),
        )
        .env(
            "TSAN_OPTIONS",
            format!("suppressions={}", root().join("xtask/tsan.supp").display()),
        )
        .env(
            "CARGO_TARGET_DIR",
            target_dir()?.join(format!("sanitizer-{name}")),
        );
    steps.run(&format!("{name} sanitizer"), &mut command)
}
