//! Kills daemons on a filesystem that drops unsynced data (`blkmq-forget`): the delivered one, which must
//! lose nothing, and mutants, each of which omits one thing that durability depends on and must be
//! caught.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::mutant;

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

/// The same with encrypted disks.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_encrypted(steps: &mut Steps, crashes: u64, seed: u64) -> Result<()> {
    let name = format!("{crashes} crashes of encrypted disks");
    run_as(steps, &name, &["--encrypted"], crashes, seed)
}

/// The same with disks in qcow2 images, of which snapshots are made meanwhile.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_images(steps: &mut Steps, crashes: u64, seed: u64) -> Result<()> {
    let name = format!("{crashes} crashes of images");
    run_as(steps, &name, IMAGES, crashes, seed)
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
    let prover = steps.program("blkmq-forget")?;
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
    let names: Vec<&str> = mutants().collect();
    ensure!(
        MUTANTS.iter().any(|mutant| is_wanted(&mutant)),
        "there is no such mutant; there are {}",
        names.join(", ")
    );
    let prover = steps.program("blkmq-forget")?;
    for Mutant { name, proof } in MUTANTS.iter().filter(is_wanted) {
        let what = mutant::what(name)?;
        let step = format!("mutant {name}: {what}");
        let how = match proof {
            Proof::Crashes(how) => how,
            Proof::Test(words) => {
                steps.time(&step, || mutant::must_fail(name, words))?;
                continue;
            }
        };
        let program = steps.time(&format!("build of mutant {name}"), || {
            mutant::build(Some(name), false)
        })?;
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

/// The names of all mutants that lose data.
pub(crate) fn mutants() -> impl Iterator<Item = &'static str> {
    MUTANTS.iter().map(|mutant| mutant.name)
}

/// The result of the crashes of one daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Right,
    Lost,
    Broken,
    NoFuse,
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
    /// The name of its patch.
    name: &'static str,
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

const fn by_crashes(name: &'static str) -> Mutant {
    let proof = Proof::Crashes(&[]);
    Mutant { name, proof }
}

const fn by_test(name: &'static str, words: &'static str) -> Mutant {
    let proof = Proof::Test(words);
    Mutant { name, proof }
}

const MUTANTS: [Mutant; 11] = [
    by_crashes("fsync"),
    by_crashes("dsync"),
    by_crashes("preflush"),
    by_crashes("postflush"),
    by_crashes("joined_flush"),
    by_crashes("latch"),
    Mutant {
        name: "block_locks",
        proof: Proof::Crashes(BLOCKS),
    },
    Mutant {
        name: "image_order",
        proof: Proof::Crashes(IMAGES),
    },
    by_test(
        "overlap",
        "-p blkmq-drivers --lib file::slot::tests::a_flush_that_overlaps",
    ),
    by_test("late_writes", "-p blkmq --test end_to_end late_writes"),
    by_test(
        "inflight",
        "-p blkmq --test end_to_end vhost_user::a_daemon_killed",
    ),
];
/// Direct I/O takes whole blocks only.
const BLOCKS: &[&str] = &["--blocks"];
/// The disk is in an image.
const IMAGES: &[&str] = &["--images"];
const NO_FUSE: &str = "no filesystem can be mounted through FUSE: that needs /dev/fuse and root, or fusermount3; below ext4 and XFS root and loop devices";
pub(crate) const CRASHES_DEFAULT: u64 = 200;
pub(crate) const CRASHES_OF_FILESYSTEMS: u64 = 50;
pub(crate) const CRASHES_OF_A_MUTANT: u64 = 200;
pub(crate) const SEED_DEFAULT: u64 = 1;
