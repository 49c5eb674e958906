//! Tests of images that are committed into their bases, while they are used.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use blkmq_host::device::{Extent, GivenUp};

use super::replaced::replace;
use super::*;
use crate::file::{FileConfig, FileDisk};

/// Makes a base in `base` that is not all zeroes, and an image on it.
pub(super) fn overlay(scratch: &Scratch, base: &str, image: &str) -> bool {
    std::fs::write(scratch.path("first"), noise(BASE as usize, 3)).unwrap();
    let format = if base == "raw" { "raw" } else { "qcow2" };
    let made = match base {
        "raw" => std::fs::copy(scratch.path("first"), scratch.path("base")).is_ok(),
        "on a base" => {
            let words = "create -q -f qcow2 -o cluster_size=4096 -b first -F raw base 3M";
            qemu(scratch, "qemu-img", words).is_some()
        }
        options => {
            let words = format!("convert -f raw -O qcow2 {options} first base");
            qemu(scratch, "qemu-img", &words).is_some()
        }
    };
    let words = format!("create -q -f qcow2 {image} -b base -F {format} image 5M");
    made && qemu(scratch, "qemu-img", &words).is_some()
}

/// Bytes of which no sector is as another one.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut chance = Chance::new(seed, 0);
    let words = (0..len / 8).map(|_| chance.bits().to_le_bytes());
    words.flatten().collect()
}

/// What QEMU reads of a file of a format.
pub(super) fn content(scratch: &Scratch, format: &str, name: &str) -> Vec<u8> {
    let words = format!("convert -f {format} -O raw {name} raw");
    qemu(scratch, "qemu-img", &words).unwrap();
    std::fs::read(scratch.path("raw")).unwrap()
}

/// What is left to be copied.
fn left(rig: &Rig, size: u64) -> Vec<Extent> {
    let (mut all, mut at) = (Vec::new(), 0);
    while at < size {
        let first = all.len();
        rig.device.left(DiskId(0), at, size - at, 7, &mut all).unwrap();
        at += all[first..].iter().map(|extent| extent.len).sum::<u64>();
    }
    all
}

fn copy_down(rig: &mut Rig, offset: u64, len: u64) {
    assert_eq!(rig.run(flagged(Op::Read, Flags::TASK, offset, len)), Status::Ok);
}

fn settle(rig: &mut Rig) -> std::io::Result<()> {
    replace(rig, Replacement::SettleCommit(GivenUp::default()))
}

/// Copies all that is left, in pieces as a job does.
fn copy_all(rig: &mut Rig, size: u64) {
    let mut at = 0;
    for extent in left(rig, size) {
        let end = at + extent.len;
        while !extent.zero && at < end {
            let len = (end - at).min(256 << 10);
            copy_down(rig, at, len);
            at += len;
        }
        at = end;
    }
}

/// Writes and discards by chance, and keeps what is to be read then.
fn change(rig: &mut Rig, chance: &mut Chance, wanted: &mut [u8], count: u32) {
    for _ in 0..count {
        let len = [512, 4096, 20480, 300_032][chance.bits() as usize % 4];
        let at = chance.bits() as usize % ((wanted.len() - len) / 512) * 512;
        let fill = noise(len, chance.bits());
        match chance.bits() % 4 {
            0 => {
                let zeroed = flagged(Op::WriteZeroes, Flags::NONE, at as u64, len as u64);
                assert_eq!(rig.run(zeroed), Status::Ok);
                wanted[at..at + len].fill(0);
            }
            _ => {
                assert_eq!(rig.write(Flags::NONE, at as u64, &fill), Status::Ok);
                wanted[at..at + len].copy_from_slice(&fill);
            }
        }
    }
}

