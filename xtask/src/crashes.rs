//! Kills daemons on a filesystem that drops unsynced data (`blkmq-forget`): the delivered one, which must
//! lose nothing, and mutants, each of which omits one thing that durability depends on and must be
//! caught.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::mutant;
use crate::place::{cargo, target_dir};
use crate::steps::Steps;

/// # Errors
/// If data was lost, or the check could not be carried out. Without FUSE it is skipped.
pub(crate) fn run(steps: &mut Steps, crashes: u64, seed: u64) -> Result<()> {
    let name = format!("{crashes} crashes on a filesystem that forgets");
    run_as(steps, &name, &[], crashes, seed)
}

/// The same past the page cache of a filesystem that takes whole blocks of 4096 bytes only.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_blocks(steps: &mut Steps, crashes: u64, seed: u64) -> Result<()> {
    let name = format!("{crashes} crashes with small writes of blocks");
    run_as(steps, &name, BLOCKS, crashes, seed)
}

/// The same with disks that have ext4 or XFS on them, on loop devices.
///
/// # Errors
/// As [`run`]. Without loop devices it is skipped.
pub(crate) fn run_filesystems(steps: &mut Steps, crashes: u64, seed: u64) -> Result<()> {
    let name = format!("{crashes} crashes below ext4 and XFS");
    run_as(steps, &name, &["--filesystems"], crashes, seed)
}

fn run_as(steps: &mut Steps, name: &str, how: &[&str], crashes: u64, seed: u64) -> Result<()> {
    let program = steps.command_under_test()?;
    let prover = build_prover(steps)?;
    let words = how.join(" ");
    let again = format!("again: cargo xtask crashes {words} --crashes {crashes} --seed {seed}");
    let verdict = steps.time(name, || {
        println!("    {again}");
        let verdict = prove(&prover, &program, how, crashes, seed)?;
        match verdict {
            Verdict::Lost => bail!("data was lost; {again}"),
            Verdict::Broken => bail!("the proof could not be made; {again}"),
            Verdict::Right | Verdict::NoFuse => Ok(verdict),
        }
    })?;
    if verdict == Verdict::NoFuse {
        steps.skip(name, NO_FUSE);
    }
    Ok(())
}

/// Tries one mutant, or all of them.
///
/// # Errors
/// If a mutant is not caught, or cannot be built, or there is none of that name.
pub(crate) fn run_mutants(steps: &mut Steps, crashes: u64, seed: u64, only: Option<&str>) -> Result<()> {
    let is_wanted = |mutant: &&Mutant| only.is_none_or(|only| only == mutant.name);
    let names = MUTANTS.map(|mutant| mutant.name).join(", ");
    ensure!(
        MUTANTS.iter().any(|mutant| is_wanted(&mutant)),
        "there is no such mutant; there are {names}"
    );
    let prover = build_prover(steps)?;
    for Mutant { name, what, proof } in MUTANTS.iter().filter(is_wanted) {
        let step = format!("mutant {name}: {what}");
        let how = match proof {
            Proof::Crashes(how) => how,
            Proof::Test(words) => {
                steps.time(&step, || mutant::must_fail(name, words))?;
                continue;
            }
        };
        let program = steps.time(&format!("build of mutant {name}"), || mutant::build(name, false))?;
        let verdict = steps.time(&step, || prove(&prover, &program, how, crashes, seed))?;
        match verdict {
            Verdict::Lost => println!("    mutant {name}: caught"),
            Verdict::Right => {
                bail!("mutant {name} ({what}) got through {crashes} crashes from seed {seed}")
            }
            Verdict::Broken => bail!("mutant {name}: the proof could not be made"),
            Verdict::NoFuse => {
                steps.skip(&step, NO_FUSE);
                return Ok(());
            }
        }
    }
    steps.print_summary();
    Ok(())
}

/// The result of the crashes of one daemon.
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

fn prove(prover: &Path, program: &Path, how: &[&str], crashes: u64, seed: u64) -> Result<Verdict> {
    let mut command = Command::new(prover);
    command.arg("--program").arg(program).args(how);
    command.args(["--crashes", &crashes.to_string(), "--seed", &seed.to_string()]);
    let status = command.status().context("starting the proof")?;
    // As documented by `blkmq-forget --help`.
    Ok(match status.code() {
        Some(0) => Verdict::Right,
        Some(3) => Verdict::Lost,
        Some(4) => Verdict::NoFuse,
        _ => Verdict::Broken,
    })
}

/// A build that loses data.
struct Mutant {
    /// Its name in the code, in `cfg!(blkmq_mutant = "NAME")`.
    name: &'static str,
    /// What it omits.
    what: &'static str,
    proof: Proof,
}

/// What must catch a mutant.
enum Proof {
    /// Crashes, with these words of `blkmq-forget`.
    Crashes(&'static [&'static str]),
    /// These tests, as `cargo test` names them. Crashes would not show the omission, because it
    /// takes effect only if two things happen within a microsecond, or if a network holds bytes
    /// back.
    Test(&'static str),
}

const fn by_crashes(name: &'static str, what: &'static str) -> Mutant {
    let proof = Proof::Crashes(&[]);
    Mutant { name, what, proof }
}

const fn by_test(name: &'static str, what: &'static str, words: &'static str) -> Mutant {
    let proof = Proof::Test(words);
    Mutant { name, what, proof }
}

const MUTANTS: [Mutant; 10] = [
    by_crashes("fsync", "a flush does nothing on the file"),
    by_crashes("dsync", "a forced write is an ordinary one"),
    by_crashes("preflush", "a flush is acknowledged without one"),
    by_crashes(
        "postflush",
        "forced zeroes, and forced writes through the page cache, are not followed by a flush",
    ),
    by_crashes(
        "joined_flush",
        "a flush joins the one under way, which began before it",
    ),
    by_crashes("latch", "a failed flush is forgotten"),
    Mutant {
        name: "block_locks",
        what: "a small write changes blocks that others write",
        proof: Proof::Crashes(BLOCKS),
    },
    by_test(
        "overlap",
        "a flush does not wait for those that overlapped it",
        "-p blkmq-drivers --lib file::slot::tests::a_flush_that_overlaps",
    ),
    by_test(
        "late_writes",
        "a repeated write does not wait for the end of the connection that was lost with it",
        "-p blkmq --test end_to_end late_writes",
    ),
    by_test(
        "inflight",
        "of a virtqueue's requests that were in flight at a kill, one is not submitted again",
        "-p blkmq --test end_to_end vhost_user::a_daemon_killed",
    ),
];
/// Direct I/O takes whole blocks only.
const BLOCKS: &[&str] = &["--blocks"];
const NO_FUSE: &str = "no filesystem can be mounted through FUSE: that needs /dev/fuse and root, or fusermount3; below ext4 and XFS root and loop devices";
pub(crate) const CRASHES_DEFAULT: u64 = 200;
pub(crate) const CRASHES_OF_FILESYSTEMS: u64 = 50;
pub(crate) const CRASHES_OF_A_MUTANT: u64 = 200;
pub(crate) const SEED_DEFAULT: u64 = 1;
