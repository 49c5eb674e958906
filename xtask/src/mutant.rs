//! A daemon with a deliberate defect, built apart from all other builds.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::place::{cargo, target_dir};
use crate::steps::run_shown;

/// Builds the command with a mutant in it: `cfg!(blkmq_mutant = "NAME")`, which no feature and no
/// environment variable of the daemon can switch on.
///
/// `optimized` is for mutants that must be about as fast as the delivered daemon.
///
/// # Errors
/// If it cannot be built.
pub(crate) fn build(mutant: &str, optimized: bool) -> Result<PathBuf> {
    let (target, mut command) = with(mutant, optimized, "build --quiet -p blkmq")?;
    run_shown(&mut command)?;
    let built = target.join("debug/blkmq");
    // A copy, because the next mutant's build replaces it.
    let program = target.join(format!("blkmq-{mutant}"));
    std::fs::copy(&built, &program).with_context(|| format!("copying {}", built.display()))?;
    ensure!(program.is_file(), "{} was not built", program.display());
    Ok(program)
}

/// Runs the tests that must catch a mutant, on a build with it and on one without.
///
/// # Errors
/// If they cannot be built, do not pass without the mutant, or pass with it.
pub(crate) fn must_fail(mutant: &str, words: &str) -> Result<()> {
    let run = |mutant: &str, more: &str| test(mutant, &format!("test --quiet {words} {more}"));
    for mutant in ["none", mutant] {
        ensure!(run(mutant, "--no-run")?, "cargo test {words} cannot be built");
    }
    ensure!(run("none", "")?, "cargo test {words} fails without a mutant");
    ensure!(
        !run(mutant, "")?,
        "mutant {mutant} got through cargo test {words}"
    );
    println!("    mutant {mutant}: caught");
    Ok(())
}

/// Runs tests with a mutant in the tested code. Says whether they passed.
///
/// # Errors
/// If cargo cannot be started.
fn test(mutant: &str, words: &str) -> Result<bool> {
    let (_, mut command) = with(mutant, false, words)?;
    // Without this variable, the tests run the program that is built for them.
    let status = command.env_remove("BLKMQ_BIN").status();
    Ok(status.context("starting cargo")?.success())
}

/// A cargo command that builds with a mutant, and the directory that it builds in.
fn with(mutant: &str, optimized: bool, words: &str) -> Result<(PathBuf, Command)> {
    // Each in a directory of its own, so that neither build invalidates the other.
    let (name, level) = match optimized {
        true => ("mutants-optimized", "2"),
        false => ("mutants", "0"),
    };
    let target = target_dir()?.join(name);
    let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    let flags = format!("{flags} --cfg blkmq_mutant=\"{mutant}\"");
    let mut command = cargo(words);
    command
        .env("RUSTFLAGS", flags.trim())
        // This builds faster, and the build is not debugged.
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", level)
        .env("CARGO_TARGET_DIR", &target);
    Ok((target, command))
}
