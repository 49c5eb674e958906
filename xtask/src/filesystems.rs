//! Runs other projects' filesystem tests on disks that are files (FUSE): fsx, and xfstests on XFS on loop
//! devices. Failed tests are repeated on plain files: if they fail there too, the fault is not ours.
//!
//! Both programs are in a built copy of xfstests, which is not part of this project.

mod ground;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use self::ground::{Ground, Scratch};
use crate::path_loss::daemon::stop;
use crate::setup::is_root;
use crate::steps::Steps;

/// The options of a run.
pub(crate) struct Wish {
    /// The directory where xfstests was built.
    pub(crate) xfstests: Option<PathBuf>,
    /// How long fsx runs.
    pub(crate) minutes: u64,
    /// Arguments of xfstests' `check`; none for its quick generic group.
    pub(crate) tests: Vec<String>,
}

/// # Errors
/// If fsx finds a fault, a filesystem is damaged, or a test fails that passes on a plain file.
pub(crate) fn run(steps: &mut Steps, wish: &Wish) -> Result<()> {
    let Some(xfstests) = &wish.xfstests else {
        steps.skip("filesystems", NO_XFSTESTS);
        return Ok(());
    };
    let fsx = xfstests.join("ltp/fsx");
    ensure!(fsx.is_file(), "{} is not there: {NO_XFSTESTS}", fsx.display());
    if !is_root() {
        steps.skip("filesystems", "loop devices need root");
        return Ok(());
    }
    let program = steps.command_under_test()?;
    let scratch = Scratch::make()?;
    let daemon = serve(&program, &scratch)?;
    let ours = Ground::new(&scratch, "disk")?;
    if wish.minutes > 0 {
        let name = format!("fsx, {} minutes", wish.minutes);
        steps.time(&name, || try_fsx(&fsx, &scratch, &ours, wish.minutes * 60))?;
    }
    let failed = steps.time("xfstests on the disks", || check(xfstests, &ours, &wish.tests))?;
    if !failed.is_empty() {
        let plain = Ground::new(&scratch, "plain")?;
        let names: Vec<String> = failed.iter().cloned().collect();
        let as_well = steps.time("what failed, on plain files", || check(xfstests, &plain, &names))?;
        let ours_alone: Vec<&String> = failed.difference(&as_well).collect();
        println!("    failed on plain files as well: {as_well:?}");
        ensure!(ours_alone.is_empty(), "failed on the disks alone: {ours_alone:?}");
    }
    drop(ours);
    stop(daemon)?;
    steps.print_summary();
    Ok(())
}

/// Serves three disks as files, and makes two plain files for comparison.
fn serve(program: &Path, scratch: &Scratch) -> Result<blkmq_testkit::Daemon> {
    let mut command = Command::new(program);
    command.arg("serve").env("BLKMQ_LOG", "warn");
    for (name, bytes) in [
        ("test", ground::TEST_BYTES),
        ("scratch", ground::SCRATCH_BYTES),
        ("raw", RAW_BYTES),
    ] {
        let image = scratch.sparse(&format!("{name}.raw"), bytes)?;
        let disk = format!("name={name},file={},block_size=512", image.display());
        command.args(["--disk", &disk]);
    }
    scratch.sparse("plain.test", ground::TEST_BYTES)?;
    scratch.sparse("plain.scratch", ground::SCRATCH_BYTES)?;
    command.arg("--fuse").arg(scratch.path("disk.{disk}"));
    blkmq_testkit::Daemon::try_spawn(command, Stdio::piped())
}

/// Runs fsx on XFS, on ext4 and directly on a disk, at the same time.
fn try_fsx(fsx: &Path, scratch: &Scratch, ground: &Ground, seconds: u64) -> Result<()> {
    let mounted = ground.mount_both()?;
    let mut running = Vec::new();
    for (words, file) in [
        ("", mounted[0].path("fsx")),
        ("", mounted[1].path("fsx")),
        (FSX_OF_BLOCKS, scratch.path("disk.raw")),
    ] {
        let mut command = Command::new(fsx);
        command.arg(format!("--duration={seconds}")).arg("-q").arg("-P");
        command.arg(scratch.path("")).args(words.split_whitespace());
        let child = command.arg(&file).spawn().context("starting fsx")?;
        running.push((child, file));
    }
    for (mut child, file) in running {
        let status = child.wait().context("waiting for fsx")?;
        ensure!(
            status.success(),
            "fsx found a fault at {}: {status}",
            file.display()
        );
    }
    drop(mounted);
    ground.check_both()
}

/// Runs xfstests; returns the names of the tests that failed.
fn check(xfstests: &Path, ground: &Ground, tests: &[String]) -> Result<BTreeSet<String>> {
    let mut command = Command::new("./check");
    command
        .current_dir(xfstests)
        .env("HOST_OPTIONS", ground.config()?);
    match tests {
        [] => command.args(["-g", "generic/quick"]),
        tests => command.args(tests),
    };
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = child.context("starting xfstests")?;
    let (mut failed, mut has_ended) = (BTreeSet::new(), false);
    let lines = BufReader::new(child.stdout.take().context("stdout is piped")?).lines();
    for line in lines.map_while(Result::ok) {
        println!("    {line}");
        if let Some(names) = line.strip_prefix("Failures:") {
            failed.extend(names.split_whitespace().map(str::to_owned));
        }
        has_ended |= line.starts_with("Passed all") || line.starts_with("Failed ");
    }
    let status = child.wait().context("waiting for xfstests")?;
    ensure!(has_ended, "xfstests was not done ({status})");
    Ok(failed)
}

const NO_XFSTESTS: &str = "name the directory of xfstests, built there by `make`";
const RAW_BYTES: u64 = 16 << 20;
/// For a file of fixed size that is accessed in whole sectors.
const FSX_OF_BLOCKS: &str = "-L -k -R -W -Z -r 512 -w 512 -t 512 -C -I -J -B -E -0 -K -a";
pub(crate) const MINUTES_DEFAULT: u64 = 10;
