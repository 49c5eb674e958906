//! Tests whether QEMU's tools read, write, discard and map the disks like any others.

use serde_json::Value;

use crate::common::tools::{installed, run, try_run};
use crate::common::{Daemon, Scratch};

#[test]
fn qemu_img_converts_to_the_disk_and_finds_it_equal() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let original = scratch.noisy_image("original.raw", 24 * MIB, 11);
    let image = scratch.image("vm1.raw", 24 * MIB);
    let daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={image}")]);
    let uri = daemon.uri("vm1");
    run(
        "qemu-img",
        &["convert", "-n", "-f", "raw", "-O", "raw", &original, &uri],
    );
    run(
        "qemu-img",
        &["compare", "-f", "raw", "-F", "raw", &original, &uri],
    );

    // Through QEMU's own format and back, so that its metadata is written this way too.
    let packed = scratch.word("packed.qcow2");
    run(
        "qemu-img",
        &["convert", "-f", "raw", "-O", "qcow2", &uri, &packed],
    );
    run(
        "qemu-img",
        &["compare", "-f", "qcow2", "-F", "raw", &packed, &uri],
    );

    // Checks that the comparison detects a difference.
    let other = scratch.noisy_image("other.raw", 24 * MIB, 12);
    assert!(!try_run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &other, &uri]).success);
    daemon.stop();
}

#[test]
fn qemu_img_maps_what_is_data_and_what_is_not() {
    if !installed(&["qemu-img", "qemu-io"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.image("vm1.raw", 16 * MIB);
    let daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={image}")]);
    let uri = daemon.uri("vm1");
    qemu_io(&uri, &["write -P 0x5a 8M 2M", "flush"]);
    let said = run("qemu-img", &["map", "--output=json", "-f", "raw", &uri]);
    let map: Value = serde_json::from_str(&said.stdout).expect("qemu-img prints JSON");
    let extents = map.as_array().expect("a list of extents");
    let data: Vec<(u64, u64)> = extents
        .iter()
        .filter(|extent| extent["data"] == true)
        .map(|extent| {
            (
                extent["start"].as_u64().expect("a start"),
                extent["length"].as_u64().expect("a length"),
            )
        })
        .collect();
    assert_eq!(data, [(8 * MIB, 2 * MIB)], "{map}");
    daemon.stop();
}

#[test]
fn qemu_io_reads_back_what_each_operation_left() {
    if !installed(&["qemu-io"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.image("file.raw", 16 * MIB);
    let daemon = Daemon::serve(
        &scratch,
        &[&format!("name=file,file={image}"), "name=ram,ram=16M"],
    );
    for disk in ["file", "ram"] {
        let uri = daemon.uri(disk);
        qemu_io(
            &uri,
            &[
                // Plain writes that overlap, of sizes that are not multiples of a block.
                "write -P 0x11 0 1M",
                "write -P 0x22 512 1536",
                "write -P 0x33 65024 70144",
                "read -P 0x11 0 512",
                "read -P 0x22 512 1536",
                "read -P 0x11 2048 62976",
                "read -P 0x33 65024 70144",
                // Forced unit access and flush.
                "write -f -P 0x44 2M 64k",
                "flush",
                "read -P 0x44 2M 64k",
                // Zeroes: kept allocated, and with permission to punch a hole.
                "write -z 256k 64k",
                "read -P 0 256k 64k",
                "write -z -u 2M 32k",
                "read -P 0 2M 32k",
                "read -P 0x44 2129920 32k",
                // A discard; only the next write checks the content that it leaves.
                "discard 4M 4M",
                "write -P 0x55 5M 4k",
                "read -P 0x55 5M 4k",
                // Several requests in flight at once.
                "aio_write -P 0x66 8M 1M",
                "aio_write -P 0x77 9M 1M",
                "aio_write -z 10M 1M",
                "aio_flush",
                "read -P 0x66 8M 1M",
                "read -P 0x77 9M 1M",
                "read -P 0 10M 1M",
                // The very end of the disk.
                "write -P 0x88 16776704 512",
                "read -P 0x88 16776704 512",
            ],
        );
    }
    daemon.stop();
}

#[test]
fn qemu_io_notices_a_wrong_pattern() {
    if !installed(&["qemu-io"]) {
        return;
    }
    let scratch = Scratch::new();
    let daemon = Daemon::serve(&scratch, &["name=ram,ram=1M"]);
    let said = try_run(
        "qemu-io",
        &[
            "-f",
            "raw",
            "-c",
            "write -P 1 0 4k",
            "-c",
            "read -P 2 0 4k",
            &daemon.uri("ram"),
        ],
    );
    assert!(
        !said.success && said.stdout.contains("Pattern verification failed"),
        "{}",
        said.stdout
    );
    daemon.stop();
}

/// Runs the commands in order and checks that each succeeds.
pub(crate) fn qemu_io(uri: &str, commands: &[&str]) {
    let mut words = vec!["-f", "raw"];
    for command in commands {
        words.extend(["-c", command]);
    }
    words.push(uri);
    let said = run("qemu-io", &words);
    // Some failures are only printed.
    for bad in ["failed", "error", "Input/output", "Invalid"] {
        assert!(!said.stdout.contains(bad), "qemu-io said:\n{}", said.stdout);
    }
}

const MIB: u64 = 1 << 20;
