//! A proof that flushes and forced writes of a real filesystem reach the drive below the daemon, in their
//! order: dm-log-writes logs everything that reaches it, and the proof examines what is durable at each
//! flush.
//!
//! ```text
//!  programs ─ ext4, XFS ─ /dev/nbd0 ─► blkmq serve ─ file driver ─► dm-log-writes ─► null_blk
//!     │                                                             ▲     │
//!     └─ fsync has returned: a mark ────────────────────────────────┘     └─► log ─► replayed to each flush
//! ```
//!
//! After each flush and forced write of the log, and at each mark, the disk is mounted, so that its
//! journal is recovered; what was synced before is looked for, and the filesystem is checked.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::devices::{Mapped, NbdDisk, NullDisk};
use super::file_load::{FileLoad, mark_number};
use super::{Filesystem, Plan};
use crate::daemon::{Daemon, EXPORT};
use crate::history::Wrong;
use crate::load::Trouble;
use crate::write_log::{Entry, Image, Kind, WriteLog};

/// How the filesystem lies on the drive.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// Which filesystem.
    pub filesystem: Filesystem,
    /// Connections of the kernel's NBD client.
    pub connections: usize,
    /// Whether the daemon goes past the page cache.
    pub is_direct: bool,
}

/// What was seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Writes in the log.
    pub writes: u64,
    /// Of these, forced.
    pub forced: u64,
    /// Bytes that were written.
    pub bytes: u64,
    /// Flushes in the log.
    pub flushes: u64,
    /// Files, records and blocks that were synced.
    pub synced: usize,
    /// States of the disk that were mounted and checked.
    pub checks: u64,
    /// How often one of the synced was looked for in them, and found.
    pub found: u64,
}

/// Loads a filesystem on a disk of ours, kills the daemon under it, and checks what is durable at
/// each flush.
///
/// # Errors
/// What was synced and is not there, or why nothing can be said.
pub fn run(plan: &Plan, round: &Round) -> Result<Report, Trouble> {
    let filesystem = round.filesystem;
    let data = NullDisk::new("data", filesystem.bytes(), 0)?;
    let log = NullDisk::new("log", LOG_BYTES, 0)?;
    filesystem.make(&data.path())?;
    let mut image = Image::read(&data.path())?;
    let load = run_load(plan, round, (&data, &log))?;
    drop(data);
    let mut report = Report {
        synced: load.count(),
        ..Report::default()
    };
    let device = File::open(log.path()).context("opening the log")?;
    let mut entries = WriteLog::open(BufReader::with_capacity(1 << 20, device))?;
    let mut replay = Replay {
        filesystem,
        load,
        reached: BTreeSet::new(),
        is_due: true,
    };
    while let Some(entry) = entries.next_entry()? {
        if entry.changes_data() {
            replay.look(&image, &mut report)?;
        }
        report.count(&entry);
        image.apply(&entry);
        replay.take(&entry);
    }
    // The log ends with what had completed and was not flushed when it was closed.
    replay.is_due = true;
    replay.look(&image, &mut report)?;
    replay.ensure_tried(round, &report)?;
    Ok(report)
}

