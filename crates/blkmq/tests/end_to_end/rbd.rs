//! Tests what disks in a Ceph cluster must do: everything that other disks do, and more when the cluster
//! hangs or dies, or another client needs the image. Needs a cluster: `cargo xtask ceph --test`.

mod cluster;
mod encryption;
mod failures;
mod file_systems;
mod guests;
mod hangs;
mod locks;
mod many_images;
mod upgrades;

use std::time::{Duration, Instant};

use rustix::process::Signal;

use self::cluster::{Ceph, library};
use crate::bench::{assert_measured, rows};
use crate::common::daemon::{program, serve_command};
use crate::common::nbd::Client;
use crate::common::pattern::block;
use crate::common::tools::{installed, lab, output_within, run};
use crate::common::{Daemon, Scratch};
use crate::fio::{VERIFY, fio};
use crate::nbd_disk::{copy_both_ways, do_everything};

#[test]
fn disk_in_a_cluster_does_everything() {
    let Some(ceph) = Ceph::find() else { return };
    if !installed(&["qemu-io", "qemu-img", "nbdcopy", "fio"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = ceph.image("everything", "16M");
    let daemon = Daemon::serve(&scratch, &[&ceph.disk("x", image.name, "")]);
    do_everything(&daemon.uri("x"));
    copy_both_ways(&scratch, &daemon.uri("x"));
    let words = "--rw=randwrite --bsrange=512-128k --size=4m --offset_increment=4m --numjobs=4 --iodepth=16 --fsync=64";
    fio(&daemon.uri("x"), words, VERIFY);
    daemon.stop();
}

#[test]
fn image_converted_to_the_disk_is_what_ceph_exports() {
    let Some(ceph) = Ceph::find() else { return };
    if !installed(&["qemu-img", "nbdinfo"]) {
        return;
    }
    let scratch = Scratch::new();
    // Small objects, so that the hole in the middle contains whole ones.
    let image = ceph.image_with("converted", "24M", &["--object-size", "1M"]);
    let noise = scratch.noisy_image("noise.raw", 24 << 20, 3);
    let daemon = Daemon::serve(&scratch, &[&ceph.disk("x", image.name, "")]);
    let uri = daemon.uri("x");
    run(
        "qemu-img",
        &["convert", "-n", "-f", "raw", "-O", "raw", &noise, &uri],
    );
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &noise, &uri]);
    let map = run("nbdinfo", &["--map", &uri]).stdout;
    assert!(map.contains("hole,zero") && map.contains("data"), "{map}");
    daemon.stop();
    let exported = scratch.word("exported.raw");
    ceph.rbd(&["export", image.name, &exported]);
    let same = std::fs::read(noise).expect("the image") == std::fs::read(exported).expect("the export");
    assert!(same, "Ceph has something else than was written");
}

#[test]
fn snapshot_is_read_only_and_stays_what_it_was() {
    let Some(ceph) = Ceph::find() else { return };
    let scratch = Scratch::new();
    let image = ceph.image("snapped", "8M");
    let disk = ceph.disk("x", image.name, "");
    let daemon = Daemon::serve(&scratch, &[&disk]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "x").expect("it is served");
    client.write(0, &block(0, 1)).expect("a write");
    ceph.rbd(&["snap", "create", &format!("{}@before", image.name)]);
    client.write(0, &block(0, 2)).expect("a write after the snapshot");
    drop(client);
    daemon.stop();
    let snapshot = ceph.disk("old", "snapped@before", "");
    let daemon = Daemon::serve(&scratch, &[&disk, &snapshot]);
    let read = |disk: &str| {
        let mut client = Client::connect(&scratch.path("nbd.sock"), disk).expect("it is served");
        let found = client.read(0, 4096).expect("a read");
        (
            found,
            client
                .write(0, &block(0, 3))
                .map_err(|error| error.raw_os_error()),
        )
    };
    assert!(
        read("old") == (block(0, 1), Err(Some(1))),
        "EPERM, and what was there before"
    );
    assert!(read("x").0 == block(0, 2));
    daemon.stop();
}

