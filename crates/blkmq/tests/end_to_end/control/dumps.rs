//! Tests that the configuration which a daemon dumps starts the same daemon, whatever it began with and
//! however it was changed.
//!
//! `BLKMQ_DUMPS=1000 cargo test -p blkmq --release --test end_to_end control::dumps` is the long
//! form.

use blkmq::control::client::Client as Control;
use blkmq_testkit::Random;
use serde_json::{Value, json};

use super::{add, remove, set};
use crate::common::{Daemon, Scratch};

#[test]
fn random_daemons_dump_starts_the_same_daemon() {
    let cases: u64 = std::env::var("BLKMQ_DUMPS").map_or(12, |text| text.parse().expect("a number"));
    let (mut done, mut refused) = (0, 0);
    for seed in 1..=cases {
        let mut case = Case::new(seed);
        case.write(&case.first.clone());
        let daemon = case.start();
        let mut control = case.control();
        for _ in 0..CHANGES {
            match case.change(&mut control) {
                Ok(_) => done += 1,
                Err(_) => refused += 1,
            }
        }
        let (dump, was) = (dumped(&mut control), state(&mut control));
        drop(control);
        daemon.stop();

        case.write(&dump);
        let daemon = case.start();
        let mut control = case.control();
        let what = format!("seed {seed}: began with\n{}and dumped\n{dump}", case.first);
        assert_eq!(state(&mut control), was, "{what}");
        assert_eq!(dumped(&mut control), dump, "{what}");
        let applied = control
            .call("config.apply", &json!({"toml": dump}))
            .expect("an answer");
        assert_eq!(applied["steps"], json!([]), "{what}");
        drop(control);
        daemon.stop();
    }
    eprintln!("{cases} daemons, {done} changes, {refused} refused");
    assert!(
        done > cases * CHANGES / 3,
        "{done} of {} changes",
        cases * CHANGES
    );
    assert!(refused > 0, "none of the changes was one that cannot be");
}

/// A random daemon.
struct Case {
    scratch: Scratch,
    random: Random,
    /// Its configuration.
    first: String,
}

impl Case {
    fn new(seed: u64) -> Self {
        let scratch = Scratch::new();
        let mut random = Random::new(seed);
        let address = |name: &str| format!("unix:{}", scratch.word(name));
        let mut first = format!(
            "[daemon]\nshutdown_limit = \"{}s\"\n[control]\nsocket = {:?}\n[[export]]\nnbd = {:?}\n",
            1 + random.below(20),
            address("control.sock"),
            address("nbd.sock")
        );
        for number in 0..FILES {
            scratch.image(&format!("f{number}.raw"), 1 << 20);
        }
        // The disk that every daemon begins with is alone on its queue.
        first += "[disk.r0]\nram = \"1M\"\nqueue = \"r0\"\n";
        for number in 1..=random.below(4) {
            first += &format!("[disk.r{number}]\nram = \"2M\"\n");
            for (key, value) in disk_keys(&mut random) {
                first += &format!("{key} = {value}\n");
            }
        }
        if random.below(2) == 0 {
            let image = scratch.word("f0.raw");
            first += &format!("[disk.f0]\nfile = {image:?}\nqueue = \"files\"\n[queue.files]\n");
            for (key, value) in queue_keys(&mut random) {
                first += &format!("{key} = {value}\n");
            }
        }
        if random.below(2) == 0 {
            first += "[queue.r0]\nmerges = false\ntimeout = \"7s\"\n";
        }
        for group in &GROUPS[..random.below(4) as usize] {
            first += &format!("[group.{group:?}]\n");
            for (key, value) in group_keys(&mut random) {
                first += &format!("{key} = {value}\n");
            }
        }
        Self {
            scratch,
            random,
            first,
        }
    }

    fn write(&self, text: &str) {
        std::fs::write(self.scratch.path("daemon.toml"), text).expect("the file can be written");
    }

    fn start(&self) -> Daemon {
        Daemon::start(&["-c", &self.scratch.word("daemon.toml")])
    }

    fn control(&self) -> Control {
        Control::connect(&self.scratch.path("control.sock")).expect("it is served")
    }

