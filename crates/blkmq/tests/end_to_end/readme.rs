//! Tests that README's example works as it states: its commands are run unchanged, except for less data and
//! less time.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::common::Scratch;
use crate::common::daemon::program;
use crate::common::tools::{installed, output_within};

#[test]
fn example_of_two_tenants_runs_as_it_stands() {
    if !installed(&["fio", "bash"]) {
        return;
    }
    let scratch = Scratch::new();
    let mut commands = example();
    for (long, short) in [("256M", "32M"), ("--runtime=10", "--runtime=1")] {
        assert!(commands.contains(long), "README's example has no {long} any more");
        commands = commands.replace(long, short);
    }
    let bin = scratch.path("bin");
    std::fs::create_dir(&bin).expect("a directory can be made");
    std::os::unix::fs::symlink(program(), bin.join("blkmq")).expect("a link can be made");
    let path = std::env::var("PATH").unwrap_or_default();
    // Nothing is left behind, whatever fails: bash ends what it has started, and timeout ends its
    // whole process group.
    let commands = format!("trap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n{commands}");
    let mut bash = Command::new("timeout");
    bash.args(["60", "bash", "-e", "-c", &commands])
        .current_dir(scratch.path("."))
        .env("PATH", format!("{}:{path}", bin.display()));
    let output = output_within(&mut bash, Duration::from_secs(90));
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{said}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let shown: Vec<&str> = said.lines().collect();
    let names = [
        "none",
        "flood.out:",
        "light.out:",
        "bfq",
        "flood.out:",
        "light.out:",
    ];
    assert_eq!(shown.len(), names.len(), "{said}");
    for (line, name) in shown.iter().zip(names) {
        assert!(line.starts_with(name), "{name} expected:\n{said}");
        assert!(
            name.ends_with("fq") || name == "none" || line.contains("IOPS="),
            "{said}"
        );
    }
}

/// The commands between the fences of README's first `sh` block.
fn example() -> String {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let text = std::fs::read_to_string(readme).expect("README is there");
    let (_, rest) = text.split_once("```sh\n").expect("README has an example");
    let (commands, _) = rest.split_once("```").expect("the example ends");
    commands.to_owned()
}
