//! Tests of what a kill between two flushes leaves: what was flushed is there, whatever was given up, replaced or used
//! again since.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::*;

/// What QEMU reads of an image as a kill at this moment leaves it. It finds lost clusters at most.
fn content_after_a_kill(scratch: &Scratch, what: &str) -> Vec<u8> {
    std::fs::copy(scratch.path("image"), scratch.path("moment")).unwrap();
    is_not_corrupt(scratch, what);
    raw_content(scratch, &scratch.path("moment"))
}

#[test]
fn compressed_clusters_stay_until_what_has_replaced_them_is_durable() {
    let scratch = Scratch::new("replaced-compressed");
    let noise: Vec<u8> = (0..1 << 20).map(|at: u32| ((at / 700) ^ at) as u8).collect();
    std::fs::write(scratch.path("raw"), &noise).unwrap();
    let words = "convert -c -f raw -O qcow2 -o cluster_size=4096 raw image";
    if qemu(&scratch, "qemu-img", words).is_none() {
        return;
    }
    let mut rig = Rig::at(&scratch.path("image"));
    for round in 0..2u8 {
        let before = content_after_a_kill(&scratch, "before");
        for cluster in 0..64usize {
            let at = (cluster * 37 % 256) * 4096;
            let status = rig.write(Flags::NONE, at as u64, &[round + 1; 4096]);
            assert_eq!(status, Status::Ok);
        }
        let found = content_after_a_kill(&scratch, "without a flush");
        for (number, (now, old)) in found.chunks(4096).zip(before.chunks(4096)).enumerate() {
            let is_new = now.iter().all(|byte| *byte == round + 1);
            assert!(
                now == old || is_new,
                "round {round}: cluster {number} is another's"
            );
        }
        rig.flush();
    }
    drop(rig);
    check(&scratch, &scratch.path("image"));
}

#[test]
fn freed_clusters_become_no_tables_and_no_data_before_that_is_durable() {
    let scratch = Scratch::new("freed");
    let words = "create -q -f qcow2 -o cluster_size=512 image 8M";
    if qemu(&scratch, "qemu-img", words).is_none() {
        return;
    }
    let mut rig = Rig::at(&scratch.path("image"));
    assert_eq!(rig.write(Flags::NONE, 0, &[7; 64 << 10]), Status::Ok);
    rig.flush();
    for op in [Op::Discard, Op::WriteZeroes] {
        assert_eq!(rig.run(request(op, 0, 32 << 10)), Status::Ok);
        // Each into a table that there is not yet.
        for table in 1..100u64 {
            let at = (table * 37 % 255 + 1) * (32 << 10);
            assert_eq!(rig.write(Flags::NONE, at, &[9; 512]), Status::Ok);
        }
        let found = content_after_a_kill(&scratch, "without a flush");
        let is_sound = |byte: &u8| *byte == 7 || *byte == 0;
        assert!(
            found[..32 << 10].iter().all(is_sound),
            "{op:?}: a freed cluster shows another's data"
        );
        rig.flush();
        assert_eq!(rig.write(Flags::NONE, 0, &[7; 32 << 10]), Status::Ok);
        rig.flush();
    }
    drop(rig);
    check(&scratch, &scratch.path("image"));
}

#[test]
fn requests_that_ended_before_a_flush_began_are_there_when_it_has_ended() {
    let scratch = Scratch::new("flushed");
    if !created(&scratch, "-o cluster_size=4096 image 64M") {
        return;
    }
    let disk = ImageDisk::open(&config(&scratch.path("image"))).unwrap();
    let written = std::sync::atomic::AtomicU64::new(0);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let order = std::sync::atomic::Ordering::SeqCst;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..4096 {
                if is_over.load(order) {
                    break;
                }
                disk.write(number * 8192, &[number as u8 | 1; 4096]).unwrap();
                written.store(number + 1, order);
            }
        });
        for round in 0..4 {
            std::thread::sleep(std::time::Duration::from_millis(20));
            let count = written.load(order);
            disk.flush().unwrap();
            std::fs::copy(scratch.path("image"), scratch.path("moment")).unwrap();
            let found = raw_content(&scratch, &scratch.path("moment"));
            for number in 0..count {
                let wanted = number as u8 | 1;
                assert_eq!(
                    found[number as usize * 8192],
                    wanted,
                    "round {round}: write {number}"
                );
            }
        }
        is_over.store(true, order);
    });
    disk.flush().unwrap();
    drop(disk);
    check(&scratch, &scratch.path("image"));
}

