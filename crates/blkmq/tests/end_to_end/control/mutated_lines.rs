//! Tests that no line which a client of the control socket can send does more than get an answer: random
//! mutations of requests, each followed by a valid request, which must be answered.
//!
//! `BLKMQ_LINES=1000000 cargo test -p blkmq --release --test end_to_end control::mutated` is the
//! long form.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;

use blkmq_testkit::Random;
use serde_json::{Value, json};

use super::{LONG, Stage, names};
use crate::upgrade::load::Load;

#[test]
fn daemon_answers_damaged_requests_and_goes_on() {
    let lines: u64 = std::env::var("BLKMQ_LINES").map_or(3000, |text| text.parse().expect("a number"));
    let stage = Stage::new(&[]);
    let load = Load::start(&stage.nbd(), "vm1", 1);
    let mut chance = Random::new(1);
    let requests = requests();
    let mut client = connect(&stage);
    let (mut refused, mut traces) = (0, 0);
    for number in 0..lines {
        let mut line = requests[chance.index(requests.len())].clone();
        for _ in 0..=chance.index(4) {
            damage(&mut line, &requests, &mut chance);
        }
        line.retain(|byte| *byte != b'\n');
        match ask(&mut client, &line, number) {
            Some(answers) => {
                refused += answers
                    .iter()
                    .filter(|answer| answer.get("error").is_some())
                    .count() as u64
            }
            // A trace begins if its request stayed valid; the connection then carries no more
            // answers.
            None => {
                client = connect(&stage);
                traces += 1;
            }
        }
    }
    assert!(refused > lines / 2, "{refused} of {lines} refused: no test");
    assert!(
        traces < lines / 50,
        "{traces} connections were lost in {lines} lines"
    );
    assert_eq!(names(&mut stage.control()), ["vm1"]);
    assert!(load.stop() > 0);
    stage.daemon.stop();
}

fn connect(stage: &Stage) -> BufReader<UnixStream> {
    let stream = UnixStream::connect(stage.scratch.path("control.sock")).expect("it listens");
    stream.set_read_timeout(Some(LONG)).expect("a time limit");
    BufReader::new(stream)
}

/// Sends a line and a valid request. Returns the answers to the line; none if the daemon sends
/// something else or disconnects.
fn ask(client: &mut BufReader<UnixStream>, line: &[u8], number: u64) -> Option<Vec<Value>> {
    let id = format!("whole {number}");
    let whole = json!({"jsonrpc": "2.0", "id": id, "method": "daemon.version"});
    let both = [line, b"\n", whole.to_string().as_bytes(), b"\n"].concat();
    client.get_mut().write_all(&both).ok()?;
    let mut answers = Vec::new();
    loop {
        let mut text = Vec::new();
        match client.read_until(b'\n', &mut text) {
            // The trace ended.
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return None,
            read => read.expect("the daemon answers in time"),
        };
        let answer: Value = serde_json::from_slice(&text).ok()?;
        if answer["id"] == id.as_str() {
            assert_eq!(answer["error"], Value::Null, "{}", String::from_utf8_lossy(line));
            return Some(answers);
        }
        answers.push(answer);
    }
}

/// The lines before mutation: requests of all kinds that change nothing permanently, even if they
/// stay valid.
fn requests() -> Vec<Vec<u8>> {
    let request = |method: &str, params: Value| {
        let request = json!({"jsonrpc": "2.0", "id": 7, "method": method, "params": params});
        request.to_string().into_bytes()
    };
    let toml = "[disk.a]\nram = \"1M\"\nsched = \"bfq\"\n[group.\"/a\"]\nweight = 3\niops = 1000\n[queue.a]\ndepth = 3\n";
    let disk = json!({"ram": "1M", "queue": "q", "sched": "kyber", "group": "/x/y"});
    vec![
        request("daemon.methods", json!({})),
        request("config.get", json!({})),
        request("config.apply", json!({"toml": toml, "dry_run": true})),
        request(
            "config.set",
            json!({"kind": "group", "name": "/vm1", "keys": {"weight": 7, "iops": null}, "dry_run": true}),
        ),
        request(
            "config.add",
            json!({"kind": "disk", "name": "a", "keys": disk, "dry_run": true}),
        ),
        request(
            "config.remove",
            json!({"kind": "disk", "name": "a", "dry_run": true}),
        ),
        request("disk.resize", json!({"name": "nobody", "size": 4096})),
        request("queue.list", json!({})),
        request("group.list", json!({})),
        request("statistics.get", json!({})),
        request("trace.start", json!({"disks": ["nobody"]})),
        request("log.set", json!({"level": "info"})),
        request(
            "multipath.message",
            json!({"disk": "nobody", "message": ["fail_path", "a"]}),
        ),
    ]
}

fn damage(line: &mut Vec<u8>, requests: &[Vec<u8>], chance: &mut Random) {
    let at = chance.index(line.len().max(1)).min(line.len());
    match chance.index(6) {
        0 => line.truncate(at),
        1 => line.insert(at, chance.index(256) as u8),
        2 if at < line.len() => line[at] ^= 1 << chance.index(8),
        3 if at < line.len() => drop(line.remove(at)),
        4 => {
            let word = WORDS[chance.index(WORDS.len())];
            drop(line.splice(at..at, word.bytes()));
        }
        _ => {
            let other = &requests[chance.index(requests.len())];
            let from = chance.index(other.len());
            line.truncate(at);
            line.extend_from_slice(&other[from..]);
        }
    }
}

const WORDS: [&str; 12] = [
    "null",
    "-1",
    "18446744073709551616",
    "1e999",
    "\"\"",
    "[]",
    "{}",
    "\\u0000",
    "\\ud800",
    "[[[[[[[[",
    "/../",
    "\u{fffd}",
];
