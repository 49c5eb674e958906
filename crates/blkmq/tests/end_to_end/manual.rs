//! Tests that a reader may stop reading what the command prints: `blkmq man | head`.

use std::process::{Command, Stdio};

use crate::common::daemon::program;

#[test]
fn reader_that_has_seen_enough_of_the_manual_is_no_failure() {
    for words in [&["man"][..], &["completions", "bash"]] {
        let mut command = Command::new(program());
        command
            .args(words)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("the command starts");
        // Nobody reads: a write of more than a pipe holds, or a late one, fails.
        drop(child.stdout.take());
        let ended = child.wait_with_output().expect("our own child ends");
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success() && said.is_empty(), "{words:?}: {said}");
    }
}
