//! Tests of disks whose image is replaced while they are served: snapshots and resets.

use blkmq_host::device::GivenUp;

use super::*;

/// Replaces the image below the disk of a rig, as the engine does.
pub(super) fn replace(rig: &mut Rig, wanted: Replacement) -> std::io::Result<()> {
    let device = rig.device.clone();
    let hctx = std::cell::RefCell::new(&mut rig.hctx);
    device.replace(&[(DiskId(0), wanted)], &|| {
        hctx.borrow_mut().refresh_disks().map_err(std::io::Error::other)
    })
}

#[test]
fn snapshot_keeps_what_was_there_and_the_disk_goes_on_above_it() {
    let scratch = Scratch::new("snapshot");
    std::fs::write(scratch.path("base"), vec![3; 1 << 20]).unwrap();
    if !created(&scratch, "-b base -F raw image 2M") {
        return;
    }
    let path = scratch.path("image");
    let mut rig = Rig::at(&path);
    assert_eq!(rig.write(Flags::NONE, 65536, &[4; 4096]), Status::Ok);
    replace(&mut rig, Replacement::Snapshot(scratch.path("first"))).unwrap();
    assert_eq!(rig.write(Flags::NONE, 65536, &[5; 512]), Status::Ok);
    replace(&mut rig, Replacement::Snapshot(scratch.path("second"))).unwrap();
    assert_eq!(rig.write(Flags::NONE, 0, &[6; 512]), Status::Ok);
    let there = replace(&mut rig, Replacement::Snapshot(scratch.path("second"))).unwrap_err();
    assert!(there.to_string().contains("cannot be made"), "{there}");
    let elsewhere = replace(&mut rig, Replacement::Snapshot("/proc/x".into())).unwrap_err();
    assert!(elsewhere.to_string().contains("is not below"), "{elsewhere}");
    rig.flush();
    assert_eq!(
        (
            rig.read(0, 513)[510..].to_vec(),
            rig.read(65536, 513)[510..].to_vec()
        ),
        (vec![6, 6, 3], vec![5, 5, 4])
    );
    drop(rig);
    for (name, wanted) in [("first", [3, 4]), ("second", [3, 5]), ("image", [6, 5])] {
        check(&scratch, &scratch.path(name));
        let content = raw_content(&scratch, &scratch.path(name));
        assert_eq!([content[0], content[65536]], wanted, "{name}");
        assert!(
            content[66048..69632].iter().all(|byte| *byte == 4) && content[70000] == 3,
            "{name}"
        );
    }
}

/// A first write copies the rest of a 32nd of a cluster then, and not of all.
#[test]
fn image_in_the_place_of_one_with_subclusters_has_them() {
    let scratch = Scratch::new("subclusters");
    std::fs::write(scratch.path("base"), vec![3; 1 << 20]).unwrap();
    if !created(
        &scratch,
        "-o extended_l2=on,cluster_size=2M -b base -F raw image 64M",
    ) {
        return;
    }
    let mut rig = Rig::at(&scratch.path("image"));
    for change in [Replacement::Snapshot(scratch.path("first")), Replacement::Reset] {
        assert_eq!(rig.write(Flags::NONE, 65536, &[4; 512]), Status::Ok);
        rig.flush();
        replace(&mut rig, change).unwrap();
        assert_eq!(rig.write(Flags::NONE, 1 << 20, &[5; 512]), Status::Ok);
        rig.flush();
        let found = [0, 65536, 1 << 20, 62 << 20].map(|at| rig.read(at, 512)[0]);
        assert_eq!(found, [3, 4, 5, 0]);
        let header = std::fs::read(scratch.path("image")).unwrap();
        assert_eq!(
            header[79], 16,
            "extended_l2 is the fifth bit of what a reader has to know"
        );
    }
    drop(rig);
    for name in ["first", "image"] {
        check(&scratch, &scratch.path(name));
    }
}