#[test]
fn image_that_grows_is_larger_for_whoever_connects_next() {
    let Some(ceph) = Ceph::find() else { return };
    let scratch = Scratch::new();
    let image = ceph.image("grows", "8M");
    let daemon = Daemon::serve(&scratch, &[&ceph.disk("x", image.name, "")]);
    let size = || {
        Client::connect(&scratch.path("nbd.sock"), "x")
            .expect("it is served")
            .size()
    };
    assert_eq!(size(), 8 << 20);
    ceph.rbd(&["resize", "--size", "16M", image.name]);
    let end = Instant::now() + LONG;
    while size() != 16 << 20 {
        assert!(
            Instant::now() < end,
            "still {} bytes; it said:\n{}",
            size(),
            daemon.said()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut client = Client::connect(&scratch.path("nbd.sock"), "x").expect("it is served");
    client
        .write((16 << 20) - 4096, &block(1, 1))
        .expect("a write at the new end");
    daemon.stop();
}

#[test]
fn images_of_a_pool_share_a_connection_and_a_queue() {
    let Some(ceph) = Ceph::find() else { return };
    let scratch = Scratch::new();
    let images = [ceph.image("one", "8M"), ceph.image("two", "8M")];
    let disks: Vec<String> = images
        .iter()
        .map(|image| ceph.disk(image.name, image.name, ""))
        .collect();
    let disks: Vec<&str> = disks.iter().map(String::as_str).collect();
    let mut daemon = Daemon::serve(&scratch, &disks);
    assert_eq!(daemon.said().matches("connected to cluster").count(), 1);
    for (number, image) in (1..).zip(&images) {
        let mut client = Client::connect(&scratch.path("nbd.sock"), image.name).expect("it is served");
        client.write(0, &block(number, number)).expect("a write");
        assert!(client.read(0, 4096).expect("a read") == block(number, number));
    }
    daemon.signal(Signal::USR1);
    let is_queue = |line: &str| line.starts_with("queue ");
    assert!(daemon.wait_for(LONG, is_queue), "{}", daemon.said());
    let said = daemon.said();
    let queues: Vec<&str> = said.lines().filter(|line| is_queue(line)).collect();
    assert!(queues.len() == 1 && queues[0].contains("-rbd"), "{queues:?}");
    daemon.stop();
}

#[test]
fn bench_measures_servers_and_shares() {
    let Some(ceph) = Ceph::find() else { return };
    let Some(lab) = lab() else { return };
    if !installed(&["fio"]) {
        return;
    }
    let _images = ["bench", "bench-1", "bench-2", "bench-3"].map(|name| ceph.image(name, "8M"));
    let conf = ceph.conf();
    let words = ["rbd", "--conf", &conf, "--what", "nbd,shares", "--depth", "4"];
    let rows = rows(&lab, &Scratch::new(), &words);
    rows.iter().for_each(assert_measured);
    let is_ours = |row: &&serde_json::Value| row["case"] == "nbd/randwrite/depth=4" && row["side"] == "ours";
    assert_eq!(rows.iter().filter(is_ours).count(), 1, "{rows:?}");
    let shares: Vec<_> = rows.iter().filter(|row| row["case"] == "shares/1:2:4").collect();
    assert!(shares.len() == 2 && shares.iter().all(|row| row["share_error_percent"].is_number()));
}

#[test]
fn fault_is_reported_with_the_image_and_what_to_do() {
    let Some(ceph) = Ceph::find() else { return };
    let _image = ceph.image_with("unlockable", "8M", &["--image-feature", "layering"]);
    let refused = |disk: &str, words: &str| {
        let said = check(disk);
        assert!(said.contains(words), "{disk}:\n{said}");
    };
    refused(
        &ceph.disk("x", "missing", ""),
        "rbd rbd/missing: cannot open the image: No such file",
    );
    let enable = "rbd feature enable rbd/unlockable exclusive-lock";
    let said = refused_start(&ceph.disk("x", "unlockable", ""));
    assert!(said.contains(enable), "{said}");
    refused(&ceph.disk("x", "unlockable", ""), enable);
    refused(
        &ceph.disk("x", "unlockable", ",option.rbd_no_such=1"),
        "cannot set Ceph's option rbd_no_such to 1",
    );
    refused(
        "name=x,rbd=rbd/x,conf=/nowhere/ceph.conf",
        "cannot read the configuration (conf=)",
    );
    if ceph.has_keys() {
        let stranger = format!("name=x,rbd=rbd/x,conf={},id=stranger", ceph.conf());
        refused(&stranger, "keyring=");
    }
    for keys in [",lock=off", ",read_only=on"] {
        let disk = ceph.disk("x", "unlockable", keys);
        let checked = output_within(
            serve_command(&["--check", "--nbd", "unix:x"]).args(["--disk", &disk]),
            LONG,
        );
        assert!(checked.status.success(), "{keys}: {checked:?}");
    }
    let daemon_of = Scratch::new();
    Daemon::serve(&daemon_of, &[&ceph.disk("x", "unlockable", ",lock=off")]).stop();
}

#[test]
fn without_librbd_the_package_is_named_and_other_disks_are_served() {
    let said = match library() {
        None => check("name=x,rbd=rbd/x"),
        Some(_) if !rustix::process::getuid().is_root() || !installed(&["unshare", "mount"]) => {
            return blkmq_testkit::skip("librbd is installed, and only root can hide it");
        }
        Some(library) => {
            let script = "mount --bind /dev/null \"$0\" && exec \"$@\"";
            let mut command = std::process::Command::new("unshare");
            command
                .args(["-m", "sh", "-c", script])
                .arg(library)
                .arg(program());
            said_by(command.args(CHECK).args(["--disk", "name=x,rbd=rbd/x"]))
        }
    };
    assert!(said.contains("apt-get install librbd1"), "{said}");
}

/// The daemon's message about a disk that it refuses.
fn check(disk: &str) -> String {
    said_by(serve_command(&["--check", "--nbd", "unix:x"]).args(["--disk", disk]))
}

/// The message of a daemon that does not start because of a disk: a check leaves locks alone.
fn refused_start(disk: &str) -> String {
    let scratch = Scratch::new();
    let address = format!("unix:{}", scratch.word("nbd.sock"));
    said_by(serve_command(&["--nbd", &address]).args(["--disk", disk]))
}

fn said_by(command: &mut std::process::Command) -> String {
    let output = output_within(command, LONG);
    assert!(!output.status.success(), "{command:?} is content");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

const CHECK: [&str; 4] = ["serve", "--check", "--nbd", "unix:x"];
const LONG: Duration = Duration::from_secs(60);
