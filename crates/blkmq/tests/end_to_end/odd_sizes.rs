//! What clients get whose requests are smaller than the blocks of the disk, or of its filesystem's direct I/O.

pub(crate) mod layers;

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::common::nbd::Client;
use crate::common::tools::{installed, run, try_run};
use crate::common::{Daemon, Scratch};

#[test]
fn clone_on_xfs_has_the_sectors_of_its_original_and_fio_finds_what_it_wrote() {
    if !installed(&["fio", "nbdinfo", "mkfs.xfs"]) {
        return;
    }
    let scratch = Scratch::new();
    let Some(xfs) = Xfs::new(&scratch) else { return };
    let (original, clone) = (xfs.image("original.raw"), xfs.image("clone.raw"));
    std::fs::write(&original, vec![7; IMAGE_BYTES]).unwrap();
    run("cp", &["--reflink=always", word(&original), word(&clone)]);
    let disks = [("original", &original), ("clone", &clone)]
        .map(|(name, path)| format!("name={name},file={},direct=on", path.display()));
    let daemon = Daemon::serve(&scratch, &[&disks[0], &disks[1]]);
    for disk in ["original", "clone"] {
        let uri = daemon.uri(disk);
        let info: Value = serde_json::from_str(&run("nbdinfo", &["--json", &uri]).stdout).unwrap();
        assert_eq!(info["exports"][0]["block_size_minimum"], 512, "{disk}");
        assert_eq!(info["exports"][0]["block_size_preferred"], 4096, "{disk}");
        for jobs in ["1", "4"] {
            let (uri, jobs) = (format!("--uri={uri}"), format!("--numjobs={jobs}"));
            let words = [
                "--name=verify",
                "--ioengine=nbd",
                &uri,
                &jobs,
                "--rw=randwrite",
                "--bsrange=512-64k",
                "--blockalign=512",
                "--size=4m",
                // Neighbours share a block.
                "--offset_increment=4194816",
                "--iodepth=16",
                "--fsync=64",
                "--verify=crc32c",
                "--verify_fatal=1",
                "--verify_state_save=0",
            ];
            run("fio", &words);
        }
    }
    daemon.stop();
    let untouched = std::fs::read(&original).unwrap();
    assert!(untouched[IMAGE_BYTES - (1 << 20)..] == vec![7; 1 << 20]);
}

#[test]
fn clone_that_is_made_while_its_original_is_served_changes_nothing_for_clients() {
    let scratch = Scratch::new();
    let Some(xfs) = Xfs::new(&scratch) else { return };
    let original = xfs.image("original.raw");
    let mut content = vec![7; IMAGE_BYTES];
    std::fs::write(&original, &content).unwrap();
    let disk = format!("name=vm1,file={},direct=on", original.display());
    let daemon = Daemon::serve(&scratch, &[&disk]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").unwrap();
    for round in 0..20 {
        if round % 5 == 0 {
            let clone = xfs.image(&format!("clone{round}.raw"));
            run("cp", &["--reflink=always", word(&original), word(&clone)]);
        }
        for sector in [1, 8, 9, 23] {
            let at = (round * 16 + sector) * 512;
            content[at..at + 512].fill(round as u8);
            client.write(at as u64, &content[at..at + 512]).unwrap();
        }
        std::thread::sleep(std::time::Duration::from_millis(30));
        assert!(client.read(0, 1 << 20).unwrap() == content[..1 << 20]);
    }
    daemon.stop();
    assert!(std::fs::read(&original).unwrap() == content);
}

#[test]
fn clients_of_sectors_and_of_bytes_are_served_on_a_disk_with_blocks_of_4096() {
    let kinds = [
        "file={},direct=auto",
        "file={},direct=off",
        "ram=1M",
        "null=1M,memory=on",
    ];
    for kind in kinds {
        let scratch = Scratch::new();
        let image = scratch.image("vm1.raw", 1 << 20);
        let disk = format!("name=vm1,{},block_size=4096", kind.replace("{}", &image));
        let daemon = Daemon::serve(&scratch, &[&disk]);
        let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").unwrap();
        let mut content = vec![0; 1 << 20];
        for (value, (at, len)) in
            (1..).zip([(512, 512), (777, 100), (4095, 2), (8000, 9000), (1 << 19, 4096)])
        {
            let own = at..at + len;
            content[own.clone()].fill(value);
            client.write(at as u64, &content[own.clone()]).unwrap();
            assert!(client.read(at as u64, len).unwrap() == content[own]);
        }
        assert!(client.read(0, 1 << 20).unwrap() == content, "{kind}");
        daemon.stop();
        if kind.starts_with("file") {
            assert!(std::fs::read(&image).unwrap() == content, "{kind}");
        }
    }
}

#[test]
fn extents_of_a_disk_with_large_blocks_are_whole_blocks_through_linear_too() {
    if !installed(&["nbdinfo"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = |name: &str, at: u64| {
        let word = scratch.image(name, 1 << 20);
        let file = std::fs::File::options().write(true).open(&word).unwrap();
        file.write_all_at(&[1; 4096], at).unwrap();
        word
    };
    let (alone, one, two) = (
        image("alone", 68 << 10),
        image("one", 1020 << 10),
        image("two", 0),
    );
    let daemon = Daemon::serve(
        &scratch,
        &[
            &format!("name=alone,file={alone},block_size=64K"),
            &format!("name=one,file={one}"),
            &format!("name=two,file={two}"),
            "name=both,linear=one+two,block_size=64K",
        ],
    );
    for (disk, expected) in [
        ("alone", vec![(0, 64, 3), (64, 64, 0), (128, 896, 3)]),
        ("both", vec![(0, 960, 3), (960, 128, 0), (1088, 960, 3)]),
    ] {
        let said = run("nbdinfo", &["--map", "--json", &daemon.uri(disk)]);
        let map: Vec<Value> = serde_json::from_str(&said.stdout).unwrap();
        let number = |extent: &Value, key: &str| extent[key].as_u64().unwrap();
        let found: Vec<_> = map
            .iter()
            .map(|extent| {
                (
                    number(extent, "offset") >> 10,
                    number(extent, "length") >> 10,
                    number(extent, "type"),
                )
            })
            .collect();
        assert_eq!(found, expected, "{disk}");
    }
    daemon.stop();
}

/// A filesystem whose files can be cloned, unmounted with this value.
struct Xfs(PathBuf);

impl Xfs {
    /// Mounts one, or says aloud why not.
    fn new(scratch: &Scratch) -> Option<Self> {
        let (image, at) = (scratch.image("xfs", 400 << 20), scratch.path("mounted"));
        std::fs::create_dir(&at).unwrap();
        let is_made = try_run("mkfs.xfs", &["-q", "-f", &image]).success
            && try_run("mount", &["-o", "loop", &image, word(&at)]).success;
        if !is_made {
            blkmq_testkit::skip("no XFS can be made and mounted (it needs root and mkfs.xfs)");
            return None;
        }
        Some(Self(at))
    }

    fn image(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Xfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

fn word(path: &Path) -> &str {
    path.to_str().expect("a path of the tests")
}

const IMAGE_BYTES: usize = 24 << 20;
