//! Images with librbd's own encryption: what is written there is what `luks=` reads of the image's bytes, and the other way
//! round.

use std::time::{Duration, Instant};

use super::cluster::Ceph;
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::run;
use crate::common::{Daemon, Scratch};
use crate::luks::keys::{ctl, start};
use crate::luks::refused;
use crate::nbd_disk::do_everything;

/// Ceph 16's command leaves out a newline at the end.
const KEY: &str = "a passphrase of some bytes";

fn client(scratch: &Scratch) -> Client {
    Client::connect(&scratch.path("nbd.sock"), "x").expect("it is served")
}

#[test]
fn image_with_librbds_encryption_is_the_one_that_luks_has_of_its_bytes() {
    let Some(ceph) = Ceph::find() else { return };
    let scratch = Scratch::new();
    let key = scratch.word("key");
    std::fs::write(&key, KEY).expect("a file");
    for (name, back, format) in [("two", "two-back", "luks2"), ("one", "one-back", "luks1")] {
        let image = ceph.image(name, "48M");
        ceph.rbd(&["encryption", "format", image.name, format, &key]);
        let keys = format!(",encryption={format},key={key}");
        let daemon = Daemon::serve(&scratch, &[&ceph.disk("x", image.name, &keys)]);
        do_everything(&daemon.uri("x"));
        let mut there = client(&scratch);
        assert!(there.size() < 48 << 20, "the header is no part of it");
        for number in 0..64 {
            there
                .write(number * BLOCK as u64, &block(number, 1))
                .expect("a write");
        }
        // Inside of a sector.
        there.write(512, &[7; 1024]).expect("a write");
        there.flush().expect("a flush");
        let map = run("nbdinfo", &["--map", "--totals", &daemon.uri("x")]).stdout;
        assert!(map.contains("data") && !map.contains("hole"), "{map}");
        assert!(!daemon.said().contains(KEY), "{}", daemon.said());
        let size = there.size();
        drop(there);
        daemon.stop();
        let exported = scratch.word(&format!("{name}.raw"));
        ceph.rbd(&["export", image.name, &exported]);
        let stored = std::fs::read(&exported).expect("the export");
        assert!(
            !stored
                .windows(BLOCK)
                .step_by(512)
                .any(|bytes| bytes == block(9, 1)),
            "it is stored as it is"
        );
        let raw = format!("name=raw,file={exported}");
        let daemon = Daemon::serve(&scratch, &[&format!("name=x,luks=raw,key={key}"), &raw]);
        let mut there = client(&scratch);
        assert_eq!(there.size(), size);
        let mut first = block(0, 1);
        first[512..1536].fill(7);
        assert!(there.read(0, BLOCK).expect("a read") == first);
        for number in 1..64 {
            assert!(
                there.read(number * BLOCK as u64, BLOCK).expect("a read") == block(number, 1),
                "block {number}"
            );
        }
        there.write(0, &block(0, 2)).expect("a write");
        there.flush().expect("a flush");
        drop(there);
        daemon.stop();
        drop(image);
        let image = ceph.imported(back, &exported);
        let read_only = format!("{keys},read_only=on");
        let daemon = Daemon::serve(&scratch, &[&ceph.disk("x", image.name, &read_only)]);
        let mut there = client(&scratch);
        assert!(there.read(0, BLOCK).expect("a read") == block(0, 2));
        assert!(there.read(BLOCK as u64, BLOCK).expect("a read") == block(1, 1));
        drop(there);
        daemon.stop();
    }
}

#[test]
fn image_whose_encryption_cannot_be_loaded_is_refused_alone() {
    let Some(ceph) = Ceph::find() else { return };
    let scratch = Scratch::new();
    let (key, wrong) = (scratch.word("key"), scratch.word("wrong"));
    std::fs::write(&key, KEY).expect("a file");
    std::fs::write(&wrong, "another").expect("a file");
    let image = ceph.image("refused", "32M");
    ceph.rbd(&["encryption", "format", image.name, "luks2", &key]);
    let plain = ceph.image("plain", "32M");
    for (image, keys, wanted) in [
        (
            image.name,
            format!(",encryption=luks2,key={wrong}"),
            "no key slot opens with this key",
        ),
        (
            image.name,
            format!(",encryption=luks2,key={key}.not"),
            "read the file of its key (key=)",
        ),
        (
            image.name,
            format!(",encryption=luks1,key={key}"),
            "load its encryption",
        ),
        (
            plain.name,
            format!(",encryption=luks2,key={key}"),
            "there is no header of this format",
        ),
        (
            image.name,
            ",encryption=luks2".to_owned(),
            "encryption=luks2 rejected: needs key=",
        ),
        (
            image.name,
            format!(",key={key}"),
            "needs encryption=luks2 or luks1",
        ),
        (
            image.name,
            format!(",encryption=aes,key={key}"),
            "luks2, luks1 or off",
        ),
    ] {
        let said = refused(&scratch, &[ceph.disk("x", image, &keys)]);
        assert!(
            said.contains(wanted) && !said.contains(KEY),
            "{keys}: {wanted}: {said}"
        );
    }
    // A change of a running daemon, and growth.
    let daemon = start(&scratch, &["name=other,ram=1M".to_owned()], &["--sandbox", "off"]);
    let disk = ceph.disk("x", image.name, "");
    let keys = disk.split(',').skip(1).map(str::to_owned);
    let add = |key: &str| {
        let more = ["encryption=luks2".to_owned(), format!("key={key}")];
        let words: Vec<String> = keys.clone().chain(more).collect();
        let words = words.iter().map(String::as_str);
        ctl(
            &scratch,
            &["add", "disk", "x"].into_iter().chain(words).collect::<Vec<_>>(),
        )
    };
    let said = add(&wrong);
    assert!(
        !said.success && said.stderr.contains("no key slot opens"),
        "{}",
        said.stderr
    );
    let said = add(&key);
    assert!(said.success, "{}", said.stderr);
    let before = client(&scratch).size();
    let size = (before + (8 << 20)).to_string();
    let said = ctl(&scratch, &["resize", "x", &size]);
    assert!(
        !said.success && said.stderr.contains("make the image larger by `rbd resize`"),
        "{}",
        said.stderr
    );
    ceph.rbd(&["resize", "--size", "40M", image.name]);
    let until = Instant::now() + Duration::from_secs(20);
    while client(&scratch).size() != before + (8 << 20) {
        assert!(Instant::now() < until, "{} bytes", client(&scratch).size());
    }
    client(&scratch)
        .write(before + (4 << 20), &block(1, 1))
        .expect("a write behind the former end");
    daemon.stop();
}
