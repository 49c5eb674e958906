//! Tests whether a trace of a running daemon agrees with its statistics, in a format that tools of other
//! projects read.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use blkmq::control::client::Client as Control;
use blkmq_core::trace::blktrace::{COMPLETE, ISSUE, MERGE, QUEUE, Record, device_text};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::common::daemon::program;
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::{Lab, installed, lab, run};
use crate::common::{Daemon, Scratch};

/// A daemon with a scheduled and a direct disk.
fn stage(scratch: &Scratch) -> Daemon {
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let control = format!("unix:{}", scratch.word("control.sock"));
    let disks = [
        "--disk",
        "name=a,ram=16M,queue=a,sched=bfq,group=/tenants/a",
        "--disk",
        "name=b,ram=16M,queue=b,group=/tenants/b",
    ];
    // Some add disks in files, for which a sandbox of disks in memory has no directory.
    let words = [
        "--nbd",
        &nbd,
        "--control",
        &control,
        "--reactors",
        "2",
        "--sandbox",
        "off",
    ];
    Daemon::start(&[&disks, &words[..]].concat())
}

/// Starts `blkmq trace` with files in the scratch directory, and waits until it has begun.
fn trace(scratch: &Scratch, disks: &[&str]) -> Child {
    let mut command = Command::new(program());
    command.args([
        "trace",
        "--socket",
        &format!("unix:{}", scratch.word("control.sock")),
    ]);
    command.args(["--out", &scratch.word("t")]).args(disks);
    let child = command.stderr(Stdio::piped()).spawn().expect("it runs");
    while !scratch.path("t.blktrace.1").exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}

/// Ends it. Returns its output.
fn end(child: Child) -> String {
    // Events are reported within some milliseconds.
    std::thread::sleep(Duration::from_millis(100));
    kill_process(Pid::from_child(&child), Signal::INT).expect("it runs");
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success());
    String::from_utf8(output.stderr).expect("text")
}

/// Scattered single blocks, and large writes, by one client after the other.
fn load(scratch: &Scratch) {
    for disk in ["a", "b"] {
        let mut client = Client::connect(&scratch.path("nbd.sock"), disk).expect("it is served");
        for number in 0..200_u64 {
            let at = number * 37 % 256 * BLOCK as u64;
            client.write(at, &block(number, 1)).expect("a write");
            client.read(at, BLOCK).expect("a read");
        }
        client.write(0, &vec![7; 2 << 20]).expect("a large write");
        client.flush().expect("a flush");
    }
}

fn statistics(scratch: &Scratch) -> Value {
    let mut control = Control::connect(&scratch.path("control.sock")).expect("it is served");
    control.call("statistics.get", &json!({})).expect("an answer")
}

/// Returns a counter of the queue's root group.
fn count(statistics: &Value, queue: &str, what: &str) -> u64 {
    let queues = statistics["queues"].as_array().expect("queues");
    let queue = queues
        .iter()
        .find(|one| one["name"] == queue)
        .expect("it is there");
    queue["groups"][0]["total"][what].as_u64().expect("a count")
}

fn records(scratch: &Scratch) -> Vec<Record> {
    let mut all = Vec::new();
    for reactor in 0..2 {
        let bytes = std::fs::read(scratch.path(&format!("t.blktrace.{reactor}"))).expect("a file");
        let mut rest = &bytes[..];
        let mut sequence = 0;
        while let Some((record, len)) = Record::parse(rest).expect("records") {
            assert_eq!((record.sequence, record.cpu), (sequence + 1, reactor));
            sequence = record.sequence;
            rest = &rest[len..];
            all.push(record);
        }
        assert!(rest.is_empty(), "half a record at the end");
    }
    all
}

#[test]
fn trace_counts_what_the_statistics_count() {
    let scratch = Scratch::new();
    let daemon = stage(&scratch);
    let tracing = trace(&scratch, &[]);
    load(&scratch);
    let said = end(tracing);
    assert!(
        said.contains("is disk a") && said.contains(" 0 dropped"),
        "{said}"
    );
    let (statistics, all) = (statistics(&scratch), records(&scratch));
    for (queue, minor) in [("a", 0), ("b", 1)] {
        let of = |action| {
            let wanted = |record: &&Record| record.device & 0xf_ffff == minor && record.is_event(action);
            all.iter().filter(wanted).count() as u64
        };
        let (ios, merged) = (
            count(&statistics, queue, "ios"),
            count(&statistics, queue, "merged"),
        );
        assert_eq!((of(QUEUE), of(MERGE)), (ios, merged), "queue {queue}");
        assert_eq!(
            (of(ISSUE), of(COMPLETE)),
            (ios - merged, ios - merged),
            "queue {queue}"
        );
    }
    daemon.stop();
}

