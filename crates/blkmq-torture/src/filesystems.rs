//! Crashes of the daemon below the kernel's own filesystems: the disk is a regular file (FUSE) with a
//! loop device on it, its image lies on the filesystem that forgets. Programs write and sync; the daemon
//! is killed, what was not durable is forgotten, another daemon starts over the dead mount, and the
//! filesystem must be whole and have what was synced.
//!
//! ```text
//!  files, fsync ─ ext4, XFS ─► loop device ─► FUSE ─► blkmq serve ─► image ─► FUSE ─► durable and volatile
//! ```
//!
//! The crashes go round both filesystems, past the page cache below the daemon and through it, on a fast drive and on a slow one. Needs root and loop devices.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use blkmq_testkit::{Random, Scratch};

use crate::crashes::{Failure, Plan};
use crate::daemon::Daemon;
use crate::guest::file_load::FileLoad;
use crate::guest::{Filesystem, tools};
use crate::history::Wrong;
use crate::medium::Forgotten;
use crate::mount::{Cache, Faults, Mount};

/// What was seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Crashes, after each of which the filesystem was whole.
    pub crashes: u64,
    /// Files, records and blocks that were synced before a crash; all were there after it.
    pub synced: u64,
    /// Changes below the daemon that were volatile at a crash.
    pub volatile: u64,
    /// Of these, dropped.
    pub dropped: u64,
    /// Of these, kept in part.
    pub torn: u64,
}

/// Goes through the crashes.
///
/// # Errors
/// The first failure, with the crash at which it was found; [`Failure::NoMount`] where there are no loop devices.
pub fn run(plan: &Plan) -> Result<Report, Failure> {
    may_try().map_err(|error| Failure::NoMount(io::Error::other(format!("{error:#}"))))?;
    let scratch = Scratch::new();
    let mut worlds: [Option<World>; WORLDS] = Default::default();
    let mut report = Report::default();
    for number in 0..plan.crashes {
        let index = (plan.only.unwrap_or(number) % WORLDS as u64) as usize;
        let world = match &mut worlds[index] {
            Some(world) => world,
            none => none.insert(World::new(plan, scratch.dir(), index)?),
        };
        let mut random = Random::new(plan.seed ^ number << 32);
        world.crash(plan, number, &mut random, &mut report).map_err(|trouble| {
            let place = format!(
                "crash {} of {}, {world}\nagain: cargo xtask crashes --filesystems --crashes {} --seed {}\nthe daemon said:\n{}",
                number + 1,
                plan.crashes,
                number + 1,
                plan.seed,
                world.daemon.as_ref().map_or_else(String::new, |daemon| daemon.last_words())
            );
            match trouble {
                Trouble::Lost(what) => Failure::Wrong(Wrong::Lost(what), place),
                Trouble::Other(error) => Failure::Other(error.context(place)),
            }
        })?;
        report.crashes += 1;
    }
    Ok(report)
}

/// What goes wrong at a crash.
enum Trouble {
    /// The filesystem is not whole, or what was synced is not there.
    Lost(String),
    Other(anyhow::Error),
}

impl From<anyhow::Error> for Trouble {
    fn from(error: anyhow::Error) -> Self {
        Self::Other(error)
    }
}

/// A filesystem on a disk on the filesystem that forgets.
struct World {
    filesystem: Filesystem,
    is_direct: bool,
    dir: PathBuf,
    daemon: Option<Daemon>,
    /// Dropped last: the daemon has its file open.
    mount: Mount,
}

impl World {
    fn new(plan: &Plan, scratch: &Path, index: usize) -> Result<Self, Failure> {
        let filesystem = Filesystem::ALL[index % 2];
        let is_direct = index.is_multiple_of(3);
        let dir = scratch.join(index.to_string());
        let mountpoint = dir.join("below");
        fs::create_dir_all(&mountpoint)
            .context("making a directory")
            .map_err(Failure::Other)?;
        let cache = if is_direct { Cache::Bypassed } else { Cache::Back };
        let mount = Mount::new(&mountpoint, filesystem.bytes() as usize, cache).map_err(Failure::NoMount)?;
        let mut world = Self {
            filesystem,
            is_direct,
            dir,
            daemon: None,
            mount,
        };
        let made = world.make(plan);
        made.map_err(Failure::Other)?;
        Ok(world)
    }

    fn make(&mut self, plan: &Plan) -> Result<()> {
        self.serve(plan)?;
        let device = Loop::attach(&self.disk())?;
        self.filesystem.make(device.path())
    }

    /// Starts a daemon, over what a killed one has left.
    fn serve(&mut self, plan: &Plan) -> Result<()> {
        let direct = if self.is_direct { "on" } else { "off" };
        let image = self.mount.image();
        let disk = format!(
            "name=disk,file={},direct={direct},block_size=512",
            image.display()
        );
        let mut command = Command::new(&plan.program);
        command
            .args(["serve", "--disk", &disk, "--fuse"])
            .arg(self.disk());
        self.daemon = Some(Daemon::spawn(command, &self.disk(), Stdio::piped())?);
        Ok(())
    }

    fn disk(&self) -> PathBuf {
        self.dir.join("disk")
    }

