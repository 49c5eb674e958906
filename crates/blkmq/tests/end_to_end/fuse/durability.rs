//! Tests whether data that a file's user has made durable survives a power cut, and whether the user is told
//! of losses: on a filesystem that loses unsynced data.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::Duration;

use blkmq_torture::mount::{Cache, Faults, Mount};
use rustix::fs::OFlags;

use super::{STEP, Stage, aligned, may_mount};
use crate::common::Scratch;

/// A disk on a filesystem that loses unsynced data, which is unmounted after the disk, and before its
/// directory is removed.
struct Forgetful {
    stage: Stage,
    medium: Mount,
    place: Scratch,
}

fn stage() -> Option<Forgetful> {
    if !may_mount() {
        return None;
    }
    let mut stage = Stage {
        daemon: None,
        scratch: Scratch::new(),
    };
    let place = Scratch::new();
    let below = place.path("below");
    std::fs::create_dir(&below).expect("a directory can be made");
    let medium = Mount::new(&below, 16 << 20, Cache::Bypassed).expect("root mounts");
    stage.serve(&format!("name=vm1,file={}", medium.image().display()));
    Some(Forgetful { stage, medium, place })
}

#[test]
fn durable_and_flushed_writes_survive_a_power_cut() {
    let Some(Forgetful {
        mut stage,
        medium,
        place,
    }) = stage()
    else {
        return;
    };
    let mut options = File::options();
    let file = options
        .write(true)
        .custom_flags((OFlags::DSYNC | OFlags::DIRECT).bits() as i32);
    let durable = file.open(stage.path()).unwrap();
    for number in 0..64 {
        durable.write_all_at(&aligned(number).0, number * STEP).unwrap();
    }
    let arrived = medium.arrived();
    assert!(arrived.durable_writes + arrived.syncs >= 64, "{arrived:?}");
    let file = stage.open();
    for number in 64..128 {
        file.write_all_at(&aligned(number).0, number * STEP).unwrap();
    }
    file.sync_data().unwrap();
    for number in 128..512 {
        file.write_all_at(&aligned(number).0, number * STEP).unwrap();
    }
    stage.daemon.take().expect("it serves").kill();
    medium.wait_closed(Duration::from_secs(10)).unwrap();
    let forgotten = medium.forget(1);
    assert!(forgotten.dropped > 0, "nothing was at stake: {forgotten:?}");
    stage.serve(&format!("name=vm1,file={}", medium.image().display()));
    let (file, mut read) = (stage.open(), aligned(999));
    for number in 0..128 {
        file.read_exact_at(&mut read.0, number * STEP).unwrap();
        assert!(read.0 == aligned(number).0, "block {number}");
    }
    drop(file);
    drop((stage, medium, place));
}

#[test]
fn sync_that_fails_below_is_heard_of() {
    let Some(Forgetful { stage, medium, place }) = stage() else {
        return;
    };
    let file = stage.open();
    file.write_all_at(&aligned(1).0, STEP).unwrap();
    file.sync_all().unwrap();
    medium.set_faults(Faults {
        failing_sync: Some(1),
        ..Faults::default()
    });
    file.write_all_at(&aligned(2).0, 2 * STEP).unwrap();
    file.sync_all().expect_err("it failed below");
    assert_eq!(medium.arrived().failed_syncs, 1);
    drop(file);
    drop((stage, medium, place));
}
