//! Decides what an engine, its queues and their disks can be asked to be. `blkmq-config` fills it in for configured disks, a library
//! user by hand; `build` makes the queues of it.

use std::sync::Arc;

use blkmq_core::group::GroupTree;
use blkmq_core::ids::GroupId;
use blkmq_core::poll::{Policy, Wait};
use blkmq_core::queue::{Dispatch, Rerun, TagMode};
use blkmq_core::sched::Kind;
use blkmq_core::stat::StatsMode;
use blkmq_core::time::Nanos;

use crate::device::{Device, Polling};
use crate::engine::mapped::MappedSpec;
use crate::error::Error;
use crate::reactor::wait;
use crate::uring::ring::RingConfig;

/// What an engine is to be.
pub struct EngineConfig {
    /// Threads that serve, 1 to 128 together with `attached_max`. With 0 there is still one, which sleeps
    /// unless an elevator's timers need somebody who always comes back. Default 1.
    pub reactors: usize,
    /// Threads of a library user that may be attached at the same time. Each costs its share of every queue's
    /// requests and tags. Default 0.
    pub attached_max: usize,
    /// The size of each thread's ring.
    pub ring: RingConfig,
    /// How long a reactor looks for events before it blocks, where that pays; see [`wait::WaitPolicy`].
    /// Default 40 µs.
    pub spin_max: Nanos,
    /// How threads wait. Default auto: by cost, at each moment.
    pub wait: Wait,
    /// The queues, with their disks.
    pub queues: Vec<QueueSpec>,
    /// Disks that lie on other disks, in any order.
    pub mapped: Vec<MappedSpec>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            reactors: 1,
            attached_max: 0,
            ring: RingConfig::default(),
            spin_max: wait::SPIN_MAX,
            wait: Wait::default(),
            queues: Vec::new(),
            mapped: Vec::new(),
        }
    }
}

/// One drive's queue and the disks on it.
pub struct QueueSpec {
    /// Its name, unique in the engine.
    pub name: String,
    /// The drive.
    pub device: Arc<dyn Device>,
    /// The disks, in the order in which the drive knows them.
    pub disks: Vec<DiskEntry>,
    /// The elevator to begin with. Default none.
    pub elevator: Kind,
    /// Tunables of the elevator that are not to be as by default: names and values.
    pub tunables: Vec<(String, u64)>,
    /// Who takes requests out of the elevator. Default one dispatcher; the other way is there to be compared.
    pub dispatch: Dispatch,
    /// Whom the end of a request runs, where the tags are shared. Default: who waits for one; the others are there to be
    /// compared.
    pub rerun: Rerun,
    /// How many requests may be in flight by default. Default 128 per hardware context.
    pub tags: TagMode,
    /// How many may be to begin with, if not as many as by default.
    pub depth: Option<u32>,
    /// Hardware contexts; none for one per thread. Fewer must not be more than there are reactors: the
    /// threads without one go through a reactor then. Default none.
    pub hctxs: Option<u16>,
    /// Requests of each thread under way, and as many bios may wait beside them. Default 256.
    pub requests_per_reactor: u32,
    /// How long a request may be with the driver. Default 30 s.
    pub timeout: Nanos,
    /// Whether neighbouring bios are merged. Default true.
    pub merges: bool,
    /// The groups to begin with, and room for more. Default: the root alone.
    pub groups: GroupTree,
    /// The paths of the groups, by their ids: the names under which [`Control`](crate::Control) knows them.
    pub group_paths: Vec<String>,
    /// Who keeps the statistics of groups. Default: each thread, outside the gate.
    pub stats: StatsMode,
    /// Whether the ends of requests are looked for instead of waited for (`io_poll`). Default: where the drive has queues for that.
    pub io_poll: Option<bool>,
    /// How requests of a polled drive are slept for (`io_poll_delay`).
    pub poll_policy: Policy,
}

impl QueueSpec {
    /// A queue without disks, everything else by default.
    pub fn new(name: impl Into<String>, device: Arc<dyn Device>) -> Self {
        Self {
            name: name.into(),
            device,
            disks: Vec::new(),
            elevator: Kind::None,
            tunables: Vec::new(),
            dispatch: Dispatch::Single,
            rerun: Rerun::default(),
            tags: TagMode::PerHctx(128),
            depth: None,
            hctxs: None,
            requests_per_reactor: 256,
            timeout: Nanos::from_secs(30),
            merges: true,
            groups: GroupTree::flat(1),
            group_paths: Vec::new(),
            stats: StatsMode::default(),
            io_poll: None,
            poll_policy: Policy::default(),
        }
    }

    /// Says whether the ends of its requests will be looked for: as asked for, or as is usual for the drive.
    ///
    /// # Errors
    /// If polling, or a way of it, is asked for and the drive cannot be polled.
    pub fn is_polled(&self) -> Result<bool, Error> {
        let refused = |name, value: &str| Err(Error::not_polled(&self.name, name, value));
        match self.device.polling() {
            Polling::Impossible if self.io_poll == Some(true) => refused("io_poll", "on"),
            Polling::Impossible if self.poll_policy != Policy::default() => {
                refused("io_poll_delay", &self.poll_policy.to_string())
            }
            polling => Ok(self.io_poll.unwrap_or(polling == Polling::Usual)),
        }
    }
}

/// A disk of a queue.
#[derive(Clone, Debug)]
pub struct DiskEntry {
    /// Its name, unique in the engine.
    pub name: String,
    /// What it is, for people. May be empty.
    pub description: String,
    /// Bytes, a multiple of the block size.
    pub size: u64,
    /// Whether changes are refused.
    pub read_only: bool,
    /// Smallest unit of its addresses and lengths, in bytes: a power of two, at least the drive's.
    pub block_size: u32,
    /// The group that doors account its I/O to.
    pub group: GroupId,
}
