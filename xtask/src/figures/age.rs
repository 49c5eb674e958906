//! Reports that are older than the code that they measured: lines that have changed since, in the crates below which
//! every figure is made.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use super::report::Report;
use super::{INSTRUCTIONS, table};
use crate::check::git;

/// The reports whose code has changed in more than [`LINES_MAX`] lines since, each with the reason; none is left out
/// because its commit is not known here.
///
/// # Errors
/// If git cannot be asked.
pub(super) fn old(reports: &BTreeMap<String, Report>, counts: &toml::Table) -> Result<Vec<String>> {
    git(&["rev-parse", "HEAD"]).context("asking for the present commit")?;
    let mut known: BTreeMap<&str, Since> = BTreeMap::new();
    let mut old = Vec::new();
    for (name, report) in reports {
        let commit = report.text("commit");
        let since = known.entry(commit).or_insert_with(|| Since::of(commit, counts));
        if let Some(why) = since.why_old(report) {
            old.push(format!("{name}, of {commit}: {why}"));
        }
    }
    Ok(old)
}

/// What has changed since a commit.
enum Since {
    /// This clone does not have the commit.
    Unknown,
    Changed {
        lines: u64,
        /// Ways whose recorded instructions have moved; none where nothing was recorded.
        moved: Option<Vec<String>>,
    },
}

impl Since {
    fn of(commit: &str, counts: &toml::Table) -> Self {
        let range = format!("{commit}..HEAD");
        let mut words = vec!["diff", "--numstat", &range, "--"];
        words.extend(CRATES);
        let Ok(diff) = git(&words) else {
            return Self::Unknown;
        };
        let before = git(&["show", &format!("{commit}:{INSTRUCTIONS}")]).ok();
        let before = before.and_then(|text| text.parse::<toml::Table>().ok());
        Self::Changed {
            lines: lines(&diff),
            moved: before.map(|before| moved(&before, counts)),
        }
    }

    fn why_old(&self, report: &Report) -> Option<String> {
        let (lines, moved) = match self {
            Self::Unknown => return Some("this clone does not have that commit".into()),
            Self::Changed { lines, .. } if *lines <= LINES_MAX => return None,
            Self::Changed { lines, moved } => (lines, moved),
        };
        let excused = is_counted(report) && moved.as_ref().is_some_and(Vec::is_empty);
        let why = match moved {
            Some(moved) if is_counted(report) => format!("; instructions of {} have moved", moved.join(", ")),
            _ => String::new(),
        };
        (!excused).then(|| format!("{lines} lines have changed since{why}"))
    }
}

/// Whether the report is of the paths whose instructions are counted: in process, without a file or a socket.
fn is_counted(report: &Report) -> bool {
    let on_device = report.text("command").contains("--device ");
    COUNTED.contains(&report.text("bench")) && !on_device
}

/// Lines added and removed, by `git diff --numstat`; a binary file counts as none.
fn lines(numstat: &str) -> u64 {
    let numbers = |line: &str| -> Option<u64> {
        let mut words = line.split('\t').map(|word| word.parse::<u64>().ok());
        Some(words.next()?? + words.next()??)
    };
    numstat.lines().filter_map(numbers).sum()
}

/// The ways whose count differs by more than the tolerance, or that only one record has.
fn moved(before: &toml::Table, now: &toml::Table) -> Vec<String> {
    let ways = before
        .keys()
        .chain(now.keys().filter(|way| !before.contains_key(*way)));
    let is_moved = |way: &&String| {
        let counts = (table::count_of(before, way), table::count_of(now, way));
        !matches!(counts, (Ok(before), Ok(now)) if (now / before - 1.0).abs() <= TOLERANCE)
    };
    ways.filter(is_moved).cloned().collect()
}

/// The code below which every figure is made.
const CRATES: [&str; 4] = [
    "crates/blkmq-core",
    "crates/blkmq-host",
    "crates/blkmq-export",
    "crates/blkmq-drivers",
];
const LINES_MAX: u64 = 100;
/// Benches in process, on null drives or models.
const COUNTED: [&str; 5] = ["engine", "stats", "stack", "run-queue", "single-dispatch"];
/// As `cargo xtask instructions` has it.
const TOLERANCE: f64 = 0.02;

#[cfg(test)]
mod tests {
    use super::*;

    fn report(bench: &str, command: &str) -> Report {
        let json = format!(
            r#"{{"bench": "{bench}", "commit": "c", "command": "{command}", "rounds": 1, "seconds": 1,
                "host": {{"kernel": "k", "cpu": "p"}},
                "rows": [{{"case": "c", "side": "s", "iops": 1.0, "rounds": [1.0]}}]}}"#
        );
        Report::parse(&json).unwrap()
    }

    #[test]
    fn report_is_old_when_more_than_100_lines_have_changed() {
        let nbd = report("nbd", "blkmq-lab bench nbd");
        let since = |lines, moved: Option<&[&str]>| Since::Changed {
            lines,
            moved: moved.map(|ways| ways.iter().map(|way| (*way).to_owned()).collect()),
        };
        assert_eq!(since(100, Some(&["direct"])).why_old(&nbd), None);
        assert!(
            since(101, Some(&[])).why_old(&nbd).is_some(),
            "instructions say nothing of sockets"
        );
        assert!(Since::Unknown.why_old(&nbd).is_some());
        let engine = report("engine", "blkmq-lab bench engine --jobs 1");
        assert_eq!(since(5000, Some(&[])).why_old(&engine), None);
        assert!(since(5000, None).why_old(&engine).is_some());
        let why = since(5000, Some(&["direct"])).why_old(&engine).unwrap();
        assert_eq!(
            why,
            "5000 lines have changed since; instructions of direct have moved"
        );
        let file = report("engine", "blkmq-lab bench engine --device file:x");
        assert!(since(5000, Some(&[])).why_old(&file).is_some());
    }

    #[test]
    fn lines_are_added_over_files() {
        assert_eq!(lines("12\t3\ta.rs\n-\t-\tb.png\n0\t7\tc.rs\n"), 22);
        assert_eq!(lines(""), 0);
    }

    #[test]
    fn count_within_the_tolerance_has_not_moved() {
        let table = |text: &str| text.parse::<toml::Table>().unwrap();
        let before = table("[a]\nper_io = 100.0\n[b]\nper_io = 100.0\n[gone]\nper_io = 1.0\n");
        let now = table("[a]\nper_io = 101.9\n[b]\nper_io = 97.0\n[new]\nper_io = 1.0\n");
        assert_eq!(moved(&before, &now), ["b", "gone", "new"]);
        assert!(moved(&before, &before).is_empty());
    }

    #[test]
    fn age_of_the_present_reports_can_be_told() {
        let reports = super::super::Source::read().unwrap();
        old(&reports.reports, &reports.instructions).unwrap();
    }
}
