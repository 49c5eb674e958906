//! A peer in a PID namespace that the daemon cannot see has no process number there, and is served
//! by its user as any other.

use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;

use crate::common::daemon::{program, serve_command};
use crate::common::nbd::Client;
use crate::common::pattern::block;
use crate::common::tools::{installed, try_run};
use crate::common::{Daemon, Scratch};

#[test]
fn peer_in_an_unseen_pid_namespace_is_served_and_takes_over() {
    if !installed(&["unshare"]) {
        return;
    }
    if !try_run("unshare", &["--pid", "--fork", "true"]).success {
        blkmq_testkit::skip("it needs to make a PID namespace");
        return;
    }
    let scratch = Scratch::new();
    let disk = format!("name=vm1,file={}", scratch.image("vm1.raw", 1 << 20));
    let at = |name: &str| format!("unix:{}", scratch.word(name));
    let (nbd, control, up) = (at("nbd.sock"), at("control.sock"), at("up.sock"));
    let words = |last| ["--disk", &disk, "--nbd", &nbd, "--control", &control, last, &up];
    let mut first = Daemon::spawn(apart(&serve_command(&words("--upgrade-socket"))));
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    let mut ctl = Command::new(program());
    let output = ctl
        .args(["ctl", "--socket", &control, "list", "disks"])
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said.contains("vm1"), "{output:?}");
    let mut second = Daemon::start(&words("--take-over"));
    assert!(first.ended_within(LIMIT).success(), "{}", first.said());
    client.write(0, &block(0, 1)).expect("it goes on");
    let third = Daemon::spawn(apart(&serve_command(&words("--take-over"))));
    assert!(second.ended_within(LIMIT).success(), "{}", second.said());
    client.write(0, &block(0, 2)).expect("it goes on");
    drop(client);
    third.signal(Signal::KILL);
}

/// The same command in a PID namespace of its own, which ends with the returned one.
fn apart(command: &Command) -> Command {
    let mut apart = Command::new("unshare");
    apart.args(["--pid", "--fork", "--kill-child"]);
    apart.arg(command.get_program()).args(command.get_args());
    apart
}

const LIMIT: Duration = Duration::from_secs(20);
