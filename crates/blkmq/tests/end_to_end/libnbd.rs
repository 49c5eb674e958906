//! Tests whether libnbd's tools and nbdkit's NBD plugin report the disks correctly and copy them without an
//! error.

use std::path::Path;

use serde_json::Value;

use crate::common::tools::{installed, run};
use crate::common::{Daemon, Scratch};

#[test]
fn nbdinfo_sees_size_flags_and_contexts() {
    if !installed(&["nbdinfo"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.image("vm1.raw", 64 * MIB);
    let daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={image}")]);
    let info = json("nbdinfo", &["--json", &daemon.uri("vm1")]);
    assert_eq!(info["protocol"], "newstyle-fixed");
    assert_eq!(info["structured"], true);
    let export = &info["exports"][0];
    assert_eq!(export["export-size"], 64 * MIB);
    assert_eq!(export["is_read_only"], false);
    for can in [
        "flush",
        "fua",
        "trim",
        "zero",
        "multi_conn",
        "cache",
        "df",
        "fast_zero",
    ] {
        assert_eq!(export[format!("can_{can}")], true, "can_{can}");
    }
    assert_eq!(export["contexts"], serde_json::json!(["base:allocation"]));
    let minimum = export["block_size_minimum"].as_u64().expect("a smallest block");
    let preferred = export["block_size_preferred"]
        .as_u64()
        .expect("a preferred block");
    let maximum = export["block_size_maximum"].as_u64().expect("a largest block");
    assert!(
        minimum.is_power_of_two() && minimum <= 512,
        "smallest block {minimum}"
    );
    assert!(
        preferred.is_power_of_two() && preferred >= 4096,
        "preferred block {preferred}"
    );
    assert!(maximum >= MIB, "largest block {maximum}");
    daemon.stop();
}

#[test]
fn nbdinfo_lists_every_disk() {
    if !installed(&["nbdinfo"]) {
        return;
    }
    let scratch = Scratch::new();
    let daemon = Daemon::serve(&scratch, &["name=a,ram=8M", "name=b,ram=16M", "name=c,null=1G"]);
    let server = daemon.uri("a").replacen("/a?", "/?", 1);
    let info = json("nbdinfo", &["--list", "--json", &server]);
    let exports = info["exports"].as_array().expect("a list of exports");
    let mut seen: Vec<(&str, u64)> = exports
        .iter()
        .map(|export| {
            (
                export["export-name"].as_str().unwrap_or("?"),
                export["export-size"].as_u64().unwrap_or(0),
            )
        })
        .collect();
    seen.sort_unstable();
    assert_eq!(seen, [("a", 8 * MIB), ("b", 16 * MIB), ("c", 1024 * MIB)]);
    for export in exports {
        let description = export["description"].as_str().unwrap_or_default();
        assert!(!description.is_empty(), "no description: {export}");
    }
    daemon.stop();
}

#[test]
fn read_only_disk_says_so_and_refuses_writes() {
    if !installed(&["nbdinfo", "nbdcopy"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.noisy_image("vm1.raw", 6 * MIB, 5);
    let daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={image},ro=on")]);
    let info = json("nbdinfo", &["--json", &daemon.uri("vm1")]);
    assert_eq!(info["exports"][0]["is_read_only"], true);
    let mut client =
        crate::common::nbd::Client::connect(&scratch.path("nbd.sock"), "vm1").expect("a reader may connect");
    let refused = client
        .write(0, &[0; 4096])
        .expect_err("a write to a read-only disk is refused");
    assert_eq!(refused.raw_os_error(), Some(1), "EPERM was wanted: {refused}");
    run("nbdcopy", &[&daemon.uri("vm1"), &scratch.word("copy.raw")]);
    assert_same(&image, &scratch.word("copy.raw"));
    daemon.stop();
}

#[test]
fn nbdinfo_map_shows_data_where_it_was_written_and_holes_elsewhere() {
    if !installed(&["nbdinfo"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.image("file.raw", 16 * MIB);
    let daemon = Daemon::serve(
        &scratch,
        &[&format!("name=file,file={image}"), "name=ram,ram=16M"],
    );
    for disk in ["file", "ram"] {
        let mut client = crate::common::nbd::Client::connect(&scratch.path("nbd.sock"), disk)
            .expect("the daemon serves it");
        client.write(4 * MIB, &vec![7; MIB as usize]).expect("a write");
        client.flush().expect("a flush");
        let map = json("nbdinfo", &["--map", "--json", &daemon.uri(disk)]);
        let extents = map.as_array().expect("a list of extents");
        let covered: u64 = extents
            .iter()
            .map(|extent| extent["length"].as_u64().unwrap_or(0))
            .sum();
        assert_eq!(covered, 16 * MIB, "{disk}: the map covers all of it");
        let data: u64 = extents
            .iter()
            .filter(|extent| extent["type"] == 0)
            .map(|e| e["length"].as_u64().unwrap())
            .sum();
        assert_eq!(data, MIB, "{disk}: {map}");
        let first = extents
            .iter()
            .find(|extent| extent["type"] == 0)
            .expect("an extent with data");
        assert_eq!(first["offset"], 4 * MIB, "{disk}");
    }
    daemon.stop();
}

#[test]
fn nbdcopy_carries_an_image_there_and_back_over_four_connections() {
    if !installed(&["nbdcopy"]) {
        return;
    }
    let scratch = Scratch::new();
    let original = scratch.noisy_image("original.raw", 48 * MIB, 1);
    let image = scratch.image("vm1.raw", 48 * MIB);
    let daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={image}"), "name=ram,ram=48M"]);
    for disk in ["vm1", "ram"] {
        let (uri, copy) = (daemon.uri(disk), scratch.word("copy.raw"));
        run("nbdcopy", &["--connections=4", "--flush", &original, &uri]);
        run("nbdcopy", &["--connections=4", &uri, &copy]);
        assert_same(&original, &copy);
    }
    daemon.stop();
    assert_same(&original, &image);
}

#[test]
fn nbdcopy_carries_one_disk_to_another_of_the_same_daemon() {
    if !installed(&["nbdcopy"]) {
        return;
    }
    let scratch = Scratch::new();
    let from = scratch.noisy_image("from.raw", 24 * MIB, 3);
    let to = scratch.image("to.raw", 24 * MIB);
    let disks = [
        format!("name=from,file={from},ro=on"),
        format!("name=to,file={to}"),
    ];
    let daemon = Daemon::serve(&scratch, &[&disks[0], &disks[1]]);
    run("nbdcopy", &["--flush", &daemon.uri("from"), &daemon.uri("to")]);
    daemon.stop();
    assert_same(&from, &to);
}

#[test]
fn nbdkit_as_a_client_in_between_changes_nothing() {
    if !installed(&["nbdkit", "nbdcopy"]) {
        return;
    }
    let scratch = Scratch::new();
    let original = scratch.noisy_image("original.raw", 24 * MIB, 2);
    let image = scratch.image("vm1.raw", 24 * MIB);
    let daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={image}")]);
    let copy = scratch.word("copy.raw");
    let upstream = format!("uri={}", daemon.uri("vm1"));
    let errand = format!("nbdcopy --flush '{original}' \"$uri\" && nbdcopy \"$uri\" '{copy}'");
    run("nbdkit", &["-U", "-", "nbd", &upstream, "--run", &errand]);
    assert_same(&original, &copy);
    daemon.stop();
    assert_same(&original, &image);
}

fn json(tool: &str, words: &[&str]) -> Value {
    let said = run(tool, words);
    serde_json::from_str(&said.stdout).unwrap_or_else(|error| panic!("{tool}: {error}:\n{}", said.stdout))
}

/// Asserts that both files are equal; otherwise reports where they first differ.
fn assert_same(left: &str, right: &str) {
    let read = |name: &str| std::fs::read(Path::new(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    let (left_bytes, right_bytes) = (read(left), read(right));
    assert_eq!(
        left_bytes.len(),
        right_bytes.len(),
        "{left} and {right} differ in size"
    );
    let differs = left_bytes
        .iter()
        .zip(&right_bytes)
        .position(|(one, other)| one != other);
    assert_eq!(differs, None, "{left} and {right} differ first at this byte");
}

const MIB: u64 = 1 << 20;