/// A name in an image is relative to its directory: elsewhere, it would lead to another file.
#[test]
fn snapshot_in_another_directory_lies_on_the_same_base() {
    let scratch = Scratch::new("elsewhere");
    std::fs::create_dir(scratch.path("sub")).unwrap();
    std::fs::write(scratch.path("base"), vec![3; 1 << 20]).unwrap();
    std::fs::write(scratch.path("sub/base"), vec![9; 1 << 20]).unwrap();
    for options in ["compat=1.1", "compat=0.10", "cluster_size=512"] {
        let words = format!("create -q -f qcow2 -o {options} -b base -F raw image 1M");
        if qemu(&scratch, "qemu-img", &words).is_none() {
            return;
        }
        let mut rig = Rig::at(&scratch.path("image"));
        assert_eq!(rig.write(Flags::NONE, 65536, &[4; 4096]), Status::Ok);
        let _ = std::fs::remove_file(scratch.path("sub/first"));
        replace(&mut rig, Replacement::Snapshot(scratch.path("sub/first"))).unwrap();
        assert_eq!(rig.write(Flags::NONE, 0, &[5; 512]), Status::Ok);
        rig.flush();
        drop(rig);
        let mut again = Rig::at(&scratch.path("image"));
        let found = [0, 512, 65536, 69632].map(|at| again.read(at, 512)[0]);
        assert_eq!(found, [5, 3, 4, 3], "{options}");
        drop(again);
        for (name, wanted) in [("sub/first", [3, 3, 4, 3]), ("image", [5, 3, 4, 3])] {
            check(&scratch, &scratch.path(name));
            let content = raw_content(&scratch, &scratch.path(name));
            assert_eq!(
                [0, 512, 65536, 69632].map(|at| content[at]),
                wanted,
                "{options}: {name}"
            );
        }
        std::fs::remove_file(scratch.path("image")).unwrap();
    }
}

/// What the pause leaves to be written is below the successor, and durable with its first flush.
#[test]
fn flush_of_a_successor_writes_what_was_not_flushed_below_it() {
    let scratch = Scratch::new("successor");
    if !created(&scratch, "-o cluster_size=4096 image 8M") {
        return;
    }
    let path = scratch.path("image");
    let old = ImageDisk::open(&config(&path)).unwrap();
    old.write(0, &[7; 1 << 20]).unwrap();
    std::fs::rename(&path, scratch.path("aside")).unwrap();
    qemu(
        &scratch,
        "qemu-img",
        "create -q -f qcow2 -u -b aside -F qcow2 -o cluster_size=4096 image 8M",
    );
    let below = old.image.become_base(&scratch.path("aside")).unwrap();
    let new = ImageDisk::open_on(&config(&path), Some(below)).unwrap();
    let directory = || std::fs::File::open(&scratch.0).unwrap();
    let directories = [directory(), directory()];
    new.image.set_unsettled(Some(old.image.clone()), directories);
    new.write(4096, &[8; 4096]).unwrap();
    assert!(!new.image.is_clean() && !old.image.is_clean());
    let mut found = vec![0; 12288];
    new.read(0, &mut found).unwrap();
    assert_eq!([0, 4096, 8192].map(|at| found[at]), [7, 8, 7]);
    new.flush().unwrap();
    assert!(new.image.is_clean() && old.image.is_clean());
    drop((new, old));
    let content = raw_content(&scratch, &path);
    assert_eq!([0, 4096, 8192].map(|at| content[at]), [7, 8, 7]);
}

/// Copies all that is below the image of a rig into it.
fn copy_up(rig: &mut Rig, size: u64) {
    assert_eq!(rig.run(flagged(Op::Read, Flags::TASK, 0, size)), Status::Ok);
    rig.device
        .replace(
            &[(DiskId(0), Replacement::SettleFlat(GivenUp::default()))],
            &|| Ok(()),
        )
        .unwrap();
}

