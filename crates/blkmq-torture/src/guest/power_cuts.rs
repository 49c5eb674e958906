//! A proof that what was acknowledged as durable survives a power cut of the drive: verified load over
//! NBD, then everything that is written is dropped, the daemon is killed, the power comes back, and the
//! disk is read.
//!
//! Two drives can lose power. dm-flakey drops all writes from a moment on, below an ext4 or XFS that
//! has the image file: what the filesystem has not written and committed by then is lost. null_blk
//! has a volatile cache that a power cut empties, below no filesystem: what was not flushed is lost.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use blkmq_testkit::Random;

use super::devices::{Mapped, NullDisk};
use super::{Filesystem, Mounted, Plan};
use crate::daemon::{Daemon, EXPORT};
use crate::history::History;
use crate::load::{Allowed, Load, Trouble, read_all};
use crate::medium::SECTOR_BYTES;

/// Where the disk lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drive {
    /// In a file of a filesystem on dm-flakey.
    File(Filesystem),
    /// On a block device whose cache forgets.
    Device,
}

/// What was seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Power cuts, after each of which the disk was right.
    pub cuts: u64,
    /// Requests that ended well before them.
    pub requests: u64,
    /// Flushes among them.
    pub flushes: u64,
    /// Forced changes among them.
    pub forced: u64,
    /// Sectors that could be one thing or another at the cuts.
    pub uncertain: u64,
}

/// Cuts the power so many times: with one connection and with four, in turn.
///
/// # Errors
/// What was lost, or why nothing can be said.
pub fn run(
    plan: &Plan,
    drive: Drive,
    is_direct: bool,
    cuts: u64,
    report: &mut Report,
) -> Result<(), Trouble> {
    let mut random = Random::new(plan.seed);
    let mut power = Power::new(drive)?;
    let image = power.image();
    let mut history = History::new(DISK_BYTES / SECTOR_BYTES);
    let mut daemon = Daemon::start(&plan.program, &image, is_direct, Path::new("/tmp"))?;
    for cut in 0..cuts {
        let connections = if cut % 2 == 0 { 1 } else { 4 };
        let place = format!("{drive:?}, direct I/O {is_direct}, cut {cut} with {connections} connections");
        let mut load = Load::connect(daemon.socket(), EXPORT, connections, random.draw())?;
        let requests = REQUESTS_MIN + random.below(REQUESTS_MORE);
        let counts = load
            .run(&mut history, requests, ALLOWED)
            .map_err(|trouble| trouble.at(&place))?;
        report.requests += counts.done;
        report.flushes += counts.flushes;
        report.forced += counts.forced;
        report.uncertain += history.uncertain() as u64;
        // What is answered from now on may have been dropped: nobody listens.
        power.fail(&daemon)?;
        drop(load);
        power.recover()?;
        daemon = Daemon::start(&plan.program, &image, is_direct, Path::new("/tmp"))?;
        let found = read_all(daemon.socket(), EXPORT, DISK_BYTES)?;
        let right = history.crashed(&found).map_err(Trouble::AfterCrash);
        right.map_err(|trouble| trouble.at(&place))?;
        report.cuts += 1;
    }
    daemon.kill();
    Ok(())
}

/// A drive whose power can be cut.
enum Power {
    File {
        filesystem: Filesystem,
        /// Dropped first, and the disk last.
        mounted: Option<Mounted>,
        mapped: Mapped,
        disk: NullDisk,
    },
    Device(NullDisk),
}

impl Power {
    fn new(drive: Drive) -> Result<Self> {
        Ok(match drive {
            Drive::Device => Self::Device(NullDisk::new("drive", DISK_BYTES as u64, CACHE_MIB)?),
            Drive::File(filesystem) => {
                let disk = NullDisk::new("data", filesystem.bytes(), 0)?;
                filesystem.make(&disk.path())?;
                let mapped = Mapped::new("drive", &disk.table("linear", "0"))?;
                let mounted = filesystem.mount(&mapped.path(), Path::new(DIR))?;
                let image = File::create(Path::new(DIR).join(IMAGE))?;
                image.set_len(DISK_BYTES as u64)?;
                image.sync_all()?;
                Self::File {
                    filesystem,
                    mounted: Some(mounted),
                    mapped,
                    disk,
                }
            }
        })
    }

    fn image(&self) -> PathBuf {
        match self {
            Self::File { .. } => Path::new(DIR).join(IMAGE),
            Self::Device(disk) => disk.path(),
        }
    }

    fn fail(&mut self, daemon: &Daemon) -> Result<()> {
        match self {
            Self::File {
                mounted,
                mapped,
                disk,
                ..
            } => {
                mapped.switch(&disk.table("flakey", "0 0 1 1 drop_writes"))?;
                daemon.kill();
                let mounted = mounted.take().context("the filesystem is mounted")?;
                mounted.unmount()
            }
            // The cache is asked for nothing when the daemon's file is closed; it is emptied when the
            // power comes back.
            Self::Device(_) => {
                daemon.kill();
                Ok(())
            }
        }
    }

    fn recover(&mut self) -> Result<()> {
        match self {
            Self::File {
                filesystem,
                mounted,
                mapped,
                disk,
            } => {
                mapped.switch(&disk.table("linear", "0"))?;
                *mounted = Some(filesystem.mount(&mapped.path(), Path::new(DIR))?);
                Ok(())
            }
            Self::Device(disk) => disk.cut_power(),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} power cuts: {} requests ended well ({} flushes, {} forced); {} sectors could be one thing or another, and each was",
            self.cuts, self.requests, self.flushes, self.forced, self.uncertain
        )
    }
}

const ALLOWED: Allowed = Allowed::NOTHING;
const DIR: &str = "/tmp/mnt";
const IMAGE: &str = "image";
const DISK_BYTES: usize = 2 << 20;
/// More than the disk has: nothing leaves the cache for want of room.
const CACHE_MIB: u64 = 16;
const REQUESTS_MIN: u64 = 60;
const REQUESTS_MORE: u64 = 500;
