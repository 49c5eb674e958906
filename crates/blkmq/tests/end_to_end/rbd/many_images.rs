//! Tests that a host with many images is served again soon after its daemon was killed. `BLKMQ_RBD_IMAGES=50` is the long
//! form, on a cluster of `cargo xtask ceph --bluestore --cephx --watch 30`, where watchers are forgotten as late as usual.

use std::time::{Duration, Instant};

use super::cluster::Ceph;
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::{Daemon, Scratch};

#[test]
fn images_of_a_daemon_that_was_killed_are_opened_again_side_by_side() {
    let Some(ceph) = Ceph::find() else { return };
    let names: Vec<String> = (0..images()).map(|number| format!("killed{number}")).collect();
    for name in &names {
        ceph.rbd(&["create", "--size", "8M", name]);
    }
    let disks: Vec<String> = names.iter().map(|name| ceph.disk(name, name, "")).collect();
    let disks: Vec<&str> = disks.iter().map(String::as_str).collect();
    let scratch = Scratch::new();
    let begun = Instant::now();
    let daemon = Daemon::serve(&scratch, &disks);
    let free = begun.elapsed();
    let connect = |name| Client::connect(&scratch.path("nbd.sock"), name).expect("it is served");
    for (number, name) in (0..).zip(&names) {
        connect(name)
            .write_through(0, &block(0, number))
            .expect("a write");
    }
    daemon.kill();
    drop(daemon);
    let begun = Instant::now();
    let daemon = Daemon::serve(&scratch, &disks);
    let locked = begun.elapsed();
    println!(
        "{} images: opened in {free:.1?}, and in {locked:.1?} after a kill; watchers are forgotten after {:?}",
        names.len(),
        ceph.watch_time()
    );
    for (number, name) in (0..).zip(&names) {
        let found = connect(name).read(0, BLOCK).expect("a read");
        assert!(
            found == block(0, number),
            "{name}: a write that was acknowledged is lost"
        );
    }
    // One after the other, each would take a second.
    let most = ceph.watch_time() + Duration::from_secs(names.len() as u64 / 2);
    assert!(locked < most, "{} images after {locked:?}", names.len());
    daemon.stop();
    for name in &names {
        ceph.rbd(&["rm", "--no-progress", name]);
    }
}

fn images() -> u64 {
    match std::env::var("BLKMQ_RBD_IMAGES") {
        Ok(number) => number.parse().expect("BLKMQ_RBD_IMAGES is a number"),
        Err(_) => 20,
    }
}
