//! Crashes of the daemon on a filesystem that forgets: the daemon serves an image on it under verified
//! load; it is killed, the filesystem forgets, the daemon starts again, and everything that was
//! acknowledged as durable has to be there.
//!
//! The crashes go round twenty combinations: past the page cache and through it, one connection and four, and with nothing
//! wrong, a slow drive, a sync that fails once, a full filesystem, a full and slow one with many flushes. Past the page cache,
//! the filesystem may take whole blocks of 4096 bytes only, so that the daemon changes the blocks around small writes.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use blkmq_testkit::{Random, Scratch};

use crate::daemon::{Daemon, EXPORT};
use crate::encryption::{self, Encryption};
use crate::history::{History, Wrong};
use crate::images::{self, Images};
use crate::load::{Allowed, Load, Trouble, read_all};
use crate::medium::SECTOR_BYTES;
use crate::mount::{Cache, Faults, Mount};

/// What is to be tried.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The daemon's program.
    pub program: PathBuf,
    /// How many crashes.
    pub crashes: u64,
    /// What chance starts from. It decides the requests, when the daemon is killed and what is forgotten; which
    /// requests are under way then is up to the machine.
    pub seed: u64,
    /// One of the [`COMBINATIONS`] if not all in turn, from 0.
    pub only: Option<u64>,
    /// What the daemon serves.
    pub disk: Disk,
}

/// What the daemon serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Disk {
    /// The file.
    #[default]
    File,
    /// The file, of which direct I/O takes whole blocks only, and which every round uses so.
    Blocks,
    /// An encrypted disk in the file: `cryptsetup` formats it.
    Encrypted,
    /// A qcow2 image, of which snapshots are made and which is committed into them meanwhile; `qemu-img` looks at it after each crash.
    Image,
}

impl Disk {
    /// The word that has it tried again.
    fn word(self) -> &'static str {
        match self {
            Self::File => "",
            Self::Blocks => "--blocks ",
            Self::Encrypted => "--encrypted ",
            Self::Image => "--images ",
        }
    }
}

/// What was seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Crashes, after each of which the disk was right.
    pub crashes: u64,
    /// Snapshots that were begun before one.
    pub snapshots: u64,
    /// Commits that were.
    pub commits: u64,
    /// Requests that ended well.
    pub requests: u64,
    /// Flushes among them.
    pub flushes: u64,
    /// Forced changes among them.
    pub forced: u64,
    /// Requests that failed where they may.
    pub failed: u64,
    /// Changes that were volatile when the filesystem forgot, and what became of them.
    pub volatile: u64,
    /// Of these, dropped.
    pub dropped: u64,
    /// Of these, kept in part.
    pub torn: u64,
    /// Sectors that could be one thing or another at the crashes.
    pub uncertain: u64,
}

/// Why the proof failed.
#[derive(Debug)]
pub enum Failure {
    /// There is no such filesystem here, or no loop device; nothing was tried.
    NoMount(std::io::Error),
    /// The disk is not what it must be.
    Wrong(Wrong, String),
    /// Anything else.
    Other(anyhow::Error),
}

/// Goes through the crashes.
///
/// # Errors
/// The first failure, with the crash at which it was found.
pub fn run(plan: &Plan) -> Result<Report, Failure> {
    let scratch = Scratch::new();
    let mut worlds = [
        World::new(plan, scratch.dir(), false)?,
        World::new(plan, scratch.dir(), true)?,
    ];
    let mut report = Report::default();
    for number in 0..plan.crashes {
        let mut round = match plan.only {
            Some(only) => Round::new(plan.seed, number * COMBINATIONS + only % COMBINATIONS),
            None if plan.disk == Disk::Blocks => Round::new(plan.seed, 2 * number + 1),
            None => Round::new(plan.seed, number),
        };
        round.has_snapshot &= plan.disk == Disk::Image;
        round.has_commit &= plan.disk == Disk::Image;
        let world = &mut worlds[usize::from(round.is_direct)];
        let result = world.crash(plan, &round, &mut report);
        result.map_err(|trouble| {
            let place = format!(
                "crash {} of {}, {round}\nagain: cargo xtask crashes {}--crashes {} --seed {}\nthe daemon said:\n{}",
                number + 1,
                plan.crashes,
                plan.disk.word(),
                number + 1,
                plan.seed,
                world.last_words()
            );
            match trouble {
                Trouble::Read(wrong) => Failure::Wrong(wrong, format!("a read before {place}")),
                Trouble::AfterCrash(wrong) => Failure::Wrong(wrong, format!("the end of {place}")),
                Trouble::Other(error) => Failure::Other(error.context(place)),
            }
        })?;
        report.crashes += 1;
    }
    Ok(report)
}

