//! Tests of images with dirty bitmaps, which QEMU made or finds: they have each change of the disk, and while they do not,
//! they say so, or a backup would leave out what was written.

use blkmq_host::device::{Changed, GivenUp};

use super::replaced::replace;
use super::*;

/// Makes an image of 4 MiB whose first MiB is there, with a bitmap.
fn image(scratch: &Scratch) -> bool {
    let made = created(scratch, "image 4M");
    if made {
        let mut rig = Rig::at(&scratch.path("image"));
        assert_eq!(rig.write(Flags::NONE, 0, &[3; 1 << 20]), Status::Ok);
        rig.flush();
        drop(rig);
        qemu(scratch, "qemu-img", "bitmap --add -f qcow2 image changed").unwrap();
        assert_eq!(found(scratch, "image"), "auto");
    }
    made
}

/// What QEMU finds of the bitmap in the file as it is now: its flags, or `none`.
fn found(scratch: &Scratch, name: &str) -> String {
    std::fs::copy(scratch.path(name), scratch.path("copy")).unwrap();
    let info = qemu(scratch, "qemu-img", "info -f qcow2 copy").unwrap();
    let Some((before, _)) = info.split_once("name: changed") else {
        return "none".to_owned();
    };
    let (_, flags) = before.rsplit_once("flags:").expect("they come first");
    let words = flags
        .split_whitespace()
        .filter(|word| word.chars().all(|c| c.is_alphabetic() || c == '-'));
    words
        .filter(|word| word.len() > 1 && *word != "granularity")
        .collect::<Vec<_>>()
        .join(" ")
}

/// The changed runs of the disk of a rig: first byte and length of each.
fn changed(rig: &Rig, name: &str) -> Vec<(u64, u64)> {
    let image = rig.device.image(DiskId(0)).unwrap();
    let mut runs = Vec::new();
    image.changed(name, 0..image.size(), 1000, &mut runs).unwrap();
    let mut at = 0;
    let mut found = Vec::new();
    for Changed { len, is_changed } in runs {
        if is_changed {
            found.push((at, len));
        }
        at += len;
    }
    assert_eq!(at, image.size());
    found
}

type Change = fn(&mut Rig) -> Status;

const CHANGES: [(&str, Change, (u64, u64)); 6] = [
    (
        "in place",
        |rig| rig.write(Flags::NONE, 0, &[7; 4096]),
        (0, 65536),
    ),
    (
        "part of a sector's block",
        |rig| rig.write(Flags::NONE, 512, &[7; 512]),
        (0, 65536),
    ),
    (
        "new cluster",
        |rig| rig.write(Flags::NONE, 2 << 20, &[7; 65536]),
        (2 << 20, 65536),
    ),
    (
        "part of a new cluster, durable",
        |rig| rig.write(Flags::FUA, (3 << 20) + 512, &[7; 512]),
        (3 << 20, 65536),
    ),
    (
        "zeroing",
        |rig| rig.run(flagged(Op::WriteZeroes, Flags::NONE, 65536, 65536)),
        (65536, 65536),
    ),
    (
        "discard",
        |rig| rig.run(flagged(Op::Discard, Flags::NONE, 131_072, 131_072)),
        (131_072, 131_072),
    ),
];

#[test]
fn bitmap_has_each_change_and_says_meanwhile_that_it_is_in_use() {
    let scratch = Scratch::new("bitmap");
    for (what, change, wanted) in CHANGES {
        for is_known in [false, true] {
            if !image(&scratch) {
                return;
            }
            let mut rig = Rig::at(&scratch.path("image"));
            rig.read(0, 4 << 20);
            assert_eq!(
                found(&scratch, "image"),
                "auto",
                "{what}: nothing was changed yet"
            );
            let mut before = Vec::new();
            if is_known {
                // The second one finds the map as the first one has left it.
                assert_eq!(rig.write(Flags::NONE, 512 << 10, &[7; 4096]), Status::Ok);
                rig.read(0, 4 << 20);
                before.push((512 << 10, 65536));
            }
            assert_eq!(change(&mut rig), Status::Ok);
            // Without a flush: what a kill leaves.
            assert_eq!(found(&scratch, "image"), "in-use auto", "{what}");
            let mut all = [&before[..], &[wanted]].concat();
            all.sort_unstable();
            assert_eq!(changed(&rig, "changed"), all, "{what}");
            rig.flush();
            assert_eq!(
                found(&scratch, "image"),
                "in-use auto",
                "{what}: a flush is no end"
            );
            Device::close(&rig.device);
            drop(rig);
            assert_eq!(found(&scratch, "image"), "auto", "{what}: afterwards");
            check(&scratch, &scratch.path("image"));
            let survey = check_refcounts(&scratch.path("image")).unwrap();
            assert_eq!((survey.errors, survey.leaks), (0, 0), "{what}: {survey:?}");
            let again = Rig::open(&Qcow2Config {
                read_only: true,
                ..config(&scratch.path("image"))
            });
            assert_eq!(changed(&again, "changed"), all, "{what}: read again");
            drop(again);
            std::fs::remove_file(scratch.path("image")).unwrap();
        }
    }
}