/// While one flush writes, others allocate: what it writes is of one moment.
#[test]
fn flush_writes_no_entry_whose_refcount_it_has_not_written() {
    let scratch = Scratch::new("one-moment");
    if !created(&scratch, "-o cluster_size=4096 image 8M") {
        return;
    }
    let disk = ImageDisk::open(&config(&scratch.path("image"))).unwrap();
    disk.write(0, &[1; 4096]).unwrap();
    for number in 1..20 {
        std::thread::scope(|scope| {
            let go_on = disk.image.files()[0].hold_syncs();
            let flush = scope.spawn(|| disk.flush());
            std::thread::sleep(std::time::Duration::from_millis(10));
            let write = scope.spawn(|| disk.write(number * 65536, &[2; 4096]));
            std::thread::sleep(std::time::Duration::from_millis(10));
            go_on();
            flush.join().unwrap().unwrap();
            write.join().unwrap().unwrap();
            std::fs::copy(scratch.path("image"), scratch.path("moment")).unwrap();
            is_not_corrupt(&scratch, &format!("write {number}"));
        });
    }
}

#[test]
fn grown_image_shows_nothing_of_a_base_that_is_longer() {
    let scratch = Scratch::new("longer-base");
    std::fs::write(scratch.path("base"), vec![3; 4 << 20]).unwrap();
    for (name, options) in [
        ("v3", "-o cluster_size=65536"),
        ("v2", "-o compat=0.10"),
        ("tiny", "-o cluster_size=512"),
    ] {
        let words = format!("create -q -f qcow2 {options} -b base -F raw {name} 1050624");
        if qemu(&scratch, "qemu-img", &words).is_none() {
            return;
        }
        let mut rig = Rig::at(&scratch.path(name));
        // The last cluster is copied whole, with what is behind the end of the disk.
        assert_eq!(rig.write(Flags::NONE, 1 << 20, &[4; 512]), Status::Ok);
        for size in [2 << 20, 8 << 20] {
            assert_eq!(rig.device.resize(DiskId(0), Some(size)).unwrap(), size);
        }
        let found = rig.read(1 << 20, 2 << 20);
        assert!(found[..512].iter().all(|byte| *byte == 4), "{name}");
        assert!(found[512..2048].iter().all(|byte| *byte == 3), "{name}");
        let shown = found[2048..].iter().position(|byte| *byte != 0);
        assert_eq!(shown, None, "{name}: old data of the base");
        rig.flush();
        drop(rig);
        check(&scratch, &scratch.path(name));
        let content = raw_content(&scratch, &scratch.path(name));
        assert!(
            content[1 << 20..3 << 20] == found[..],
            "{name}: QEMU reads otherwise"
        );
    }
}

/// A wrong flag says of a cluster of a snapshot that it may be written in its place.
#[test]
fn check_finds_copied_flags_that_contradict_refcounts_as_qemu_does() {
    let scratch = Scratch::new("copied");
    if !created(&scratch, "-o cluster_size=4096 image 1M") {
        return;
    }
    let path = scratch.path("image");
    let mut rig = Rig::at(&path);
    assert_eq!(rig.write(Flags::NONE, 0, &[7; 8192]), Status::Ok);
    rig.flush();
    drop(rig);
    assert_eq!(check_refcounts(&path).unwrap().errors, 0);
    let good = std::fs::read(&path).unwrap();
    let u64_at = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let l1 = u64_at(&good, 40) as usize;
    let l2 = (u64_at(&good, l1) & check::L1_OFFSET) as usize;
    for place in [l1, l2, l2 + 8] {
        let mut bad = good.clone();
        bad[place] ^= 0x80;
        std::fs::write(&path, &bad).unwrap();
        assert_eq!(check_refcounts(&path).unwrap().errors, 1, "the entry at {place}");
        let output = Command::new("qemu-img")
            .args(["check", "-f", "qcow2"])
            .arg(&path)
            .output();
        assert_eq!(
            output.unwrap().status.code(),
            Some(2),
            "QEMU of the entry at {place}"
        );
    }
    std::fs::write(&path, &good).unwrap();
    qemu(&scratch, "qemu-img", "snapshot -c before image");
    assert_eq!(
        check_refcounts(&path).unwrap().errors,
        0,
        "entries without the flag are right now"
    );
}

