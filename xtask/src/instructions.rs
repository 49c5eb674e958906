//! Checks that an I/O still costs the recorded number of instructions. They are counted, because time is
//! not stable on shared machines.
//!
//! Each table of `bench/instructions.toml` names a way in which `in_process`, an example of
//! `blkmq-bench`, does its I/Os. It runs twice under callgrind, with few and with many; the
//! difference excludes set-up and tear-down.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::place::root;
use crate::steps::Steps;
use blkmq_testkit::tools::find;

/// Compares every recorded count with the present one; with `update`, records the present one
/// instead.
///
/// # Errors
/// If a count changed by more than the tolerance in either direction: a gain must be recorded too.
pub(crate) fn run(steps: &mut Steps, update: bool) -> Result<()> {
    if find("valgrind").is_none() {
        steps.skip(
            "instructions per I/O",
            "valgrind is not installed; run: cargo xtask setup",
        );
        return Ok(());
    }
    let program = steps.program(&format!("examples/{EXAMPLE}"))?;
    steps.time("instructions per I/O", || {
        let file = root().join(RECORD);
        let text = std::fs::read_to_string(&file).with_context(|| format!("reading {RECORD}"))?;
        let record: toml::Table = text.parse().with_context(|| format!("reading {RECORD}"))?;
        ensure!(!record.is_empty(), "{RECORD} names no way");
        let mut counted = Vec::new();
        for (way, entry) in &record {
            counted.push((way.as_str(), recorded(way, entry)?, count(&program, way)?));
        }
        if update {
            write_record(&file, &text, &counted)
        } else {
            compare(&counted)
        }
    })
}

fn recorded(way: &str, entry: &toml::Value) -> Result<f64> {
    let value = entry
        .get(KEY)
        .with_context(|| format!("{RECORD}: [{way}] has no {KEY}"))?;
    value
        .as_float()
        .or(value.as_integer().map(|n| n as f64))
        .with_context(|| format!("{RECORD}: [{way}] {KEY} is no number"))
}

/// Instructions per I/O of a way, as counted now.
fn count(program: &Path, way: &str) -> Result<f64> {
    let few = instructions(program, way, IOS_FEW)?;
    let many = instructions(program, way, IOS_MANY)?;
    ensure!(
        many > few,
        "{way}: {many} instructions for {IOS_MANY} I/Os, {few} for {IOS_FEW}: it ignores its argument"
    );
    Ok((many - few) as f64 / (IOS_MANY - IOS_FEW) as f64)
}

/// All instructions of one run, as callgrind counts them.
fn instructions(program: &Path, way: &str, ios: u64) -> Result<u64> {
    let mut command = Command::new("valgrind");
    command
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(program)
        .args([way, &ios.to_string()]);
    let output = command.output().context("starting valgrind")?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!(
            "{} {way} {ios} under callgrind: {}\n{said}",
            program.display(),
            output.status
        );
    }
    collected(&said).with_context(|| format!("callgrind printed no count:\n{said}"))
}

/// The number on callgrind's closing line `==PID== Collected : N`.
fn collected(said: &str) -> Option<u64> {
    said.lines()
        .find_map(|line| line.split_once("Collected : ")?.1.trim().parse().ok())
}

fn compare(counted: &[(&str, f64, f64)]) -> Result<()> {
    let mut moved = Vec::new();
    for (way, before, now) in counted {
        let change = (now / before - 1.0) * 100.0;
        println!("    {way}: {now:.1} instructions per I/O, recorded {before:.1}, {change:+.1} %");
        if change.abs() > TOLERANCE_PERCENT {
            moved.push(format!("{way} by {change:+.1} %"));
        }
    }
    ensure!(
        moved.is_empty(),
        "moved by more than {TOLERANCE_PERCENT} %: {}; if that is meant, say why in the commit and run: cargo xtask instructions --update",
        moved.join(", ")
    );
    Ok(())
}

/// Rewrites the numbers and leaves the comments of the file as they are.
fn write_record(file: &Path, text: &str, counted: &[(&str, f64, f64)]) -> Result<()> {
    let mut way = "";
    let mut lines = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            way = name;
        }
        let now = counted
            .iter()
            .find(|(name, ..)| *name == way)
            .map(|(.., now)| now);
        match now {
            Some(now) if line.starts_with(KEY) => lines.push(format!("{KEY} = {now:.1}")),
            _ => lines.push(line.to_owned()),
        }
    }
    for (way, before, now) in counted {
        println!("    {way}: {before:.1} -> {now:.1} instructions per I/O");
    }
    std::fs::write(file, lines.join("\n") + "\n").with_context(|| format!("writing {RECORD}"))
}

const RECORD: &str = "bench/instructions.toml";
const EXAMPLE: &str = "in_process";
const KEY: &str = "per_io";
const IOS_FEW: u64 = 20_000;
const IOS_MANY: u64 = 120_000;
/// Far above the counter's noise, which is none, and far below the cost of a lost inlining.
const TOLERANCE_PERCENT: f64 = 2.0;

#[cfg(test)]
mod tests {
    use super::{collected, compare};

    #[test]
    fn count_is_read_from_the_closing_line() {
        let said = "==7== Events    : Ir\n==7== Collected : 1234567\n==7== \n";
        assert_eq!(collected(said), Some(1_234_567));
        assert_eq!(collected("==7== nothing"), None);
    }

    #[test]
    fn move_in_either_direction_beyond_the_tolerance_fails() {
        assert!(compare(&[("a", 100.0, 101.9), ("b", 100.0, 98.1)]).is_ok());
        assert!(compare(&[("a", 100.0, 102.1)]).is_err());
        assert!(compare(&[("a", 100.0, 97.9)]).is_err());
    }
}
