//! `nbdcopy` as a side on an NBD server: it copies the whole export to nowhere, repeatedly, with as many
//! connections, threads and requests as our side.

use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::args::Plan;
use crate::rounds::{Latency, Sample};
use crate::usage::Usage;

/// Says whether nbdcopy is installed.
pub(crate) fn is_installed() -> bool {
    let answer = Command::new("nbdcopy")
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    answer.is_ok_and(|status| status.success())
}

/// Copies for the plan's window or a little longer. Latencies are not known.
///
/// # Errors
/// If nbdcopy fails.
pub(crate) fn measure(uri: &str, size: u64, jobs: u32, depth: u32, bs: u32, plan: &Plan) -> Result<Sample> {
    let words = [
        "--no-extents".to_owned(),
        format!("--connections={jobs}"),
        format!("--threads={jobs}"),
        format!("--requests={depth}"),
        format!("--request-size={bs}"),
        uri.to_owned(),
        "null:".to_owned(),
    ];
    let (mut elapsed, mut usage, mut copies) = (Duration::ZERO, Usage::default(), 0);
    while elapsed < plan.window {
        let start = Instant::now();
        let mut child = Command::new("nbdcopy")
            .args(&words)
            .stdin(Stdio::null())
            .spawn()
            .context("starting nbdcopy")?;
        let mut used = Usage::default();
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            // The last reading before its threads end; it misses a few milliseconds.
            let now = Usage::of(child.id()).unwrap_or_default();
            if now.cpu_ns >= used.cpu_ns {
                used = now;
            }
            thread::sleep(LOOK_EVERY);
        };
        ensure!(status.success(), "nbdcopy {}: {status}", words.join(" "));
        elapsed += start.elapsed();
        usage.cpu_ns += used.cpu_ns;
        usage.switches += used.switches;
        copies += 1;
    }
    Ok(Sample {
        ios: copies * (size / u64::from(bs)),
        elapsed,
        latency: Latency::default(),
        usage,
        client: None,
        figures: Vec::new(),
    })
}

const LOOK_EVERY: Duration = Duration::from_millis(2);