#[test]
fn committed_image_is_empty_and_bases_of_all_shapes_have_what_it_had() {
    let images = [
        "-o cluster_size=65536",
        "-o cluster_size=512",
        "-o cluster_size=2M",
        "-o extended_l2=on",
        "-o compat=0.10",
    ];
    let bases = [
        "raw",
        "-o cluster_size=4096",
        "-c -o cluster_size=2M",
        "-o compat=0.10",
        "-o extended_l2=on",
        "-o data_file=base.data",
        "on a base",
    ];
    let all = bases
        .iter()
        .flat_map(|base| images.iter().map(move |image| (base, image)));
    for (seed, (base, image)) in (0..).zip(all) {
        let scratch = Scratch::new("committed");
        if !overlay(&scratch, base, image) {
            return;
        }
        let what = format!("{base:?} below {image:?}");
        let mut wanted = content(&scratch, "qcow2", "image");
        let mut rig = Rig::at(&scratch.path("image"));
        let mut chance = Chance::new(seed, 1);
        change(&mut rig, &mut chance, &mut wanted, 20);
        for round in 0..2 {
            replace(&mut rig, Replacement::BeginCommit).unwrap();
            change(&mut rig, &mut chance, &mut wanted, 5);
            for _ in 0..2 {
                copy_all(&mut rig, SIZE);
                assert!(left(&rig, SIZE).iter().all(|extent| extent.zero), "{what}");
                change(&mut rig, &mut chance, &mut wanted, 10);
                assert!(rig.read(0, SIZE as usize) == wanted, "{what}: meanwhile");
                settle(&mut rig).unwrap();
            }
            assert!(left(&rig, SIZE).iter().any(|extent| !extent.zero), "{what}");
            // Clusters as large as the image's are copied for others, and one that is read keeps its old place.
            change(&mut rig, &mut chance, &mut wanted, 3);
            replace(&mut rig, Replacement::Commit).unwrap();
            assert!(
                rig.read(0, SIZE as usize) == wanted,
                "{what}: afterwards, {round}"
            );
            let taken = std::fs::metadata(scratch.path("image")).unwrap().blocks() * 512;
            assert!(taken <= 64 << 10, "{what}: {taken} bytes");
            let header = std::fs::read(scratch.path("image")).unwrap();
            assert_eq!(header[79] & 16 != 0, image.contains("extended_l2"), "{what}");
        }
        let was = wanted.clone();
        change(&mut rig, &mut chance, &mut wanted, 5);
        rig.flush();
        drop(rig);
        let format = if *base == "raw" { "raw" } else { "qcow2" };
        assert!(content(&scratch, format, "base") == was, "{what}: the base");
        assert!(content(&scratch, "qcow2", "image") == wanted, "{what}: the image");
        check(&scratch, &scratch.path("image"));
        if format == "qcow2" {
            check(&scratch, &scratch.path("base"));
        }
        let first = std::fs::read(scratch.path("first")).unwrap();
        assert!(first == noise(BASE as usize, 3), "{what}: what is below the base");
    }
}

/// The base may be read only together with what hides it until the image is empty.
#[test]
fn image_that_is_being_committed_is_right_at_each_moment() {
    for (base, image) in [
        ("raw", "-o cluster_size=4096"),
        ("-o cluster_size=65536", "-o cluster_size=65536"),
        ("-c", "-o extended_l2=on"),
    ] {
        let scratch = Scratch::new("commit-moments");
        if !overlay(&scratch, base, image) {
            return;
        }
        let mut wanted = content(&scratch, "qcow2", "image");
        let mut rig = Rig::at(&scratch.path("image"));
        let mut chance = Chance::new(5, 2);
        change(&mut rig, &mut chance, &mut wanted, 30);
        rig.flush();
        replace(&mut rig, Replacement::BeginCommit).unwrap();
        let mut at = 0;
        while at < SIZE {
            copy_down(&mut rig, at, 256 << 10);
            at += 256 << 10;
            if at.is_multiple_of(1 << 20) {
                change(&mut rig, &mut chance, &mut wanted, 2);
                rig.flush();
            }
            // As a kill leaves it: what was written is in the files.
            std::fs::create_dir_all(scratch.path("killed")).unwrap();
            for name in ["image", "base", "first"] {
                std::fs::copy(scratch.path(name), scratch.path(&format!("killed/{name}"))).unwrap();
            }
            assert!(
                content(&scratch, "qcow2", "killed/image") == wanted,
                "{base}: at {at}"
            );
            let said = qemu_said(&scratch, "check -f qcow2 killed/image");
            assert!(!said.contains("corrupt"), "{said}");
            if base != "raw" {
                let said = qemu_said(&scratch, "check -f qcow2 killed/base");
                assert!(!said.contains("corrupt"), "{said}");
            }
        }
    }
}

