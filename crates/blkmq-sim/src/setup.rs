//! The setup of one history: the queue, the drive, the reactors, the clients and the control thread.
//! Scenarios fill it in, partly by chance; `world` runs it.

use blkmq_core::limits::Limits;
use blkmq_core::queue::Dispatch;
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::Nanos;

use crate::cpu::Costs;
use crate::drive::fault::Faults;
use crate::drive::model::Model;
use crate::drive::{Span, Spec};
use crate::mapped::Mapped;
use crate::paths;
use crate::rng::{Ppm, Rng};
use crate::workload::Workload;

/// The initial state of a history.
#[derive(Clone, Debug)]
pub struct Setup {
    /// One per reactor: whether it always returns to wait for events.
    pub is_event_loop: Vec<bool>,
    /// How many reactors own a hardware context.
    pub hctxs: u16,
    /// Tags of each hardware context, or of all if shared.
    pub depth: u32,
    /// All hardware contexts share one tag set.
    pub shared_tags: bool,
    /// Number of requests of each reactor.
    pub requests_per_reactor: u32,
    /// The drive's limits.
    pub limits: Limits,
    /// The elevator at the start.
    pub elevator: &'static ElevatorType,
    /// Which contexts dispatch from it.
    pub dispatch: Dispatch,
    /// The queue's time limit.
    pub timeout: Nanos,
    /// Bios may be merged.
    pub merges: bool,
    /// Size of each disk in blocks.
    pub disk_blocks: Vec<u32>,
    /// Disks that refuse writes.
    pub read_only: Vec<bool>,
    /// The drive.
    pub drive: Spec,
    /// Further drives, with their limits: each has a queue of its own, and disks, like the first.
    pub more_drives: Vec<(Limits, Spec)>,
    /// Mapped disks over the drives' disks, which the clients use instead of these.
    pub mapped: Option<Mapped>,
    /// The paths to it, if requests go over several.
    pub paths: Option<paths::Spec>,
    /// The clients: reactor `i` has `clients[i % clients.len()]`.
    pub clients: Vec<Workload>,
    /// The control thread.
    pub control: Control,
    /// The costs of steps.
    pub costs: Costs,
    /// Interval at which the drive writes some of its cache back.
    pub destage_every: Option<Nanos>,
    /// Number of power cuts.
    pub power_cuts: u32,
    /// How often an attached thread stops polling when it has no work.
    pub away: Ppm,
    /// How long it stays away at most.
    pub away_max: Nanos,
    /// Probability that another reactor takes a step in the middle of a driver's call; drawn again
    /// after each such step. Below 100 %.
    pub interleave: Ppm,
    /// Time without any end, although bios are under way, after which the history fails.
    pub patience: Nanos,
    /// `check_invariants` is called after one of this many steps.
    pub check_every: u64,
    /// A fault of the harness, for tests of the oracle.
    pub sabotage: Option<Sabotage>,
}

/// What the control thread does, at random times.
#[derive(Clone, Debug)]
pub struct Control {
    /// Time between two actions, at least and at most; none if `None`.
    pub every: Option<(Nanos, Nanos)>,
    /// Weight of a freeze, maybe nested.
    pub freeze: u32,
    /// Weight of a quiesce.
    pub quiesce: u32,
    /// Weight of a switch of elevator.
    pub switch: u32,
    /// Weight of a change of depth.
    pub depth: u32,
    /// Weight of a change of groups: one is made, weighted, capped, moved or removed.
    pub groups: u32,
}

/// Deliberate faults of the world around the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// A bio that has ended is not returned.
    LosesEnd,
    /// A bio that has ended is returned twice.
    RepeatsEnd,
    /// An interrupt of the drive is lost.
    LosesInterrupt,
    /// A kick from one reactor to another is lost.
    LosesKick,
    /// The queue is reported as quiesced, but was not asked to quiesce.
    QuiescesNothing,
    /// A flush of a mapped disk omits the first drive.
    FlushLeavesOutMember,
    /// A mapped disk addresses the next chunk instead of each chunk.
    AddressesNextChunk,
    /// A bio is returned when some of its parts are done.
    EndsBeforeLastPart,
    /// A bio with a failed part is returned without the error.
    LosesError,
    /// A bio whose parts failed in more than one way is returned with an error that was not the
    /// first.
    EndsWithAnotherError,
}

