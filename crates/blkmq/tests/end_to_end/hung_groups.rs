//! Tests whether an operator sees which tenant has requests that hang: in the lists, the metrics, the statistics and the
//! report of the daemon.

use std::process::Command as Process;
use std::time::{Duration, Instant};

use blkmq::control::client::Client as Control;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::Daemon;
use crate::common::daemon::program;
use crate::common::nbd::{Client as Nbd, Command};
use crate::hung_changes::Stage;
use crate::metrics;

#[test]
fn group_whose_requests_hang_is_named_with_their_number_and_a_growing_age() {
    let Some(stage) = Stage::new("hung,queue=q,group=/t/hung") else {
        return;
    };
    let mut words = stage.words.clone();
    let ok = format!("name=ok,file={},queue=q,group=/t/ok", stage.scratch.word("a.raw"));
    let metrics = format!("unix:{}", stage.scratch.word("metrics.sock"));
    words.extend(["--disk".to_owned(), ok, "--metrics".to_owned(), metrics]);
    let daemon = Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let socket = stage.scratch.path("nbd.sock");
    let connect = |disk| Nbd::connect(&socket, disk).expect("the daemon serves it");
    let (mut hung, mut ok) = (connect("hung"), connect("ok"));
    let mut control = stage.control();
    assert_eq!(in_flight(&mut control, "/t/hung"), (0, None), "nothing hangs yet");
    stage.fall_silent();
    for number in 0..HUNG {
        // Apart, so that they stay requests of their own.
        hung.send(Command::Read, 0, number * (64 << 10), 4096, &[])
            .expect("it is taken");
    }
    let begun = Instant::now();
    while in_flight(&mut control, "/t/hung").0 != HUNG {
        assert!(begun.elapsed() < LIMIT, "not all of them are at the drive");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut ages = Vec::new();
    for _ in 0..3 {
        let (requests, oldest) = in_flight(&mut control, "/t/hung");
        assert_eq!(requests, HUNG);
        ages.push(oldest.expect("there is an oldest one"));
        std::thread::sleep(Duration::from_millis(100));
        ok.read(0, 4096).expect("nothing is wrong with it");
    }
    let grows_with_time = |pair: &[Duration]| pair[1] >= pair[0] + Duration::from_millis(100);
    assert!(ages.windows(2).all(grows_with_time), "{ages:?}");
    assert!(
        *ages.last().expect("three") <= begun.elapsed() + LIMIT,
        "{ages:?}"
    );
    assert_eq!(
        in_flight(&mut control, "/t/ok"),
        (0, None),
        "its neighbour is answered"
    );
    let statistics = control.call("statistics.get", &json!({})).expect("an answer");
    let of_hung = find(&statistics["queues"][0]["groups"], "/t/hung");
    assert_eq!(of_hung["in_flight"], HUNG, "{statistics}");
    assert!(of_hung["oldest_ns"].as_u64() > Some(0), "{statistics}");
    said_by_ctl(&stage);
    said_by_metrics(&metrics::text(&stage.scratch.path("metrics.sock")));
    daemon.signal(Signal::USR1);
    let reported = format!("  /t/hung in_flight {HUNG}, oldest_time ");
    while !daemon.says(&reported) || !daemon.says("  /t/ok in_flight 0, oldest_time 0") {
        assert!(begun.elapsed() < LIMIT, "{}", daemon.said());
        std::thread::sleep(Duration::from_millis(5));
    }
    stage.silent.go_on();
    while in_flight(&mut control, "/t/hung") != (0, None) {
        assert!(begun.elapsed() < 2 * LIMIT, "they have not ended");
        std::thread::sleep(Duration::from_millis(5));
    }
    daemon.stop();
}

/// The row of a group.
fn find(rows: &Value, path: &str) -> Value {
    let mut rows = rows.as_array().expect("a list").iter();
    let found = rows.find(|row| row["path"] == path);
    found.unwrap_or_else(|| panic!("{path} is not there")).clone()
}

/// How many requests of a group are at the drive, and for how long the oldest of them.
fn in_flight(control: &mut Control, path: &str) -> (u64, Option<Duration>) {
    let group = find(&control.call("group.list", &json!({})).expect("a list"), path);
    let requests = group["in_flight"].as_u64();
    let requests = requests.unwrap_or_else(|| panic!("nothing is said of it: {group}"));
    (requests, group["oldest_ns"].as_u64().map(Duration::from_nanos))
}

fn said_by_ctl(stage: &Stage) {
    let socket = format!("unix:{}", stage.scratch.word("control.sock"));
    let ctl = |words: &[&str]| {
        let run = Process::new(program())
            .args(["ctl", "--socket", &socket])
            .args(words)
            .output();
        let run = run.expect("the command runs");
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        String::from_utf8(run.stdout).expect("text")
    };
    let list = ctl(&["list", "groups"]);
    let of = |path: &str| -> Vec<String> {
        let line = list.lines().find(|line| line.contains(path));
        let words = line.expect("it has a line").split_whitespace();
        words.map(str::to_owned).collect()
    };
    let (hung, ok) = (of("/t/hung"), of("/t/ok"));
    assert_eq!(hung[hung.len() - 2], HUNG.to_string(), "{list}");
    assert_ne!(hung.last().expect("words"), "-", "{list}");
    assert_eq!(ok[ok.len() - 2..], ["0", "-"], "{list}");
    let shown = ctl(&["show", "group", "/t/hung"]);
    let has = |key: &str| shown.lines().find(|line| line.starts_with(key));
    assert!(
        has("in_flight ").is_some_and(|line| line.ends_with(" 3")),
        "{shown}"
    );
    assert!(has("oldest ").is_some_and(|line| !line.ends_with('-')), "{shown}");
}

fn said_by_metrics(text: &str) {
    let value = |name: &str, group: &str| -> f64 {
        let series = format!("{name}{{queue=\"q\",group=\"{group}\"}} ");
        let found = text.lines().find_map(|line| line.strip_prefix(&series));
        let found = found.unwrap_or_else(|| panic!("no {series}in {text}"));
        found.parse().expect("a number")
    };
    assert_eq!(value("blkmq_group_in_flight", "/t/hung"), HUNG as f64);
    assert_eq!(value("blkmq_group_in_flight", "/t/ok"), 0.0);
    assert!(value("blkmq_group_oldest_seconds", "/t/hung") > 0.2);
    assert_eq!(value("blkmq_group_oldest_seconds", "/t/ok"), 0.0);
}

const HUNG: u64 = 3;
const LIMIT: Duration = Duration::from_secs(15);
