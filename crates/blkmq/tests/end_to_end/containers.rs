//! Tests that the example of containers with disks works as its page states: its commands are run unchanged,
//! except for other directories, less data and less time.

use std::process::Command;
use std::time::Duration;

use crate::common::Scratch;
use crate::common::daemon::program;
use crate::common::tools::{installed, output_within, try_run};

#[test]
fn example_of_two_containers_runs_as_it_stands() {
    if !installed(&["bash", "losetup", "findmnt", "mkfs.xfs", "jq", "runc", "busybox"]) {
        return;
    }
    let is_root = rustix::process::geteuid().is_root();
    if !is_root || !try_run("losetup", &["--find"]).success {
        blkmq_testkit::skip("it needs root and loop devices");
        return;
    }
    let scratch = Scratch::new();
    let mut commands = example();
    for (there, here) in [
        ("/run/blkmq", scratch.word("run")),
        ("/srv", scratch.word("srv")),
        ("count=256", "count=8".to_owned()),
        ("sleep 12", "sleep 3".to_owned()),
        ("timeout 11", "timeout 2.5".to_owned()),
        ("stats 5", "stats 1".to_owned()),
    ] {
        assert!(commands.contains(there), "the page has no {there} any more");
        commands = commands.replace(there, &here);
    }
    let bin = scratch.path("bin");
    std::fs::create_dir(&bin).expect("a directory can be made");
    std::os::unix::fs::symlink(program(), bin.join("blkmq")).expect("a link can be made");
    let path = std::env::var("PATH").unwrap_or_default();
    // Nothing is left behind, whatever fails.
    let mut bash = Command::new("timeout");
    bash.args(["60", "bash", "-c", &format!("trap '{DOWN}' EXIT\n{commands}")])
        .current_dir(scratch.path("."))
        .env("PATH", format!("{}:{path}", bin.display()))
        .env("srv", scratch.word("srv"));
    let output = output_within(&mut bash, Duration::from_secs(90));
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    if errors.contains("runc") && errors.contains("cgroup") {
        blkmq_testkit::skip(&format!("runc finds no control groups here: {errors}"));
        return;
    }
    assert!(
        output.status.success(),
        "the commands ended with {}: {said}\n{errors}",
        output.status
    );
    // The first table counts since the start, so it has what mounting read.
    let tables: Vec<&str> = said.split("errors\n").skip(1).collect();
    let [_, .., last] = tables[..] else {
        panic!("a table for the time since the start alone: {said}\n{errors}");
    };
    for group in ["/web", "/batch"] {
        assert!(last.contains(group), "{group} read nothing: {said}\n{errors}");
    }
}

/// The page's commands, one block after the other.
fn example() -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operate/containers.md");
    let page = std::fs::read_to_string(page).expect("the page is there");
    let blocks = page.split("```sh\n").skip(1);
    blocks
        .filter_map(|block| block.split("```").next())
        .collect::<Vec<_>>()
        .join("\n")
}

/// Removes what the commands have left.
const DOWN: &str = r#"
for name in web batch; do
  device=$(findmnt -n -o SOURCE "$srv/$name") && umount "$srv/$name" && losetup --detach "$device"
done
kill $(jobs -p) 2> /dev/null; wait"#;
