//! Tests whether data that was acknowledged as durable survives a crash of daemon and page cache, on a
//! filesystem that loses unsynced data. `cargo xtask crashes` does more crashes, and checks that builds which
//! lose data are caught.

use blkmq_torture::crashes::{self, Disk, Failure, Plan};
use blkmq_torture::filesystems;

use crate::common::daemon::program;
use crate::common::tools::installed;

#[test]
fn durable_writes_survive_crashes_that_forget_the_rest() {
    survives_crashes(10, Disk::File);
}

#[test]
fn small_writes_of_blocks_survive_crashes_that_forget_and_tear_none() {
    survives_crashes(10, Disk::Blocks);
}

#[test]
fn encrypted_disk_keeps_durable_data_over_crashes_that_forget_the_rest() {
    if installed(&["cryptsetup"]) {
        survives_crashes(6, Disk::Encrypted);
    }
}

#[test]
fn image_keeps_durable_data_and_is_sound_after_crashes_that_forget_the_rest() {
    if installed(&["qemu-img"]) {
        survives_crashes(10, Disk::Image);
    }
}

fn survives_crashes(crashes: u64, disk: Disk) {
    let plan = Plan {
        program: program(),
        crashes,
        seed: 1,
        only: None,
        disk,
    };
    match crashes::run(&plan) {
        Ok(report) => {
            println!("{report}");
            let is_no_test =
                report.flushes == 0 || report.forced == 0 || report.dropped == 0 || report.torn == 0;
            assert!(
                !is_no_test && report.uncertain > 0,
                "nothing was at stake: {report}"
            );
        }
        Err(Failure::NoMount(error)) => {
            blkmq_testkit::skip(&format!("no FUSE here: {error}"));
        }
        Err(failure) => panic!("{failure}"),
    }
}

#[test]
fn ext4_and_xfs_on_a_disk_survive_crashes_that_forget_and_have_what_was_synced() {
    // Filesystems flush often, and a crash at which nothing is volatile tests nothing.
    for seed in 1..=24 {
        let plan = Plan {
            program: program(),
            crashes: 2,
            seed,
            only: None,
            disk: Disk::File,
        };
        match filesystems::run(&plan) {
            Ok(report) => {
                println!("{report}");
                if report.synced > 0 && report.volatile > 0 {
                    return;
                }
            }
            Err(Failure::NoMount(error)) => {
                return blkmq_testkit::skip(&format!("no loop device on a disk of FUSE here: {error}"));
            }
            Err(failure) => panic!("{failure}"),
        }
    }
    panic!("nothing was at stake at any crash");
}