#[test]
fn bitmap_of_an_image_that_was_killed_is_not_used_again() {
    let scratch = Scratch::new("bitmap-killed");
    if !image(&scratch) {
        return;
    }
    let mut rig = Rig::at(&scratch.path("image"));
    assert_eq!(rig.write(Flags::NONE, 0, &[7; 4096]), Status::Ok);
    rig.flush();
    std::fs::copy(scratch.path("image"), scratch.path("killed")).unwrap();
    drop(rig);
    let mut rig = Rig::at(&scratch.path("killed"));
    rig.read(0, 512);
    let image = rig.device.image(DiskId(0)).unwrap();
    let error = image.changed("changed", 0..4096, 1, &mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("no bitmap of that name"), "{error}");
    assert!(image.bitmap_names().is_empty());
    assert_eq!(image.bitmaps().unwrap()[0].changed, None);
    let error = image.add_bitmap("changed", None).unwrap_err();
    assert!(error.to_string().contains("remove it first"), "{error}");
    assert_eq!(rig.write(Flags::NONE, 0, &[8; 4096]), Status::Ok);
    Device::close(&rig.device);
    assert_eq!(found(&scratch, "killed"), "in-use auto");
    image.remove_bitmap("changed").unwrap();
    assert_eq!(found(&scratch, "killed"), "none");
    image.add_bitmap("changed", None).unwrap();
    drop(image);
    Device::close(&rig.device);
    drop(rig);
    assert_eq!(found(&scratch, "killed"), "auto");
    check(&scratch, &scratch.path("killed"));
}

#[test]
fn bitmap_that_is_added_has_what_changes_from_then_on_and_qemu_reads_it() {
    let scratch = Scratch::new("bitmap-added");
    for options in [
        "compat=1.1",
        "cluster_size=4096",
        "extended_l2=on",
        "data_file=data,data_file_raw=on",
    ] {
        let _ = std::fs::remove_file(scratch.path("image"));
        if !created(&scratch, &format!("-o {options} image 64M")) {
            return;
        }
        let mut rig = Rig::at(&scratch.path("image"));
        assert_eq!(rig.write(Flags::NONE, 0, &[3; 1 << 20]), Status::Ok);
        let image = rig.device.image(DiskId(0)).unwrap();
        image.add_bitmap("changed", None).unwrap();
        image.add_bitmap("fine", Some(512)).unwrap();
        assert_eq!(image.bitmap_names(), ["changed", "fine"]);
        assert!(changed(&rig, "changed").is_empty());
        assert_eq!(rig.write(Flags::NONE, 1 << 20, &[4; 512]), Status::Ok);
        assert_eq!(rig.write(Flags::NONE, 4096, &[4; 4096]), Status::Ok);
        assert_eq!(changed(&rig, "fine"), [(4096, 4096), (1 << 20, 512)]);
        drop(image);
        Device::close(&rig.device);
        drop(rig);
        assert_eq!(found(&scratch, "image"), "auto", "{options}");
        check(&scratch, &scratch.path("image"));
        // What QEMU makes of the two is what we did.
        qemu(
            &scratch,
            "qemu-img",
            "bitmap --add --merge fine -g 512 -f qcow2 image all",
        )
        .unwrap();
        let again = Rig::open(&Qcow2Config {
            read_only: true,
            ..config(&scratch.path("image"))
        });
        assert_eq!(
            changed(&again, "all"),
            [(4096, 4096), (1 << 20, 512)],
            "{options}"
        );
    }
}