#[test]
fn blkparse_and_btt_read_a_trace_of_one_disk() {
    if !installed(&["blkparse", "btt"]) {
        return;
    }
    let scratch = Scratch::new();
    let daemon = stage(&scratch);
    let tracing = trace(&scratch, &["b"]);
    load(&scratch);
    end(tracing);
    let (input, merged) = (scratch.word("t"), scratch.word("merged"));
    let text = run("blkparse", &["-i", &input, "-s", "-d", &merged]).stdout;
    let ios = count(&statistics(&scratch), "b", "ios");
    let queued: u64 = ["Reads Queued:", "Writes Queued:"]
        .iter()
        .map(|what| {
            let at = text.find(what).expect("it counts them") + what.len();
            let number = text[at..].split_whitespace().next().expect("a number");
            number.trim_end_matches(',').parse::<u64>().expect("a number")
        })
        .sum();
    assert!(text.contains("/tenants/b"), "{text}");
    assert!(!text.contains("/tenants/a"), "the other disk is not traced");
    // blkparse counts flushes as reads.
    assert_eq!(queued, ios);
    let mut btt = Command::new("btt");
    // It leaves files where it runs.
    btt.args(["-i", &merged]).current_dir(scratch.path(""));
    let output = btt.output().expect("it is installed");
    let report = String::from_utf8_lossy(&output.stdout);
    assert!(report.contains("D2C"), "{report}");
    daemon.stop();
}

/// Replays a recording. Returns the output of `blkmq-lab replay --json`.
fn replay(lab: &Lab, recording: &str, disks: &[&str]) -> Value {
    let disks: Vec<&str> = disks.iter().flat_map(|disk| ["--disk", disk]).collect();
    replay_on(lab, recording, &disks)
}

/// The same with any flags.
fn replay_on(lab: &Lab, recording: &str, flags: &[&str]) -> Value {
    let mut command = lab.command(&["replay", recording, "--json"]);
    command.args(flags);
    let output = command.output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_str(&text).expect("JSON")
}

#[test]
fn trace_is_played_again_with_the_same_counts() {
    let Some(lab) = lab() else { return };
    let scratch = Scratch::new();
    let daemon = stage(&scratch);
    let tracing = trace(&scratch, &[]);
    load(&scratch);
    end(tracing);
    let statistics = statistics(&scratch);
    let disks = ["name=a,ram=16M,sched=bfq", "name=b,ram=16M"];
    let played = replay(&lab, &scratch.word("t"), &disks);
    for direction in ["read", "write", "flush"] {
        for what in ["ios", "bytes"] {
            let of = |queue: &str| {
                let queues = statistics["queues"].as_array().expect("queues");
                let queue = queues.iter().find(|one| one["name"] == queue);
                let group = &queue.expect("it is there")["groups"][0];
                group[direction][what].as_u64().expect("a count")
            };
            assert_eq!(played[direction][what], of("a") + of("b"), "{direction} {what}");
        }
    }
    daemon.stop();
}

#[test]
fn trace_is_played_in_virtual_time_with_the_same_counts_and_figures_for_a_seed() {
    let Some(lab) = lab() else { return };
    let scratch = Scratch::new();
    let daemon = stage(&scratch);
    let tracing = trace(&scratch, &[]);
    load(&scratch);
    end(tracing);
    daemon.stop();
    let recording = scratch.word("t");
    let real = replay(&lab, &recording, &["name=a,ram=16M,sched=bfq", "name=b,ram=16M"]);
    let on_model = |seed| {
        replay_on(
            &lab,
            &recording,
            &["--simulate", "flash,units=1", "--sched", "bfq", "--seed", seed],
        )
    };
    let (one, again, other) = (on_model("1"), on_model("1"), on_model("2"));
    for direction in ["read", "write", "discard", "flush"] {
        for what in ["ios", "bytes", "failed"] {
            assert_eq!(one[direction][what], real[direction][what], "{direction} {what}");
        }
    }
    assert!(one["write"]["ios"].as_u64() > Some(400), "{one}");
    assert_eq!(one, again);
    assert_ne!(one, other, "another seed");
}

