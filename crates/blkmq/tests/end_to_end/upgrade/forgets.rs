//! Tests whether data that was acknowledged as durable survives a power cut after upgrades, or after kills of
//! a daemon with guests: on a filesystem that loses unsynced data. The next daemon's flush must make durable
//! what the previous one wrote and did not flush.

use std::time::{Duration, Instant};

use blkmq_torture::history::History;
use blkmq_torture::load::{Allowed, Counts, Load, Trouble, read_all};
use blkmq_torture::medium::SECTOR_BYTES;
use blkmq_torture::mount::{Cache, Faults, Mount};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::{Stage, upgrades};
use crate::common::nbd::Client;
use crate::common::pattern::{self, BLOCK, SECTOR, block};
use crate::common::{Daemon, Scratch};
use crate::vhost_user::{Driver, RECORD_BYTES, Ring, send_record};

#[test]
fn flushed_writes_of_nbd_clients_survive_upgrades_and_a_power_cut() {
    let (mut flushes, mut dropped) = (0, 0);
    for round in 0..upgrades() as u64 {
        let Some(medium) = Medium::new(round, BYTES) else {
            return;
        };
        let stage = medium.stage("vm1", &[]);
        let mut daemon = stage.start();
        let mut history = History::new(BYTES / SECTOR_BYTES);
        let mut load = Load::connect(&stage.socket(), "vm1", 2, round).expect("it is served");
        let run = |load: &mut Load, history: &mut History, allowed| -> Result<Counts, Trouble> {
            let more = load.run(history, 0, allowed)?.ended() + 60;
            load.run(history, more, allowed)
        };
        for _ in 0..2 {
            daemon = std::thread::scope(|scope| {
                let upgrade = scope.spawn(|| stage.upgrade(daemon));
                while !upgrade.is_finished() {
                    run(&mut load, &mut history, Allowed::NOTHING)
                        .unwrap_or_else(|trouble| panic!("round {round}: {trouble}"));
                }
                upgrade.join().expect("it takes over")
            });
        }
        // A sync that fails in the last daemon also loses what the others have written, so no flush
        // may succeed any more.
        let allowed = medium.fail_a_sync(round);
        run(&mut load, &mut history, allowed).unwrap_or_else(|trouble| panic!("round {round}: {trouble}"));
        daemon.kill();
        flushes += load
            .drain(&mut history, allowed)
            .map_or(0, |counts| counts.flushes);
        dropped += medium.cut_the_power(round);
        let daemon = stage.start();
        let found = read_all(&stage.socket(), "vm1", BYTES).expect("it is read");
        history
            .crashed(&found)
            .unwrap_or_else(|wrong| panic!("round {round}: {wrong:?}"));
        daemon.kill();
    }
    eprintln!("{flushes} flushes, {dropped} volatile changes dropped");
    assert!(flushes > 0 && dropped > 0, "nothing was at stake");
}

#[test]
fn flushed_writes_of_guests_survive_kills_upgrades_and_a_power_cut() {
    let (mut flushes, mut behind) = (0, 0);
    for round in 0..upgrades() as u64 {
        let Some(medium) = Medium::new(round, GUEST_BYTES) else {
            return;
        };
        let address = format!("unix:{}", medium.scratch.word("{disk}.sock"));
        let stage = medium.stage("vm", &["--vhost-user", &address]);
        let socket = medium.scratch.path("vm.sock");
        let mut daemon = stage.start();
        let record = memfd_create("record", MemfdFlags::CLOEXEC).expect("memory");
        ftruncate(&record, RECORD_BYTES).expect("memory");
        let ring = if round % 2 == 0 { Ring::SPLIT } else { Ring::PACKED };
        let mut driver = Driver::new(&socket, round, ring);
        driver.flush_often();
        send_record(&driver.client, &record);
        driver.client.start_at(driver.base());
        for step in 0..2 {
            driver.load_until(Instant::now() + LOAD_TIME);
            daemon = if (round / 4 + step) % 2 == 0 {
                daemon.kill();
                driver.take_ended();
                let daemon = stage.start();
                driver.serve_again(&socket, &record);
                daemon
            } else {
                upgrade_under_load(&stage, daemon, &mut driver)
            };
        }
        driver.load_until(Instant::now() + LOAD_TIME);
        daemon.kill();
        driver.take_ended();
        flushes += driver.flushes;
        medium.cut_the_power(round);
        behind += driver.verify_after_a_power_cut(&medium.mount.image());
    }
    eprintln!("{flushes} flushes, {behind} sectors are behind what was sent last");
    assert!(flushes > 0 && behind > 0, "nothing was at stake");
}

