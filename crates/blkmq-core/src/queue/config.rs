//! The configuration of a queue: what is possible, and errors that say what is wrong with the rest.

use std::fmt;

use crate::gate::Dispatch;
use crate::group::{GROUPS_MAX, GroupTree};
use crate::ids::REACTORS_MAX;
use crate::limits::{LimitError, Limits};
use crate::poll::Policy;
use crate::rerun::Rerun;
use crate::sched::{self, ElevatorType};
use crate::stat::StatsMode;
use crate::tag::{DEPTH_MAX, TagMode};
use crate::time::{Instant, Nanos};

/// The configuration of a queue.
#[derive(Clone, Debug)]
pub struct QueueConfig {
    /// Its name, for messages.
    pub name: String,
    /// Its reactors, 1 to 128.
    pub reactors: Vec<ReactorConfig>,
    /// Hardware contexts: 1 to the number of reactors. Reactor `i` owns context `i`; a reactor without one uses context
    /// `i % hctxs` through its owner, which then must be one with an event loop.
    pub hctxs: u16,
    /// Tags, 1 to 65536: how many requests may be in flight by default.
    pub tags: TagMode,
    /// Initial depth: how many requests may be in flight, 1 to 65536. The depth can never exceed the larger of
    /// this and the default. Default: the number of tags.
    pub depth: Option<u32>,
    /// Requests per reactor, 1 to 65536: how many parts of its bios may be under way. Equally many bios may
    /// wait. While few requests are free, each group has a share of them.
    pub requests_per_reactor: u32,
    /// The drive's limits.
    pub limits: Limits,
    /// The initial elevator.
    pub elevator: &'static ElevatorType,
    /// Which reactors dispatch from it. Default: one dispatcher for all; the others are slower, and exist for comparison.
    pub dispatch: Dispatch,
    /// Which contexts the end of a request runs, where the tags are shared. Default: those that wait; the others
    /// exist for comparison.
    pub rerun: Rerun,
    /// How long a request may be with the driver. Default 30 s.
    pub timeout: Nanos,
    /// Whether neighbouring bios are merged. Default true.
    pub merges: bool,
    /// The initial groups; the tree's capacity limits their number. Default: the root alone, and no room for others.
    pub groups: GroupTree,
    /// Where the statistics of groups are kept. Default: by each reactor, outside the gate; the others are for measurement.
    pub stats: StatsMode,
    /// Reads the clock; only `StatsMode::UnderGateTimed`, of the feature `baselines`, uses it. Default: always zero.
    pub clock: fn() -> Instant,
    /// Whether completions are polled for instead of announced (`io_poll`), if the driver can be polled. Default false.
    pub io_poll: bool,
    /// How to sleep before such a poll (`io_poll_delay`).
    pub poll_policy: Policy,
    /// The initial disks of this queue.
    pub disks: Vec<DiskConfig>,
    /// The largest number of disks, if more than these. Default: no more.
    pub disks_max: usize,
}

/// A reactor, as a queue sees it.
#[derive(Clone, Copy, Debug)]
pub struct ReactorConfig {
    /// It always returns to its event loop, so others may leave work to it.
    pub is_event_loop: bool,
}

/// A disk: what a client sees of a drive.
#[derive(Clone, Debug)]
pub struct DiskConfig {
    /// Its name.
    pub name: String,
    /// Where it starts on the queue, in bytes: elevators sort by it. Disks must not overlap.
    pub base: u64,
    /// Its size in bytes, a multiple of its block size.
    pub size: u64,
    /// Whether writes and other changes are refused.
    pub read_only: bool,
    /// Its block size: a power of two, at least the drive's.
    pub logical_block: u32,
}

