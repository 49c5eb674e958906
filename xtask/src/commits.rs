//! The rules for commit messages that CONTRIBUTING.md names: a short subject without a period at its
//! end, and a body unless the change is trivial.

use anyhow::{Result, ensure};

use crate::check::git;

/// Checks the message of every commit in a range, as git writes ranges; merges have no rules.
///
/// # Errors
/// If there is no such range, or a message breaks a rule: the commit and the rule of each.
pub(crate) fn check(range: &str) -> Result<()> {
    let format = "--format=%x1e%h%x00%s%x00%b%x00";
    let log = git(&["log", "--no-merges", "--shortstat", format, range])?;
    let commits: Vec<&str> = log.split('\x1e').skip(1).collect();
    println!("    {} commit(s) in {range}", commits.len());
    let wrong: Vec<String> = commits.iter().flat_map(|commit| faults(commit)).collect();
    ensure!(wrong.is_empty(), "commit messages:\n{}", wrong.join("\n"));
    Ok(())
}

/// Which rules a commit breaks; it is given as its name, subject, body and statistics, with NUL
/// between them.
fn faults(commit: &str) -> Vec<String> {
    let mut parts = commit.split('\0');
    let mut part = || parts.next().unwrap_or_default().trim();
    let (name, subject, body, statistics) = (part(), part(), part(), part());
    let length = subject.chars().count();
    let lines = changed_lines(statistics);
    let mut faults = Vec::new();
    let mut add = |rule: String| faults.push(format!("{name} ({subject}): {rule}"));
    if length > SUBJECT_MAX {
        add(format!(
            "the subject has {length} characters, {SUBJECT_MAX} allowed"
        ));
    }
    if subject.ends_with('.') {
        add("the subject ends with a period".into());
    }
    if body.is_empty() && lines > TRIVIAL_MAX {
        add(format!(
            "{lines} lines changed, and no body says why; up to {TRIVIAL_MAX} need none"
        ));
    }
    faults
}

/// The insertions and deletions of ` 3 files changed, 10 insertions(+), 2 deletions(-)`.
fn changed_lines(statistics: &str) -> u64 {
    let counts = statistics.split(", ").filter(|part| part.contains('('));
    counts
        .filter_map(|part| part.split_whitespace().next()?.parse::<u64>().ok())
        .sum()
}

const SUBJECT_MAX: usize = 72;
/// Lines of a change that its subject explains alone.
const TRIVIAL_MAX: u64 = 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn commit(subject: &str, body: &str, statistics: &str) -> Vec<String> {
        faults(&format!("abc\0{subject}\0{body}\0\n {statistics}\n"))
    }

    const LARGE: &str = "3 files changed, 10 insertions(+), 2 deletions(-)";
    const TRIVIAL: &str = "1 file changed, 10 insertions(+)";

    #[test]
    fn messages_as_they_should_be_pass() {
        let longest = "a".repeat(SUBJECT_MAX);
        assert!(commit(&longest, "Why.", LARGE).is_empty());
        assert!(commit("docs: a missing word", "", TRIVIAL).is_empty());
        assert!(
            commit(
                "core: a file is renamed",
                "",
                "1 file changed, 0 insertions(+), 0 deletions(-)"
            )
            .is_empty()
        );
    }

    #[test]
    fn messages_that_break_a_rule_are_named_with_it() {
        let long = "ü".repeat(SUBJECT_MAX + 1);
        for (subject, body, rule) in [
            (long.as_str(), "Why.", "73 characters"),
            ("core: it works.", "Why.", "period"),
            ("core: more", "", "12 lines changed"),
        ] {
            let faults = commit(subject, body, LARGE);
            assert!(faults.len() == 1 && faults[0].contains(rule), "{faults:?}");
        }
    }

    #[test]
    fn ranges_that_do_not_exist_are_an_error() {
        assert!(check("no-such-branch..HEAD").is_err());
    }
}
