//! Whether a reload makes the differences of the configuration file alone, and leaves what was changed by `ctl`.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::{LONG, Stage};
use crate::common::nbd::Client;
use crate::common::pattern::BLOCK;
use crate::common::{Daemon, Scratch};

/// A daemon with a configuration file.
struct WithFile(Stage);

impl WithFile {
    fn new(disks: &str) -> Self {
        let scratch = Scratch::new();
        write(&scratch, disks);
        let daemon = Daemon::start(&["-c", &scratch.word("a.toml")]);
        Self(Stage { scratch, daemon })
    }

    /// Reloads another file. Waits until a line of the log has this.
    fn reload(&self, disks: &str, wanted: &str) {
        write(&self.0.scratch, disks);
        let daemon = &self.0.daemon;
        let before = daemon.said().matches(wanted).count();
        daemon.signal(Signal::HUP);
        let end = Instant::now() + LONG;
        while daemon.said().matches(wanted).count() <= before {
            assert!(Instant::now() < end, "{wanted}:\n{}", daemon.said());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn changed(&self, words: &[&str]) {
        let (code, said) = self.0.ctl(words);
        assert_eq!(code, 0, "{words:?}: {said}");
    }

    fn has(&self, disk: &str) -> bool {
        self.0.ctl(&["show", "disk", disk]).0 == 0
    }
}

fn write(scratch: &Scratch, disks: &str) {
    let (nbd, control) = (scratch.word("nbd.sock"), scratch.word("control.sock"));
    let text = format!("[control]\nsocket = \"unix:{control}\"\n[[export]]\nnbd = \"unix:{nbd}\"\n{disks}");
    std::fs::write(scratch.path("a.toml"), text).expect("the file can be written");
}

const VM1: &str = "[disk.vm1]\nram = \"1M\"\n";
const VM2: &str = "[disk.vm2]\nram = \"1M\"\n";

#[test]
fn reload_keeps_what_ctl_added_with_its_clients() {
    let stage = WithFile::new(VM1);
    let group = |weight: u32| format!("{VM1}[group.\"/vm1\"]\nweight = {weight}\n");
    stage.changed(&["add", "disk", "vm7", "ram=1M"]);
    let other = format!("nbd=unix:{}", stage.0.scratch.word("other.sock"));
    stage.changed(&["add", "export", &other]);
    stage.changed(&["set", "group", "/vm1", "iops=5000"]);
    let mut client = Client::connect(&stage.0.scratch.path("other.sock"), "vm7").expect("it is served");
    stage.reload(VM1, "SIGHUP: nothing differs");
    stage.reload(VM1, "otherwise than in the file are: disk vm7");
    stage.reload(&group(300), "set group /vm1: weight default -> 300");
    assert_eq!(client.read(0, BLOCK).expect("a read"), vec![0; BLOCK]);
    // What is set by ctl stays until the file has another value.
    stage.changed(&["set", "group", "/vm1", "weight=500"]);
    stage.reload(&group(300), "SIGHUP: nothing differs");
    stage.reload(&group(400), "set group /vm1: weight 500 -> 400");
    let (_, dumped) = stage.0.ctl(&["dump"]);
    assert!(dumped.contains("iops = 5000"), "{dumped}");
    // It is of the file, too, by now, and goes with it.
    let both = group(400) + "[disk.vm7]\nram = \"1M\"\n";
    stage.reload(&both, "SIGHUP: nothing differs");
    drop(client);
    stage.reload(&group(400), "SIGHUP: remove disk vm7");
    stage.0.daemon.stop();
}

#[test]
fn reload_leaves_disks_removed_that_ctl_removed_until_the_file_changes_them() {
    let stage = WithFile::new(&[VM1, VM2].concat());
    stage.changed(&["remove", "disk", "vm2"]);
    stage.reload(&[VM1, VM2].concat(), "SIGHUP: nothing differs");
    assert!(!stage.has("vm2"));
    stage.reload(&[VM1, &VM2.replace("1M", "2M")].concat(), "SIGHUP: add disk vm2");
    // A reload that is refused is made up for by the next one.
    stage.reload("[disk.vm1]\nram = \"2M\"\n", "the configuration is not changed");
    assert!(stage.has("vm2"));
    stage.reload(VM1, "SIGHUP: remove disk vm2");
    stage.0.daemon.stop();
}

#[test]
fn apply_removes_what_the_file_does_not_have_only_if_it_is_told_to() {
    let stage = WithFile::new(VM1);
    stage.changed(&["add", "disk", "vm7", "ram=1M"]);
    let file = stage.0.scratch.word("a.toml");
    let (code, said) = stage.0.ctl(&["apply", &file]);
    assert!(
        code == 1 && said.contains("disk vm7") && said.contains("--remove"),
        "{said}"
    );
    assert!(stage.has("vm7"));
    let would = "would remove disk vm7\n".to_owned();
    assert_eq!(stage.0.ctl(&["apply", &file, "--dry-run"]), (0, would));
    let done = "remove disk vm7\n".to_owned();
    assert_eq!(stage.0.ctl(&["apply", &file, "--remove"]), (0, done));
    stage.0.daemon.stop();
}