impl QueueConfig {
    /// A queue of `reactors` reactors with an event loop, a hardware context and 128 tags each, without disks.
    pub fn new(name: impl Into<String>, reactors: u16) -> Self {
        Self {
            name: name.into(),
            reactors: vec![ReactorConfig { is_event_loop: true }; reactors.into()],
            hctxs: reactors,
            tags: TagMode::PerHctx(128),
            depth: None,
            requests_per_reactor: 256,
            limits: Limits::default(),
            elevator: sched::NONE,
            dispatch: Dispatch::Single,
            rerun: Rerun::default(),
            timeout: Nanos::from_secs(30),
            merges: true,
            groups: GroupTree::flat(1),
            stats: StatsMode::default(),
            clock: || Instant(0),
            io_poll: false,
            poll_policy: Policy::default(),
            disks: Vec::new(),
            disks_max: 0,
        }
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let range = |name, value: u64, min: u64, max: u64| {
            if (min..=max).contains(&value) {
                return Ok(());
            }
            Err(self.error(format!("{name} {value} rejected: must be from {min} to {max}")))
        };
        self.limits
            .check()
            .map_err(|error: LimitError| self.error(error.to_string()))?;
        range(
            "number of reactors",
            self.reactors.len() as u64,
            1,
            REACTORS_MAX as u64,
        )?;
        range(
            "number of hardware contexts",
            self.hctxs.into(),
            1,
            self.reactors.len() as u64,
        )?;
        range("number of tags", self.tags.depth().into(), 1, DEPTH_MAX.into())?;
        range("depth", self.depth_or_default().into(), 1, DEPTH_MAX.into())?;
        range(
            "requests per reactor",
            self.requests_per_reactor.into(),
            1,
            DEPTH_MAX.into(),
        )?;
        range(
            "number of groups",
            self.groups.capacity() as u64,
            1,
            GROUPS_MAX.into(),
        )?;
        for (id, node) in self.groups.iter() {
            let caps = node.caps.check(&self.limits);
            caps.map_err(|error| self.error(format!("group {id}: {error}")))?;
        }
        range("timeout in ns", self.timeout.0, 1, u64::MAX / 4)?;
        let owners = usize::from(self.hctxs);
        if owners < self.reactors.len()
            && !self.reactors[..owners]
                .iter()
                .all(|reactor| reactor.is_event_loop)
        {
            return Err(self.error("hardware contexts for others need owners that promise to run".into()));
        }
        range("number of disks", self.disks_max() as u64, 0, DISKS_MAX as u64)?;
        let mut disks = self.disks.iter();
        disks.try_for_each(|disk| check_disk(&self.name, &self.limits, disk))
    }

    /// The initial depth.
    pub(super) fn depth_or_default(&self) -> u32 {
        self.depth.unwrap_or(self.tags.depth())
    }

    /// How many disks there can be.
    pub(super) fn disks_max(&self) -> usize {
        self.disks_max.max(self.disks.len())
    }

    fn error(&self, problem: String) -> ConfigError {
        ConfigError::new(&self.name, problem)
    }
}

/// Checks that a disk can be on a queue; the error says what is wrong with it.
pub(super) fn check_disk(queue: &str, limits: &Limits, disk: &DiskConfig) -> Result<(), ConfigError> {
    let block = disk.logical_block;
    let problem = if !block.is_power_of_two() || !(limits.logical_block..=65536).contains(&block) {
        format!(
            "block size {block} rejected: must be a power of two from {} to 65536",
            limits.logical_block
        )
    } else if disk.size == 0 || !disk.size.is_multiple_of(block.into()) {
        format!(
            "size {} rejected: must be a multiple of the block size {block}",
            disk.size
        )
    } else if disk.base.checked_add(disk.size).is_none() {
        format!("size {} rejected: it ends beyond 2^64 bytes", disk.size)
    } else {
        return Ok(());
    };
    Err(ConfigError::new(queue, format!("disk {}: {problem}", disk.name)))
}

/// Largest number of disks in the tables of a queue.
const DISKS_MAX: usize = 65_536;

/// A configuration that no queue can have; the text names the object, the value and the limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError(String);

impl ConfigError {
    pub(super) fn new(queue: &str, problem: String) -> Self {
        Self(format!("queue {queue}: {problem}"))
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}