#[test]
fn image_whose_successor_a_context_refuses_is_in_its_place_again() {
    let scratch = Scratch::new("refused");
    std::fs::write(scratch.path("base"), vec![3; 1 << 20]).unwrap();
    for wanted in [
        Replacement::Flat,
        Replacement::Reset,
        Replacement::Snapshot(scratch.path("first")),
    ] {
        let words = "create -q -f qcow2 -b base -F raw image 2M";
        if qemu(&scratch, "qemu-img", words).is_none() {
            return;
        }
        let mut rig = Rig::at(&scratch.path("image"));
        assert_eq!(rig.write(Flags::NONE, 65536, &[4; 4096]), Status::Ok);
        copy_up(&mut rig, 2 << 20);
        rig.refuse_to_replace(wanted.clone());
        // What is written now is in the image, and the image on its base.
        assert_eq!(rig.write(Flags::NONE, 1 << 20, &[5; 4096]), Status::Ok);
        let found = [0, 65536, 1 << 20].map(|at| rig.read(at, 512)[0]);
        assert_eq!(found, [3, 4, 5], "{wanted:?}");
        rig.flush();
        let again = rig
            .device
            .replace(&[(DiskId(0), Replacement::BeginFlat)], &|| Ok(()));
        again.unwrap();
        drop(rig);
        check(&scratch, &scratch.path("image"));
        let content = raw_content(&scratch, &scratch.path("image"));
        assert_eq!(
            [content[0], content[65536], content[1 << 20]],
            [3, 4, 5],
            "{wanted:?}"
        );
        let info = qemu(&scratch, "qemu-img", "info -f qcow2 image").unwrap();
        assert!(info.contains("backing file: base"), "{info}");
        std::fs::remove_file(scratch.path("image")).unwrap();
        for left in ["first", "image.blkmq-old", "image.blkmq-new"] {
            assert!(!scratch.path(left).exists(), "{wanted:?}: {left}");
        }
    }
}

#[test]
fn image_is_flat_only_when_all_was_copied_and_goes_on_without_its_base() {
    let scratch = Scratch::new("flat");
    std::fs::write(scratch.path("base"), vec![3; 1 << 20]).unwrap();
    if !created(&scratch, "-b base -F raw image 2M") {
        return;
    }
    let mut rig = Rig::at(&scratch.path("image"));
    let early = replace(&mut rig, Replacement::Flat).unwrap_err();
    assert!(early.to_string().contains("begin again"), "{early}");
    let early = replace(&mut rig, Replacement::SettleFlat(GivenUp::default())).unwrap_err();
    assert!(
        early.to_string().contains("at 0 is still read from below"),
        "{early}"
    );
    let given_up = GivenUp::default();
    given_up.give_up();
    let left = replace(&mut rig, Replacement::SettleFlat(given_up)).unwrap_err();
    assert!(left.to_string().contains("it was given up"), "{left}");
    assert!(replace(&mut rig, Replacement::Flat).is_err());
    // What the disk grows by shows nothing of the base.
    copy_up(&mut rig, 2 << 20);
    assert_eq!(rig.device.resize(DiskId(0), Some(4 << 20)).unwrap(), 4 << 20);
    assert_eq!(rig.write(Flags::NONE, (3 << 20) + 512, &[5; 512]), Status::Ok);
    replace(&mut rig, Replacement::Flat).unwrap();
    std::fs::remove_file(scratch.path("base")).unwrap();
    assert_eq!(rig.write(Flags::NONE, 512, &[4; 512]), Status::Ok);
    rig.flush();
    drop(rig);
    check(&scratch, &scratch.path("image"));
    let content = raw_content(&scratch, &scratch.path("image"));
    let found = [0, 512, 1 << 20, (3 << 20) + 512].map(|at| content[at]);
    assert_eq!(found, [3, 4, 0, 5]);
}

#[test]
fn reset_shows_the_base_again_and_gives_the_space_back() {
    let scratch = Scratch::new("reset");
    std::fs::write(scratch.path("base"), vec![3; 1 << 20]).unwrap();
    if !created(&scratch, "-b base -F raw -o cluster_size=4096 image 64M") {
        return;
    }
    let path = scratch.path("image");
    let mut rig = Rig::at(&path);
    for round in 0..3 {
        // As a daemon that was killed leaves it.
        std::fs::hard_link(&path, scratch.path("image.blkmq-old")).unwrap();
        assert_eq!(rig.write(Flags::NONE, 512, &[4; 1 << 20]), Status::Ok);
        replace(&mut rig, Replacement::Reset).unwrap();
        assert!(
            rig.read(0, 1 << 20).iter().all(|byte| *byte == 3),
            "round {round}"
        );
        assert!(rig.read(1 << 20, 4096).iter().all(|byte| *byte == 0));
    }
    assert!(std::fs::metadata(&path).unwrap().len() < 1 << 20);
    drop(rig);
    check(&scratch, &path);
    let left = std::fs::read_dir(&scratch.0).unwrap().count();
    assert_eq!(left, 2, "files are left behind");
}

