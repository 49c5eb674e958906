//! Decides which daemons are killed on a filesystem that forgets (`blkmq-forget`): the one that is delivered, which must lose
//! nothing, and mutants, each of which leaves out one thing that durability rests on and must be caught.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::mutant;
use crate::place::{cargo, target_dir};
use crate::steps::Steps;

/// # Errors
/// If data was lost, or the proof could not be made. A machine without FUSE is a reason to skip.
pub(crate) fn run(steps: &mut Steps, crashes: u64, seed: u64) -> Result<()> {
    let program = steps.command_under_test()?;
    let prover = build_prover(steps)?;
    let name = format!("{crashes} crashes on a filesystem that forgets");
    let again = format!("again: cargo xtask crashes --crashes {crashes} --seed {seed}");
    let verdict = steps.time(&name, || {
        println!("    {again}");
        let verdict = prove(&prover, &program, crashes, seed)?;
        match verdict {
            Verdict::Lost => bail!("data was lost; {again}"),
            Verdict::Broken => bail!("the proof could not be made; {again}"),
            Verdict::Right | Verdict::NoFuse => Ok(verdict),
        }
    })?;
    if verdict == Verdict::NoFuse {
        steps.skip(&name, NO_FUSE);
    }
    Ok(())
}

/// Tries one mutant, or all of them.
///
/// # Errors
/// If a mutant gets through, or cannot be built, or there is none of that name.
pub(crate) fn run_mutants(steps: &mut Steps, crashes: u64, seed: u64, only: Option<&str>) -> Result<()> {
    let is_wanted = |(name, _): &&(&str, &str)| only.is_none_or(|only| only == *name);
    let names = MUTANTS.map(|(name, _)| name).join(", ");
    ensure!(
        MUTANTS.iter().any(|mutant| is_wanted(&mutant)),
        "there is no such mutant; there are {names}"
    );
    let prover = build_prover(steps)?;
    for (mutant, what) in MUTANTS.iter().filter(is_wanted) {
        let program = steps.time(&format!("build of mutant {mutant}"), || {
            mutant::build(mutant, false)
        })?;
        let name = format!("mutant {mutant}: {what}");
        let verdict = steps.time(&name, || prove(&prover, &program, crashes, seed))?;
        match verdict {
            Verdict::Lost => println!("    mutant {mutant}: caught"),
            Verdict::Right => {
                bail!("mutant {mutant} ({what}) got through {crashes} crashes from seed {seed}")
            }
            Verdict::Broken => bail!("mutant {mutant}: the proof could not be made"),
            Verdict::NoFuse => {
                steps.skip(&name, NO_FUSE);
                return Ok(());
            }
        }
    }
    steps.print_summary();
    Ok(())
}

/// What came of the crashes of one daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Right,
    Lost,
    Broken,
    NoFuse,
}

fn build_prover(steps: &mut Steps) -> Result<PathBuf> {
    steps.run(
        "build of the filesystem that forgets",
        &mut cargo("build --release -p blkmq-forget"),
    )?;
    Ok(target_dir()?.join("release/blkmq-forget"))
}

fn prove(prover: &Path, program: &Path, crashes: u64, seed: u64) -> Result<Verdict> {
    let mut command = Command::new(prover);
    command.arg("--program").arg(program);
    command.args(["--crashes", &crashes.to_string(), "--seed", &seed.to_string()]);
    let status = command.status().context("starting the proof")?;
    // As `blkmq-forget --help` has them.
    Ok(match status.code() {
        Some(0) => Verdict::Right,
        Some(3) => Verdict::Lost,
        Some(4) => Verdict::NoFuse,
        _ => Verdict::Broken,
    })
}

/// What each mutant leaves out; the code has it as `cfg!(blkmq_mutant = "NAME")`.
const MUTANTS: [(&str, &str); 7] = [
    ("fsync", "a flush does nothing on the file"),
    ("dsync", "a forced write is an ordinary one"),
    ("preflush", "a flush is acknowledged without one"),
    (
        "postflush",
        "forced zeroes, and forced writes through the page cache, are not followed by a flush",
    ),
    (
        "joined_flush",
        "a flush joins the one under way, which began before it",
    ),
    ("latch", "a failed flush is forgotten"),
    ("overlap", "a flush does not wait for those that overlapped it"),
];
const NO_FUSE: &str =
    "no filesystem can be mounted through FUSE: that needs /dev/fuse and root, or fusermount3";
pub(crate) const CRASHES_DEFAULT: u64 = 200;
pub(crate) const CRASHES_OF_A_MUTANT: u64 = 200;
pub(crate) const SEED_DEFAULT: u64 = 1;
