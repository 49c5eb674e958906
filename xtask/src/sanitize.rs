//! Runs the crates with threads or `unsafe` under the compiler's sanitizers.
//!
//! The standard library is built with them, from source: ThreadSanitizer does not see the fences of
//! the delivered library, and reports every `Arc` and every joined thread. Suppressing those
//! reports would suppress nearly everything.

use anyhow::Result;

use crate::place::{cargo, root, rust_source_is_installed, target_dir};
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
    if !rust_source_is_installed() {
        let mut install = std::process::Command::new("rustup");
        steps.run(
            "installing rust-src",
            install.args(["component", "add", "rust-src"]),
        )?;
    }
    // With an explicit target, the flags do not apply to build scripts and procedural macros.
    let mut command = cargo(
        "test -Zbuild-std --target x86_64-unknown-linux-gnu --tests -p blkmq-sync -p blkmq-nbd -p blkmq-host -p blkmq-drivers -p blkmq-config -p blkmq-export -p blkmq-engine",
    );
    command
        // The stable compiler accepts these flags only with this variable.
        .env("RUSTC_BOOTSTRAP", "1")
        // A sanitizer that does not see unmap and map calls takes the new memory for the old.
        // rustix makes these calls itself, unless it uses libc.
        .env("RUSTFLAGS", format!("-Zsanitizer={name} --cfg=rustix_use_libc"))
        .env(
            "LSAN_OPTIONS",
            format!(
                "suppressions={}",
                root().join("xtask/leaks-on-purpose.txt").display()
            ),
        )
        // Without this, the stack of a leak ends at the first function of the standard library that
        // has no frame pointer, and no suppression names that.
        .env("ASAN_OPTIONS", "fast_unwind_on_malloc=0")
        .env(
            "CARGO_TARGET_DIR",
            target_dir()?.join(format!("sanitizer-{name}")),
        );
    steps.run(&format!("{name} sanitizer"), &mut command)
}
