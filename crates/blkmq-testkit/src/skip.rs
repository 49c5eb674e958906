//! The report of a skipped test: aloud, and in a list that outlives the test runner's capture.
//!
//! `cargo xtask test` names the list in [`LIST`], prints it at the end of the run, and with
//! `--strict` fails for each skip that `.ci/allowed-skips.txt` does not allow. For tests alone.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

/// The environment variable that names the file to which skips are appended, one a line.
pub const LIST: &str = "BLKMQ_SKIPS";

/// Reports that the test on this thread is skipped, and why.
///
/// # Panics
/// If the list that [`LIST`] names cannot be written: a skip that nobody counts looks like a test
/// that ran.
pub fn skip(reason: &str) {
    let thread = std::thread::current();
    let program = std::env::current_exe().unwrap_or_default();
    skip_of(&test_name(&program, thread.name().unwrap_or("a test")), reason);
}

/// Reports that `what` is skipped, where the thread's name is not the test's.
///
/// # Panics
/// As [`skip`].
pub fn skip_of(what: &str, reason: &str) {
    let line = line(what, reason);
    // Around the test runner's capture, which hides what a passing test prints by `eprintln!`.
    let _ = io::stderr().write_all(format!("SKIPPED {line}").as_bytes());
    if let Some(list) = std::env::var_os(LIST) {
        append(Path::new(&list), &line).unwrap_or_else(|error| panic!("{LIST}={}: {error}", list.display()));
    }
}

/// `host::driver::lock::tests::name` for a test of the program `host-0123456789abcdef`.
fn test_name(program: &Path, thread: &str) -> String {
    let stem = program.file_name().unwrap_or_default().to_string_lossy();
    let stem = stem.rsplit_once('-').map_or(&*stem, |(name, _hash)| name);
    format!("{stem}::{thread}")
}

/// A reason of several lines would look like several skips.
fn line(what: &str, reason: &str) -> String {
    let reason = reason.split_whitespace().collect::<Vec<_>>().join(" ");
    format!("{what}: {reason}\n")
}

/// One write in append mode: tests of one run skip at the same time, from several processes.
fn append(list: &Path, line: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(list)?;
    file.write_all(line.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skip_is_one_line_that_names_the_test_and_the_reason() {
        let name = test_name(Path::new("deps/end_to_end-0123456789abcdef"), "qemu::reads");
        assert_eq!(
            line(&name, "no FUSE\n  here"),
            "end_to_end::qemu::reads: no FUSE here\n"
        );
    }

    #[test]
    fn skips_of_several_tests_follow_one_another_in_the_list() {
        let list = std::env::temp_dir().join(format!("blkmq-testkit-{}", std::process::id()));
        append(&list, "a: x\n").unwrap();
        append(&list, "b: y\n").unwrap();
        let text = std::fs::read_to_string(&list).unwrap();
        let _ = std::fs::remove_file(&list);
        assert_eq!(text, "a: x\nb: y\n");
    }
}