    /// Works on the filesystem, kills the daemon, forgets, starts another one and looks for what must be there.
    fn crash(
        &mut self,
        plan: &Plan,
        number: u64,
        random: &mut Random,
        report: &mut Report,
    ) -> Result<(), Trouble> {
        let work = format!("crash{number}");
        let is_slow = number / WORLDS as u64 % 2 == 1;
        self.mount.set_faults(Faults {
            delay: if is_slow { DELAY } else { Duration::ZERO },
            ..Faults::default()
        });
        let (load, forgotten) = self.work_and_crash(&work, random)?;
        self.mount.set_faults(Faults::default());
        report.volatile += forgotten.changes;
        report.dropped += forgotten.dropped;
        report.torn += forgotten.torn;
        self.serve(plan)?;
        let device = Loop::attach(&self.disk())?;
        let at = self.dir.join("above");
        let mounted = self.filesystem.mount(device.path(), &at);
        // A filesystem that cannot recover its journal has lost something.
        let mounted = mounted.map_err(|error| Trouble::Lost(format!("{error:#}")))?;
        let reached: BTreeSet<u64> = (1..=load.count() as u64).collect();
        let found = load.check(&at.join(&work), &reached).map_err(Trouble::Lost)?;
        report.synced += found as u64;
        mounted.unmount()?;
        self.filesystem.check(device.path()).map_err(Trouble::Lost)?;
        let mounted = self.filesystem.mount(device.path(), &at)?;
        fs::remove_dir_all(at.join(work)).context("removing what was found")?;
        mounted.unmount()?;
        Ok(())
    }

    fn work_and_crash(&mut self, work: &str, random: &mut Random) -> Result<(FileLoad, Forgotten)> {
        let at = self.dir.join("above");
        let device = Loop::attach(&self.disk())?;
        let mounted = self.filesystem.mount(device.path(), &at)?;
        let dir = at.join(work);
        fs::create_dir(&dir).context("making a directory")?;
        File::open(&at)?.sync_all()?;
        let (load, seed) = (FileLoad::default(), random.draw());
        let wanted = SYNCED_MIN + random.below(SYNCED_MORE) as usize;
        let daemon = self.daemon.as_ref().context("no daemon")?;
        thread::scope(|scope| {
            let mark = |_: &str| Ok(());
            let start = |worker| {
                let (load, dir) = (&load, &dir);
                scope.spawn(move || load.work(dir, worker, seed, &mark))
            };
            let workers: Vec<_> = (0..WORKERS).map(start).collect();
            let waited = wait_until(|| load.count() >= wanted || workers.iter().any(|one| one.is_finished()));
            load.end();
            daemon.kill();
            for worker in workers {
                let worked = worker.join().map_err(|_| anyhow!("a worker panicked"))?;
                worked.context("working on the filesystem before the crash")?;
            }
            waited
        })?;
        mounted.unmount()?;
        drop(device);
        let closed = self.mount.wait_closed(CLOSED_TIME_MAX);
        closed.context("after the daemon was killed")?;
        Ok((load, self.mount.forget(random.draw())))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            // It unmounts the disk.
            let _ = daemon.terminate(END_TIME_MAX);
        }
        // What a killed one has left.
        while tools::run("umount", "--lazy", [self.disk()]).is_ok() {}
    }
}

impl fmt::Display for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cache = if self.is_direct {
            "direct I/O"
        } else {
            "page cache"
        };
        write!(f, "{}, {cache}", self.filesystem.name())
    }
}

/// A loop device with direct I/O, until this is dropped.
struct Loop(PathBuf);

impl Loop {
    fn attach(file: &Path) -> Result<Self> {
        let device = tools::output("losetup", "--find --show --direct-io=on", [file])?;
        Ok(Self(PathBuf::from(device.trim())))
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        if let Err(error) = tools::run("losetup", "--detach", [&self.0]) {
            eprintln!("{error:#}");
        }
    }
}

/// # Errors
/// What is missing here.
fn may_try() -> Result<()> {
    ensure!(rustix::process::geteuid().is_root(), "loop devices need root");
    tools::run("losetup", "--find", NOTHING)?;
    for program in ["mkfs.ext4", "e2fsck", "mkfs.xfs", "xfs_repair"] {
        tools::run(program, "-V", NOTHING)?;
    }
    Ok(())
}

fn wait_until(mut is_done: impl FnMut() -> bool) -> Result<()> {
    let start = Instant::now();
    while !is_done() {
        ensure!(
            start.elapsed() < WORK_TIME_MAX,
            "too little was synced in {WORK_TIME_MAX:?}"
        );
        thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} crashes below ext4 and XFS: {} files, records and blocks were synced and there; {} changes were volatile at a crash, {} \
             of them dropped, {} torn; every filesystem was whole",
            self.crashes, self.synced, self.volatile, self.dropped, self.torn
        )
    }
}

/// Both filesystems, each past the page cache below the daemon and through it.
const WORLDS: usize = 4;
/// How long each write and sync takes on the slow drive.
const DELAY: Duration = Duration::from_micros(500);
const WORKERS: u64 = 4;
/// What is synced before the daemon is killed.
const SYNCED_MIN: usize = 20;
const SYNCED_MORE: u64 = 300;
const WORK_TIME_MAX: Duration = Duration::from_secs(60);
const CLOSED_TIME_MAX: Duration = Duration::from_secs(10);
const END_TIME_MAX: Duration = Duration::from_secs(5);
const NOTHING: [&str; 0] = [];
