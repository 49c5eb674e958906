//! Tests whether data that was acknowledged as durable survives a crash of daemon and page cache, on a
//! filesystem that loses unsynced data. `cargo xtask crashes` does more crashes, and checks that builds which
//! lose data are caught.

use blkmq_forget::crashes::{self, Failure, Plan};
use blkmq_forget::filesystems;

use crate::common::daemon::program;

#[test]
fn what_was_acknowledged_as_durable_survives_crashes_that_forget_the_rest() {
    survives_crashes(false);
}

#[test]
fn small_writes_of_blocks_survive_crashes_that_forget_and_tear_none() {
    survives_crashes(true);
}

fn survives_crashes(has_blocks: bool) {
    let plan = Plan {
        program: program(),
        crashes: 10,
        seed: 1,
        only: None,
        has_blocks,
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
            blkmq_skip::skip(&format!("no FUSE here: {error}"));
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
            has_blocks: false,
        };
        match filesystems::run(&plan) {
            Ok(report) => {
                println!("{report}");
                if report.synced > 0 && report.volatile > 0 {
                    return;
                }
            }
            Err(Failure::NoMount(error)) => {
                return blkmq_skip::skip(&format!("no loop device on a disk of FUSE here: {error}"));
            }
            Err(failure) => panic!("{failure}"),
        }
    }
    panic!("nothing was at stake at any crash");
}