/// What `qemu-img` says, whatever its end: it ends with an error if clusters are lost.
fn qemu_said(scratch: &Scratch, words: &str) -> String {
    let mut command = Command::new("qemu-img");
    let output = command
        .args(words.split(' '))
        .current_dir(&scratch.0)
        .output()
        .unwrap();
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

#[test]
fn base_that_others_use_or_nobody_may_write_is_refused_and_used_as_before() {
    let scratch = Scratch::new("commit-refused");
    if !overlay(&scratch, "-o cluster_size=65536", "") {
        return;
    }
    let words = "create -q -f qcow2 -b base -F qcow2 other 5M";
    qemu(&scratch, "qemu-img", words).unwrap();
    let mut rig = Rig::at(&scratch.path("image"));
    assert_eq!(rig.write(Flags::NONE, 0, &[9; 4096]), Status::Ok);
    let mut begin = |part: &str| {
        let error = replace(&mut rig, Replacement::BeginCommit)
            .unwrap_err()
            .to_string();
        assert!(error.contains("base") && error.contains(part), "{error}");
    };
    let other = ImageDisk::open(&config(&scratch.path("other"))).unwrap();
    begin("others of this daemon");
    drop(other);
    let reader = FileConfig {
        path: scratch.path("base"),
        read_only: true,
        ..FileConfig::default()
    };
    let reader = FileDisk::open(&reader).unwrap();
    begin("this process");
    drop(reader);
    let mode =
        |mode| std::fs::set_permissions(scratch.path("base"), PermissionsExt::from_mode(mode)).unwrap();
    mode(0o444);
    begin("chmod");
    mode(0o644);
    // Another file is where it was.
    std::fs::rename(scratch.path("base"), scratch.path("moved")).unwrap();
    begin("No such file");
    std::fs::copy(scratch.path("moved"), scratch.path("base")).unwrap();
    begin("another file is there now");
    std::fs::rename(scratch.path("moved"), scratch.path("base")).unwrap();
    // It is locked as before.
    let writer = FileConfig {
        path: scratch.path("base"),
        ..FileConfig::default()
    };
    assert!(
        FileDisk::open(&writer)
            .unwrap_err()
            .to_string()
            .contains("in use")
    );
    let other = ImageDisk::open(&config(&scratch.path("other"))).unwrap();
    assert!(Arc::ptr_eq(
        other.image.base().unwrap(),
        rig_image(&rig).base().unwrap()
    ));
    drop(other);
    // While it is written, nobody can begin to use it.
    replace(&mut rig, Replacement::BeginCommit).unwrap();
    for path in ["other", "base"] {
        let error = ImageDisk::open(&config(&scratch.path(path)))
            .unwrap_err()
            .to_string();
        assert!(error.contains("in use"), "{error}");
    }
    replace(&mut rig, Replacement::LeaveCommit).unwrap();
    let other = ImageDisk::open(&config(&scratch.path("other"))).unwrap();
    assert_eq!(other.image.size(), SIZE);
    assert_eq!(rig.read(0, 4096), [9; 4096]);
}

/// The image that is served.
fn rig_image(rig: &Rig) -> Arc<Image> {
    rig.device.image(DiskId(0)).unwrap()
}

#[test]
fn images_that_cannot_be_committed_say_why() {
    let scratch = Scratch::new("commit-not");
    if !created(&scratch, "alone 1M") {
        return;
    }
    let begin = |name: &str, is_read_only: bool, part: &str| {
        let config = Qcow2Config {
            read_only: is_read_only,
            ..config(&scratch.path(name))
        };
        let error = replace(&mut Rig::open(&config), Replacement::BeginCommit).unwrap_err();
        assert!(error.to_string().contains(part), "{name}: {error}");
    };
    begin("alone", false, "lies on nothing");
    assert!(overlay(&scratch, "raw", ""));
    begin("image", true, "read-only");
    qemu(&scratch, "qemu-img", "snapshot -c one image").unwrap();
    begin("image", false, "snapshots inside");
    qemu(
        &scratch,
        "qemu-img",
        "create -q -f qcow2 -o data_file=data -b base -F raw beside 1M",
    )
    .unwrap();
    begin("beside", false, "file of its own");
}

#[test]
fn image_is_committed_only_when_all_was_copied_and_may_begin_again() {
    let scratch = Scratch::new("commit-settled");
    if !overlay(&scratch, "raw", "") {
        return;
    }
    let mut wanted = content(&scratch, "qcow2", "image");
    let mut rig = Rig::at(&scratch.path("image"));
    let early = replace(&mut rig, Replacement::Commit).unwrap_err().to_string();
    assert!(early.contains("begin again"), "{early}");
    change(&mut rig, &mut Chance::new(1, 1), &mut wanted, 10);
    for end in [Replacement::LeaveCommit, Replacement::Commit] {
        replace(&mut rig, Replacement::BeginCommit).unwrap();
        let early = settle(&mut rig).unwrap_err().to_string();
        assert!(early.contains("was not copied"), "{early}");
        let early = replace(&mut rig, Replacement::Commit).unwrap_err().to_string();
        assert!(early.contains("begin again"), "{early}");
        copy_all(&mut rig, SIZE);
        let given_up = GivenUp::default();
        given_up.give_up();
        let left = replace(&mut rig, Replacement::SettleCommit(given_up)).unwrap_err();
        assert!(left.to_string().contains("it was given up"), "{left}");
        settle(&mut rig).unwrap();
        replace(&mut rig, end).unwrap();
        assert!(rig.read(0, SIZE as usize) == wanted);
        assert_eq!(rig.write(Flags::NONE, 4096, &[8; 4096]), Status::Ok);
        wanted[4096..8192].fill(8);
    }
    rig.flush();
    // It is the image of a disk as any other, and lies on the same base.
    assert_eq!(rig.device.resize(DiskId(0), Some(6 << 20)).unwrap(), 6 << 20);
    wanted.resize(6 << 20, 0);
    replace(&mut rig, Replacement::BeginCommit).unwrap();
    assert_eq!(rig.device.resize(DiskId(0), Some(7 << 20)).unwrap(), 7 << 20);
    assert_eq!(rig.write(Flags::NONE, (7 << 20) - 512, &[7; 512]), Status::Ok);
    wanted.resize(7 << 20, 0);
    wanted[(7 << 20) - 512..].fill(7);
    copy_all(&mut rig, 7 << 20);
    settle(&mut rig).unwrap();
    replace(&mut rig, Replacement::Commit).unwrap();
    assert!(rig.read(0, 7 << 20) == wanted);
    drop(rig);
    assert!(content(&scratch, "raw", "base") == wanted);
    let info = qemu(&scratch, "qemu-img", "info -f qcow2 image").unwrap();
    assert!(info.contains("backing file: base"), "{info}");
    check(&scratch, &scratch.path("image"));
}

/// Tables of a former moment take the place of those in memory: what was copied of newer ones counts no more.
#[test]
fn commit_begins_again_when_the_image_was_opened_again_after_a_failed_sync() {
    let scratch = Scratch::new("commit-reopened");
    if !overlay(&scratch, "raw", "") {
        return;
    }
    let mut rig = Rig::at(&scratch.path("image"));
    assert_eq!(rig.write(Flags::NONE, 0, &[4; 65536]), Status::Ok);
    rig.flush();
    replace(&mut rig, Replacement::BeginCommit).unwrap();
    assert_eq!(rig.write(Flags::NONE, 65536, &[5; 65536]), Status::Ok);
    copy_all(&mut rig, SIZE);
    settle(&mut rig).unwrap();
    let image = rig_image(&rig);
    image.files()[0].fail_syncs(true);
    assert_eq!(rig.run(request(Op::Flush, 0, 0)), Status::Io);
    rig.device.reopen(DiskId(0)).unwrap();
    let again = replace(&mut rig, Replacement::Commit).unwrap_err().to_string();
    assert!(again.contains("opened again"), "{again}");
    copy_all(&mut rig, SIZE);
    settle(&mut rig).unwrap();
    replace(&mut rig, Replacement::Commit).unwrap();
    assert_eq!(rig.read(0, 65536), [4; 65536]);
}

/// After a failed sync, nothing that was only in memory counts: neither of the image nor of its base.
#[test]
fn failed_syncs_end_a_commit_and_the_base_is_what_was_durable_of_it() {
    let scratch = Scratch::new("commit-syncs");
    if !overlay(&scratch, "-c -o cluster_size=2M", "-o cluster_size=4096") {
        return;
    }
    let mut wanted = content(&scratch, "qcow2", "image");
    let mut rig = Rig::at(&scratch.path("image"));
    let mut chance = Chance::new(4, 1);
    change(&mut rig, &mut chance, &mut wanted, 10);
    replace(&mut rig, Replacement::BeginCommit).unwrap();
    copy_all(&mut rig, SIZE);
    rig_image(&rig).files()[1].fail_syncs(true);
    let failed = settle(&mut rig).unwrap_err().to_string();
    assert!(failed.contains("a flush has failed"), "{failed}");
    replace(&mut rig, Replacement::LeaveCommit).unwrap_err();
    assert!(rig.read(0, SIZE as usize) == wanted);
    rig.flush();
    // Another description of the file knows nothing of it.
    replace(&mut rig, Replacement::BeginCommit).unwrap();
    copy_all(&mut rig, SIZE);
    settle(&mut rig).unwrap();
    let image = rig_image(&rig);
    change(&mut rig, &mut chance, &mut wanted, 1);
    image.files()[0].fail_syncs(true);
    let failed = replace(&mut rig, Replacement::Commit).unwrap_err().to_string();
    assert!(failed.contains("a flush has failed"), "{failed}");
    replace(&mut rig, Replacement::LeaveCommit).unwrap();
    let failed = replace(&mut rig, Replacement::BeginCommit)
        .unwrap_err()
        .to_string();
    assert!(failed.contains("a flush has failed"), "{failed}");
    image.files()[0].fail_syncs(false);
    assert!(rig.read(0, SIZE as usize) == wanted);
    rig.flush();
    drop((rig, image));
    assert!(content(&scratch, "qcow2", "image") == wanted);
    check(&scratch, &scratch.path("image"));
    let said = qemu_said(&scratch, "check -f qcow2 base");
    assert!(!said.contains("corrupt"), "{said}");
}

#[test]
fn image_whose_commit_a_context_refuses_goes_on_and_its_base_is_as_before() {
    for refused in [Replacement::BeginCommit, Replacement::Commit] {
        let scratch = Scratch::new("commit-refused-late");
        if !overlay(&scratch, "-o cluster_size=65536", "") {
            return;
        }
        let mut wanted = content(&scratch, "qcow2", "image");
        let mut rig = Rig::at(&scratch.path("image"));
        change(&mut rig, &mut Chance::new(1, 1), &mut wanted, 10);
        if refused == Replacement::Commit {
            replace(&mut rig, Replacement::BeginCommit).unwrap();
            copy_all(&mut rig, SIZE);
            settle(&mut rig).unwrap();
        }
        rig.refuse_to_replace(refused.clone());
        change(&mut rig, &mut Chance::new(2, 1), &mut wanted, 10);
        assert!(rig.read(0, SIZE as usize) == wanted, "{refused:?}");
        replace(&mut rig, Replacement::LeaveCommit).unwrap();
        // Others may read it, and nobody may write it.
        let base = |read_only| Qcow2Config {
            read_only,
            ..config(&scratch.path("base"))
        };
        assert!(ImageDisk::open(&base(false)).is_err(), "{refused:?}");
        drop(ImageDisk::open(&base(true)).unwrap_or_else(|error| panic!("{refused:?}: {error}")));
        rig.flush();
        drop(rig);
        assert!(content(&scratch, "qcow2", "image") == wanted, "{refused:?}");
        check(&scratch, &scratch.path("image"));
        check(&scratch, &scratch.path("base"));
        let left = std::fs::read_dir(&scratch.0).unwrap();
        let left = left.filter(|entry| {
            entry
                .as_ref()
                .unwrap()
                .path()
                .to_string_lossy()
                .contains(".blkmq")
        });
        assert_eq!(left.count(), 0, "files are left behind");
    }
}

/// Bytes of the base, and of the image.
const BASE: u64 = 2_500_096;
pub(super) const SIZE: u64 = 5 << 20;
