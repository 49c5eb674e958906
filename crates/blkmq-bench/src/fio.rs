//! fio as the other side of a comparison: how it is run, and its output. The engine bench runs its io_uring
//! engine on the same file, the NBD bench its nbd engine on every server.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::programs;
use crate::rounds::{Latency, Sample};
use crate::usage::Usage;

/// Says whether fio can be started.
pub(crate) fn is_installed() -> bool {
    let answer = Command::new("fio")
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    answer.is_ok_and(|status| status.success())
}

/// Says whether fio was built with an engine, or can load it.
pub(crate) fn has_engine(name: &str) -> bool {
    let answer = Command::new("fio").arg(format!("--enghelp={name}")).output();
    // fio exits with success in any case.
    answer.is_ok_and(|output| {
        let said = [output.stdout, output.stderr].concat();
        !String::from_utf8_lossy(&said).contains("not ")
    })
}

/// Runs one job for `window` after `warm_up` and returns the results that fio reports, including
/// its CPU time and context switches.
///
/// `options` are fio's own, in an order that the caller chooses (its nbd engine must be named
/// before its `--uri`).
///
/// # Errors
/// If fio fails; the error contains its message.
pub(crate) fn run(options: &[String], warm_up: Duration, window: Duration) -> Result<Sample> {
    run_as(Command::new("fio"), options, warm_up, window)
}

/// As [`run`], with a command that becomes fio when fio's options are added.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_as(
    mut command: Command,
    options: &[String],
    warm_up: Duration,
    window: Duration,
) -> Result<Sample> {
    command
        .args(["--name=bench", "--output-format=json", "--time_based"])
        .args(["--lat_percentiles=1", "--clat_percentiles=0"])
        .args([
            "--percentile_list=50:99:99.9",
            "--randrepeat=0",
            "--norandommap=1",
        ])
        .arg(format!("--ramp_time={}ms", warm_up.as_millis()))
        .arg(format!("--runtime={}ms", window.as_millis()))
        .args(options)
        .stdin(Stdio::null());
    programs::note(&command);
    let output = command.output().context("starting fio")?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "fio {}: {}\n{}{said}",
        options.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    // fio may print warnings before the JSON document.
    let json = said.find('{').map(|start| &said[start..]);
    let document: Value =
        serde_json::from_str(json.context("fio printed no JSON")?).context("reading fio's JSON")?;
    sample(&document["jobs"][0])
}

/// Reads one job: its reads, or its writes if it has none.
fn sample(job: &Value) -> Result<Sample> {
    let side = [&job["read"], &job["write"]]
        .into_iter()
        .find(|side| number(&side["total_ios"]) > 0.0)
        .context("fio's job ended no I/O")?;
    let percentile = |name: &str| number(&side["lat_ns"]["percentile"][name]) as u64;
    let runtime_ms = number(&side["runtime"]);
    ensure!(runtime_ms > 0.0, "fio's job has no run time");
    let cpu_share = (number(&job["usr_cpu"]) + number(&job["sys_cpu"])) / 100.0;
    Ok(Sample {
        ios: (number(&side["iops"]) * runtime_ms / 1e3) as u64,
        elapsed: Duration::from_secs_f64(runtime_ms / 1e3),
        latency: Latency {
            p50_ns: percentile("50.000000"),
            p99_ns: percentile("99.000000"),
            p999_ns: percentile("99.900000"),
        },
        usage: Usage {
            cpu_ns: (cpu_share * runtime_ms * 1e6) as u64,
            switches: number(&job["ctx"]) as u64,
        },
        client: None,
        figures: Vec::new(),
    })
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_is_read_from_its_json() {
        let job = serde_json::json!({
            "usr_cpu": 20.0, "sys_cpu": 30.0, "ctx": 500, "write": {"total_ios": 0},
            "read": {"total_ios": 10_000, "iops": 5_000.0, "runtime": 2_000,
                     "lat_ns": {"percentile": {"50.000000": 36_000, "99.000000": 300_000, "99.900000": 400_000}}}
        });
        let sample = sample(&job).unwrap();
        assert_eq!((sample.ios, sample.elapsed), (10_000, Duration::from_secs(2)));
        assert_eq!((sample.latency.p50_ns, sample.latency.p999_ns), (36_000, 400_000));
        assert_eq!((sample.usage.cpu_ns, sample.usage.switches), (1_000_000_000, 500));
    }

    #[test]
    fn job_without_io_is_an_error() {
        assert!(sample(&serde_json::json!({"read": {"total_ios": 0}})).is_err());
    }
}