/// A disk on a filesystem that forgets, served in one way.
struct World {
    dir: PathBuf,
    history: History,
    is_direct: bool,
    encryption: Option<Encryption>,
    images: Option<Images>,
    /// Dropped first: it holds the file.
    daemon: Option<Daemon>,
    mount: Mount,
}

impl World {
    fn new(plan: &Plan, scratch: &Path, is_direct: bool) -> Result<Self, Failure> {
        let dir = scratch.join(if is_direct { "direct" } else { "cached" });
        let mountpoint = dir.join("mnt");
        std::fs::create_dir_all(&mountpoint)
            .context("making a directory")
            .map_err(Failure::Other)?;
        // Past the page cache, only the flag of a forced write tells that it is one, and it says nothing of others.
        let cache = if is_direct { Cache::Bypassed } else { Cache::Back };
        let file_bytes = match plan.disk {
            Disk::Image => IMAGE_BYTES,
            _ => DISK_BYTES,
        };
        let mount = Mount::new(&mountpoint, file_bytes, cache).map_err(Failure::NoMount)?;
        if is_direct && plan.disk == Disk::Blocks {
            mount.set_block(BLOCK_BYTES);
        }
        let is_encrypted = plan.disk == Disk::Encrypted;
        let encryption = is_encrypted.then(|| Encryption::make(&dir));
        let encryption = encryption.transpose().map_err(Failure::Other)?;
        let images = || Images::make(&plan.program, &mount.image(), &dir, is_direct, DISK_BYTES);
        let is_image = plan.disk == Disk::Image;
        let images = is_image.then(images).transpose().map_err(Failure::Other)?;
        let mut world = Self {
            dir,
            encryption,
            images,
            history: History::new(DISK_BYTES / SECTOR_BYTES),
            is_direct,
            daemon: None,
            mount,
        };
        world.start(plan).map_err(Failure::Other)?;
        if let (Some(daemon), true) = (&world.daemon, is_encrypted) {
            encryption::zero(daemon.socket(), DISK_BYTES).map_err(Failure::Other)?;
        }
        Ok(world)
    }

    fn start(&mut self, plan: &Plan) -> Result<()> {
        let image = self.mount.image();
        let encryption = self.encryption.as_ref();
        let daemon = match &self.images {
            Some(images) => Daemon::serve(&plan.program, &images.words(), &self.dir),
            None => Daemon::start_over(&plan.program, &image, self.is_direct, &self.dir, encryption),
        };
        self.daemon = Some(daemon?);
        Ok(())
    }

    fn last_words(&self) -> String {
        self.daemon
            .as_ref()
            .map_or_else(String::new, |daemon| daemon.last_words())
    }

    /// Loads the daemon, kills it, forgets, starts it again and checks the disk.
    fn crash(&mut self, plan: &Plan, round: &Round, report: &mut Report) -> Result<(), Trouble> {
        let daemon = self.daemon.as_ref().expect("started");
        let connect = match plan.disk {
            Disk::Encrypted => Load::connect_without_trims,
            _ => Load::connect,
        };
        let mut load = connect(daemon.socket(), EXPORT, round.connections, round.seed)?;
        self.mount.set_faults(round.faults(self.mount.allocated_bytes()));
        let allowed = round.allowed(plan.disk);
        if round.trouble == What::FullAndFlushed {
            load.flush_often();
        }
        let mut begun = None;
        if let Some(images) = self
            .images
            .as_mut()
            .filter(|_| round.has_snapshot || round.has_commit)
        {
            load.run(&mut self.history, round.requests / 2, allowed)?;
            begun = match round.has_snapshot {
                true => Some(images.begin_snapshot()?),
                false => images.begin_commit()?,
            };
            report.commits += u64::from(!round.has_snapshot && begun.is_some());
        }
        load.run(&mut self.history, round.requests, allowed)?;
        daemon.kill();
        begun.map_or(Ok(()), images::end)?;
        let counts = load.drain(&mut self.history, allowed)?;
        let closed = self.mount.wait_closed(CLOSED_TIME_MAX);
        closed.context("after the daemon was killed")?;
        report.requests += counts.done;
        report.flushes += counts.flushes;
        report.forced += counts.forced;
        report.failed += counts.failed;
        report.uncertain += self.history.uncertain() as u64;
        self.mount.set_faults(Faults::default());
        let forgotten = self.mount.forget(round.seed);
        report.volatile += forgotten.changes;
        report.dropped += forgotten.dropped;
        report.torn += forgotten.torn;
        if let Some(images) = &mut self.images {
            images.check()?;
            images.make_flat()?;
            report.snapshots += u64::from(round.has_snapshot);
        }
        self.start(plan)?;
        let daemon = self.daemon.as_ref().expect("started");
        let found = read_all(daemon.socket(), EXPORT, DISK_BYTES)?;
        self.history.crashed(&found).map_err(Trouble::AfterCrash)
    }
}

