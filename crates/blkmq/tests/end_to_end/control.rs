//! Tests whether a daemon can be queried and changed while it serves: each change is made completely or not
//! at all, and clients of other disks do not notice it.

mod clients;
mod dry_runs;
mod dumps;
mod mutated_lines;
mod names;
mod paths;
mod random_changes;
mod reloads;
mod removals;
mod sizes;

use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use blkmq::control::client::Client as Control;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};
use serde_json::{Value, json};

use crate::common::daemon::{program, wait_within};
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::{Daemon, Scratch};
use crate::upgrade::load::Load;
use blkmq_testkit::vhost_user::FrontEnd as Guest;

/// A daemon with a control socket, and one disk in a file.
struct Stage {
    scratch: Scratch,
    daemon: Daemon,
}

impl Stage {
    fn new(more: &[&str]) -> Self {
        Self::of(Scratch::new(), more)
    }

    fn with_vhost_user() -> Self {
        let scratch = Scratch::new();
        let address = format!("unix:{}", scratch.word("{disk}.vsock"));
        Self::of(scratch, &["--vhost-user", &address])
    }

    fn of(scratch: Scratch, more: &[&str]) -> Self {
        let disk = format!("name=vm1,file={},sched=bfq", scratch.image("vm1.raw", DISK_BYTES));
        let nbd = format!("unix:{}", scratch.word("nbd.sock"));
        let control = format!("unix:{}", scratch.word("control.sock"));
        let words = ["--disk", &disk, "--nbd", &nbd, "--control", &control];
        let daemon = Daemon::start(&[&words, more].concat());
        Self { scratch, daemon }
    }

    fn control(&self) -> Control {
        Control::connect(&self.scratch.path("control.sock")).expect("it is served")
    }

    fn nbd(&self) -> PathBuf {
        self.scratch.path("nbd.sock")
    }

    /// The keys of a disk in a new file.
    fn file(&self, name: &str) -> Value {
        json!({"file": self.scratch.image(name, DISK_BYTES)})
    }

    /// Runs `blkmq ctl`. Returns its exit code and what it printed.
    fn ctl(&self, words: &[&str]) -> (i32, String) {
        let mut command = Command::new(program());
        command.args([
            "ctl",
            "--socket",
            &format!("unix:{}", self.scratch.word("control.sock")),
        ]);
        let output = command.args(words).output().expect("the command runs");
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8(text).expect("it prints text");
        (output.status.code().expect("no signal"), text)
    }
}

#[test]
fn shell_is_offered_the_names_of_a_running_daemon() {
    let scratch = Scratch::new();
    let runtime = scratch.path("run");
    std::fs::create_dir_all(runtime.join("blkmq")).expect("a directory");
    let control = format!("unix:{}", runtime.join("blkmq/control.sock").display());
    let disks = [
        "--disk",
        "name=vm1,ram=1M,group=/customers/a",
        "--disk",
        "name=vm2,ram=1M",
    ];
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let daemon = Daemon::start(&[&disks[..], &["--control", &control, "--nbd", &nbd]].concat());
    let offered = |words: &[&str]| {
        let mut command = Command::new(program());
        command.args(["--", "blkmq"]).args(words);
        command
            .env("XDG_RUNTIME_DIR", &runtime)
            .env("BLKMQ_COMPLETE", "bash");
        command.env("_CLAP_COMPLETE_INDEX", words.len().to_string());
        command.env("_CLAP_IFS", "\n");
        let output = command.output().expect("it runs");
        String::from_utf8(output.stdout).expect("text")
    };
    assert_eq!(offered(&["ctl", "resize", "v"]), "vm1\nvm2");
    assert_eq!(
        offered(&["ctl", "set", "group", "/cus"]),
        "/customers\n/customers/a"
    );
    assert_eq!(offered(&["ctl", "remove", "di"]), "disk");
    assert_eq!(offered(&["trace", "vm2"]), "vm2");
    daemon.stop();
    assert_eq!(offered(&["ctl", "resize", "v"]), "");
}

fn add(control: &mut Control, kind: &str, name: &str, keys: &Value) -> anyhow::Result<Value> {
    control.call("config.add", &json!({"kind": kind, "name": name, "keys": keys}))
}

fn set(control: &mut Control, kind: &str, name: &str, keys: &Value) -> anyhow::Result<Value> {
    control.call("config.set", &json!({"kind": kind, "name": name, "keys": keys}))
}