#[test]
fn model_that_is_none_and_flags_that_do_not_go_with_it_are_refused() {
    let Some(lab) = lab() else { return };
    let refusals: [(&[&str], &str); 4] = [
        (&["--simulate", "tape"], "flash or rotating"),
        (
            &["--simulate", "flash", "--sched", "cfq"],
            "none, mq-deadline, kyber, bfq",
        ),
        (
            &["--simulate", "flash", "--disk", "name=a,ram=1M"],
            "cannot be used with",
        ),
        (&["--seed", "2"], "--simulate"),
    ];
    for (flags, what) in refusals {
        let output = lab.command(&["replay", "t"]).args(flags).output();
        let output = output.expect("it runs");
        let said = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {said}");
        assert!(said.contains(what), "{flags:?}: {said}");
    }
}

#[test]
fn io_log_of_fio_is_played_with_its_counts_and_one_that_does_not_fit_is_refused() {
    let Some(lab) = lab() else { return };
    if !installed(&["fio"]) {
        return;
    }
    let scratch = Scratch::new();
    let (log, image) = (scratch.word("log"), scratch.image("image", 8 << 20));
    let words = format!(
        "--name=x --filename={image} --rw=randrw --bsrange=512-64k --size=8m --fsync=32 --write_iolog={log}"
    );
    run("fio", &words.split(' ').collect::<Vec<_>>());
    let text = std::fs::read_to_string(&log).expect("a log");
    let actions = |action: &str| text.lines().filter(|line| line.contains(action)).count() as u64;
    let played = replay(&lab, &log, &["name=a,ram=8M"]);
    for (direction, action) in [("read", " read "), ("write", " write "), ("flush", " sync ")] {
        assert_eq!(played[direction]["ios"], actions(action), "{direction}");
        assert!(actions(action) > 0, "{direction}");
    }
    let small = lab.command(&["replay", &log, "--disk", "name=a,ram=4M"]).output();
    let said = String::from_utf8(small.expect("it runs").stderr).expect("text");
    assert!(
        said.contains("disk a: has 4194304 bytes, and the recording reaches"),
        "{said}"
    );
}

#[test]
fn disk_that_takes_the_place_of_another_is_not_traced_as_that_one() {
    let scratch = Scratch::new();
    let daemon = stage(&scratch);
    let change = |method: &str, params: Value| {
        let mut control = Control::connect(&scratch.path("control.sock")).expect("it is served");
        control.call(method, &params).expect("it is done");
    };
    let add = |name: &str| {
        let keys = json!({"file": scratch.image(name, 1 << 20), "queue": "c", "group": format!("/{name}")});
        change("config.add", json!({"kind": "disk", "name": name, "keys": keys}));
        let mut client = Client::connect(&scratch.path("nbd.sock"), name).expect("it is served");
        client.read(0, BLOCK).expect("a read");
        // Events are reported before anything changes.
        std::thread::sleep(Duration::from_millis(50));
    };
    add("stays");
    let all = trace(&scratch, &[]);
    add("also");
    change("config.remove", json!({"kind": "disk", "name": "also"}));
    add("second");
    let said = end(all);
    assert!(
        said.contains("is disk also") && said.contains("is disk second"),
        "{said}"
    );
    let device_of = |name: &str| {
        let line = said
            .lines()
            .find(|line| line.ends_with(&format!(" is disk {name}")));
        line.and_then(|line| line.split(' ').next())
            .expect("it is named")
            .to_owned()
    };
    let of = |name: &str| {
        let device = device_of(name);
        let is_its = |record: &&Record| device_text(record.device) == device && record.is_event(COMPLETE);
        records(&scratch).iter().filter(is_its).count()
    };
    assert_eq!((of("also"), of("second")), (1, 1), "{said}");
    daemon.stop();
}

