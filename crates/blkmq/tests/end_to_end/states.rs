//! What `ctl list disks` and the metrics say of disks whose drives are elsewhere or whose files are not where they were, and of
//! disks on others.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use blkmq::control::client::Client as Control;
use blkmq_torture::mount::{Cache, Mount};
use rustix::process::Signal;
use serde_json::json;

use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::{Daemon, Scratch};
use crate::metrics;

/// The state of each disk, by its name.
fn states(scratch: &Scratch) -> BTreeMap<String, String> {
    let mut control = Control::connect(&scratch.path("control.sock")).expect("it is served");
    let disks = control.call("disk.list", &json!({})).expect("an answer");
    let text = |disk: &serde_json::Value, key: &str| disk[key].as_str().expect("a text").to_owned();
    let disks = disks.as_array().expect("a list").iter();
    disks
        .map(|disk| (text(disk, "name"), text(disk, "state")))
        .collect()
}

/// Waits until all of these disks are in a state, and returns the states of all.
fn await_state(scratch: &Scratch, disks: &[&str], state: &str) -> BTreeMap<String, String> {
    let begun = Instant::now();
    loop {
        let found = states(scratch);
        if disks.iter().all(|disk| found[*disk] == state) {
            return found;
        }
        assert!(begun.elapsed() < LONG, "not all {state}: {found:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn serve(scratch: &Scratch, disks: &[&str]) -> Daemon {
    let [nbd, control, metrics] =
        ["nbd", "control", "metrics"].map(|of| format!("unix:{}", scratch.word(&format!("{of}.sock"))));
    let mut words = vec!["--nbd", &nbd, "--control", &control, "--metrics", &metrics];
    disks.iter().for_each(|disk| words.extend(["--disk", disk]));
    Daemon::start(&words)
}

#[test]
fn state_of_a_lost_server_is_that_of_all_disks_above_it() {
    let (far, near) = (Scratch::new(), Scratch::new());
    let server = serve(&far, &["name=a,ram=4M", "name=b,ram=4M"]);
    let on = |disk: &str| format!("nbd=nbd+unix:///{disk}?socket={}", far.word("nbd.sock"));
    let daemon = serve(
        &near,
        &[
            &format!("name=plain,{},reconnect=60s", on("a")),
            &format!("name=path,{}", on("b")),
            "name=paths,multipath=path",
            "name=local,ram=4M",
            "name=whole,linear=local+plain",
            "name=top,striped=paths+other",
            "name=other,ram=4M",
        ],
    );
    let above = ["plain", "paths", "whole", "top"];
    await_state(&near, &above, "ok");
    server.kill();
    let found = await_state(&near, &above, "gone");
    assert_eq!((&*found["local"], &*found["other"]), ("ok", "ok"));
    let server = serve(&far, &["name=a,ram=4M", "name=b,ram=4M"]);
    await_state(&near, &above, "ok");
    server.stop();
    daemon.kill();
}

#[test]
fn state_of_a_truncated_member_is_that_of_the_disk_on_it() {
    let scratch = Scratch::new();
    let image = scratch.image("vm.raw", 4 << 20);
    let daemon = serve(
        &scratch,
        &[
            &format!("name=part,file={image}"),
            "name=ram,ram=4M",
            "name=whole,striped=part+ram",
            "name=beside,ram=4M",
        ],
    );
    await_state(&scratch, &["part", "whole"], "ok");
    let file = std::fs::File::options().write(true).open(&image);
    file.expect("the image").set_len(1 << 20).expect("it shrinks");
    let mut client = Client::connect(&scratch.path("nbd.sock"), "whole").expect("it is served");
    for at in 0..8 {
        // Some of these are behind the new end.
        let _ = client.read(at << 20, BLOCK);
    }
    let found = await_state(&scratch, &["part", "whole"], "truncated");
    assert_eq!((&*found["ram"], &*found["beside"]), ("ok", "ok"));
    daemon.stop();
}

/// The states of a disk for which `blkmq_disk_state` is 1; it has a series for each state.
fn states_in_metrics(scratch: &Scratch, disk: &str) -> Vec<String> {
    let text = metrics::text(&scratch.path("metrics.sock"));
    let series = format!("blkmq_disk_state{{disk=\"{disk}\",state=\"");
    let all = text.lines().filter_map(|line| line.strip_prefix(&series));
    let values: Vec<(&str, &str)> = all.filter_map(|rest| rest.split_once("\"} ")).collect();
    assert_eq!(values.len(), STATES.len(), "{text}");
    assert!(
        STATES
            .iter()
            .all(|state| values.iter().any(|(found, _)| found == state)),
        "{values:?}"
    );
    let is_in = |(state, value): &(&str, &str)| (*value == "1.0").then(|| (*state).to_owned());
    values.iter().filter_map(is_in).collect()
}

#[test]
fn state_of_a_disk_whose_file_is_truncated_is_in_the_metrics() {
    let scratch = Scratch::new();
    let image = scratch.image("vm.raw", 4 << 20);
    let daemon = serve(&scratch, &[&format!("name=vm,file={image}"), "name=ram,ram=4M"]);
    assert_eq!(states_in_metrics(&scratch, "vm"), ["ok"]);
    let file = std::fs::File::options().write(true).open(&image);
    file.expect("the image").set_len(1 << 20).expect("it shrinks");
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm").expect("it is served");
    let _ = client.read(2 << 20, BLOCK);
    assert_eq!(states_in_metrics(&scratch, "vm"), ["truncated"]);
    assert_eq!(states_in_metrics(&scratch, "ram"), ["ok"]);
    daemon.stop();
}

#[test]
fn image_that_is_removed_moved_or_replaced_is_shown_as_such_and_logged_once() {
    let scratch = Scratch::new();
    let [removed, replaced, moved] =
        ["removed", "replaced", "moved"].map(|name| scratch.image(name, 4 << 20));
    let mut daemon = serve(
        &scratch,
        &[
            &format!("name=removed,file={removed}"),
            &format!("name=replaced,file={replaced}"),
            &format!("name=moved,file={moved}"),
            "name=ram,ram=4M",
            "name=whole,striped=removed+ram",
        ],
    );
    let mut client = Client::connect(&scratch.path("nbd.sock"), "replaced").expect("it is served");
    let of = |found: &BTreeMap<String, String>| {
        ["removed", "replaced", "moved", "whole", "ram"].map(|disk| found[disk].clone())
    };
    assert_eq!(of(&states(&scratch)), ["ok"; 5]);
    // Each kind of look finds one of them.
    std::fs::remove_file(&removed).expect("it is there");
    assert_eq!(of(&states(&scratch)), ["missing", "ok", "ok", "missing", "ok"]);
    std::fs::rename(scratch.image("new", 4 << 20), &replaced).expect("both are there");
    assert_eq!(states_in_metrics(&scratch, "replaced"), ["replaced"]);
    let aside = scratch.path("aside");
    std::fs::rename(&moved, &aside).expect("it is there");
    daemon.signal(Signal::HUP);
    let line = |file: &str, what: &str| format!("file {file:?}: {what}");
    let missing = "nothing is at its path any more";
    let is_logged = line(&moved, missing);
    assert!(daemon.wait_for(LONG, |said| said.contains(&is_logged)));
    let found = states(&scratch);
    assert_eq!(of(&found), ["missing", "replaced", "missing", "missing", "ok"]);
    // Clients go on.
    client.write(0, &block(0, 1)).expect("a write");
    assert_eq!(client.read(0, BLOCK).expect("a read"), block(0, 1));
    let mut control = Control::connect(&scratch.path("control.sock")).expect("it is served");
    for disk in ["replaced", "moved"] {
        let refused = control.call("disk.resize", &json!({"disk": disk, "size": 8 << 20}));
        let refused = refused.expect_err("nobody finds the file").to_string();
        assert!(
            refused.contains("would grow where nobody finds it"),
            "{disk}: {refused}"
        );
    }
    std::fs::rename(&aside, &moved).expect("both are there");
    let found = states(&scratch);
    assert_eq!(of(&found), ["missing", "replaced", "ok", "missing", "ok"]);
    let deleted =
        "and what is written goes to a deleted file that nobody can open again: copy it through the daemon";
    let all = [
        line(&removed, &format!("{missing}, {deleted}")),
        line(&replaced, &format!("another file is at its path, {deleted}")),
        line(
            &moved,
            &format!(
                "{missing}, and what is written goes to the one that was opened, which has another name"
            ),
        ),
        line(&moved, "is at its path again"),
    ];
    for wanted in all {
        assert!(daemon.wait_for(LONG, |said| said.contains(&wanted)), "{wanted}");
        let count = daemon.said().matches(&wanted).count();
        assert_eq!(count, 1, "{wanted}");
    }
    daemon.stop();
}

#[test]
fn truncation_by_the_server_of_a_filesystem_is_found_out_though_a_write_hides_it() {
    let scratch = Scratch::new();
    let dir = scratch.path("mnt");
    std::fs::create_dir(&dir).expect("a directory");
    let mount = match Mount::new(&dir, 4 << 20, Cache::Bypassed) {
        Ok(mount) => mount,
        Err(error) => return blkmq_testkit::skip(&format!("no FUSE here: {error}")),
    };
    let daemon = serve(&scratch, &[&format!("name=vm,file={}", mount.image().display())]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm").expect("it is served");
    client.write(0, &block(0, 1)).expect("a write");
    await_state(&scratch, &["vm"], "ok");
    // The kernel is not told.
    mount.cut(2 << 20).expect("it is shorter");
    let behind = 3 << 20;
    let _ = client.write(behind, &block(behind, 1));
    await_state(&scratch, &["vm"], "truncated");
    assert!(client.read(2 << 20, BLOCK).is_err(), "what was lost");
    daemon.stop();
}

const STATES: [&str; 9] = [
    "ok",
    "failing",
    "full",
    "missing",
    "replaced",
    "locked",
    "lock_lost",
    "truncated",
    "gone",
];
const LONG: Duration = Duration::from_secs(20);