fn remove(control: &mut Control, kind: &str, name: &str) -> anyhow::Result<Value> {
    control.call("config.remove", &json!({"kind": kind, "name": name}))
}

fn names(control: &mut Control) -> Vec<String> {
    let disks = control.call("disk.list", &json!({})).expect("an answer");
    let disks = disks.as_array().expect("a list").iter();
    let mut names: Vec<String> = disks
        .map(|disk| disk["name"].as_str().expect("a text").to_owned())
        .collect();
    names.sort_unstable();
    names
}

#[test]
fn disks_come_and_go_beside_clients_that_do_not_notice() {
    let stage = Stage::with_vhost_user();
    let mut control = stage.control();
    let load = Load::start(&stage.nbd(), "vm1", 2);
    for round in 0..5 {
        add(&mut control, "disk", "vm2", &stage.file("vm2.raw")).expect("it can be added");
        let mut client = Client::connect(&stage.nbd(), "vm2").expect("it is served");
        client.write(0, &block(0, round)).expect("a write");
        assert!(stage.scratch.path("vm2.vsock").exists());
        let removed = remove(&mut control, "disk", "vm2").expect("it can be removed");
        assert_eq!(removed["steps"], json!(["remove disk vm2"]));
        assert!(client.read(0, BLOCK).is_err(), "its client is hung up on");
        assert!(Client::connect(&stage.nbd(), "vm2").is_err());
        assert!(!stage.scratch.path("vm2.vsock").exists());
        let on_file = std::fs::read(stage.scratch.path("vm2.raw")).expect("the file stays");
        assert!(on_file[..BLOCK] == block(0, round));
    }
    assert_eq!(names(&mut control), ["vm1"]);
    assert!(load.stop() > 0);
    stage.daemon.stop();
}

#[test]
fn change_of_which_one_step_fails_changes_nothing() {
    let stage = Stage::new(&["--disk", "name=r,ram=1M"]);
    let mut control = stage.control();
    let before = control.call("config.get", &json!({})).expect("an answer");
    let text = before["toml"].as_str().expect("a text");
    let good = stage.scratch.image("good.raw", DISK_BYTES);
    for (more, part) in [
        // The third of four steps fails.
        (
            format!("[group.\"/x\"]\nweight = 7\n[disk.good]\nfile = {good:?}\n[disk.late]\nfile = \"/nowhere/x\"\n"),
            "/nowhere/x",
        ),
        (format!("[disk.good]\nfile = {good:?}\n[[export]]\nnbd = \"unix:/nowhere/x.sock\"\n"), "/nowhere/x.sock"),
        ("[queue.q]\nsched = \"bfq\"\ntunables = { nonsense = 3 }\n[disk.q]\nram = \"1M\"\nqueue = \"q\"\n".to_owned(), "nonsense"),
        ("[disk.good]\nfile = 3\n".to_owned(), "disk good"),
        ("[demon]\n".to_owned(), "demon"),
        ("[disk.\"\n".to_owned(), "TOML"),
    ] {
        let whole = match more.starts_with("[disk.\"\n") {
            true => more.clone(),
            false => format!("{more}\n{}", text.replace("[daemon]\n", "")),
        };
        let error = control.call("config.apply", &json!({"toml": whole})).expect_err("it is refused").to_string();
        assert!(error.contains(part), "{more}: {error}");
        let after = control.call("config.get", &json!({})).expect("an answer");
        assert_eq!(after, before, "{more}");
        assert_eq!(names(&mut control), ["r", "vm1"], "{more}");
        let groups = control.call("group.list", &json!({})).expect("an answer");
        assert!(!groups.to_string().contains("/x"), "{more}: {groups}");
    }
    // Nothing of it is left: the file can be locked.
    add(&mut control, "disk", "good", &json!({"file": good})).expect("it is free");
    stage.daemon.stop();
}

