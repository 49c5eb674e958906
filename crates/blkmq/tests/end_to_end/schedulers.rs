//! Which scheduler a daemon gives its queues, and what it says when settings of groups have no effect there.

use std::process::Command;
use std::time::Duration;

use crate::common::daemon::{program, serve_command};
use crate::common::tools::output_within;
use crate::common::{Daemon, Scratch};

/// A daemon with a control socket.
struct Stage {
    scratch: Scratch,
    daemon: Daemon,
}

impl Stage {
    fn new(words: &[&str]) -> Self {
        let scratch = Scratch::new();
        let nbd = format!("unix:{}", scratch.word("nbd.sock"));
        let control = format!("unix:{}", scratch.word("control.sock"));
        let daemon = Daemon::start(&[words, &["--nbd", &nbd, "--control", &control]].concat());
        Self { scratch, daemon }
    }

    /// Runs `blkmq ctl`, and returns what it printed.
    fn ctl(&self, words: &[&str]) -> String {
        let socket = format!("unix:{}", self.scratch.word("control.sock"));
        let mut command = Command::new(program());
        let output = command.args(["ctl", "--socket", &socket]).args(words).output();
        let output = output.expect("it runs");
        let said = String::from_utf8([output.stdout, output.stderr].concat()).expect("text");
        assert!(output.status.success(), "{words:?}: {said}");
        said
    }

    fn sched(&self, queue: &str) -> String {
        let shown = self.ctl(&["show", "queue", queue]);
        let line = shown
            .lines()
            .find(|line| line.starts_with("sched "))
            .expect("it has one");
        line.split_whitespace().nth(1).expect("a name").to_owned()
    }
}

#[test]
fn default_scheduler_is_set_by_its_flag_and_changed_while_disks_are_served() {
    let disks = ["--disk", "name=a,null=1M", "--disk", "name=b,null=1M,sched=kyber"];
    let stage = Stage::new(&[&disks[..], &["--sched", "mq-deadline"]].concat());
    assert_eq!((&*stage.sched("a"), &*stage.sched("b")), ("mq-deadline", "kyber"));
    assert!(stage.ctl(&["dump"]).contains("sched = \"mq-deadline\""));
    assert_eq!(
        stage.ctl(&["set", "daemon", "sched=bfq"]),
        "set queues: daemon sched \"mq-deadline\" -> \"bfq\"\n"
    );
    assert_eq!((&*stage.sched("a"), &*stage.sched("b")), ("bfq", "kyber"));
    stage.ctl(&["set", "daemon", "sched="]);
    assert_eq!((&*stage.sched("a"), &*stage.sched("b")), ("none", "kyber"));
    stage.daemon.stop();
}

#[test]
fn weights_give_bfq_to_queues_without_a_named_scheduler_and_take_it_away() {
    let disks = ["--disk", "name=a,null=1M", "--disk", "name=b,null=1M"];
    let stage = Stage::new(&[&disks[..], &["--group", "/a,weight=300"]].concat());
    assert_eq!((&*stage.sched("a"), &*stage.sched("b")), ("bfq", "none"));
    let reason = "queue a: sched=bfq, since the weight of group /a needs it and no scheduler is named";
    assert_eq!(
        stage.daemon.said().matches(reason).count(),
        1,
        "{}",
        stage.daemon.said()
    );
    let said = stage.ctl(&["set", "group", "/b", "weight=7"]);
    assert!(
        said.contains("queue b: sched=bfq, since the weight of group /b"),
        "{said}"
    );
    assert_eq!(stage.sched("b"), "bfq");
    stage.ctl(&["set", "group", "/b", "weight="]);
    assert_eq!(stage.sched("b"), "none");
    stage.daemon.stop();
}

#[test]
fn weights_and_targets_without_effect_are_warned_of_once_a_queue() {
    let disks = [
        "--disk",
        "name=a,null=1M,sched=none",
        "--disk",
        "name=b,null=1M,sched=kyber",
    ];
    let warning =
        "queue a: sched=none knows no weights, so the weights of /a have no effect: set sched=bfq of disk a";
    let words = [&disks[..], &["--group", "/a,weight=300"]].concat();
    let checked = output_within(
        &mut serve_command(&[&words[..], &["--check"]].concat()),
        Duration::from_secs(30),
    );
    assert!(checked.status.success(), "{checked:?}");
    let said = String::from_utf8_lossy(&checked.stderr);
    assert_eq!(said.matches(warning).count(), 1, "{said}");

    let stage = Stage::new(&words);
    assert_eq!(
        stage.daemon.said().matches(warning).count(),
        1,
        "{}",
        stage.daemon.said()
    );
    assert!(!stage.daemon.said().contains("queue b: sched"));
    assert!(stage.ctl(&["set", "group", "/a", "weight=200"]).contains(warning));
    assert!(
        stage
            .ctl(&["set", "group", "/a", "weight=", "--dry-run"])
            .ends_with("-> default\n")
    );
    let said = stage.ctl(&["set", "group", "/a", "weight=", "latency_target=1ms"]);
    assert!(
        said.contains("sched=none keeps no latency targets, so the latency targets of /a"),
        "{said}"
    );
    // A scheduler keeps a target of its queue, and other changes say nothing of it again.
    let said = stage.ctl(&["set", "group", "/b", "latency_target=1ms"]);
    assert_eq!(said, "set group /b: latency_target default -> \"1ms\"\n");
    assert!(
        stage
            .ctl(&["set", "group", "/b", "weight=3"])
            .contains("queue b: sched=kyber knows no weights")
    );
    stage.daemon.stop();
}