#[test]
fn discards_and_zeroing_of_any_size_succeed_and_zero_what_they_say() {
    let scratch = Scratch::new("small");
    std::fs::write(scratch.path("base"), vec![3; 1 << 20]).unwrap();
    let ranges = [
        (0, 1),
        (1, 1),
        (511, 2),
        (512, 512),
        (4000, 200),
        (65535, 2),
        (65536, 65536),
        (100, 200_000),
    ];
    for (name, options) in [
        ("v3", ""),
        ("v2", "-o compat=0.10"),
        ("on-v3", "-b base -F raw"),
        ("on-v2", "-b base -F raw -o compat=0.10"),
        ("large", "-b base -F raw -o cluster_size=2M"),
        ("beside", "-o data_file=data"),
    ] {
        if !created(&scratch, &format!("{options} {name} 1050624")) {
            return;
        }
        for direct in [Direct::Auto, Direct::Off] {
            let config = Qcow2Config {
                direct,
                ..config(&scratch.path(name))
            };
            let mut rig = Rig::open(&config);
            let ends = [(1_050_623, 1), (1_050_112, 512), (983_040, 67_584)];
            for (offset, len) in ranges.into_iter().chain(ends) {
                for flags in [Flags::NONE, Flags::NO_UNMAP, Flags::FUA, Flags::FAST_ONLY] {
                    let what = format!("{name}, {direct:?}: {len} at {offset}, {flags:?}");
                    assert_eq!(rig.write(Flags::NONE, 0, &vec![7; 1_050_624]), Status::Ok);
                    if flags == Flags::NONE {
                        let discarded = rig.run(request(Op::Discard, offset, len));
                        assert_eq!(discarded, Status::Ok, "discard: {what}");
                    }
                    let status = rig.run(flagged(Op::WriteZeroes, flags, offset, len));
                    if flags == Flags::FAST_ONLY && status == Status::NotSupported {
                        continue;
                    }
                    assert_eq!(status, Status::Ok, "{what}");
                    let found = rig.read(0, 1_050_624);
                    let range = offset as usize..(offset + len) as usize;
                    assert!(found[range.clone()].iter().all(|byte| *byte == 0), "{what}");
                    let around = found[..range.start].iter().chain(&found[range.end..]);
                    assert!(around.into_iter().all(|byte| *byte == 7), "{what}: around it");
                }
            }
        }
    }
}

/// The kernel drops pages that it could not write: with those of a new cluster, what was copied around the data.
#[test]
fn reopen_after_a_failed_sync_shows_what_was_durable_before_it() {
    let scratch = Scratch::new("reopened");
    std::fs::write(scratch.path("base"), vec![3; 1 << 20]).unwrap();
    if !created(&scratch, "-b base -F raw image 1M") {
        return;
    }
    let path = scratch.path("image");
    let disk = ImageDisk::open(&config(&path)).unwrap();
    let image = Arc::clone(&disk.image);
    let mut rig = Rig::of(disk);
    assert_eq!(rig.write(Flags::NONE, 0, &[4; 4096]), Status::Ok);
    rig.flush();
    let file = Arc::clone(&image.files()[0]);
    for at in [65536, 1 << 19] {
        assert_eq!(rig.write(Flags::NONE, at, &[5; 4096]), Status::Ok);
    }
    file.fail_syncs(true);
    assert_eq!(rig.run(request(Op::Flush, 0, 0)), Status::Io);
    // Before them there are the header, its tables, and the cluster that was flushed.
    let dropped = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    dropped.write_all_at(&vec![0; 1 << 18], 6 << 16).unwrap();
    assert!(rig.device.reopen(DiskId(0)).unwrap().is_none());
    for (at, wanted) in [(0, 4), (4096, 3), (65536, 3), (1 << 19, 3), ((1 << 19) + 8192, 3)] {
        assert!(rig.read(at, 4096) == vec![wanted; 4096], "at {at}");
    }
    assert_eq!(rig.write(Flags::NONE, 65536, &[6; 512]), Status::Ok);
    rig.flush();
    let content = content_after_a_kill(&scratch, "after a reopen");
    assert_eq!(
        [content[0], content[65536], content[66048], content[1 << 19]],
        [4, 6, 3, 3]
    );
}
