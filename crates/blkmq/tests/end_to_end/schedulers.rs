//! Which scheduler a daemon gives its queues.

use std::process::Command;

use crate::common::daemon::program;
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
