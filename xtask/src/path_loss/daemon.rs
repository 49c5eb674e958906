//! Reads the log and the report of a daemon on one of the hosts.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use blkmq_testkit::Daemon;
use rustix::process::Signal;

/// A path as the report shows it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PathLine {
    pub(crate) name: String,
    pub(crate) is_active: bool,
    pub(crate) in_flight: u64,
    pub(crate) failures: u64,
}

/// The lines of its output so far, without its reports.
pub(crate) fn log(daemon: &Daemon) -> Vec<String> {
    let is_log = |line: &&String| LEVELS.iter().any(|level| line.contains(level));
    daemon.lines().iter().filter(is_log).cloned().collect()
}

/// Adds a line to its output.
pub(crate) fn note(daemon: &Daemon, line: String) {
    daemon.lines().push(line);
}

/// Requests the statistics, and reads the paths from them. The daemon has `queues` queues.
///
/// # Errors
/// If it does not report them.
pub(crate) fn paths(daemon: &Daemon, queues: usize) -> Result<Vec<PathLine>> {
    let before = daemon.lines().len();
    daemon.signal(Signal::USR1);
    let end = Instant::now() + PATIENCE;
    loop {
        let lines = daemon.lines();
        let report = &lines[before..];
        let ends = report.iter().filter(|line| line.starts_with("  events:"));
        if ends.count() == queues {
            return Ok(report.iter().filter_map(|line| PathLine::parse(line)).collect());
        }
        drop(lines);
        ensure!(
            Instant::now() < end,
            "the daemon does not report; it said:\n{}",
            daemon.last_words()
        );
        thread::sleep(LOOK);
    }
}

/// Requests its end, which must come in time and without an error.
///
/// # Errors
/// If it does not end so.
pub(crate) fn stop(mut daemon: Daemon) -> Result<()> {
    daemon.signal(Signal::TERM);
    let status = daemon.try_ended_within(PATIENCE);
    ensure!(
        status.is_some_and(|status| status.success()),
        "the daemon ended with {status:?} after SIGTERM; it said:\n{}",
        daemon.last_words()
    );
    Ok(())
}

/// The last lines of its log.
pub(crate) fn last_words(name: &str, daemon: &Daemon) -> String {
    let log = log(daemon);
    let last = &log[log.len().saturating_sub(SHOWN)..];
    format!("{name} said at last:\n{}\n", last.join("\n"))
}

impl PathLine {
    fn parse(line: &str) -> Option<Self> {
        let (name, rest) = line.strip_prefix("  path ")?.split_once(": ")?;
        let number = |key: &str| {
            let found = rest.split(", ").find_map(|part| part.strip_prefix(key))?;
            found.split_whitespace().next()?.parse().ok()
        };
        Some(Self {
            name: name.to_owned(),
            is_active: rest.starts_with("active,"),
            in_flight: number("in flight ")?,
            failures: number("failures ")?,
        })
    }
}

/// Time limit for a report and an end.
const PATIENCE: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(5);
/// Levels in a line of the log; the last one is in our own lines.
const LEVELS: [&str; 4] = [" ERROR ", " WARN ", " INFO ", " CUT "];
/// Lines of the log that an error shows.
const SHOWN: usize = 60;

#[cfg(test)]
mod tests {
    use super::PathLine;

    #[test]
    fn path_of_the_report_is_read() {
        let line = "  path a-1: failed, group 0, in flight 3, requests 9, bytes 512, errors 1, failures 2 (Transport), \
                    service time 5 µs";
        let wanted = PathLine {
            name: "a-1".to_owned(),
            is_active: false,
            in_flight: 3,
            failures: 2,
        };
        assert_eq!(PathLine::parse(line), Some(wanted));
        assert_eq!(PathLine::parse("queue a (none)"), None);
    }
}
