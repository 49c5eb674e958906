//! Who may open a disk at a unix socket: the owner of its path, and the users that an address lists, whatever the modes
//! on the way allow.

use std::os::unix::fs::MetadataExt;
use std::process::{Command, Output};
use std::time::Duration;

use crate::common::daemon::program;
use crate::common::tools::installed;
use crate::common::{Daemon, Scratch};

#[test]
fn socket_is_its_owners_alone_and_users_who_are_not_listed_are_refused_by_name() {
    if !installed(&["setpriv", "nbdinfo"]) || !is_root() {
        return;
    }
    let scratch = Scratch::new();
    let mut daemon = start(&scratch);
    let path = scratch.path("nbd.sock");
    let mode = || std::fs::metadata(&path).expect("it is there").mode() & 0o777;
    assert_eq!(mode(), 0o600);
    let refused = as_nobody(&scratch);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("Permission denied"), "{said}");

    ctl(&scratch, &["mode=0666", "allow_uid=[\"1\"]"]);
    assert_eq!(mode(), 0o666);
    assert!(!as_nobody(&scratch).status.success());
    let is_logged =
        |line: &str| line.contains("of user 65534 refused: neither in allow_uid nor in allow_gid");
    assert!(daemon.wait_for(LOGGED, is_logged), "{}", daemon.said());
    // The daemon's own user is root here.
    assert!(info(Command::new("nbdinfo"), &scratch).status.success());

    ctl(&scratch, &["allow_gid=[\"65534\"]"]);
    assert!(as_nobody(&scratch).status.success(), "a member");
    ctl(&scratch, &["allow_gid=[\"1\"]", "allow_uid=[\"65534\"]"]);
    assert!(as_nobody(&scratch).status.success(), "a user");
    daemon.stop();
}

#[test]
fn socket_has_the_owner_and_group_of_its_address_and_keeps_them_over_a_take_over() {
    if !is_root() {
        return;
    }
    let scratch = Scratch::new();
    let upgrade = format!("unix:{}", scratch.word("upgrade.sock"));
    let config = |keys: &str| {
        let text = format!(
            "[disk.a]\nram = \"1M\"\n[[export]]\nvhost-user = \"unix:{}\"\n{keys}\n",
            scratch.word("{disk}.sock")
        );
        std::fs::write(scratch.path("c.toml"), text).expect("it is written");
        scratch.word("c.toml")
    };
    let found = || {
        let found = std::fs::metadata(scratch.path("a.sock")).expect("it is there");
        (found.uid(), found.gid(), found.mode() & 0o777)
    };
    let first = Daemon::start(&[
        "-c",
        &config("owner = \"65534\"\ngroup = \"daemon\""),
        "--upgrade-socket",
        &upgrade,
    ]);
    assert_eq!(found(), (65534, 1, 0o660));
    let second = Daemon::start(&["-c", &config("mode = \"0640\""), "--take-over", &upgrade]);
    assert_eq!(found().2, 0o640);
    drop(first);
    second.stop();
}

#[test]
fn socket_lies_in_the_directory_of_its_disks_group() {
    let scratch = Scratch::new();
    std::fs::create_dir_all(scratch.path("customers/a")).expect("our own");
    let (pattern, control) = (
        format!("unix:{}", scratch.word("{group}/{disk}.sock")),
        format!("unix:{}", scratch.word("control.sock")),
    );
    let daemon = Daemon::start(&[
        "--disk",
        "name=vm1,ram=1M,group=/customers/a",
        "--vhost-user",
        &pattern,
        "--control",
        &control,
    ]);
    assert!(scratch.path("customers/a/vm1.sock").exists());
    let add = |group: &str| {
        let words = ["ctl", "--socket", &control, "add", "disk", "vm2", "ram=1M", group];
        Command::new(program()).args(words).output().expect("it runs")
    };
    let refused = add("group=/customers/b");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success() && said.contains("customers/b"),
        "{said}"
    );
    let added = add("group=/customers/a");
    assert!(
        added.status.success(),
        "{}",
        String::from_utf8_lossy(&added.stderr)
    );
    assert!(scratch.path("customers/a/vm2.sock").exists());
    daemon.stop();
}

/// Only root becomes another user, and gives a socket away.
fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        blkmq_testkit::skip("not root");
    }
    is_root
}

fn start(scratch: &Scratch) -> Daemon {
    let socket = |name: &str| format!("unix:{}", scratch.word(name));
    let (nbd, control) = (socket("nbd.sock"), socket("control.sock"));
    Daemon::start(&["--disk", "name=a,ram=1M", "--nbd", &nbd, "--control", &control])
}

/// Sets keys of the address.
fn ctl(scratch: &Scratch, keys: &[&str]) {
    let (control, nbd) = (
        format!("unix:{}", scratch.word("control.sock")),
        format!("unix:{}", scratch.word("nbd.sock")),
    );
    let words = ["ctl", "--socket", &control, "set", "export", &nbd];
    let output = Command::new(program())
        .args(words)
        .args(keys)
        .output()
        .expect("it runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Connects as another user.
fn as_nobody(scratch: &Scratch) -> Output {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "nbdinfo"]);
    info(command, scratch)
}

fn info(mut command: Command, scratch: &Scratch) -> Output {
    let uri = format!("nbd+unix:///a?socket={}", scratch.word("nbd.sock"));
    command.args(["--size", &uri]).output().expect("it runs")
}

/// How long the log's thread may take.
const LOGGED: Duration = Duration::from_secs(5);
