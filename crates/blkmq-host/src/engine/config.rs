//! The configuration of an engine, its queues and their disks. `blkmq-config` fills it in for configured
//! disks, a library user does so in code; `build` makes the queues from it.

use std::io;
use std::sync::Arc;

use blkmq_core::group::GroupTree;
use blkmq_core::ids::GroupId;
use blkmq_core::poll::{Policy, Wait};
use blkmq_core::queue::{Dispatch, Rerun, TagMode};
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::stat::StatsMode;
use blkmq_core::time::Nanos;

use crate::device::{Device, Polling};
use crate::engine::mapped::MappedSpec;
use crate::error::Error;
use crate::reactor::wait;
use crate::uring::ring::RingConfig;

/// The configuration of an engine.
pub struct EngineConfig {
    /// Reactor threads, 1 to 128 together with `attached_max`. With 0 there is still one, which sleeps unless an
    /// elevator's timers need a thread with an event loop. Default 1.
    pub reactors: usize,
    /// Threads of a library user that can be attached at the same time. Each costs its share of every queue's
    /// requests and tags. Default 0.
    pub attached_max: usize,
    /// The size of each thread's ring.
    pub ring: RingConfig,
    /// How long a reactor polls for events before it blocks, if that pays; see [`wait::WaitPolicy`].
    /// Default 40 µs.
    pub spin_max: Nanos,
    /// How threads wait. Default auto: by cost, at each moment.
    pub wait: Wait,
    /// The queues, with their disks.
    pub queues: Vec<QueueSpec>,
    /// Disks that lie on other disks, in any order.
    pub mapped: Vec<MappedSpec>,
    /// Called by each reactor's thread once it is set up, before it serves: to confine it, for instance.
    pub on_reactor: Option<OnReactor>,
}

/// What a reactor's thread calls when it is set up. An error ends the start of the engine.
pub type OnReactor = Arc<dyn Fn() -> io::Result<()> + Send + Sync>;

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
            on_reactor: None,
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
    /// The initial elevator. Default none.
    pub elevator: &'static ElevatorType,
    /// Tunables of the elevator that differ from the default: names and values.
    pub tunables: Vec<(String, u64)>,
    /// Which reactors dispatch from the elevator. Default one dispatcher; the other ways exist for comparison.
    pub dispatch: Dispatch,
    /// Which contexts the end of a request runs, if the tags are shared. Default: those that wait for a tag; the
    /// others exist for comparison.
    pub rerun: Rerun,
    /// How many requests may be in flight by default. Default 128 per hardware context.
    pub tags: TagMode,
    /// The initial depth, if it differs from the default.
    pub depth: Option<u32>,
    /// Hardware contexts; none for one per thread. A smaller number must not exceed the number of reactors:
    /// threads without a context go through a reactor. Default none.
    pub hctxs: Option<u16>,
    /// Requests of each thread under way; equally many bios may wait. Default 256.
    pub requests_per_reactor: u32,
    /// How long a request may be with the driver. Default 30 s.
    pub timeout: Nanos,
    /// Whether neighbouring bios are merged. Default true.
    pub merges: bool,
    /// The initial groups, and room for more. Default: the root alone.
    pub groups: GroupTree,
    /// The paths of the groups, by their ids: the names under which [`Control`](crate::Control) knows them.
    pub group_paths: Vec<String>,
    /// Where the statistics of groups are kept. Default: by each thread, outside the gate.
    pub stats: StatsMode,
    /// Whether completions are polled for (`io_poll`). Default: if the drive has queues for polling.
    pub io_poll: Option<bool>,
    /// How reactors sleep before they poll (`io_poll_delay`).
    pub poll_policy: Policy,
}

impl QueueSpec {
    /// A queue without disks, with defaults for all other fields.
    pub fn new(name: impl Into<String>, device: Arc<dyn Device>) -> Self {
        Self {
            name: name.into(),
            device,
            disks: Vec::new(),
            elevator: sched::NONE,
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

    /// Says whether it will be polled: as configured, or by the drive's default.
    ///
    /// # Errors
    /// If polling, or a polling policy, is configured and the drive cannot be polled.
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
    /// A description for people. May be empty.
    pub description: String,
    /// What its guests find as its serial number, at most [`crate::disk::SERIAL_BYTES_MAX`]. Default: see
    /// [`crate::disk::default_serial`].
    pub serial: Option<String>,
    /// What NBD clients call it. Default: its name.
    pub export: Option<String>,
    /// Bytes, a multiple of the block size.
    pub size: u64,
    /// Whether writes and other changes are refused.
    pub read_only: bool,
    /// Smallest unit of its addresses and lengths, in bytes: a power of two, at least the drive's.
    pub block_size: u32,
    /// The group that doors account its I/O to.
    pub group: GroupId,
}