#[test]
fn bitmap_of_an_image_that_is_only_read_is_kept() {
    let scratch = Scratch::new("bitmap-read");
    if !image(&scratch) {
        return;
    }
    let config = Qcow2Config {
        read_only: true,
        ..config(&scratch.path("image"))
    };
    let mut rig = Rig::open(&config);
    rig.read(0, 4 << 20);
    drop(rig);
    let words = "create -q -f qcow2 -b image -F qcow2 above 4M";
    qemu(&scratch, "qemu-img", words).unwrap();
    let mut rig = Rig::at(&scratch.path("above"));
    assert_eq!(rig.write(Flags::NONE, 0, &[7; 512]), Status::Ok);
    rig.flush();
    assert_eq!(found(&scratch, "image"), "auto", "it is a base");
    // Until another image is committed into it.
    replace(&mut rig, Replacement::BeginCommit).unwrap();
    assert_eq!(rig.run(flagged(Op::Read, Flags::TASK, 0, 65536)), Status::Ok);
    assert_eq!(found(&scratch, "image"), "none", "it was written");
    replace(&mut rig, Replacement::SettleCommit(GivenUp::default())).unwrap();
    replace(&mut rig, Replacement::Commit).unwrap();
    drop(rig);
    assert_eq!(
        found(&scratch, "image"),
        "none",
        "it has what was written above it"
    );
}

/// The disk stays what it is, so what has changed of it does, too.
#[test]
fn bitmap_goes_on_in_the_empty_image_of_a_commit() {
    let scratch = Scratch::new("bitmap-committed");
    if !created(&scratch, "base 4M") {
        return;
    }
    let words = "create -q -f qcow2 -b base -F qcow2 image 4M";
    qemu(&scratch, "qemu-img", words).unwrap();
    qemu(
        &scratch,
        "qemu-img",
        "bitmap --add --disable -f qcow2 image other",
    )
    .unwrap();
    qemu(&scratch, "qemu-img", "bitmap --add -f qcow2 image changed").unwrap();
    let mut rig = Rig::at(&scratch.path("image"));
    assert_eq!(rig.write(Flags::NONE, 0, &[7; 4096]), Status::Ok);
    replace(&mut rig, Replacement::BeginCommit).unwrap();
    assert_eq!(rig.run(flagged(Op::Read, Flags::TASK, 0, 4 << 20)), Status::Ok);
    assert_eq!(rig.write(Flags::NONE, 1 << 20, &[8; 4096]), Status::Ok);
    replace(&mut rig, Replacement::SettleCommit(GivenUp::default())).unwrap();
    replace(&mut rig, Replacement::Commit).unwrap();
    assert_eq!(changed(&rig, "changed"), [(0, 65536), (1 << 20, 65536)]);
    assert_eq!(found(&scratch, "image"), "in-use auto", "what a kill leaves");
    // The map of the new image is empty, and its clusters are.
    assert_eq!(rig.write(Flags::NONE, 2 << 20, &[9; 4096]), Status::Ok);
    assert_eq!(rig.write(Flags::NONE, 2 << 20, &[9; 4096]), Status::Ok);
    let all = [(0, 65536), (1 << 20, 65536), (2 << 20, 65536)];
    assert_eq!(changed(&rig, "changed"), all);
    assert_eq!(changed(&rig, "other"), []);
    Device::close(&rig.device);
    drop(rig);
    assert_eq!(found(&scratch, "image"), "auto");
    check(&scratch, &scratch.path("image"));
    let again = Rig::open(&Qcow2Config {
        read_only: true,
        ..config(&scratch.path("image"))
    });
    assert_eq!(changed(&again, "changed"), all);
}

