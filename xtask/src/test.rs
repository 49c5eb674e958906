//! `cargo xtask test`: all checks, first those that are cheap and likely to fail, the test suite last.
//!
//! The tests are built beside the steps that need no debug build: those wait for clocks, or for one long unit of the
//! release build. The suite comes last so that its own closing lines are the end of the whole run: the list of
//! skipped tests precedes the documentation's tests, which cannot skip.

use anyhow::{Context, Result};

use crate::place::{cargo, has_cargo_command};
use crate::steps::{BuildBeside, Steps, run_shown};
use crate::{
    ceph, figures, fuzz, guest, instructions, loom, mutant, outside, path_loss, release, setup, siege, sim,
    skips,
};

/// # Errors
/// The first step that fails; with [`skips::Mode::Strict`] also a skip that is not allowed.
pub(crate) fn run(steps: &mut Steps, mode: skips::Mode) -> Result<()> {
    let skips = skips::List::start()?;
    setup::run(steps)?;
    check_formats(steps)?;
    steps.run("clippy", &mut cargo(LINTS))?;
    steps.run(
        "the command alone",
        &mut cargo("check -p blkmq --no-default-features"),
    )?;
    steps.run("the library with one driver", &mut cargo(LINTS_OF_ONE_DRIVER))?;
    let mut documentation = cargo("doc --workspace --no-deps");
    documentation.env("RUSTDOCFLAGS", "-D warnings");
    steps.run("links in the documentation", &mut documentation)?;
    let tests = BuildBeside::start(cargo(SUITE).arg("--no-run"))?;
    check_dependencies(steps)?;
    mutant::check_all(steps)?;
    loom::run(steps, loom::Depth::Short)?;
    sim::run(steps, sim::SEEDS_SHORT)?;
    instructions::run(steps, false)?;
    // Reports cannot be taken again for each commit: an old one is no failure here.
    steps.time("age of the reports", figures::warn_of_old)?;
    outside::run(steps)?;
    release::run(steps, false, None)?;
    path_loss::run(steps, path_loss::SECONDS_SHORT, None)?;
    siege::run(steps, siege::SECONDS_SHORT, siege::SEED_DEFAULT, None)?;
    guest::run_short(steps)?;
    steps.time("rest of the build of the tests", || tests.finish())?;
    ceph::test_short(steps)?;
    fuzz::replay(steps)?;
    run_suite(steps, &skips, mode)
}

/// Checks the format of all workspaces: a fault of another one would show late otherwise, where it is used.
///
/// # Errors
/// The first workspace that has a fault.
pub(crate) fn check_formats(steps: &mut Steps) -> Result<()> {
    steps.run("format", &mut cargo("fmt --all --check"))?;
    let examples = outside::EXAMPLES.map(|name| format!("examples/{name}"));
    for other in examples.iter().map(String::as_str).chain(["fuzz"]) {
        let mut format = cargo(&format!("fmt --manifest-path {other}/Cargo.toml --check"));
        steps.run(&format!("format of {other}"), &mut format)?;
    }
    Ok(())
}

/// Licences, sources and bans need the lock file alone; advisories need their database from the
/// network.
fn check_dependencies(steps: &mut Steps) -> Result<()> {
    if !has_cargo_command("deny") {
        steps.skip(
            "dependencies",
            "cargo-deny is not installed; run: cargo install --locked cargo-deny",
        );
        return Ok(());
    }
    steps.run(
        "dependencies",
        &mut cargo("deny --log-level error check licenses bans sources"),
    )?;
    let fetched = cargo("deny fetch db").output();
    if fetched.is_ok_and(|output| output.status.success()) {
        steps.run("advisories", &mut cargo("deny check --disable-fetch advisories"))
    } else {
        steps.skip("advisories", "the advisory database cannot be fetched from here");
        Ok(())
    }
}

/// Runs the test suite; its end-to-end tests drive the release build of the command.
///
/// Property tests use a fixed seed, so that a failure is due to the change under test;
/// [`soak`](crate::soak) uses new ones.
fn run_suite(steps: &mut Steps, skips: &skips::List, mode: skips::Mode) -> Result<()> {
    let command = steps.program("blkmq")?;
    steps.print_summary();
    println!("\n==> tests");
    let tests = run_shown(
        skips::listed(&mut cargo(SUITE))?
            .env("BLKMQ_BIN", command)
            .env(THREADS, threads()?)
            .env(PROPERTY_SEED, "1"),
    );
    println!("\n==> skipped");
    let skipped = skips.check(steps.skipped(), mode);
    println!("\n==> tests in the documentation");
    let documentation = run_shown(&mut cargo("test --workspace --no-fail-fast --doc"));
    tests.and(documentation).and(skipped)
}

/// How many tests run at a time. Those that take long sleep: they wait for daemons, clients and clocks, so as many as
/// there are processors would leave half of them idle.
fn threads() -> Result<String> {
    let processors = std::thread::available_parallelism().context("counting processors")?;
    Ok(std::env::var(THREADS).unwrap_or_else(|_| (processors.get() * 2).to_string()))
}

/// Cargo's words for the test suite.
const SUITE: &str = "test --workspace --no-fail-fast --lib --bins --tests";
/// The variable from which tests read how many of them run at a time.
const THREADS: &str = "RUST_TEST_THREADS";
/// Cargo's words for the lints.
pub(crate) const LINTS: &str = "clippy --workspace --all-targets -- -D warnings";
/// The workspace is built with all drivers: what only the others need is no dead code there.
const LINTS_OF_ONE_DRIVER: &str = "clippy --lib -p blkmq-drivers -p blkmq-config -p blkmq-engine --no-default-features --features blkmq-engine/file -- -D warnings";
/// The variable from which proptest reads its seed.
pub(crate) const PROPERTY_SEED: &str = "PROPTEST_RNG_SEED";