#[test]
fn requests_under_way_go_on_above_snapshots_and_none_is_lost() {
    let scratch = Scratch::new("under-way");
    if !created(&scratch, "-o cluster_size=16384 image 8M") {
        return;
    }
    let path = scratch.path("image");
    let mut rig = Rig::at(&path);
    let mut generation = vec![0u8; 2048];
    let mut chance = Chance::new(7, 7);
    let (ask, asked) = std::sync::mpsc::channel::<()>();
    let (answer, answered) = std::sync::mpsc::channel::<()>();
    let device = rig.device.clone();
    std::thread::scope(|scope| {
        let scratch = &scratch;
        let snapshots = scope.spawn(move || {
            for number in 0..8 {
                std::thread::sleep(std::time::Duration::from_millis(30));
                let wanted = Replacement::Snapshot(scratch.path(&format!("s{number}")));
                let refresh = || {
                    ask.send(()).unwrap();
                    answered.recv().map_err(std::io::Error::other)
                };
                device.replace(&[(DiskId(0), wanted)], &refresh).unwrap();
            }
        });
        let mut memory: Vec<Mapping> = (0..DEPTH).map(|_| Mapping::new(4096).unwrap()).collect();
        let mut left = vec![None; DEPTH as usize];
        let mut done = Vec::new();
        while !snapshots.is_finished() || left.iter().any(Option::is_some) {
            for tag in 0..DEPTH as usize {
                if left[tag].is_some() || snapshots.is_finished() {
                    continue;
                }
                let block = chance.bits() as usize % generation.len();
                if left.iter().flatten().any(|(other, _)| *other == block) {
                    continue;
                }
                let is_write = !chance.bits().is_multiple_of(3);
                if is_write {
                    generation[block] = generation[block].wrapping_add(1).max(1);
                    memory[tag].bytes_mut().fill(generation[block]);
                }
                let op = if is_write { Op::Write } else { Op::Read };
                let rq = request_with(
                    op,
                    Flags::NONE,
                    0,
                    block as u64 * 4096,
                    &[lend(memory[tag].bytes_mut())],
                );
                match rig.hctx.issue(&rq, cookie(tag as u32), true, Instant(0)) {
                    Issued::Queued => left[tag] = Some((block, is_write)),
                    Issued::Done(status) => assert_eq!(status, Status::Ok),
                    _ => panic!("there is room"),
                }
            }
            if asked.try_recv().is_ok() {
                rig.hctx.refresh_disks().unwrap();
                answer.send(()).unwrap();
            }
            rig.reap(&mut done);
            for end in done.drain(..) {
                assert_eq!(end.status, Status::Ok);
                let tag = end.cookie.tag().index();
                let (block, is_write) = left[tag].take().unwrap();
                let found = &*memory[tag].bytes_mut();
                assert!(
                    found.iter().all(|byte| *byte == generation[block]),
                    "block {block}: write {is_write}"
                );
            }
        }
    });
    rig.flush();
    let found: Vec<u8> = (0..2048).map(|block| rig.read(block * 4096, 4096)[0]).collect();
    assert_eq!(found, generation);
    drop(rig);
    let content = raw_content(&scratch, &path);
    let found: Vec<u8> = content.chunks(4096).map(|block| block[0]).collect();
    assert_eq!(found, generation);
    check(&scratch, &path);
}

/// Threads that reactors start may open nothing in the sandbox, and flush an image that has just been replaced.
#[test]
fn flush_behind_a_snapshot_opens_nothing() {
    let scratch = Scratch::new("settled");
    std::fs::create_dir(scratch.path("in")).unwrap();
    if !created(&scratch, "in/image 1M") {
        return;
    }
    let rig = std::cell::RefCell::new(Rig::at(&scratch.path("in/image")));
    assert_eq!(rig.borrow_mut().write(Flags::NONE, 0, &[4; 512]), Status::Ok);
    let device = rig.borrow().device.clone();
    let wanted = Replacement::Snapshot(scratch.path("in/first"));
    let flushed = std::cell::Cell::new(None);
    let replaced = device.replace(&[(DiskId(0), wanted)], &|| {
        let rig = &mut *rig.borrow_mut();
        rig.hctx.refresh_disks().map_err(std::io::Error::other)?;
        // Nothing can be opened there any more.
        std::fs::rename(scratch.path("in"), scratch.path("moved"))?;
        flushed.set(Some(rig.run(request(Op::Flush, 0, 0))));
        Ok(())
    });
    assert_eq!(flushed.get(), Some(Status::Ok));
    replaced.unwrap();
}
