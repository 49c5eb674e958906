//! Tests whether clients of both front doors continue over the same upgrades: vhost-user drivers with a split
//! and with a packed ring, and NBD clients, on disks that share a queue with `bfq` and on one without, in
//! groups with weights.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::load::{Load, LongestGap};
use super::{DISK_BYTES, Stage, upgrades};
use crate::common::Scratch;
use crate::vhost_user::{Driver, Ring};

#[test]
fn drivers_and_nbd_clients_of_one_daemon_go_on_over_upgrades() {
    let stage = stage();
    let daemon = stage.start();
    let loads = ["nbd1", "nbd2"].map(|disk| (disk, Load::start(&stage.socket(), disk, CLIENTS)));
    let mut drivers = [("split", Ring::SPLIT), ("packed", Ring::PACKED)].map(|(disk, ring)| {
        let socket = stage.scratch.path(&format!("{disk}.sock"));
        let mut driver = Driver::new(&socket, 1, ring);
        driver.serve();
        (disk, driver)
    });
    let gaps = [LongestGap::default(), LongestGap::default()];
    let is_over = AtomicBool::new(false);
    let upgrades = upgrades();
    let mut pauses = Vec::new();
    let daemon = std::thread::scope(|scope| {
        let mut daemon = daemon;
        for ((_, driver), gap) in drivers.iter_mut().zip(&gaps) {
            let is_over = &is_over;
            scope.spawn(move || drive(driver, gap, is_over));
        }
        let take_longest_gap = || {
            let of_clients = loads.iter().map(|(_, load)| load.take_longest_gap());
            of_clients.chain(gaps.iter().map(LongestGap::take)).max()
        };
        std::thread::sleep(Duration::from_millis(200));
        for _ in 0..upgrades {
            take_longest_gap();
            daemon = stage.upgrade(daemon);
            std::thread::sleep(Duration::from_millis(30));
            pauses.extend(take_longest_gap());
        }
        is_over.store(true, Ordering::Relaxed);
        daemon
    });
    let image = |disk: &str| stage.scratch.path(&format!("{disk}.raw"));
    let of_nbd: u64 = loads
        .into_iter()
        .map(|(disk, load)| load.stop_and_verify(&image(disk)))
        .sum();
    drivers.iter_mut().for_each(|(_, driver)| driver.finish());
    daemon.stop();
    for (disk, driver) in &drivers {
        driver.verify_image(&image(disk));
        assert!(driver.ended() > 10 * upgrades as u64, "{disk}: no test");
    }
    report(
        upgrades,
        of_nbd,
        drivers.map(|(_, driver)| driver.ended()),
        pauses,
    );
}

/// Four disks: for each front door one with `bfq`, on a shared drive, and one without a scheduler.
fn stage() -> Stage {
    let scratch = Scratch::new();
    let disks = [
        ("split", 1 << 20, "queue=fair,sched=bfq,group=/guests/split"),
        ("packed", 1 << 20, "queue=plain,sched=none,group=/guests/packed"),
        ("nbd1", DISK_BYTES, "queue=fair,sched=bfq,group=/nbd1"),
        ("nbd2", DISK_BYTES, "queue=plain,sched=none,group=/nbd2"),
    ];
    let disks = disks.map(|(name, bytes, keys)| {
        let image = scratch.image(&format!("{name}.raw"), bytes);
        format!("name={name},file={image},{keys}")
    });
    let address = format!("unix:{}", scratch.word("{disk}.sock"));
    let mut stage = Stage::of(scratch, &disks.each_ref().map(String::as_str));
    let more = ["--vhost-user", &address, "--group", "/guests,weight=400"];
    stage.words.extend(more.map(str::to_owned));
    stage
        .words
        .extend(["--group", "/nbd1,weight=100"].map(str::to_owned));
    stage
}

/// Loads a driver's ring. It sleeps between polls, as a guest does; two drivers that spin would use
/// both processors.
fn drive(driver: &mut Driver, gap: &LongestGap, is_over: &AtomicBool) {
    let mut last = Instant::now();
    while !is_over.load(Ordering::Relaxed) {
        if driver.step() {
            gap.answered(&mut last);
        }
        std::thread::sleep(LOOK_TIME);
    }
}

/// Reports what clients saw. The long form asserts the goal, on a quiet machine and with a release
/// build.
fn report(upgrades: usize, of_nbd: u64, of_drivers: [u64; 2], mut pauses: Vec<Duration>) {
    pauses.sort_unstable();
    let at = |per_cent: usize| pauses[(pauses.len() * per_cent).div_ceil(100) - 1];
    eprintln!(
        "{upgrades} upgrades beside {of_nbd} requests by NBD, and {of_drivers:?} of drivers with a split and a packed ring; the longest \
         time that a client was without an answer: median {:?}, p99 {:?}, worst {:?}",
        at(50),
        at(99),
        at(100)
    );
    if upgrades >= 100 {
        assert!(at(99) <= PAUSE_MAX, "p99 of the pause: {:?}", at(99));
    }
}

/// NBD clients of each disk.
const CLIENTS: u64 = 2;
const LOOK_TIME: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(50);
