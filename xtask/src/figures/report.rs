//! A report file, and what it must state before a figure is taken from it: the host, the commit, the
//! number of rounds, the command.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// A report of `blkmq-lab bench --json`.
pub(super) struct Report(Value);

impl Report {
    /// Reads a report.
    ///
    /// # Errors
    /// If it is not JSON, or does not state its command and circumstances.
    pub(super) fn parse(text: &str) -> Result<Report> {
        let report = Report(serde_json::from_str(text)?);
        for key in ["bench", "commit", "command", "kernel", "cpu"] {
            ensure!(!report.text(key).is_empty(), "it does not say its {key}");
        }
        for key in ["rounds", "seconds"] {
            ensure!(
                report.0[key].as_f64().is_some_and(|n| n > 0.0),
                "it does not say its {key}"
            );
        }
        let commit = report.text("commit");
        ensure!(
            commit != "unknown" && !commit.ends_with("-dirty"),
            "it is of `{commit}`, which nobody can build again"
        );
        for row in report.rows() {
            ensure!(
                row["rounds"].as_array().is_some_and(|rounds| !rounds.is_empty()),
                "the row `{}` of `{}` does not have its rounds",
                word(row, "case"),
                word(row, "side")
            );
        }
        ensure!(!report.rows().is_empty(), "it has no rows");
        Ok(report)
    }

    /// A text that describes the report or its host.
    pub(super) fn text(&self, key: &str) -> &str {
        let own = self.0[key].as_str().or(self.0["host"][key].as_str());
        own.unwrap_or_default()
    }

    pub(super) fn number(&self, key: &str) -> f64 {
        let own = self.0[key].as_f64().or(self.0["host"][key].as_f64());
        own.unwrap_or_default()
    }

    pub(super) fn rows(&self) -> &[Value] {
        self.0["rows"].as_array().map_or(&[], Vec::as_slice)
    }

    /// A figure of a row.
    ///
    /// # Errors
    /// If there is no such row, or it has no such figure.
    pub(super) fn figure(&self, case: &str, side: &str, key: &str) -> Result<f64> {
        let is_it = |row: &&Value| word(row, "case") == case && word(row, "side") == side;
        let row = self.rows().iter().find(is_it);
        let row = row.with_context(|| format!("no row `{case}` of side `{side}`"))?;
        row[key]
            .as_f64()
            .with_context(|| format!("no figure `{key}` at `{case}` of side `{side}`"))
    }

    /// The figure of each round; none if the report did not keep them, as older ones did only of IOPS.
    pub(super) fn rounds(&self, case: &str, side: &str, key: &str) -> Option<Vec<f64>> {
        let is_it = |row: &&Value| word(row, "case") == case && word(row, "side") == side;
        let row = self.rows().iter().find(is_it)?;
        let rounds = row["by_round"][key].as_array();
        let rounds = rounds.or_else(|| row["rounds"].as_array().filter(|_| key == "iops"))?;
        rounds.iter().map(Value::as_f64).collect()
    }

    /// Whether it is of enough rounds, long enough, on a machine that did nothing else.
    ///
    /// # Errors
    /// Says what is missing.
    pub(super) fn is_evidence(&self) -> Result<()> {
        let kernel = self
            .rows()
            .iter()
            .any(|row| word(row, "side").starts_with("kernel-"));
        let seconds_min = if kernel { KERNEL_SECONDS_MIN } else { SECONDS_MIN };
        let (rounds, seconds, load) = (
            self.number("rounds"),
            self.number("seconds"),
            self.number("load_before"),
        );
        ensure!(
            rounds >= ROUNDS_MIN,
            "it has {rounds} rounds: must have at least {ROUNDS_MIN}"
        );
        ensure!(
            seconds >= seconds_min,
            "its windows are of {seconds} s: must be of at least {seconds_min} s{}",
            if kernel {
                " beside the kernel's schedulers"
            } else {
                ""
            }
        );
        ensure!(
            load < LOAD_MAX,
            "the load before it was {load}: must be below {LOAD_MAX}"
        );
        Ok(())
    }
}

/// A text in a row: its case or its side.
pub(super) fn word<'a>(row: &'a Value, key: &str) -> &'a str {
    row[key].as_str().unwrap_or_default()
}

/// # Errors
/// If there is no report with this name.
pub(super) fn find<'a>(reports: &'a BTreeMap<String, Report>, name: &str) -> Result<&'a Report> {
    reports
        .get(name)
        .with_context(|| format!("there is no report {name}"))
}

/// Every report of a directory, by its file's name without `.json`.
///
/// # Errors
/// If one cannot be read.
pub(super) fn read_all(dir: &Path) -> Result<BTreeMap<String, Report>> {
    let mut reports = BTreeMap::new();
    for entry in fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))? {
        let path = entry?.path();
        let name = path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        let report = Report::parse(&text).with_context(|| format!("report {name}"))?;
        reports.insert(name, report);
    }
    Ok(reports)
}

