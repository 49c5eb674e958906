//! A proof that a drive which fails for a while costs only what it must: dm-flakey fails every write
//! below the file driver, under verified load. Clients receive the errors; a failed flush is not
//! forgotten; reads go on, and so do writes when the drive is well; what was durable before survives a
//! power cut behind it all.

use std::fmt;
use std::path::Path;

use anyhow::{Result, ensure};
use blkmq_nbd::codec::CommandFlags;
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_testkit::Random;

use super::Plan;
use super::devices::{Mapped, NullDisk};
use crate::connection::Connection;
use crate::daemon::{Daemon, EXPORT};
use crate::history::{History, Wrong};
use crate::load::{Allowed, Counts, Load, Trouble, read_all};
use crate::medium::SECTOR_BYTES;

/// What was seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Times for which the drive failed.
    pub intervals: u64,
    /// Requests that ended well.
    pub done: u64,
    /// Requests that were told an error.
    pub failed: u64,
    /// Flushes that were acknowledged, none of them behind one that had failed.
    pub flushes: u64,
}

/// Has the drive fail so many times; after each of them the daemon is killed, the power is cut, and
/// the disk is read.
///
/// # Errors
/// What was lost or not told, or why nothing can be said.
pub fn run(plan: &Plan, is_direct: bool, intervals: u64, report: &mut Report) -> Result<(), Trouble> {
    let mut random = Random::new(plan.seed);
    let disk = NullDisk::new("data", DISK_BYTES as u64, CACHE_MIB)?;
    let well = disk.table("linear", "0");
    let mut history = History::new(DISK_BYTES / SECTOR_BYTES);
    for interval in 0..intervals {
        let connections = if interval % 2 == 0 { 1 } else { 4 };
        let place = format!("direct I/O {is_direct}, interval {interval} with {connections} connections");
        let drive = Mapped::new("drive", &well)?;
        let daemon = Daemon::start(&plan.program, &drive.path(), is_direct, Path::new("/tmp"))?;
        let mut load = Load::connect(daemon.socket(), EXPORT, connections, random.draw())?;
        let result = fail(&mut load, &mut history, is_direct, (&drive, &disk), &daemon);
        let counts = result.map_err(|trouble| trouble.at(&place))?;
        report.done += counts.done;
        report.failed += counts.failed;
        report.flushes += counts.flushes;
        daemon.kill();
        drop(load);
        drive.remove()?;
        disk.cut_power()?;
        let drive = Mapped::new("drive", &well)?;
        let daemon = Daemon::start(&plan.program, &drive.path(), is_direct, Path::new("/tmp"))?;
        let found = read_all(daemon.socket(), EXPORT, DISK_BYTES)?;
        let right = history.crashed(&found).map_err(Trouble::AfterCrash);
        right.map_err(|trouble| trouble.at(&place))?;
        told(&daemon, 0).map_err(|trouble| trouble.at(&place))?;
        daemon.kill();
        drive.remove()?;
        report.intervals += 1;
    }
    Ok(())
}

/// Loads the daemon while the drive is well, fails, and is well again.
fn fail(
    load: &mut Load,
    history: &mut History,
    is_direct: bool,
    (drive, disk): (&Mapped, &NullDisk),
    daemon: &Daemon,
) -> Result<Counts, Trouble> {
    let none = Allowed {
        failures: false,
        stale_reads: false,
        lost_clusters: false,
    };
    let some = Allowed {
        failures: true,
        // A page that could not be written out is dropped when its memory is wanted.
        stale_reads: !is_direct,
        lost_clusters: false,
    };
    let before = load.run(history, REQUESTS, none)?;
    drive.switch(&disk.table("flakey", "0 0 1 1 error_writes"))?;
    let during = load.run(history, before.ended() + REQUESTS, some)?;
    told(daemon, libc::EIO)?;
    drive.switch(&disk.table("linear", "0"))?;
    let after = load.run(history, during.ended() + REQUESTS, some)?;
    // The kernel has forgotten what it could not write, and would call the next flush good.
    told(daemon, libc::EIO)?;
    ensure_told(&during, &after)?;
    match after.flushes - during.flushes {
        0 => Ok(after),
        flushes => Err(Trouble::AfterCrash(Wrong::Lost(format!(
            "{flushes} flushes were acknowledged behind one that failed"
        )))),
    }
}

/// Looks whether clients were told of the failures, and whether other requests go well when the drive
/// does.
fn ensure_told(during: &Counts, after: &Counts) -> Result<()> {
    ensure!(during.failed > 0, "nothing has failed while the drive failed");
    let failed = after.failed - during.failed;
    let done = after.done - during.done;
    ensure!(
        done > failed,
        "{done} requests went well and {failed} failed after the drive was well again"
    );
    Ok(())
}

/// Looks whether a flush ends as it must.
fn told(daemon: &Daemon, wanted: i32) -> Result<(), Trouble> {
    match flush(daemon)? {
        error if error == wanted => Ok(()),
        error => Err(Trouble::AfterCrash(Wrong::Lost(format!(
            "a flush ended with error {error}, wanted {wanted}"
        )))),
    }
}

fn flush(daemon: &Daemon) -> Result<i32> {
    let mut connection = Connection::open(daemon.socket(), EXPORT)?;
    let header = RequestHeader {
        cookie: 0,
        offset: 0,
        length: 0,
        command: Command::FLUSH,
        flags: CommandFlags::NONE,
    };
    connection.send(header, &[], 0, ())?;
    let mut ended = Vec::new();
    while ended.is_empty() {
        ensure!(connection.receive(&mut ended)?, "the server has hung up");
    }
    Ok(ended[0].error)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} times of failure: {} requests ended well ({} flushes), {} were told an error",
            self.intervals, self.done, self.flushes, self.failed
        )
    }
}

const DISK_BYTES: usize = 2 << 20;
/// More than the disk has: nothing leaves the cache for want of room.
const CACHE_MIB: u64 = 16;
/// Before the drive fails, while it does, and behind that.
const REQUESTS: u64 = 200;