    /// Makes one change, which may be refused.
    fn change(&mut self, control: &mut Control) -> anyhow::Result<Value> {
        let random = &mut self.random;
        let number = random.below(FILES);
        match random.below(7) {
            0 => {
                let mut keys = json!({"file": self.scratch.word(&format!("f{number}.raw"))});
                if random.below(2) == 0 {
                    keys["queue"] = json!("files");
                }
                add(control, "disk", &format!("f{number}"), &keys)
            }
            1 => {
                let mut keys = object(disk_keys(random));
                keys["ram"] = json!("3M");
                if random.below(3) == 0 {
                    keys["sched"] = json!(random.one_of(&SCHEDS));
                }
                add(control, "disk", &format!("r{}", 1 + number), &keys)
            }
            2 => remove(control, "disk", &format!("f{number}")),
            3 => remove(control, "disk", &format!("r{}", 1 + number)),
            4 => {
                let group = random.one_of(&GROUPS);
                set(control, "group", group, &object(group_keys(random)))
            }
            5 => {
                let queue = random.one_of(&["r0", "r1", "r2", "ram", "files"]);
                set(control, "queue", queue, &object(queue_keys(random)))
            }
            _ if random.below(2) == 0 => {
                let sched = random.one_of(&[Some("none"), Some("kyber"), None, None]);
                set(control, "daemon", "daemon", &json!({"sched": sched}))
            }
            _ => {
                let limit = format!("{}s", 1 + random.below(20));
                set(control, "daemon", "daemon", &json!({"shutdown_limit": limit}))
            }
        }
    }
}

/// Keys with values that TOML and JSON write alike.
type Keys = Vec<(&'static str, String)>;

fn disk_keys(random: &mut Random) -> Keys {
    let mut keys = Vec::new();
    if random.below(2) == 0 {
        keys.push(("group", format!("{:?}", random.one_of(&GROUPS))));
    }
    if random.below(2) == 0 {
        keys.push(("queue", format!("{:?}", random.one_of(&["r0", "ram"]))));
    }
    if random.below(3) == 0 {
        keys.push(("block_size", random.one_of(&["512", "4096"]).to_owned()));
    }
    if random.below(4) == 0 {
        keys.push(("description", format!("{:?}", "with \"quotes\" and \\")));
    }
    keys
}

fn queue_keys(random: &mut Random) -> Keys {
    let mut keys = Vec::new();
    if random.below(2) == 0 {
        keys.push(("depth", (1 + random.below(128)).to_string()));
    }
    if random.below(2) == 0 {
        keys.push(("sched", format!("{:?}", random.one_of(&SCHEDS))));
    }
    keys
}

fn group_keys(random: &mut Random) -> Keys {
    let mut keys = vec![("weight", (1 + random.below(1000)).to_string())];
    if random.below(3) == 0 {
        keys.push(("iops", (100 + random.below(1000)).to_string()));
        keys.push(("iops_burst", random.below(50).to_string()));
    }
    if random.below(3) == 0 {
        keys.push(("latency_target", format!("\"{}ms\"", 1 + random.below(50))));
    }
    keys
}

fn object(keys: Keys) -> Value {
    let value = |text: &str| serde_json::from_str::<Value>(text).expect("as in JSON");
    keys.iter()
        .map(|(key, text)| ((*key).to_owned(), value(text)))
        .collect()
}

fn dumped(control: &mut Control) -> String {
    let answer = control.call("config.get", &json!({})).expect("an answer");
    answer["toml"].as_str().expect("a text").to_owned()
}

/// The daemon's objects, unordered.
fn state(control: &mut Control) -> Vec<String> {
    let mut all = Vec::new();
    for list in ["disk.list", "queue.list", "group.list", "export.list"] {
        let answer = control.call(list, &json!({})).expect("an answer");
        let entries = answer.as_array().expect("a list");
        all.extend(entries.iter().map(|entry| format!("{list}: {entry}")));
    }
    all.sort();
    all
}

const CHANGES: u64 = 12;
const FILES: u64 = 3;
const GROUPS: [&str; 4] = ["/d", "/a", "/a/b", "/c"];
const SCHEDS: [&str; 4] = ["none", "bfq", "kyber", "mq-deadline"];
