//! Decides what the tenants share: a scratch drive with a disk for each on one queue, served as `blkmq serve` does, in a private
//! directory that is gone afterwards.

use std::fs::{self, DirBuilder, File};
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use blkmq_core::group::{CapKind, Caps};
use blkmq_core::sched::Kind;
use blkmq_host::groups::GroupSpec;

use super::client::{Client, Job, noise};
use crate::config::{Address, Config, DiskSpec, ExportSpec, QueueSettings};
use crate::plan;
use crate::serve::Daemon;

/// A running server with its disks.
pub(super) struct Scene {
    // The daemon before the directories: fields are dropped in this order.
    daemon: Daemon,
    socket: PathBuf,
    _files: Option<Scratch>,
    _dir: Scratch,
}

impl Scene {
    /// Makes the drive, on the filesystem of `dir` if one is given, and serves it with `depth` requests at most.
    ///
    /// # Errors
    /// What cannot be made or served.
    pub(super) fn set(dir: Option<&Path>, depth: u32) -> Result<Self> {
        let scratch = Scratch::make_in(&std::env::temp_dir())?;
        let files = dir.map(files).transpose()?;
        let socket = scratch.0.join("nbd.sock");
        let config = config(files.as_ref(), depth, &socket)?;
        let daemon = Daemon::start(&config, plan::plan(&config)?)?;
        Ok(Self {
            daemon,
            socket,
            _files: files,
            _dir: scratch,
        })
    }

    /// Connects a tenant to a disk.
    ///
    /// # Errors
    /// What the server refuses.
    pub(super) fn connect(&self, disk: &str, job: Job) -> Result<Client> {
        Client::connect(&self.socket, disk, job)
    }

    /// Has the drive shared by a rule, under whatever load there is.
    ///
    /// # Errors
    /// What the engine says.
    pub(super) fn switch(&self, rule: Rule) -> Result<()> {
        let control = self.daemon.engine().control();
        let queue = control.queue(QUEUE)?;
        let (kind, caps) = match rule {
            Rule::Scheduler(kind) => (kind, Caps::default()),
            Rule::Caps { flood_bps } => (
                Kind::None,
                Caps::default().with(CapKind::Bps, flood_bps.max(CAP_MIN)),
            ),
        };
        control
            .set_elevator(queue, kind)
            .with_context(|| format!("switching to {kind}"))?;
        control
            .set_group_caps(queue, &format!("/{FLOOD}"), caps)
            .context("capping the flooding tenant")
    }

    /// Ends the server and takes everything away.
    ///
    /// # Errors
    /// What was not finished in time.
    pub(super) fn end(self) -> Result<()> {
        self.daemon.shutdown(SHUTDOWN_LIMIT)
    }
}

/// How the drive is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// As a scheduler does.
    Scheduler(Kind),
    /// Without a scheduler, the flooding tenant bounded to so many bytes per second.
    Caps { flood_bps: u64 },
}

impl Rule {
    /// Its name in the table.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Scheduler(kind) => kind.name(),
            Self::Caps { .. } => "caps",
        }
    }
}

/// Says what the drive is.
pub(super) fn describe(dir: Option<&Path>) -> String {
    match dir {
        Some(dir) => format!(
            "a file of {} MiB for each disk in {}",
            FILE_BYTES >> 20,
            dir.display()
        ),
        None => format!(
            "a model of flash: {LATENCY_US} us for a request, {PARALLEL} at once, {BANDWIDTH_MIB} MiB/s in all"
        ),
    }
}

/// What the modelled drive can do for a job, in MB/s.
pub(super) fn capacity(job: Job) -> f64 {
    let by_servers = f64::from(PARALLEL * job.block_bytes()) / f64::from(LATENCY_US);
    by_servers.min(f64::from(BANDWIDTH_MIB << 20) / 1e6)
}

/// What a configuration file for the same would say.
fn config(files: Option<&Scratch>, depth: u32, socket: &Path) -> Result<Config> {
    let disk = |name: &str| {
        let mut pairs = vec![("queue".to_owned(), QUEUE.to_owned())];
        match files {
            Some(files) => pairs.push(("file".into(), files.image(name).to_string_lossy().into_owned())),
            None => pairs.extend(model().map(|(key, value)| (key.to_owned(), value))),
        }
        DiskSpec::from_pairs(name.to_owned(), pairs)
    };
    let queue = QueueSettings {
        depth: Some(depth),
        ..QueueSettings::default()
    };
    let export = ExportSpec::new(Address::Unix(socket.to_owned()));
    let config = Config {
        // One, so that both tenants meet in one place whatever the number of processors.
        reactors: Some(1),
        disks: disks().map(disk).collect::<Result<_>>()?,
        groups: WEIGHTED.into_iter().map(weighted).collect::<Result<_>>()?,
        queues: [(QUEUE.to_owned(), queue)].into(),
        exports: vec![export],
        ..Config::default()
    };
    config.check()?;
    Ok(config)
}

fn model() -> [(&'static str, String); 5] {
    [
        ("null", "64G".into()),
        ("latency", format!("{LATENCY_US}us")),
        ("spread", "15us".into()),
        ("parallel", PARALLEL.to_string()),
        ("bandwidth", format!("{BANDWIDTH_MIB}M")),
    ]
}

/// The group of a tenant with a weight: that of its disk's name.
fn weighted((name, weight): (&str, u16)) -> Result<GroupSpec> {
    let mut group = GroupSpec::new(&format!("/{name}"))?;
    group.weight = weight;
    Ok(group)
}

fn disks() -> impl Iterator<Item = &'static str> {
    [LIGHT, FLOOD].into_iter().chain(WEIGHTED.map(|(name, _)| name))
}

/// Makes the images, full of noise: holes would be read without the drive.
fn files(dir: &Path) -> Result<Scratch> {
    let scratch = Scratch::make_in(dir)?;
    let noise = noise(1 << 20);
    for name in disks() {
        let path = scratch.image(name);
        let fill = || -> std::io::Result<()> {
            let mut file = File::create_new(&path)?;
            for _ in 0..FILE_BYTES >> 20 {
                file.write_all(&noise)?;
            }
            file.sync_all()
        };
        fill().with_context(|| {
            format!(
                "{}: cannot be filled with {} MiB; choose another --dir",
                path.display(),
                FILE_BYTES >> 20
            )
        })?;
    }
    Ok(scratch)
}

/// A directory for us alone, removed with all that is in it.
struct Scratch(PathBuf);

impl Scratch {
    fn make_in(parent: &Path) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        // Relaxed: only the numbers must differ.
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("blkmq-demo-{}-{number}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&path).with_context(|| {
            format!(
                "{}: cannot be made; is there a directory to write to?",
                path.display()
            )
        })?;
        Ok(Self(path))
    }

    fn image(&self, disk: &str) -> PathBuf {
        self.0.join(format!("{disk}.raw"))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(super) const LIGHT: &str = "light";
pub(super) const FLOOD: &str = "flood";
/// Three more tenants, and their weights.
pub(super) const WEIGHTED: [(&str, u16); 3] = [("bronze", 100), ("silver", 200), ("gold", 400)];
const QUEUE: &str = "scratch";
/// No cap may be below one largest request per second.
const CAP_MIN: u64 = 4 << 20;

/// The modelled drive: one that any host can keep busy over NBD with less than a core.
const LATENCY_US: u32 = 100;
const PARALLEL: u32 = 4;
const BANDWIDTH_MIB: u32 = 300;
const FILE_BYTES: u64 = 128 << 20;
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);