/// One crash, as chance has it.
struct Round {
    is_direct: bool,
    connections: usize,
    trouble: What,
    /// The sync that fails, if one does.
    failing_sync: u64,
    /// Requests that end before the daemon is killed.
    requests: u64,
    /// A snapshot is made in the middle, of a disk that is in an image.
    has_snapshot: bool,
    /// It is committed into the snapshot below it.
    has_commit: bool,
    seed: u64,
}

/// What goes wrong before the crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Nothing,
    SlowDrive,
    FailingSync,
    FullFilesystem,
    /// A slow one that is full, where flushes from several sides are under way at any moment: one of them is told of an error.
    FullAndFlushed,
}

impl Round {
    fn new(seed: u64, number: u64) -> Self {
        let mut random = Random::new(seed ^ number << 32);
        let trouble = match (number + 2 * (number / 4)) % 5 {
            0 => What::Nothing,
            1 => What::SlowDrive,
            2 => What::FailingSync,
            3 => What::FullFilesystem,
            _ => What::FullAndFlushed,
        };
        let (failing_sync, requests, seed) = (1 + random.below(8), 60 + random.below(700), random.draw());
        let change = random.below(3);
        Self {
            is_direct: number % 2 == 1,
            connections: if (number / 2).is_multiple_of(2) { 1 } else { 4 },
            trouble,
            failing_sync,
            requests,
            seed,
            has_snapshot: change == 0,
            has_commit: change == 1,
        }
    }

    fn allowed(&self, disk: Disk) -> Allowed {
        let is_full = matches!(self.trouble, What::FullFilesystem | What::FullAndFlushed);
        Allowed {
            failures: is_full || self.trouble == What::FailingSync,
            stale_reads: is_full && !self.is_direct,
            lost_clusters: is_full && !self.is_direct && disk == Disk::Image,
        }
    }

    fn faults(&self, allocated_bytes: usize) -> Faults {
        let none = Faults::default();
        match self.trouble {
            What::Nothing => none,
            What::SlowDrive => Faults {
                delay: Duration::from_micros(500),
                ..none
            },
            What::FailingSync => Faults {
                failing_sync: Some(self.failing_sync),
                ..none
            },
            What::FullFilesystem => Faults {
                room: Some(allocated_bytes + ROOM_BYTES),
                ..none
            },
            What::FullAndFlushed => Faults {
                room: Some(allocated_bytes + ROOM_BYTES),
                delay: Duration::from_micros(500),
                ..none
            },
        }
    }
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cache = if self.is_direct {
            "direct I/O"
        } else {
            "page cache"
        };
        write!(
            f,
            "{cache}, {} connections, {} requests, {:?}{}{}",
            self.connections,
            self.requests,
            self.trouble,
            if self.has_snapshot { ", a snapshot" } else { "" },
            if self.has_commit { ", a commit" } else { "" }
        )
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoMount(error) => write!(f, "it cannot be tried here: {error}"),
            Self::Wrong(Wrong::Lost(what), place) => write!(f, "LOST: {what}\nat {place}"),
            Self::Wrong(Wrong::Foreign(what), place) => write!(f, "FOREIGN: {what}\nat {place}"),
            Self::Other(error) => write!(f, "{error:#}"),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} crashes, {} during or behind a snapshot, {} a commit: {} requests ended well ({} flushes, {} forced), {} failed; {} changes were volatile at a crash, {} of them \
             dropped, {} torn; {} sectors could be one thing or another, and each was",
            self.crashes,
            self.snapshots,
            self.commits,
            self.requests,
            self.flushes,
            self.forced,
            self.failed,
            self.volatile,
            self.dropped,
            self.torn,
            self.uncertain
        )
    }
}

/// Ways of serving, loads and troubles that are tried in turn.
pub const COMBINATIONS: u64 = 20;
const DISK_BYTES: usize = 2 << 20;
/// The most that an image of it takes: two copies of everything, with tables.
const IMAGE_BYTES: usize = 8 << 20;
/// What direct I/O takes with [`Disk::Blocks`].
const BLOCK_BYTES: u64 = 4096;
/// Room that a full filesystem has left when the load begins.
const ROOM_BYTES: usize = 64 << 10;
const CLOSED_TIME_MAX: Duration = Duration::from_secs(10);
