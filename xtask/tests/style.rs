//! Checks habits of CONTRIBUTING.md by a machine instead of by reviewers.
//!
//! The rules check every file that git tracks or would track, line by line. They tell comments and
//! string literals apart well enough for this code base; what needs a real parser is left to
//! clippy.

use std::path::{Path, PathBuf};
use std::process::Command;

/// One file of the project and where it lies, relative to the root.
struct Source {
    path: String,
    text: String,
}

#[test]
fn every_rust_file_opens_with_a_module_doc() {
    let broken = rust_files()
        .into_iter()
        .filter(|file| !file.text.starts_with("//! "));
    assert_none(
        broken
            .map(|file| format!("{}: the first line is not a module doc", file.path))
            .collect(),
    );
}

#[test]
fn module_docs_begin_with_their_subject() {
    let broken = rust_files()
        .into_iter()
        .filter(|file| file.text.starts_with("//! Decides "));
    assert_none(
        broken
            .map(|file| format!("{}: say what the module is, not what it decides", file.path))
            .collect(),
    );
}

#[test]
fn no_rust_file_is_longer_than_800_lines() {
    let counted = rust_files()
        .into_iter()
        .map(|file| (file.text.lines().count(), file.path));
    let long = counted.filter(|(lines, _)| *lines > LINES_MAX);
    assert_none(
        long.map(|(lines, path)| format!("{path}: {lines} lines, {LINES_MAX} allowed: split by concept"))
            .collect(),
    );
}

#[test]
fn module_with_submodules_lies_beside_their_folder() {
    let is_old = |path: &str| path.contains("/src/") && path.ends_with("/mod.rs");
    let broken = rust_files().into_iter().filter(|file| is_old(&file.path));
    assert_none(
        broken
            .map(|file| format!("{}: `foo.rs` beside `foo/`, not `foo/mod.rs`", file.path))
            .collect(),
    );
}

#[test]
fn test_names_are_short_and_begin_with_their_subject() {
    let mut broken = Vec::new();
    for file in rust_files() {
        let mut is_test = false;
        for (index, line) in file.text.lines().enumerate() {
            is_test |= line.trim() == "#[test]";
            if let Some(name) = is_test.then(|| function_name(line)).flatten() {
                is_test = false;
                if !is_test_name(name) {
                    broken.push(at(&file, index, line));
                }
            }
        }
    }
    assert_none(broken);
}

#[test]
fn nothing_is_left_to_be_done_later() {
    assert_none(lines_where(&rust_files(), |_, line| {
        LEFTOVERS.iter().any(|word| line.contains(word))
    }));
}

/// `thiserror` takes a field of this name for the cause, which is printed once more behind the text.
#[test]
fn no_error_prints_its_cause_twice() {
    assert_none(lines_where(&rust_files(), |_, line| {
        line.contains("error(\"") && line.contains(concat!("{", "source"))
    }));
}

#[test]
fn every_unsafe_block_states_why_it_is_safe() {
    let mut broken = Vec::new();
    for file in rust_files() {
        let lines: Vec<&str> = file.text.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            if opens_unsafe(&code_of(line)) && !is_justified(&lines, index) {
                broken.push(at(&file, index, line));
            }
        }
    }
    assert_none(broken);
}

#[test]
fn unsafe_stays_in_the_crates_and_files_made_for_it() {
    let elsewhere: Vec<Source> = rust_files()
        .into_iter()
        .filter(|file| !may_be_unsafe(&file.path))
        .collect();
    assert_none(lines_where(&elsewhere, |_, line| {
        has_word(&code_of(line), "unsafe")
    }));
}

#[test]
fn core_reads_no_clock_starts_no_thread_and_hashes_nothing() {
    let core: Vec<Source> = rust_files()
        .into_iter()
        .filter(|file| file.path.starts_with("crates/blkmq-core/src/"))
        .collect();
    assert!(
        !core.is_empty(),
        "the core's sources were not found: has crates/blkmq-core moved?"
    );
    let mut broken = Vec::new();
    for file in core {
        let lines: Vec<&str> = file.text.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            let banned = BANNED_IN_CORE.iter().any(|word| code_of(line).contains(word));
            if banned && !is_excepted(&lines, index) {
                broken.push(at(&file, index, line));
            }
        }
    }
    assert_none(broken);
}

