//! Changes of a daemon while a client is measured: by one who asks for a change, waits for the answer and
//! pauses. Disks come and go, weights and the scheduler of the client's own queue change, whole
//! configurations are applied, and four in ten are refused.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::nbd::EXPORT;

/// The changes, until this is ended or dropped.
pub(super) struct Changes {
    /// Nothing is ever sent: its end is the sign.
    go_on: Sender<()>,
    changer: JoinHandle<Result<u64>>,
}

impl Changes {
    /// Begins to change the daemon whose control socket is at `control`.
    pub(super) fn start(control: &Path) -> Result<Self> {
        let mut daemon = Daemon::connect(control)?;
        let first = daemon.ask("config.get", &json!({}))??;
        let first = first["toml"]
            .as_str()
            .context("a configuration is text")?
            .to_owned();
        let (go_on, ended) = channel::<()>();
        let changer = thread::spawn(move || {
            let mut done = 0;
            for change in changes(&first).iter().cycle() {
                if ended.recv_timeout(PAUSE) != Err(RecvTimeoutError::Timeout) {
                    break;
                }
                daemon.make(change)?;
                done += 1;
            }
            // As it was, for whoever is measured next.
            daemon.make(&apply(&first, "", true))?;
            Ok(done)
        });
        Ok(Self { go_on, changer })
    }

    /// Ends them and makes the daemon what it was. Returns how many there were.
    pub(super) fn end(self) -> Result<u64> {
        drop(self.go_on);
        self.changer
            .join()
            .expect("who changes the daemon does not panic")
    }
}

/// A change, and whether it can be made.
struct Change {
    method: &'static str,
    params: Value,
    can_be: bool,
}

fn changes(first: &str) -> [Change; 10] {
    let change = |method, kind: &str, name: &str, keys: Value, can_be| Change {
        method,
        params: json!({"kind": kind, "name": name, "keys": keys}),
        can_be,
    };
    let set = |kind, name, keys, can_be| change("config.set", kind, name, keys, can_be);
    let disk = json!({"ram": "1M", "group": "/changed"});
    [
        change("config.add", "disk", "late", disk.clone(), true),
        change("config.add", "disk", "late", disk, false),
        set("group", "/changed", json!({"weight": 300}), true),
        set("group", "/changed", json!({"weight": 0}), false),
        set("disk", EXPORT, json!({"sched": "mq-deadline"}), true),
        set("disk", EXPORT, json!({"sched": "cfq"}), false),
        apply(first, "[disk.more]\nram = \"1M\"\n", true),
        apply(first, "[disk.more]\nfile = \"/nowhere/more\"\n", false),
        set("disk", EXPORT, json!({"sched": "kyber"}), true),
        apply(first, "", true),
    ]
}

fn apply(first: &str, more: &str, can_be: bool) -> Change {
    Change {
        method: "config.apply",
        params: json!({"toml": format!("{first}{more}")}),
        can_be,
    }
}

/// A daemon's control socket.
struct Daemon(BufReader<UnixStream>);

impl Daemon {
    fn connect(control: &Path) -> Result<Self> {
        let stream = UnixStream::connect(control).context("connecting to the control socket")?;
        stream.set_read_timeout(Some(ANSWER_WITHIN))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Makes one change, or sees it refused.
    fn make(&mut self, change: &Change) -> Result<()> {
        let Change {
            method,
            params,
            can_be,
        } = change;
        let answer = self.ask(method, params)?;
        ensure!(answer.is_ok() == *can_be, "{method} {params}: {answer:?}");
        Ok(())
    }

    /// Returns the result, or what the daemon says against it.
    fn ask(&mut self, method: &str, params: &Value) -> Result<Result<Value>> {
        let request = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
        self.0.get_mut().write_all(format!("{request}\n").as_bytes())?;
        let mut line = String::new();
        self.0.read_line(&mut line).context("waiting for an answer")?;
        let mut answer: Value = serde_json::from_str(&line).context("reading an answer")?;
        Ok(match answer.get("error") {
            Some(error) => Err(anyhow::anyhow!("{error}")),
            None => Ok(answer["result"].take()),
        })
    }
}

/// 33 changes a second are 10,000 in five minutes.
const PAUSE: Duration = Duration::from_millis(30);
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
