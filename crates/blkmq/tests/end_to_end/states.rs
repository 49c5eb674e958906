//! What `ctl list disks` says of disks whose drives are elsewhere, and of disks on others.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use blkmq::control::client::Client as Control;
use serde_json::json;

use crate::common::nbd::Client;
use crate::common::pattern::BLOCK;
use crate::common::{Daemon, Scratch};

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
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let control = format!("unix:{}", scratch.word("control.sock"));
    let mut words = vec!["--nbd", &nbd, "--control", &control];
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

const LONG: Duration = Duration::from_secs(20);
