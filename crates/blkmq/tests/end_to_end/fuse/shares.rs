//! Tests whether groups have their shares of a drive through files as through other front doors.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::{Aligned, STEP, Stage, may_mount};
use crate::common::pattern::BLOCK;
use crate::common::{Daemon, Scratch};

#[test]
fn two_groups_share_a_slow_drive_by_their_weights() {
    if !may_mount() {
        return;
    }
    let mut stage = Stage {
        daemon: None,
        scratch: Scratch::new(),
    };
    // About 4000 reads a second for both disks together.
    let drive = "null=1G,queue=q,sched=bfq,latency=1ms,parallel=4";
    let disk = |name: &str| format!("name={name},{drive},group=/{name}");
    let place = stage.scratch.word("{disk}");
    let groups = ["--group", "/disk,weight=100", "--group", "/other,weight=300"];
    let words = [
        "--disk",
        &disk("disk"),
        "--disk",
        &disk("other"),
        "--fuse",
        &place,
    ];
    stage.daemon = Some(Daemon::start(
        &[&words[..], &groups, &["--control", "none"]].concat(),
    ));
    let [light, heavy] = read_for(&stage, Duration::from_secs(3));
    let ratio = heavy as f64 / light as f64;
    eprintln!("weights 1:3, reads {light}:{heavy}, {ratio:.2}");
    assert!(
        (2.4..3.6).contains(&ratio),
        "{light}:{heavy}, {ratio:.2} instead of 3"
    );
    stage.stop();
}

/// Reads each disk with many threads; returns how many reads of each ended in that time.
fn read_for(stage: &Stage, time: Duration) -> [u64; 2] {
    let (is_over, done) = (AtomicBool::new(false), [AtomicU64::new(0), AtomicU64::new(0)]);
    std::thread::scope(|scope| {
        for (name, done) in ["disk", "other"].into_iter().zip(&done) {
            for number in 0..THREADS {
                let (file, is_over) = (stage.open_at(&stage.scratch.path(name)), &is_over);
                scope.spawn(move || {
                    let mut read = Box::new(Aligned([0; BLOCK]));
                    // Far apart, so that nothing is merged.
                    let mut at = number;
                    while !is_over.load(Ordering::Relaxed) {
                        at = (at * 7919 + 1) % BLOCKS;
                        file.read_exact_at(&mut read.0, at * STEP).expect("a read");
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        }
        std::thread::sleep(time / 3);
        let counts = || done.each_ref().map(|done| done.load(Ordering::Relaxed));
        let before = counts();
        std::thread::sleep(time);
        let after = counts();
        is_over.store(true, Ordering::Relaxed);
        [after[0] - before[0], after[1] - before[1]]
    })
}

const THREADS: u64 = 16;
/// Blocks of a disk.
const BLOCKS: u64 = 1 << 18;