impl Setup {
    /// A modest history as a basis for others: up to four reactors with a hardware context each,
    /// flash with a cache, three disks of which one is read-only, all operations.
    pub fn base(rng: &mut Rng) -> Self {
        Self {
            is_event_loop: vec![true; rng.from_to(1, 4) as usize],
            hctxs: u16::MAX,
            depth: rng.from_to(2, 32) as u32,
            shared_tags: false,
            requests_per_reactor: rng.pick(&[8, 32, 64]),
            limits: limits(rng),
            elevator: sched::NONE,
            dispatch: Dispatch::Single,
            timeout: Nanos::from_secs(30),
            merges: true,
            // The second disk does not start at a round place, so that boundaries do not coincide.
            disk_blocks: vec![251, 128, 16],
            read_only: vec![false, false, true],
            drive: flash(rng),
            more_drives: Vec::new(),
            mapped: None,
            paths: None,
            clients: vec![Workload::mixed(rng)],
            control: Control::none(),
            costs: Costs::lab(),
            destage_every: None,
            power_cuts: 0,
            away: Ppm::NEVER,
            away_max: Nanos::ZERO,
            interleave: Ppm::percent(5),
            patience: Nanos::from_secs(1),
            check_every: rng.pick(&[1, 4, 16]),
            sabotage: None,
        }
    }

    /// Returns all drives, with their limits.
    pub fn drives(&self) -> impl Iterator<Item = (&Limits, &Spec)> {
        let more = self.more_drives.iter().map(|(limits, drive)| (limits, drive));
        std::iter::once((&self.limits, &self.drive)).chain(more)
    }

    /// Returns the unit in which content and places are counted, in bytes: the smallest block of a
    /// drive.
    pub fn block(&self) -> u32 {
        let blocks = self.drives().map(|(limits, _)| limits.logical_block);
        blocks.min().expect("there is a drive")
    }

    /// Returns where each disk of a drive lies, one after the other.
    pub fn places(&self, drive: usize) -> Vec<Span> {
        let mut first = drive as u32 * self.disk_blocks.iter().sum::<u32>();
        let place = |&blocks: &u32| {
            let place = Span { first, blocks };
            first += blocks;
            place
        };
        self.disk_blocks.iter().map(place).collect()
    }

    /// Returns how many hardware contexts there are: at most one per reactor.
    pub fn hctx_count(&self) -> u16 {
        self.hctxs.min(self.is_event_loop.len() as u16)
    }

    /// Returns the number of events of a life within which the power is cut, while the clients
    /// work.
    pub fn events_before_cut(&self) -> u64 {
        let bios: u64 = (0..self.is_event_loop.len())
            .map(|id| self.clients[id % self.clients.len()].bios)
            .sum();
        (bios * 6 / (u64::from(self.power_cuts) + 1)).max(10)
    }

    /// Makes the drive lose its volatile cache, or gain one, as the limits say.
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.drive.cache = limits.cache;
        self.limits = limits;
        self
    }
}

impl Control {
    /// No control actions.
    pub fn none() -> Self {
        Self {
            every: None,
            freeze: 0,
            quiesce: 0,
            switch: 0,
            depth: 0,
            groups: 0,
        }
    }

    /// An action every `us` microseconds on average.
    pub fn every_us(us: u64) -> Self {
        Self {
            every: Some((Nanos::from_micros(us / 2), Nanos::from_micros(us * 3 / 2))),
            ..Self::none()
        }
    }
}

/// The limits of a drive with a cache: small transfers, so that bios are split; FUA at random.
pub fn limits(rng: &mut Rng) -> Limits {
    Limits {
        logical_block: 4096,
        any_alignment: false,
        physical_block: 4096,
        optimal_io: 0,
        transfer_max: 4096 * rng.pick(&[4, 8, 16]),
        segments_max: rng.pick(&[4, 16, 128]),
        boundary: rng.pick(&[0, 0, 64 << 10]),
        discard_max: 128 << 10,
        discard_granularity: 4096,
        zeroes_max: 64 << 10,
        zeroes_are_written: false,
        cache: true,
        fua: rng.chance(Ppm::percent(50)),
        leaves_buffers: false,
        rotational: false,
    }
}

/// A flash drive with a cache and without faults.
pub fn flash(rng: &mut Rng) -> Spec {
    let model = Model::Flash {
        units: rng.pick(&[1, 4, 16]),
        read: Nanos::from_micros(80),
        write: Nanos::from_micros(20),
        spread: 50,
    };
    Spec {
        model,
        slots: 1024,
        faults: Faults::default(),
        mutation: None,
        cache: true,
        interrupts: rng.chance(Ppm::percent(70)),
        slowness: Vec::new(),
    }
}
