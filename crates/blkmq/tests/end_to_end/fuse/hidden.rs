//! Whether a daemon whose mounts the host does not see says so: in a mount namespace of its own, as a hardened unit has
//! one, and in a container.

use std::process::Command;
use std::time::Duration;

use super::may_mount;
use crate::common::daemon::program;
use crate::common::tools::installed;
use crate::common::{Daemon, Scratch};

/// A daemon behind `unshare` with these arguments, and what it warns of.
fn warned(unshare: &[&str]) -> Option<String> {
    let scratch = Scratch::new();
    let file = scratch.word("vm1.disk");
    let mut command = match unshare {
        [] => Command::new(program()),
        words => {
            let mut command = Command::new("unshare");
            command.args(words).arg(program());
            command
        }
    };
    command.args(["serve", "--disk", "name=vm1,ram=8M", "--fuse", &file]);
    let daemon = Daemon::spawn(command);
    std::thread::sleep(Duration::from_millis(100));
    let said = daemon.said();
    let line = said.lines().find(|line| line.contains("mounted in"));
    let line = line.map(str::to_owned);
    // Behind a second process the signal would reach that one.
    match unshare.contains(&"--fork") {
        true => daemon.kill(),
        false => daemon.stop(),
    }
    line
}

#[test]
fn mount_that_the_host_does_not_see_is_warned_of_with_what_to_change() {
    if !may_mount() || !installed(&["unshare"]) {
        return;
    }
    let of_service = warned(&["--mount", "--propagation", "private"]).expect("it is hidden");
    assert!(
        of_service.contains("WARN") && of_service.contains("PrivateTmp="),
        "{of_service}"
    );
    let words = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let of_container = warned(&words).expect("it is hidden");
    assert!(of_container.contains("rshared"), "{of_container}");
    assert_eq!(warned(&[]), None);
}
