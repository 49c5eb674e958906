//! The scene that the tenants share: a scratch drive with a disk for each on one queue, served as by `blkmq
//! serve`, in a private directory that is removed afterwards.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use blkmq_config::luks::Keyring;
use blkmq_config::{Config, DiskSpec, Document, ExportSpec, GroupSpec, QueueSettings, plan};
use blkmq_core::group::{CapKind, Caps};
use blkmq_core::sched::{self, ElevatorType};

use super::client::{Client, Job};
use super::drive::{Drive, Medium, Scratch};
use crate::sandbox::Sandbox;
use crate::serve::Daemon;

/// A running server with its disks.
pub(super) struct Scene {
    // The daemon before the drive: fields are dropped in this order.
    daemon: Daemon,
    socket: PathBuf,
    _drive: Drive,
    _dir: Scratch,
}

impl Scene {
    /// Makes the drive and serves it with `depth` requests at most.
    ///
    /// # Errors
    /// What cannot be made or served.
    pub(super) fn set(medium: &Medium, depth: u32) -> Result<Self> {
        let scratch = Scratch::make_in(&std::env::temp_dir())?;
        let names: Vec<&str> = disks().collect();
        let drive = Drive::make(medium, &names)?;
        let socket = scratch.join("nbd.sock");
        let config = config(&drive, depth, &socket)?;
        let daemon = {
            let plan = plan(&config)?;
            Daemon::start(
                (Document::default(), config),
                plan,
                (Sandbox::none(), Keyring::default()),
            )?
        };
        Ok(Self {
            daemon,
            socket,
            _drive: drive,
            _dir: scratch,
        })
    }

    /// Connects a tenant to a disk.
    ///
    /// # Errors
    /// The server refuses.
    pub(super) fn connect(&self, disk: &str, job: Job) -> Result<Client> {
        Client::connect(&self.socket, disk, job)
    }

    /// Switches the rule by which the drive is shared, under load.
    ///
    /// # Errors
    /// The engine's error.
    pub(super) fn switch(&self, rule: Rule) -> Result<()> {
        let control = self.daemon.engine().control();
        let queue = control.queue(QUEUE)?;
        let (kind, caps) = match rule {
            Rule::Scheduler(kind) => (kind, Caps::default()),
            Rule::Caps { flood_bps } => (
                sched::NONE,
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

    /// Ends the server and removes everything.
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
    /// By a scheduler.
    Scheduler(&'static ElevatorType),
    /// Without a scheduler; the flooding tenant is capped at this many bytes per second.
    Caps { flood_bps: u64 },
}

impl Rule {
    /// Its name in the table.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Scheduler(kind) => kind.name,
            Self::Caps { .. } => "caps",
        }
    }
}

/// The configuration, as a file would have it.
fn config(drive: &Drive, depth: u32, socket: &Path) -> Result<Config> {
    let specs = drive.disks(QUEUE).into_iter();
    let specs = specs.map(|(name, pairs)| DiskSpec::from_pairs(name, pairs));
    let queue = QueueSettings {
        // Each run sets its own; named here, none is chosen for the weights.
        sched: Some(sched::BFQ),
        depth: Some(depth),
        ..QueueSettings::default()
    };
    let export = ExportSpec::new("nbd", &format!("unix:{}", socket.display()))?;
    let config = Config {
        // One, so that both tenants meet at one reactor whatever the number of processors.
        reactors: Some(1),
        disks: specs.collect::<Result<_>>()?,
        groups: WEIGHTED.iter().map(weighted).collect::<Result<_>>()?,
        queues: [(QUEUE.to_owned(), queue)].into(),
        exports: vec![export],
        ..Config::default()
    };
    config.check()?;
    Ok(config)
}

/// The group of a tenant with a weight, named after its disk.
fn weighted(tenant: &Weighted) -> Result<GroupSpec> {
    let mut group = GroupSpec::new(&format!("/{}", tenant.name))?;
    group.weight = Some(tenant.weight);
    Ok(group)
}

/// The names of all tenants' disks.
pub(super) fn disks() -> impl Iterator<Item = &'static str> {
    [LIGHT, PAUSING, FLOOD]
        .into_iter()
        .chain(WEIGHTED.map(|tenant| tenant.name))
}

/// A tenant with a weight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weighted {
    pub(super) name: &'static str,
    pub(super) weight: u16,
    /// How many requests it keeps in flight.
    pub(super) depth: usize,
}

impl Weighted {
    const fn new(name: &'static str, weight: u16, depth: usize) -> Self {
        Self { name, weight, depth }
    }
}

pub(super) const LIGHT: &str = "light";
pub(super) const PAUSING: &str = "pausing";
pub(super) const FLOOD: &str = "flood";
/// Four more tenants. The last has the largest weight, and few requests in flight to get its share
/// with.
pub(super) const WEIGHTED: [Weighted; 4] = [
    Weighted::new("bronze", 100, FLOOD_DEPTH),
    Weighted::new("silver", 200, FLOOD_DEPTH),
    Weighted::new("gold", 400, FLOOD_DEPTH),
    Weighted::new("platinum", 800, FEW_IN_FLIGHT),
];
/// Requests that a flooding tenant keeps in flight.
pub(super) const FLOOD_DEPTH: usize = 64;
const FEW_IN_FLIGHT: usize = 4;
const QUEUE: &str = "scratch";
/// A cap must permit at least one largest request per second.
const CAP_MIN: u64 = 4 << 20;
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);