#[test]
fn no_file_names_a_path_of_the_machine_it_was_written_on() {
    assert_none(lines_where(&tracked_files(), |_, line| {
        MACHINE_PATHS.iter().any(|path| names_path(line, path))
    }));
}

#[test]
fn rules_themselves_can_fail() {
    assert!(opens_unsafe("let x = unsafe { y };") && opens_unsafe(concat!("unsafe", " impl Send for T {}")));
    assert!(!opens_unsafe("#![deny(unsafe_code)]") && !opens_unsafe(&code_of("// an unsafe { block }")));
    assert!(is_justified(
        &["// SAFETY: the pointer is ours.", "x(unsafe { y })"],
        1
    ));
    assert!(is_justified(
        &["// SAFETY: a", "// long reason.", "let x =", "    unsafe { y };"],
        3
    ));
    assert!(!is_justified(
        &["// Safe because I say so.", "x(unsafe { y })"],
        1
    ));
    assert!(!is_justified(
        &[
            "// SAFETY: far away.",
            "a();",
            "b();",
            "c();",
            "d();",
            "unsafe { y }"
        ],
        5
    ));
    let name = |line| function_name(line).is_some_and(is_test_name);
    assert!(name("    fn gate_is_open() {") && name("pub(super) fn gates_open() {"));
    assert!(!name("fn a_gate_is_open() {") && !name("fn what_is_open() {"));
    assert!(!name(&format!("fn {}() {{", "x".repeat(81))));
    assert!(names_path("see '/opt/build/x'", "/opt/build/") && !names_path("a/opt/build/x", "/opt/build/"));
    assert_eq!(code_of(r#"call("https://host") // why"#), r#"call("") "#);
}

/// Asserts that no rule was broken, and prints every place where one was.
fn assert_none(broken: Vec<String>) {
    assert!(
        broken.is_empty(),
        "{} place(s) break this rule:\n{}",
        broken.len(),
        broken.join("\n")
    );
}

fn lines_where(files: &[Source], breaks_rule: impl Fn(&Source, &str) -> bool) -> Vec<String> {
    let mut broken = Vec::new();
    for file in files {
        for (index, line) in file.text.lines().enumerate() {
            if breaks_rule(file, line) {
                broken.push(at(file, index, line));
            }
        }
    }
    broken
}

fn at(file: &Source, index: usize, line: &str) -> String {
    format!("{}:{}: {}", file.path, index + 1, line.trim())
}

/// The line without its string literals' contents and without a trailing `//` comment.
fn code_of(line: &str) -> String {
    let mut code = String::with_capacity(line.len());
    let (mut in_literal, mut previous) = (false, ' ');
    for letter in line.chars() {
        if letter == '"' && previous != '\\' && previous != '\'' {
            in_literal = !in_literal;
            code.push(letter);
        } else if !in_literal {
            if letter == '/' && previous == '/' {
                code.pop();
                break;
            }
            code.push(letter);
        }
        previous = letter;
    }
    code
}

fn opens_unsafe(code: &str) -> bool {
    let mut rest = code;
    while let Some(start) = rest.find("unsafe") {
        let after = rest[start + "unsafe".len()..].trim_start();
        let whole = !rest[..start].ends_with(is_word);
        if whole && (after.starts_with('{') || after.starts_with("impl")) {
            return true;
        }
        rest = &rest[start + "unsafe".len()..];
    }
    false
}

/// Whether a comment with `SAFETY:` ends at most three lines of code above, or stands on the line
/// itself.
fn is_justified(lines: &[&str], index: usize) -> bool {
    if lines[index].contains("SAFETY:") {
        return true;
    }
    let is_comment = |line: &str| line.trim_start().starts_with("//");
    let mut above = lines[..index].iter().rev().skip_while({
        let mut skipped = 0;
        move |line| {
            skipped += 1;
            skipped <= 3 && !is_comment(line)
        }
    });
    above
        .by_ref()
        .take_while(|line| is_comment(line))
        .any(|line| line.contains("SAFETY:"))
}

/// Whether the attribute right above the function allows it in clippy, with a reason.
fn is_excepted(lines: &[&str], index: usize) -> bool {
    let above = &lines[index.saturating_sub(6)..index];
    above.iter().any(|line| line.contains("clippy::disallowed_"))
        && above.iter().any(|line| line.contains("reason ="))
}

/// The name of the function that a line begins.
fn function_name(line: &str) -> Option<&str> {
    let (before, after) = line.split_once("fn ")?;
    let is_begin = before.trim().is_empty() || before.trim_start().starts_with("pub");
    is_begin.then(|| after.split('(').next()).flatten()
}

/// Whether a test's name is short, and its first word is none that every name could begin with.
fn is_test_name(name: &str) -> bool {
    name.len() <= TEST_NAME_MAX && !NO_SUBJECTS.iter().any(|word| name.starts_with(word))
}

fn may_be_unsafe(path: &str) -> bool {
    UNSAFE_CRATES.iter().any(|home| path.starts_with(home))
        || path.ends_with("/sys.rs")
        || path.contains("/sys/")
}

fn has_word(code: &str, word: &str) -> bool {
    code.split(|letter| !is_word(letter)).any(|found| found == word)
}

fn is_word(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

/// Whether `line` has `path` where an absolute path begins, not as the middle of a longer one.
fn names_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(start, _)| {
        !line[..start]
            .ends_with(|before: char| is_word(before) || matches!(before, '.' | '*' | '}' | ')' | '-'))
    })
}

fn rust_files() -> Vec<Source> {
    let files: Vec<Source> = tracked_files()
        .into_iter()
        .filter(|file| file.path.ends_with(".rs"))
        .collect();
    assert!(
        files.len() > 8,
        "only {} Rust files were found: is git installed and this its work tree?",
        files.len()
    );
    files
}

/// Every text file that git tracks, or would with the next `git add`.
fn tracked_files() -> Vec<Source> {
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git lists the project's files");
    assert!(
        listed.status.success(),
        "git ls-files: {}",
        String::from_utf8_lossy(&listed.stderr)
    );
    let paths = String::from_utf8(listed.stdout).expect("file names are UTF-8");
    // Binary files, and those deleted but still tracked, have no text to check.
    paths
        .lines()
        .filter_map(|path| {
            let text = std::fs::read_to_string(root().join(path)).ok()?;
            Some(Source {
                path: path.to_owned(),
                text,
            })
        })
        .collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the root")
        .to_owned()
}

const LINES_MAX: usize = 800;
/// Bytes of a test's name.
const TEST_NAME_MAX: usize = 80;
/// Words that every name could begin with; those after the articles leave the subject out.
const NO_SUBJECTS: [&str; 5] = ["a_", "an_", "the_", "what_", "who_"];
const LEFTOVERS: [&str; 5] = [
    concat!("to", "do!("),
    concat!("FIX", "ME"),
    concat!("db", "g!("),
    concat!("unimpl", "emented!("),
    concat!("XX", "X:"),
];
const BANNED_IN_CORE: [&str; 8] = [
    "Instant::now",
    "SystemTime",
    "thread::sleep",
    "thread::spawn",
    "HashMap",
    "HashSet",
    "std::net",
    "std::fs",
];
const MACHINE_PATHS: [&str; 3] = [
    concat!("/wo", "rk/"),
    concat!("/ro", "ot/"),
    concat!("/ho", "me/"),
];
/// Crates whose purpose needs `unsafe`; elsewhere it is only in files named `sys.rs`.
const UNSAFE_CRATES: [&str; 2] = ["crates/blkmq-sync/", "crates/blkmq-fio/"];
