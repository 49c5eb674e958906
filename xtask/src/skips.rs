//! Skipped tests and steps: each is listed, and in a strict run each must be allowed.
//!
//! Tests append to the list by `blkmq-testkit`, whatever captures their output;
//! [`steps`](crate::steps) has its own list.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::place::{root, target_dir};

/// The effect of a skip that is not allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// It is listed.
    Listed,
    /// It fails the run.
    Strict,
}

/// The file to which the tests of this run append their skips.
pub(crate) struct List {
    file: PathBuf,
}

impl List {
    /// Starts an empty list.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn start() -> Result<List> {
        let file = file()?;
        std::fs::write(&file, "").with_context(|| format!("emptying {}", file.display()))?;
        Ok(List { file })
    }

    /// Prints what was skipped: `steps`, and the tests in the list.
    ///
    /// # Errors
    /// If the list or [`ALLOWED`] cannot be read; in a strict run, if a skip is not allowed.
    pub(crate) fn check(&self, steps: impl Iterator<Item = String>, mode: Mode) -> Result<()> {
        let tests = std::fs::read_to_string(&self.file)
            .with_context(|| format!("reading {}", self.file.display()))?;
        let allowed =
            std::fs::read_to_string(root().join(ALLOWED)).with_context(|| format!("reading {ALLOWED}"))?;
        let mut skips: Vec<String> = steps.chain(tests.lines().map(str::to_owned)).collect();
        skips.sort();
        skips.dedup();
        let allowed = read_allowed(&allowed)?;
        let checked = check(&skips, &allowed);
        print!("{}", show(&checked));
        ensure!(
            mode == Mode::Listed || checked.iter().all(|(_, reason)| reason.is_some()),
            "skips that {ALLOWED} does not allow; install what they need, or add a line with the reason"
        );
        Ok(())
    }
}

/// Makes the command append its skips to the list.
///
/// # Errors
/// If this program's own path cannot be read.
pub(crate) fn listed(command: &mut Command) -> Result<&mut Command> {
    Ok(command.env(blkmq_testkit::SKIPS, file()?))
}

fn file() -> Result<PathBuf> {
    Ok(target_dir()?.join("skips.txt"))
}

/// A skip that is allowed on any machine.
struct Allowed {
    /// What the skip's line begins with.
    pattern: String,
    reason: String,
}

/// Reads lines `PATTERN | REASON`; `#` begins a comment.
fn read_allowed(text: &str) -> Result<Vec<Allowed>> {
    let lines = text
        .lines()
        .filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let parts = line.split_once(" | ");
            let (pattern, reason) = parts.unwrap_or((line, ""));
            ensure!(
                !pattern.trim().is_empty() && !reason.trim().is_empty(),
                "{ALLOWED}: `{line}` rejected: must be `PATTERN | REASON`"
            );
            Ok(Allowed {
                pattern: pattern.trim().to_owned(),
                reason: reason.trim().to_owned(),
            })
        })
        .collect()
}

/// Each skip with the reason why it is allowed, if it is.
fn check<'a>(skips: &'a [String], allowed: &'a [Allowed]) -> Vec<(&'a str, Option<&'a str>)> {
    let reason = |skip: &str| {
        let entry = allowed.iter().find(|entry| skip.starts_with(&entry.pattern))?;
        Some(entry.reason.as_str())
    };
    skips.iter().map(|skip| (skip.as_str(), reason(skip))).collect()
}

fn show(checked: &[(&str, Option<&str>)]) -> String {
    let mut text = String::new();
    for (skip, reason) in checked {
        match reason {
            Some(reason) => text += &format!("    allowed      {skip}\n                 ({reason})\n"),
            None => text += &format!("    NOT ALLOWED  {skip}\n"),
        }
    }
    let strange = checked.iter().filter(|(_, reason)| reason.is_none()).count();
    text + &format!("    {} skipped, {strange} of them not allowed\n", checked.len())
}

/// The skips that a strict run allows, each with its reason.
const ALLOWED: &str = ".ci/allowed-skips.txt";

#[cfg(test)]
mod tests {
    use super::*;

    fn list(name: &str, skips: &str) -> List {
        let file = std::env::temp_dir().join(format!("blkmq-skips-{}-{name}", std::process::id()));
        std::fs::write(&file, skips).unwrap();
        List { file }
    }

    impl Drop for List {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.file);
        }
    }

    #[test]
    fn skip_that_is_not_allowed_fails_a_strict_run_alone() {
        let list = list("strict", "end_to_end::qemu::reads: not installed: qemu-io\n");
        assert!(list.check(std::iter::empty(), Mode::Listed).is_ok());
        let error = list.check(std::iter::empty(), Mode::Strict).unwrap_err();
        assert!(error.to_string().contains(ALLOWED), "{error:#}");
    }

    #[test]
    fn step_that_is_skipped_fails_a_strict_run_like_a_test() {
        let list = list("step", "");
        assert!(list.check(std::iter::empty(), Mode::Strict).is_ok());
        let step = || std::iter::once("path loss: it needs root".to_owned());
        assert!(list.check(step(), Mode::Strict).is_err());
    }

    #[test]
    fn skip_is_allowed_by_what_its_line_begins_with() {
        let allowed = read_allowed("# why\n\nhost::polled | the guest has such a device\n").unwrap();
        let skips = [
            "host::polled::reads: no device".to_owned(),
            "x: host::polled".to_owned(),
        ];
        let checked = check(&skips, &allowed);
        assert_eq!(checked[0].1, Some("the guest has such a device"));
        assert_eq!(checked[1].1, None);
        assert!(
            show(&checked).contains("2 skipped, 1 of them not allowed"),
            "{}",
            show(&checked)
        );
    }

    #[test]
    fn entry_without_a_reason_is_refused() {
        for line in ["host::polled", "host::polled | ", " | because"] {
            assert!(read_allowed(line).is_err(), "{line}");
        }
    }

    #[test]
    fn every_allowed_skip_of_this_repository_has_its_reason() {
        let text = std::fs::read_to_string(root().join(ALLOWED)).unwrap();
        assert!(!read_allowed(&text).unwrap().is_empty());
    }
}
