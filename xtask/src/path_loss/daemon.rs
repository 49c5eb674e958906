//! Starts and stops a `blkmq serve` on one of the hosts, and reads its report.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

/// A running daemon; dropping it kills it.
pub(crate) struct Daemon {
    name: &'static str,
    child: Child,
    said: Arc<Mutex<Vec<String>>>,
}

/// A path as the report shows it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PathLine {
    pub(crate) name: String,
    pub(crate) is_active: bool,
    pub(crate) in_flight: u64,
    pub(crate) failures: u64,
}

impl Daemon {
    /// Starts a daemon, and waits until it serves.
    ///
    /// # Errors
    /// If it ends instead, or takes too long; the error contains its output.
    pub(crate) fn start(name: &'static str, command: &mut Command) -> Result<Self> {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        let mut daemon = Self {
            name,
            child,
            said: Arc::default(),
        };
        let stdout = daemon.child.stdout.take().context("stdout is piped")?;
        let stderr = daemon.child.stderr.take().context("stderr is piped")?;
        daemon.listen(stdout);
        daemon.listen(stderr);
        let end = Instant::now() + PATIENCE;
        while !daemon.lines().iter().any(|line| line == "ready") {
            let has_ended = daemon.child.try_wait()?.is_some();
            ensure!(
                !has_ended && Instant::now() < end,
                "{}",
                daemon.complaint("is not ready")
            );
            thread::sleep(LOOK);
        }
        Ok(daemon)
    }

    /// The lines of its output so far, without its reports.
    pub(crate) fn log(&self) -> Vec<String> {
        let lines = self.lines();
        let is_log = |line: &&String| LEVELS.iter().any(|level| line.contains(level));
        lines.iter().filter(is_log).cloned().collect()
    }

    /// Adds a line to its output.
    pub(crate) fn note(&self, line: String) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        said.push(line);
    }

    /// Requests the statistics, and reads the paths from them. The daemon has `queues` queues.
    ///
    /// # Errors
    /// If it does not report them.
    pub(crate) fn paths(&self, queues: usize) -> Result<Vec<PathLine>> {
        let before = self.lines().len();
        self.signal("USR1")?;
        let end = Instant::now() + PATIENCE;
        loop {
            let lines = self.lines();
            let report = &lines[before..];
            let ends = report.iter().filter(|line| line.starts_with("  events:"));
            if ends.count() == queues {
                return Ok(report.iter().filter_map(|line| PathLine::parse(line)).collect());
            }
            drop(lines);
            ensure!(Instant::now() < end, "{}", self.complaint("does not report"));
            thread::sleep(LOOK);
        }
    }

    /// Requests its end, which must come in time and without an error.
    ///
    /// # Errors
    /// If it does not end so.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.signal("TERM")?;
        let end = Instant::now() + PATIENCE;
        loop {
            match self.child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => bail!("{}", self.complaint(&format!("ended with {status}"))),
                None => ensure!(Instant::now() < end, "{}", self.complaint("does not end")),
            }
            thread::sleep(LOOK);
        }
    }

    /// The last lines of its log.
    pub(crate) fn last_words(&self) -> String {
        let log = self.log();
        let last = &log[log.len().saturating_sub(SHOWN)..];
        format!("{} said at last:\n{}\n", self.name, last.join("\n"))
    }

    fn complaint(&self, what: &str) -> String {
        let lines = self.lines();
        let last = &lines[lines.len().saturating_sub(SHOWN)..];
        format!("{} {what}; it said:\n{}", self.name, last.join("\n"))
    }

    fn signal(&self, signal: &str) -> Result<()> {
        let id = self.child.id().to_string();
        let status = Command::new("kill").args(["-s", signal, &id]).status()?;
        ensure!(status.success(), "{}", self.complaint("cannot be signalled"));
        Ok(())
    }

    fn listen(&self, pipe: impl std::io::Read + Send + 'static) {
        let said = Arc::clone(&self.said);
        thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                said.lock().unwrap_or_else(PoisonError::into_inner).push(line);
            }
        });
    }

    fn lines(&self) -> MutexGuard<'_, Vec<String>> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Both fail if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
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

/// Time limit for a start, a report and an end.
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
    fn a_path_of_the_report_is_read() {
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