/// Copies a report into the directory, without directories in its command, and returns its name. With `force` also one
/// that is no evidence.
///
/// # Errors
/// If it is not a report, or cannot be read or written.
pub(super) fn take_in(file: &Path, dir: &Path, force: bool) -> Result<String> {
    let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    let name = file
        .file_stem()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let mut report = Report::parse(&text).with_context(|| format!("report {name}"))?;
    if !force {
        report
            .is_evidence()
            .with_context(|| format!("report {name} rejected; repeat it, or take it with --force"))?;
    }
    let command = plain(report.text("command"));
    report.0["command"] = command.into();
    let text = serde_json::to_string_pretty(&report.0)? + "\n";
    let path = dir.join(format!("{name}.json"));
    fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    Ok(name)
}

/// The command without options for output files, and with the names of files alone.
fn plain(command: &str) -> String {
    let mut words = Vec::new();
    let mut all = command.split_whitespace();
    while let Some(word) = all.next() {
        if word == "--json" || word == "--svg" {
            all.next();
        } else {
            words.push(without_directories(word));
        }
    }
    words.join(" ")
}

/// `file:disk.raw` for `file:/some/where/disk.raw`.
fn without_directories(word: &str) -> String {
    let Some(start) = word
        .find([':', '='])
        .map(|at| at + 1)
        .filter(|start| word[*start..].starts_with('/') && !word[*start..].starts_with("//"))
    else {
        return if word.starts_with('/') {
            last(word)
        } else {
            socket(word)
        };
    };
    word[..start].to_owned() + &last(&word[start..])
}

/// An NBD URI with the name of its socket alone.
fn socket(word: &str) -> String {
    match word.split_once("socket=/") {
        Some((uri, path)) => format!("{uri}socket={}", last(path)),
        None => word.to_owned(),
    }
}

fn last(path: &str) -> String {
    path.rsplit('/').next().unwrap_or_default().to_owned()
}

const ROUNDS_MIN: f64 = 9.0;
const SECONDS_MIN: f64 = 2.0;
/// The kernel's bfq serves in turns of some hundred milliseconds.
const KERNEL_SECONDS_MIN: f64 = 3.0;
/// The load average before a run, over one minute.
const LOAD_MAX: f64 = 0.5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_that_does_not_say_how_it_was_made_is_refused() {
        let whole = r#"{"bench": "b", "commit": "c", "command": "blkmq", "rounds": 3, "seconds": 1.0,
            "host": {"kernel": "Linux", "cpu": "X"}, "rows": [{"case": "c", "side": "s", "iops": 2.0, "rounds": [2.0]}]}"#;
        let report = Report::parse(whole).unwrap();
        assert_eq!(report.figure("c", "s", "iops").unwrap(), 2.0);
        assert!(report.figure("c", "t", "iops").is_err() && report.figure("c", "s", "p50_ns").is_err());
        for (there, instead) in [
            (r#""commit": "c""#, r#""commit": "c-dirty""#),
            (r#""commit": "c""#, r#""commit": "unknown""#),
            (r#""kernel": "Linux""#, r#""kernel": """#),
            (r#""rounds": 3"#, r#""rounds": 0"#),
            (r#""rounds": [2.0]"#, r#""rounds": []"#),
        ] {
            assert!(
                Report::parse(&whole.replace(there, instead)).is_err(),
                "{instead}"
            );
        }
    }

    #[test]
    fn report_of_few_or_short_rounds_or_a_busy_machine_is_no_evidence() {
        let whole = r#"{"bench": "b", "commit": "c", "command": "x", "rounds": 9, "seconds": 2.0,
            "host": {"kernel": "Linux", "cpu": "X", "load_before": 0.4},
            "rows": [{"case": "c", "side": "bfq", "iops": 2.0, "rounds": [2.0]}]}"#;
        let judged = |text: &str| {
            Report::parse(text)
                .unwrap()
                .is_evidence()
                .map_err(|e| e.to_string())
        };
        assert_eq!(judged(whole), Ok(()));
        for (there, instead, expected) in [
            (r#""rounds": 9"#, r#""rounds": 8"#, "at least 9"),
            (r#""seconds": 2.0"#, r#""seconds": 1.9"#, "at least 2 s"),
            (r#""load_before": 0.4"#, r#""load_before": 0.5"#, "below 0.5"),
            (
                r#""side": "bfq""#,
                r#""side": "kernel-bfq""#,
                "at least 3 s beside the kernel",
            ),
        ] {
            let error = judged(&whole.replace(there, instead)).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn command_is_kept_as_another_would_type_it() {
        assert_eq!(
            plain("blkmq-lab bench engine --device file:/a/b/disk.raw --json /a/x.json --seconds 1"),
            "blkmq-lab bench engine --device file:disk.raw --seconds 1"
        );
        assert_eq!(plain("blkmq --dir /a/b"), "blkmq --dir b");
        assert_eq!(
            plain("blkmq --device nbd+unix:///?socket=/a/nbd.sock"),
            "blkmq --device nbd+unix:///?socket=nbd.sock"
        );
    }
}