#[test]
fn change_of_an_export_that_fails_is_taken_back_and_stands_in_no_other_change() {
    let stage = Stage::new(&["--disk", "name=vm2,ram=1M"]);
    let mut control = stage.control();
    let pattern = format!("unix:{}", stage.scratch.word("{disk}.vsock"));
    let one = format!("unix:{}", stage.scratch.word("one.vsock"));
    let keys = |address: &str, disks: &[&str]| json!({"vhost-user": address, "disks": disks});
    for address in [&pattern, &one] {
        add(&mut control, "export", address, &keys(address, &["vm1"])).expect("an address");
    }
    // A socket cannot be made where a directory is.
    let obstacle = stage.scratch.path("vm2.vsock");
    std::fs::create_dir(&obstacle).expect("a directory");
    let before = control.call("config.get", &json!({})).expect("an answer");
    for (address, disks, part) in [
        (&pattern, &["vm1", "vm2"][..], "something else than a socket"),
        (&pattern, &["vm2"], "something else than a socket"),
        (&one, &["vm1", "vm2"], "one socket for 2 disks"),
    ] {
        // The socket stays the same: it is not closed and opened again.
        let inode = || std::fs::metadata(stage.scratch.path("vm1.vsock")).map(|found| found.ino());
        let first = inode().expect("it is served");
        let error =
            set(&mut control, "export", address, &json!({"disks": disks})).expect_err("it is refused");
        assert!(error.to_string().contains(part), "{address} {disks:?}: {error}");
        assert_eq!(inode().expect("it is served on"), first, "{address} {disks:?}");
        let after = control.call("config.get", &json!({})).expect("an answer");
        assert_eq!(after, before, "{address} {disks:?}");
        add(&mut control, "disk", "vm3", &json!({"ram": "1M"})).expect("another disk comes");
        remove(&mut control, "disk", "vm3").expect("and goes");
        for socket in ["vm1.vsock", "one.vsock"] {
            Guest::connect(&stage.scratch.path(socket)).start();
        }
    }
    // One address is given to another disk, and several addresses to several disks.
    std::fs::remove_dir(&obstacle).expect("the directory");
    set(&mut control, "export", &one, &json!({"disks": ["vm2"]})).expect("it is free");
    set(&mut control, "export", &pattern, &json!({"disks": ["vm2"]})).expect("it is free");
    for socket in ["vm2.vsock", "one.vsock"] {
        Guest::connect(&stage.scratch.path(socket)).start();
    }
    assert!(!stage.scratch.path("vm1.vsock").exists());
    stage.daemon.stop();
}

#[test]
fn dumped_configuration_starts_the_same_daemon() {
    let stage = Stage::new(&[
        "--group",
        "/vm1,weight=300,iops=100,iops_burst=7",
        "--reactors",
        "1",
    ]);
    let mut control = stage.control();
    add(
        &mut control,
        "disk",
        "vm2",
        &json!({"ram": "4M", "sched": "mq-deadline"}),
    )
    .expect("a disk");
    set(
        &mut control,
        "group",
        "/vm2",
        &json!({"bps": "10M", "latency_target": "2ms"}),
    )
    .expect("a group");
    let (code, dumped) = stage.ctl(&["dump"]);
    assert_eq!(code, 0, "{dumped}");
    let lists = ["disk.list", "queue.list", "group.list"];
    let of = |control: &mut Control| lists.map(|list| control.call(list, &json!({})).expect("an answer"));
    let before = of(&mut control);
    drop(control);
    let Stage { scratch, daemon } = stage;
    daemon.stop();
    let file = scratch.path("dumped.toml");
    std::fs::write(&file, &dumped).expect("the file can be written");
    let daemon = Daemon::start(&["-c", &scratch.word("dumped.toml")]);
    let stage = Stage { scratch, daemon };
    let mut control = stage.control();
    let key = |value: &Value| value.to_string();
    for (was, is) in before.iter().zip(of(&mut control)) {
        let sorted = |list: &Value| {
            let mut list = list.as_array().expect("a list").clone();
            list.sort_by_key(key);
            list
        };
        assert_eq!(sorted(was), sorted(&is));
    }
    let (_, again) = stage.ctl(&["dump"]);
    assert_eq!(again, dumped);
    let (code, said) = stage.ctl(&["apply", &stage.scratch.word("dumped.toml")]);
    assert_eq!((code, said.as_str()), (0, "nothing differs\n"));
    stage.daemon.stop();
}