#[test]
fn trace_of_what_is_not_there_and_a_second_one_are_refused() {
    let scratch = Scratch::new();
    let daemon = stage(&scratch);
    let control = || Control::connect(&scratch.path("control.sock")).expect("it is served");
    let start = |disks: Value| control().call("trace.start", &json!({"disks": disks}));
    let refused = start(json!(["zebra"])).expect_err("there is none").to_string();
    assert!(refused.contains("disk zebra: there is no such disk"), "{refused}");
    let refused = start(json!(["b", "a", "b"]))
        .expect_err("two of a name")
        .to_string();
    assert!(refused.contains("disk b: it is named twice"), "{refused}");
    let tracing = trace(&scratch, &["a"]);
    let refused = start(json!([])).expect_err("one at a time").to_string();
    assert!(refused.contains("a trace is being taken already"), "{refused}");
    end(tracing);
    end(trace(&scratch, &["a"]));
    let mut control = control();
    let started = control.call("trace.start", &json!({}));
    started.expect("the one before has ended");
    let again = control.call("trace.start", &json!({}));
    let refused = again.expect_err("one for a connection").to_string();
    assert!(refused.contains("this connection traces already"), "{refused}");
    daemon.stop();
}

#[test]
fn trace_starts_in_the_moment_in_which_the_one_before_has_ended() {
    let scratch = Scratch::new();
    let daemon = stage(&scratch);
    for number in 0..300 {
        let mut control = Control::connect(&scratch.path("control.sock")).expect("it is served");
        let started = control.call("trace.start", &json!({}));
        assert!(started.is_ok(), "trace {number}: {started:?}");
    }
    daemon.stop();
}

#[test]
fn trace_that_finds_its_disk_full_says_which_file() {
    let scratch = Scratch::new();
    let daemon = stage(&scratch);
    for number in 0..2 {
        let file = scratch.path(&format!("t.blktrace.{number}"));
        std::os::unix::fs::symlink("/dev/full", file).expect("a link");
    }
    let mut command = Command::new(program());
    command.args([
        "trace",
        "--socket",
        &format!("unix:{}", scratch.word("control.sock")),
    ]);
    command.args(["--out", &scratch.word("t")]).stderr(Stdio::piped());
    let mut child = command.spawn().expect("it runs");
    while child.try_wait().expect("our own child").is_none() {
        load(&scratch);
    }
    let output = child.wait_with_output().expect("it ends");
    let said = String::from_utf8(output.stderr).expect("text");
    assert!(!output.status.success());
    let name = format!("{}.blktrace.", scratch.word("t"));
    assert!(said.contains(&name) && said.contains("No space left"), "{said}");
    daemon.stop();
}

#[test]
fn trace_has_all_that_a_daemon_recorded_before_it_was_killed() {
    let scratch = Scratch::new();
    let daemon = stage(&scratch);
    let tracing = trace(&scratch, &[]);
    load(&scratch);
    let ios = count(&statistics(&scratch), "b", "ios");
    kill_process(Pid::from_raw(daemon.id() as i32).expect("a pid"), Signal::KILL).expect("it runs");
    let output = tracing.wait_with_output().expect("it ends");
    assert!(!output.status.success());
    let said = String::from_utf8(output.stderr).expect("text");
    assert!(said.contains("start it again"), "{said}");
    let all = records(&scratch);
    let is_queued = |record: &&Record| record.device & 0xf_ffff == 1 && record.is_event(QUEUE);
    assert_eq!(all.iter().filter(is_queued).count() as u64, ios);
    drop(daemon);
}

#[test]
fn trace_into_an_unread_fifo_or_beyond_a_limit_of_file_sizes_ends_with_the_reason() {
    let scratch = Scratch::new();
    let daemon = stage(&scratch);
    let (socket, out) = (
        format!("unix:{}", scratch.word("control.sock")),
        scratch.word("t"),
    );
    run("mkfifo", &[&scratch.word("t.blktrace.0")]);
    let traced = |limit: &str| {
        let script = format!(
            "{limit} exec {} trace --socket {socket} --out {out} --seconds 1",
            program().display()
        );
        Command::new("sh")
            .args(["-c", &script])
            .stderr(Stdio::piped())
            .spawn()
            .expect("it runs")
    };
    let said = |child: Child| {
        let output = child.wait_with_output().expect("it ends");
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).expect("text")
    };
    let refused = said(traced(""));
    assert!(refused.contains("t.blktrace.0 cannot be written"), "{refused}");
    std::fs::remove_file(scratch.path("t.blktrace.0")).expect("it is there");
    let mut limited = traced("ulimit -f 8;");
    while limited.try_wait().expect("our own child").is_none() {
        load(&scratch);
    }
    let refused = said(limited);
    assert!(
        refused.contains("cannot be written") && refused.contains("too large"),
        "{refused}"
    );
    daemon.stop();
}