#[test]
fn bitmap_stays_right_over_a_handover_that_comes_to_nothing() {
    let scratch = Scratch::new("bitmap-handover");
    if !image(&scratch) {
        return;
    }
    let mut rig = Rig::at(&scratch.path("image"));
    assert_eq!(rig.write(Flags::NONE, 0, &[7; 4096]), Status::Ok);
    rig.flush();
    rig.device.prepare_handover(DiskId(0));
    assert_eq!(found(&scratch, "image"), "auto", "another daemon finds it");
    rig.read(0, 1 << 20);
    assert_eq!(found(&scratch, "image"), "auto", "reads change nothing");
    assert_eq!(rig.write(Flags::NONE, 65536, &[7; 4096]), Status::Ok);
    assert_eq!(found(&scratch, "image"), "in-use auto");
    assert_eq!(changed(&rig, "changed"), [(0, 131_072)]);
    rig.device.prepare_handover(DiskId(0));
    // Whole clusters that are not there are a reactor's.
    assert_eq!(rig.write(Flags::NONE, 2 << 20, &[7; 65536]), Status::Ok);
    assert_eq!(found(&scratch, "image"), "in-use auto");
    assert_eq!(changed(&rig, "changed"), [(0, 131_072), (2 << 20, 65536)]);
}

#[test]
fn bitmap_of_a_disk_that_grows_has_what_is_new_as_changed() {
    let scratch = Scratch::new("bitmap-grown");
    if !image(&scratch) {
        return;
    }
    let mut rig = Rig::at(&scratch.path("image"));
    assert_eq!(rig.write(Flags::NONE, 0, &[7; 4096]), Status::Ok);
    assert_eq!(rig.device.resize(DiskId(0), Some(6 << 20)).unwrap(), 6 << 20);
    assert_eq!(rig.write(Flags::NONE, 5 << 20, &[7; 4096]), Status::Ok);
    assert_eq!(changed(&rig, "changed"), [(0, 65536), (4 << 20, 2 << 20)]);
    Device::close(&rig.device);
    drop(rig);
    assert_eq!(found(&scratch, "image"), "auto");
    check(&scratch, &scratch.path("image"));
    qemu(&scratch, "qemu-img", "bitmap --clear -f qcow2 image changed").unwrap();
}

#[test]
fn bitmap_of_a_disk_that_grows_inside_its_last_cluster_ends_with_the_disk() {
    let scratch = Scratch::new("bitmap-grown-inside");
    if !created(&scratch, "-o cluster_size=2M image 4194816") {
        return;
    }
    let mut rig = Rig::at(&scratch.path("image"));
    let image = rig.device.image(DiskId(0)).unwrap();
    image.add_bitmap("fine", Some(512)).unwrap();
    drop(image);
    assert_eq!(rig.write(Flags::NONE, 4 << 20, &[7; 512]), Status::Ok);
    assert_eq!(rig.device.resize(DiskId(0), Some(5 << 20)).unwrap(), 5 << 20);
    assert_eq!(changed(&rig, "fine"), [(4 << 20, 1 << 20)]);
    Device::close(&rig.device);
    drop(rig);
    check(&scratch, &scratch.path("image"));
}

/// What a snapshot has is of its moment, and what the image on it has begins there.
#[test]
fn bitmap_ends_in_a_snapshot_and_begins_anew_above_it() {
    let scratch = Scratch::new("bitmap-snapshot");
    if !image(&scratch) {
        return;
    }
    let mut rig = Rig::at(&scratch.path("image"));
    assert_eq!(rig.write(Flags::NONE, 0, &[7; 4096]), Status::Ok);
    replace(&mut rig, Replacement::Snapshot(scratch.path("before"))).unwrap();
    assert_eq!(rig.write(Flags::NONE, 1 << 20, &[8; 4096]), Status::Ok);
    rig.flush();
    assert_eq!(found(&scratch, "before"), "auto");
    assert_eq!(found(&scratch, "image"), "in-use auto");
    assert_eq!(changed(&rig, "changed"), [(1 << 20, 65536)]);
    replace(&mut rig, Replacement::Snapshot(scratch.path("after"))).unwrap();
    assert_eq!(found(&scratch, "image"), "auto", "nothing was written");
    assert_eq!(changed(&rig, "changed"), []);
    Device::close(&rig.device);
    drop(rig);
    for (name, wanted) in [("before", (0, 65536)), ("after", (1 << 20, 65536))] {
        assert_eq!(found(&scratch, name), "auto", "{name}");
        check(&scratch, &scratch.path(name));
        let snapshot = Rig::open(&Qcow2Config {
            read_only: true,
            ..config(&scratch.path(name))
        });
        assert_eq!(changed(&snapshot, "changed"), [wanted], "{name}");
    }
}
