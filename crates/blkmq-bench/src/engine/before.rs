//! The comparison of another build of this command with this one: it measures the same point in a process of
//! its own, for the same time, and its report is read. `engine` makes it the side `before`.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blkmq_core::sched::ElevatorType;
use serde_json::Value;

use super::{DeviceArg, EngineArgs};
use crate::args::{Plan, TO_ANOTHER_BENCH};
use crate::report::Row;
use crate::rounds::{Latency, Sample};
use crate::usage::Usage;

/// Has `program` measure one point for the plan's window.
///
/// # Errors
/// If it fails or reports no row; the error holds what it said.
pub(crate) fn measure(
    program: &Path,
    args: &EngineArgs,
    elevator: &'static ElevatorType,
    jobs: u32,
    depth: u32,
    plan: &Plan,
) -> Result<Sample> {
    let device = match &args.device {
        DeviceArg::File(path) => format!("file:{}", path.display()),
        DeviceArg::Nbd(uri) => uri.clone(),
        device => device.to_string(),
    };
    let mut command = Command::new(program);
    command
        .args(["bench", "engine", "--rounds", "1", "--json", TO_ANOTHER_BENCH])
        .args(["--seconds", &plan.window.as_secs_f64().to_string()])
        .args(["--device", &device, "--elevator", elevator.name])
        .args(["--jobs", &jobs.to_string(), "--depth", &depth.to_string()])
        .args(["--rw", args.rw.name(), "--bs", &args.bs.to_string()])
        .args(args.overwrite.then_some("--overwrite"))
        .args(args.groups.then_some("--groups"))
        .stdin(Stdio::null());
    let output = command
        .output()
        .with_context(|| format!("starting {}", program.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{}: {}\n{said}",
        program.display(),
        output.status
    );
    let row = row(&said).with_context(|| format!("{} reported:\n{said}", program.display()))?;
    Ok(sample(&row, plan.window))
}

/// The first row of side `ours` in the report, before which lines of progress may be printed.
fn row(said: &str) -> Result<Row> {
    let start = said.find("{\n").context("no JSON")?;
    let end = said.rfind("\n}").context("no end of JSON")? + 2;
    let report: Value = serde_json::from_str(&said[start..end]).context("reading the JSON")?;
    let rows: Vec<Row> = serde_json::from_value(report["rows"].clone()).context("reading the rows")?;
    rows.into_iter()
        .find(|row| row.side == "ours")
        .context("no row of its own")
}

/// The row as if it had been measured here.
fn sample(row: &Row, window: Duration) -> Sample {
    let ios = row.iops * window.as_secs_f64();
    Sample {
        ios: ios as u64,
        elapsed: window,
        latency: Latency {
            p50_ns: row.p50_ns,
            p99_ns: row.p99_ns,
            p999_ns: row.p999_ns,
        },
        usage: Usage {
            cpu_ns: (row.cpu_ns_per_io * ios) as u64,
            switches: (row.ctx_per_io * ios) as u64,
        },
        client: None,
        figures: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_is_found_between_lines_of_progress() {
        let json = serde_json::json!({"bench": "engine", "rows": [
            {"case": "c", "side": "fio", "iops": 1.0, "p50_ns": 1, "p99_ns": 2, "p999_ns": 3, "cpu_ns_per_io": 4.0,
             "ctx_per_io": 0.5, "rounds": [1.0]},
            {"case": "c", "side": "ours", "iops": 500.0, "p50_ns": 1, "p99_ns": 2, "p999_ns": 3, "cpu_ns_per_io": 4.0,
             "ctx_per_io": 0.5, "rounds": [500.0]}]});
        let json = serde_json::to_string_pretty(&json).unwrap();
        let said = format!("[1/1] round 1/1  c ours\n{json}\nwrote FILE\n");
        let row = row(&said).unwrap();
        assert_eq!(row.iops, 500.0);
        let sample = sample(&row, Duration::from_secs(2));
        assert_eq!(
            (sample.ios, sample.usage.cpu_ns, sample.usage.switches),
            (1000, 4000, 500)
        );
        assert!(super::row("nothing here").is_err());
    }
}