/// Has programs work on the filesystem until enough was synced, and kills the daemon while they go on.
fn run_load(plan: &Plan, round: &Round, (data, log): (&NullDisk, &NullDisk)) -> Result<FileLoad> {
    let log_path = log.path();
    let drive = Mapped::new(
        "drive",
        &data.table("log-writes", &log_path.display().to_string()),
    )?;
    let daemon = Daemon::start(&plan.program, &drive.path(), round.is_direct, Path::new(DIR))?;
    let disk = NbdDisk::connect(daemon.socket(), EXPORT, round.connections)?;
    let mounted = round
        .filesystem
        .mount(&disk.path(), &PathBuf::from(DIR).join("mnt"))?;
    let load = FileLoad::default();
    let worked = std::thread::scope(|scope| {
        let dir = PathBuf::from(DIR).join("mnt");
        let (load, drive) = (&load, &drive);
        let workers: Vec<_> = (0..WORKERS)
            .map(|worker| {
                let dir = dir.clone();
                scope.spawn(move || load.work(&dir, worker, plan.seed, &|name| drive.mark(name)))
            })
            .collect();
        let deadline = Instant::now() + LOAD_TIME_MAX;
        while load.count() < SYNCED && Instant::now() < deadline {
            if workers.iter().any(|worker| worker.is_finished()) {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        load.end();
        daemon.kill();
        // What waits for the server that is gone fails now, and not after the client's own time.
        drop(disk);
        for worker in workers {
            worker.join().expect("a worker does not panic")?;
        }
        anyhow::Ok(())
    });
    worked.with_context(|| format!("the daemon said:\n{}", daemon.last_words()))?;
    ensure!(
        load.count() >= SYNCED,
        "only {} syncs within {LOAD_TIME_MAX:?}; the daemon said:\n{}",
        load.count(),
        daemon.last_words()
    );
    mounted.unmount()?;
    drive.remove()?;
    Ok(load)
}

/// Where the replay is.
struct Replay {
    filesystem: Filesystem,
    load: FileLoad,
    reached: BTreeSet<u64>,
    /// A flush, a forced write or a mark has come since the last check.
    is_due: bool,
}

impl Replay {
    /// Notes what the entry makes durable.
    fn take(&mut self, entry: &Entry) {
        match &entry.kind {
            Kind::Mark(name) => {
                if let Some(number) = mark_number(name) {
                    self.reached.insert(number);
                    self.is_due = true;
                }
            }
            _ => self.is_due |= entry.is_flush || entry.is_forced,
        }
    }

    /// Checks the image, which is about to change, if that is due: after the latest flush, with all
    /// marks behind it.
    fn look(&mut self, image: &Image, report: &mut Report) -> Result<(), Trouble> {
        if !self.is_due {
            return Ok(());
        }
        self.is_due = false;
        report.checks += 1;
        let found = self.check(image)?.map_err(|found| {
            let place = format!("check {}: {report}", report.checks);
            Trouble::AfterCrash(Wrong::Lost(format!("{found}\nat {place}")))
        })?;
        report.found += found as u64;
        Ok(())
    }

    /// Says whether the log could have shown anything.
    fn ensure_tried(&self, round: &Round, report: &Report) -> Result<()> {
        let marks = self.reached.len();
        ensure!(
            marks >= report.synced,
            "{marks} of {} marks are in the log",
            report.synced
        );
        // Through the page cache, a forced write is one with a flush behind it.
        let has_forced = report.forced > 0 || !round.is_direct;
        let is_test = report.flushes > 0 && has_forced && report.found > 0;
        ensure!(is_test, "nothing was at stake: {report}");
        Ok(())
    }

    /// Mounts and checks what the image holds, and says what is wrong with it.
    fn check(&self, image: &Image) -> Result<Result<usize, String>> {
        let disk = NullDisk::new("replay", self.filesystem.bytes(), 0)?;
        image.write(&disk.path())?;
        let dir = PathBuf::from(DIR).join("replay");
        let mounted = match self.filesystem.mount(&disk.path(), &dir) {
            Ok(mounted) => mounted,
            Err(error) => return Ok(Err(format!("it cannot be mounted: {error:#}"))),
        };
        let looked = self.load.check(&dir, &self.reached);
        mounted.unmount()?;
        Ok(looked.and_then(|count| self.filesystem.check(&disk.path()).map(|()| count)))
    }
}

impl Report {
    fn count(&mut self, entry: &Entry) {
        self.flushes += u64::from(entry.is_flush);
        if let Kind::Write { data, .. } = &entry.kind
            && !data.is_empty()
        {
            self.writes += 1;
            self.bytes += data.len() as u64;
            self.forced += u64::from(entry.is_forced);
        }
    }
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, connections) = (self.filesystem.name(), self.connections);
        let way = if self.is_direct { "past" } else { "through" };
        write!(f, "{name}, {connections} connections, {way} the page cache")
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} writes of {} KiB together ({} forced) and {} flushes in the log; {} times something was synced, and it was found {} times in {} states of the disk",
            self.writes,
            self.bytes >> 10,
            self.forced,
            self.flushes,
            self.synced,
            self.found,
            self.checks
        )
    }
}

/// The guest's own files: on a filesystem in memory, with a short path.
const DIR: &str = "/tmp";
const LOG_BYTES: u64 = 512 << 20;
const WORKERS: u64 = 3;
/// Enough for every kind of them, and few enough to look at each flush.
const SYNCED: usize = 24;
const LOAD_TIME_MAX: Duration = Duration::from_secs(60);
