//! Runs the system's programs to their end; if one fails, the error has its output.

use std::ffi::OsStr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Runs a program with words and paths.
///
/// # Errors
/// If it cannot be started, or fails, with what it said.
pub(crate) fn run<P: AsRef<OsStr>>(
    program: &str,
    words: &str,
    paths: impl IntoIterator<Item = P>,
) -> Result<()> {
    output(program, words, paths).map(drop)
}

/// The same; returns what it printed.
///
/// # Errors
/// If it cannot be started, or fails, with what it said.
pub(crate) fn output<P: AsRef<OsStr>>(
    program: &str,
    words: &str,
    paths: impl IntoIterator<Item = P>,
) -> Result<String> {
    let mut command = Command::new(program);
    command
        .args(words.split_whitespace())
        .args(paths)
        .stdin(Stdio::null());
    let output = command.output().with_context(|| format!("starting {program}"))?;
    if !output.status.success() {
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        let lines: Vec<&str> = said.lines().collect();
        let end = lines[lines.len().saturating_sub(LINES_MAX)..].join("\n");
        bail!("{program} {words}: {}: {end}", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Tries again for a while what fails as long as a process that was killed holds a device.
///
/// # Errors
/// The last one, when the time is over.
pub(crate) fn until_free(mut work: impl FnMut() -> Result<()>) -> Result<()> {
    let deadline = Instant::now() + FREE_TIME_MAX;
    loop {
        match work() {
            Err(_) if Instant::now() < deadline => std::thread::sleep(PAUSE),
            result => return result,
        }
    }
}

const LINES_MAX: usize = 20;
const FREE_TIME_MAX: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(50);
