//! Tests which disks in a cluster another daemon may take over: read-only ones. This process has the lock of
//! a writable one, and the other daemon is refused before any client notices.

use std::time::Duration;

use super::cluster::Ceph;
use crate::common::daemon::serve_command;
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::output_within;
use crate::common::{Daemon, Scratch};
use crate::upgrade::load::Load;

fn words(scratch: &Scratch, disk: &str, how: &str) -> Vec<String> {
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let upgrade = format!("unix:{}", scratch.word("up.sock"));
    ["--disk", disk, "--nbd", &nbd, how, &upgrade]
        .map(str::to_owned)
        .to_vec()
}

fn start(scratch: &Scratch, disk: &str, how: &str) -> Daemon {
    let words = words(scratch, disk, how);
    Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn disk_that_is_written_is_not_handed_over_and_its_clients_go_on() {
    let Some(ceph) = Ceph::find() else { return };
    let scratch = Scratch::new();
    let image = ceph.image("not-handed-over", "32M");
    let disk = ceph.disk("vm1", image.name, "");
    let daemon = start(&scratch, &disk, "--upgrade-socket");
    let load = Load::start(&scratch.path("nbd.sock"), "vm1", 2);
    let words = words(&scratch, &disk, "--take-over");
    for _ in 0..2 {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        // It must not wait for the lock.
        let output = output_within(&mut serve_command(&words), SOON);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "it took over: {said}");
        assert!(said.contains(REFUSAL) && said.contains("vm1"), "{said}");
    }
    daemon_goes_on(&scratch);
    assert!(load.stop() > 0);
    daemon.stop();
}

fn daemon_goes_on(scratch: &Scratch) {
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    let last = client.size() - BLOCK as u64;
    client.write(last, &block(1, 1)).expect("a write");
    assert!(client.read(last, BLOCK).expect("a read") == block(1, 1));
}

#[test]
fn disk_that_is_read_alone_is_handed_over_with_its_client() {
    let Some(ceph) = Ceph::find() else { return };
    let scratch = Scratch::new();
    let image = ceph.image("handed-over", "8M");
    let first = Daemon::serve(&scratch, &[&ceph.disk("vm1", image.name, "")]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    client.write(0, &block(0, 1)).expect("a write");
    drop(client);
    first.stop();
    ceph.rbd(&["snap", "create", "--no-progress", "handed-over@then"]);
    for disk in [
        ceph.disk("vm1", image.name, ",ro=on"),
        ceph.disk("vm1", "handed-over@then", ""),
    ] {
        let mut old = start(&scratch, &disk, "--upgrade-socket");
        let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
        assert!(client.read(0, BLOCK).expect("a read") == block(0, 1));
        let new = start(&scratch, &disk, "--take-over");
        assert!(old.ended_within(LONG).success(), "{}", old.said());
        assert!(client.read(0, BLOCK).expect("the same connection") == block(0, 1));
        assert!(client.write(0, &block(0, 2)).is_err());
        new.stop();
    }
}

const REFUSAL: &str =
    "is held by this process's connection to the cluster; remove the disk, or restart the daemon";
const SOON: Duration = Duration::from_secs(10);
const LONG: Duration = Duration::from_secs(60);
