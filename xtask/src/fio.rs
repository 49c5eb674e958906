//! Compares the fio engine: a job on the null disk and a job with fio's own null engine, which completes
//! at once, alternate.

use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::place::{cargo, target_dir};
use crate::steps::Steps;
use blkmq_testkit::tools::find;

/// # Errors
/// If fio is missing, or a run fails.
pub(crate) fn run(steps: &mut Steps, seconds: u64, rounds: u64) -> Result<()> {
    ensure!(
        seconds > 0 && rounds > 0,
        "--seconds and --rounds must be at least 1"
    );
    let fio = find("fio").context("fio is not installed; run: cargo xtask setup")?;
    steps.run(
        "release build of the engine",
        &mut cargo("build --release -p blkmq-fio"),
    )?;
    let library = target_dir()?.join("release/libblkmq_fio.so");
    let ours = format!("--ioengine=external:{}", library.display());
    // Plain, as users run it; and with as few clock readings as fio allows, where the engine's cost
    // is the largest part.
    for (name, extra) in [
        ("plain", &[][..]),
        ("gtod_reduce", &["--gtod_reduce=1", "--norandommap"][..]),
    ] {
        let (mut null, mut own) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            null.push(iops(
                Command::new(&fio).arg("--ioengine=null").args(extra),
                seconds,
            )?);
            let disk = [ours.as_str(), "--disk=null=1T,zero=off"];
            own.push(iops(Command::new(&fio).args(disk).args(extra), seconds)?);
        }
        let (null, own) = (median(null), median(own));
        println!(
            "{name:12} one job, depth 64: fio's null {:.2} M, ours {:.2} M IOPS, {:.0} % (medians of {rounds})",
            null / 1e6,
            own / 1e6,
            own / null * 100.0
        );
    }
    Ok(())
}

/// Runs one job and returns its IOPS.
fn iops(command: &mut Command, seconds: u64) -> Result<f64> {
    command.args("--thread --name=a --rw=randread --bs=4k --iodepth=64 --size=1T --time_based".split(' '));
    command.args([format!("--runtime={seconds}"), "--minimal".to_owned()]);
    let output = command.output().context("running fio")?;
    let text = String::from_utf8_lossy(&output.stdout);
    // The eighth field of fio's terse output is the reads' IOPS.
    let line = text.lines().find(|line| line.starts_with("3;"));
    match line.and_then(|line| line.split(';').nth(7)?.parse().ok()) {
        Some(iops) if output.status.success() => Ok(iops),
        _ => bail!("fio failed: {}{text}", String::from_utf8_lossy(&output.stderr)),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

pub(crate) const SECONDS_DEFAULT: u64 = 2;
pub(crate) const ROUNDS_DEFAULT: u64 = 5;