#[test]
fn hangup_applies_the_file_again() {
    let scratch = Scratch::new();
    let write = |more: &str| {
        let nbd = scratch.word("nbd.sock");
        let text = format!("[disk.vm1]\nram = \"1M\"\n[[export]]\nnbd = \"unix:{nbd}\"\n{more}");
        std::fs::write(scratch.path("a.toml"), text).expect("the file can be written");
    };
    write("");
    let mut daemon = Daemon::start(&["-c", &scratch.word("a.toml")]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    write("[disk.vm2]\nram = \"1M\"\n");
    daemon.signal(Signal::HUP);
    assert!(daemon.wait_for(LONG, |line| line.contains("SIGHUP: add disk vm2")));
    drop(Client::connect(&scratch.path("nbd.sock"), "vm2").expect("it is served"));
    write("[disk.vm2]\nram = 3\n");
    daemon.signal(Signal::HUP);
    assert!(daemon.wait_for(LONG, |line| {
        line.contains("SIGHUP: the configuration is not changed: ")
    }));
    write("");
    daemon.signal(Signal::HUP);
    assert!(daemon.wait_for(LONG, |line| line.contains("SIGHUP: remove disk vm2")));
    assert_eq!(client.read(0, BLOCK).expect("a read"), vec![0; BLOCK]);
    daemon.stop();
}

#[test]
fn command_lists_sets_and_says_what_is_wrong() {
    let stage = Stage::new(&[]);
    for (words, code, part) in [
        (&["status"][..], 0, "disks              1"),
        (&["list", "disks"], 0, "vm1"),
        (&["set", "group", "/vm1", "weight=300"], 0, "set group /vm1"),
        (&["show", "group", "/vm1"], 0, "weight             300"),
        (&["set", "group", "/vm1", "weight=300"], 0, "nothing differs"),
        (
            &["set", "group", "/vm1", "weight="],
            0,
            "set group /vm1: weight 300 -> default",
        ),
        (&["set", "group", "/vm9", "weight=3"], 1, "no disk is in it"),
        (&["add", "group", "/vm9", "weight=3"], 0, "set group /vm9"),
        (&["set", "group", "/vm9", "weight=4"], 0, "weight 3 -> 4"),
        (&["list", "groups"], 0, "-         /vm9       4"),
        (
            &[
                "call",
                "config.add",
                r#"{"kind":"export","name":"x","keys":{"nbd":"unix:/y"}}"#,
            ],
            1,
            "named by its address",
        ),
        (&["call", "config.get", "[]"], 1, "must be an object"),
        (
            &["set", "group", "/vm1", "weight=heavy"],
            1,
            "weight=heavy rejected",
        ),
        (&["set", "disk", "vm1", "sched=kyber"], 0, "set queues"),
        (&["list", "queues"], 0, "kyber"),
        (&["set", "disk", "vm1", "sched=cfq"], 1, "sched=cfq rejected"),
        (&["set", "daemon", "", "reactors=7"], 1, "--take-over"),
        (&["set", "daemon", "reactors"], 1, "is not KEY=VALUE"),
        (
            &["add", "disk", "vm2", "ram=1M", "--dry-run"],
            0,
            "would add disk vm2",
        ),
        (&["show", "disk", "vm2"], 1, "there are: vm1"),
        (&["show", "disk", "vm1"], 0, " bytes)"),
        (
            &["show", "disk", "vm1", "--client", "uri"],
            0,
            "nbd+unix:///vm1?socket=/",
        ),
        (
            &["show", "disk", "vm1", "--client", "libvirt"],
            0,
            "<source protocol='nbd' name='vm1'>",
        ),
        (
            &["show", "disk", "vm1", "--client", "nbd-client", "--json"],
            0,
            "\"settings\": \"nbd-client -unix /",
        ),
        (
            &["show", "disk", "vm1", "--client", "nbd-client"],
            0,
            " -N vm1 -C 4 -b 512 -t 30 /dev/nbd0",
        ),
        (
            &["add", "disk", "wide", "ram=1M", "block_size=4096"],
            0,
            "add disk wide",
        ),
        (
            &["show", "disk", "wide", "--client", "nbd-client"],
            0,
            " -N wide -C 4 -b 4096 -t 30 /dev/nbd0",
        ),
        (&["remove", "disk", "wide"], 0, ""),
        (
            &["show", "disk", "vm1", "--client", "firecracker"],
            1,
            "no address of it is for firecracker: add an export",
        ),
        (
            &["show", "disk", "vm2", "--client", "qemu"],
            1,
            "there is no such disk",
        ),
        (
            &["show", "queue", "vm1", "--client", "qemu"],
            1,
            "--client is for disks",
        ),
        (&["add", "disk", "vm1", "ram=1M"], 1, "there is one already"),
        (&["remove", "disk", "vm9"], 1, "`blkmq ctl list disks`"),
        (&["message", "vm1", "fail_path", "a"], 1, "has no paths"),
        (&["log", "debug"], 0, ""),
        (&["log", "blkmq=what"], 1, "rejected"),
        (&["call", "daemon.version"], 0, "\"api\": 16"),
        (&["stats", "--json"], 0, "uptime_ns"),
        (&["stats"], 0, "device_p99"),
        (&["list", "what"], 2, "possible values"),
    ] {
        let (found, said) = stage.ctl(words);
        assert!(found == code && said.contains(part), "{words:?}: {found}, {said}");
    }
    stage.daemon.stop();
}

#[test]
fn shortage_of_descriptors_is_said_once_and_ends_with_the_shortage() {
    let mut stage = Stage::new(&[]);
    let pid = Pid::from_raw(stage.daemon.id() as i32);
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = |current| {
        let set = prlimit(pid, Resource::Nofile, Rlimit { current, maximum });
        set.expect("our own child's limit").current
    };
    let before = limit(Some(3));
    let path = stage.scratch.path("control.sock");
    let waiting = UnixStream::connect(&path).expect("the backlog takes it");
    let is_said = |line: &str| line.contains("control: nobody can be accepted");
    assert!(stage.daemon.wait_for(LONG, is_said));
    std::thread::sleep(Duration::from_secs(1));
    limit(before);
    stage
        .control()
        .call("daemon.version", &json!({}))
        .expect("an answer");
    assert_eq!(
        stage.daemon.said().lines().filter(|line| is_said(line)).count(),
        1
    );
    drop(waiting);
    stage.daemon.stop();
}

#[test]
fn caps_are_listed_with_their_bursts_under_the_keys_of_the_configuration() {
    let stage = Stage::new(&[]);
    let set = ["set", "group", "/vm1", "iops=5000", "iops_burst=50"];
    assert_eq!(stage.ctl(&set).0, 0);
    let (_, said) = stage.ctl(&["list", "groups"]);
    assert!(said.contains("iops=5000 iops_burst=50"), "{said}");
    stage.daemon.stop();
}

#[test]
fn list_that_is_watched_is_printed_again_when_it_differs() {
    let stage = Stage::new(&[]);
    let socket = format!("unix:{}", stage.scratch.word("control.sock"));
    let mut command = Command::new(program());
    command.args(["ctl", "--socket", &socket, "watch", "disks", "0.1"]);
    let mut watch = command.stdout(Stdio::piped()).spawn().expect("it runs");
    let mut lines = BufReader::new(watch.stdout.take().expect("a pipe")).lines();
    let mut until = |part: &str| lines.by_ref().any(|line| line.expect("text").starts_with(part));
    assert!(until("name") && until("vm1"));
    add(&mut stage.control(), "disk", "vm2", &json!({"ram": "1M"})).expect("a disk");
    assert!(
        until("name") && until("vm1") && until("vm2"),
        "the whole list again"
    );
    drop(lines);
    let status = wait_within(&mut watch, Duration::from_secs(5));
    if status.is_none() {
        watch.kill().expect("our own child");
    }
    assert!(status.expect("it ends with its reader").success());
    assert_eq!(stage.ctl(&["watch", "disks", "0"]).0, 2);
    stage.daemon.stop();
}

#[test]
fn ctl_adds_and_removes_an_address_by_what_it_is() {
    let stage = Stage::new(&[]);
    let path = stage.scratch.path("more.sock");
    let address = format!("unix:{}", stage.scratch.word("more.sock"));
    let key = format!("nbd={address}");
    // A name before the key is accepted, as other kinds have one.
    let ways: [&[&str]; 2] = [&["add", "export", &key], &["add", "export", &address, &key]];
    for add in ways {
        let (code, said) = stage.ctl(&[add, &["disks=[\"vm1\"]"]].concat());
        assert_eq!(code, 0, "{add:?}: {said}");
        drop(Client::connect(&path, "vm1").expect("it is served there, too"));
        let (code, said) = stage.ctl(add);
        assert!(
            code == 1 && said.contains("there is one already"),
            "{add:?}: {said}"
        );
        let (code, said) = stage.ctl(&["remove", "export", &address]);
        assert_eq!(code, 0, "{said}");
        assert!(Client::connect(&path, "vm1").is_err(), "nobody listens any more");
    }
    stage.daemon.stop();
}

/// Messages of a front end.
const DISK_BYTES: u64 = 8 << 20;
const LONG: Duration = Duration::from_secs(20);