#[test]
fn flush_alone_after_an_upgrade_makes_durable_what_the_daemon_before_has_written() {
    let mut dropped = 0;
    for round in 0..8 {
        let Some(medium) = Medium::new(round, BYTES) else {
            return;
        };
        let stage = medium.stage("vm1", &[]);
        let daemon = stage.start();
        let mut client = Client::connect(&stage.socket(), "vm1").expect("it is served");
        let write = |client: &mut Client, generation| {
            for number in 0..BLOCKS {
                let data = block(number, generation);
                client.write(number * BLOCK as u64, &data).expect("a write");
            }
        };
        write(&mut client, 1);
        let daemon = stage.upgrade(daemon);
        client.flush().expect("a flush");
        // None of these need be there, and most are not.
        write(&mut client, 2);
        daemon.kill();
        dropped += medium.cut_the_power(round);
        let image = std::fs::read(medium.mount.image()).expect("the image");
        for number in 0..BLOCKS {
            let sectors = image[number as usize * BLOCK..]
                .chunks(SECTOR)
                .take(BLOCK / SECTOR);
            for (index, sector) in (0..).zip(sectors) {
                let found = pattern::generation(number, index, sector);
                assert!(
                    matches!(found, Ok(1 | 2)),
                    "round {round}, block {number}: generation {found:?}, 1 is durable"
                );
            }
        }
    }
    assert!(dropped > 0, "nothing was at stake");
}

#[test]
fn daemon_whose_flush_has_failed_is_not_taken_over_and_its_clients_are_told_again() {
    let Some(medium) = Medium::new(2, BYTES) else {
        return;
    };
    let stage = medium.stage("vm1", &[]);
    let mut daemon = stage.start();
    let mut client = Client::connect(&stage.socket(), "vm1").expect("it is served");
    client.write(0, &block(0, 1)).expect("a write");
    medium.fail_a_sync(2);
    assert!(
        client.flush().is_err(),
        "the filesystem has lost what was written"
    );
    let said = stage.fail_to_upgrade(&stage.words("--take-over"));
    assert!(
        said.contains("has failed, and another process would not know"),
        "{said}"
    );
    assert!(daemon.is_running());
    assert!(client.flush().is_err(), "what was lost is lost");
    daemon.kill();
}

fn upgrade_under_load(stage: &Stage, daemon: Daemon, driver: &mut Driver) -> Daemon {
    std::thread::scope(|scope| {
        let upgrade = scope.spawn(|| stage.upgrade(daemon));
        while !upgrade.is_finished() {
            driver.step();
        }
        upgrade.join().expect("it takes over")
    })
}

/// An image on a filesystem that loses unsynced data. The round decides whether it is used with
/// direct I/O, and how slow it is.
struct Medium {
    mount: Mount,
    is_direct: bool,
    /// Dropped last, because it contains the mount.
    scratch: Scratch,
}

impl Medium {
    /// None, with a message, without FUSE.
    fn new(round: u64, bytes: usize) -> Option<Self> {
        let scratch = Scratch::new();
        let dir = scratch.path("mnt");
        std::fs::create_dir(&dir).expect("a directory");
        let is_direct = (round / 2).is_multiple_of(2);
        let cache = if is_direct { Cache::Bypassed } else { Cache::Back };
        match Mount::new(&dir, bytes, cache) {
            Ok(mount) => {
                if round % 3 == 1 {
                    let delay = Duration::from_micros(500);
                    mount.set_faults(Faults {
                        delay,
                        ..Faults::default()
                    });
                }
                Some(Self {
                    mount,
                    is_direct,
                    scratch,
                })
            }
            Err(error) => {
                blkmq_testkit::skip(&format!("no FUSE here: {error}"));
                None
            }
        }
    }

    fn stage(&self, disk: &str, more: &[&str]) -> Stage {
        let direct = if self.is_direct { "on" } else { "off" };
        let image = self.mount.image();
        let disk = format!(
            "name={disk},file={},direct={direct},block_size=512",
            image.display()
        );
        let mut stage = Stage::of(Scratch::new(), &[&disk]);
        stage.words.extend(more.iter().map(|word| (*word).to_owned()));
        stage
    }

    /// Fails a sync in every third round. Returns what clients may see from now on.
    fn fail_a_sync(&self, round: u64) -> Allowed {
        let fails = round % 3 == 2;
        if fails {
            let failing_sync = Some(1);
            self.mount.set_faults(Faults {
                failing_sync,
                ..Faults::default()
            });
        }
        Allowed {
            failures: fails,
            stale_reads: false,
            lost_clusters: false,
        }
    }

    /// Cuts the power. Returns how many changes were lost.
    fn cut_the_power(&self, seed: u64) -> u64 {
        let closed = self.mount.wait_closed(CLOSED_TIME);
        closed.expect("the daemon that was killed has let go");
        self.mount.set_faults(Faults::default());
        self.mount.forget(seed).dropped
    }
}

const BYTES: usize = 4 << 20;
const BLOCKS: u64 = 64;
const GUEST_BYTES: usize = 1 << 20;
const LOAD_TIME: Duration = Duration::from_millis(15);
const CLOSED_TIME: Duration = Duration::from_secs(10);
