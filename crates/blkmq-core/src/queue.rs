//! A queue: what the reactors of one drive share (its limits and disks, the gate, the tags, each
//! reactor's mailbox), and the control operations on it. `local` is one reactor's side of it.

mod config;
mod control;
mod disks;
mod request_path;

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};

use blkmq_sync::CachePadded;
use blkmq_sync::epoch_count::FreezeState;
use blkmq_sync::gate::Gate;
use blkmq_sync::mpsc;
use blkmq_sync::run_work::RunWork;
use blkmq_sync::spsc;

pub use self::config::{ConfigError, DiskConfig, QueueConfig, ReactorConfig};
pub use self::control::NextElevator;
use self::disks::DiskSlot;
pub(crate) use self::disks::LocalDisk;
use self::request_path::RequestPath;
use crate::bio::{Bio, Flags, Parent, Status};
use crate::flush;
pub use crate::gate::Dispatch;
use crate::gate::{GateState, Report};
use crate::group::GroupStates;
use crate::ids::{ReactorId, ReactorSet};
use crate::limits::Limits;
use crate::poll::Polling;
use crate::qos::share::Shares;
use crate::qos::tag_share::SharedTags;
use crate::qos::target::Targets;
use crate::qos::throttle::Throttle;
use crate::request::Request;
pub use crate::rerun::Rerun;
use crate::sched::{ElevatorType, Setup};
use crate::stat::{Shard, Stats, StatsMode, Watch};
pub use crate::tag::TagMode;
use crate::time::Nanos;

/// The gate is held at this moment, or the queue is not at rest: try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy;

/// What the caller must do after a call of a `LocalQueue`.
#[derive(Debug, Default)]
pub struct Effects {
    /// Bios of this reactor's submitters that have ended.
    pub ended: Vec<Bio>,
    /// Parts of mapped disks' bios that have ended: [`crate::mapper::stack::Stack::complete_parts`] takes them.
    pub(crate) parts: Vec<Bio>,
    /// How many bios in `ended` went unsplit to a member of a mapped disk and must be restored.
    pub(crate) passed: u32,
    /// Reactors to wake, once each, after the batch. If the calling reactor is among them, it must run again.
    pub kicks: ReactorSet,
}

impl Effects {
    /// Makes effects with room for `ended` bios.
    pub fn with_capacity(ended: usize) -> Self {
        Self {
            ended: Vec::with_capacity(ended),
            parts: Vec::new(),
            passed: 0,
            kicks: ReactorSet::default(),
        }
    }

    pub(crate) fn end(&mut self, mut bio: Bio, status: Status) {
        bio.status = status;
        self.give_back(bio);
    }

    /// Returns an ended bio to its submitter, or to the stack of mapped disks.
    pub(crate) fn give_back(&mut self, bio: Bio) {
        match bio.origin.0 {
            Parent::Part(_) => return self.parts.push(bio),
            Parent::Passed(_) => self.passed += 1,
            _ => {}
        }
        self.ended.push(bio);
    }
}

/// A message from one reactor to another.
pub(crate) enum Mail {
    /// A request that has ended, with its single bio, for its owner.
    Complete(Box<Request>),
    /// A request to issue.
    Issue(Box<Request>),
}

/// One reactor as the others see it.
pub(crate) struct ReactorEntry {
    pub(crate) is_event_loop: bool,
    pub(crate) mail: mpsc::Sender<Mail>,
    /// The run work of the hardware context that the reactor owns.
    pub(crate) run: CachePadded<RunWork>,
    /// Only the reactor writes it, at every I/O.
    pub(crate) shard: CachePadded<Shard>,
    /// The time up to which the reactor has delivered all ends to its clients and taken in their responses;
    /// the largest time while the reactor never reports. Only the reactor writes it, once a turn.
    pub(crate) answered: CachePadded<AtomicU64>,
    /// The latest grace period that the reactor has finished (`sw_ctx`); [`UNATTACHED`] while it is not attached.
    pub(crate) grace_period_done: AtomicU64,
}

/// The request queue of one drive, shared by its reactors.
pub struct Queue {
    name: String,
    limits: Limits,
    disks: Box<[DiskSlot]>,
    /// The number of disks that the tables have room for.
    fitted_disks: AtomicU32,
    hctxs: u16,
    tag_mode: TagMode,
    requests_per_reactor: u32,
    merges: bool,
    #[cfg(feature = "baselines")]
    pub(crate) dispatch: Dispatch,
    pub(crate) rerun: Rerun,
    /// Largest read or write that needs no check of boundaries; 0 if all need one.
    plain_max: u64,
    pub(crate) timeout: Nanos,
    entries: Box<[ReactorEntry]>,
    /// The queue is ending: caps hold nothing back any more.
    is_ending: AtomicBool,
    /// Caps are lifted for a while and hold nothing back.
    has_lifted_caps: AtomicBool,
    pub(crate) gate: Gate<GateState>,
    pub(crate) shared_tags: Option<Arc<SharedTags>>,
    /// Counts entries that may start requests; it admits none while frozen or quiesced.
    usage: FreezeState,
    /// Counts entries that may issue started requests; it admits none while quiesced.
    issuing: FreezeState,
    /// Direct, or through the gate.
    path: RequestPath,
    /// The elevator, for observers; no I/O locks it.
    elevator: Mutex<&'static ElevatorType>,
    /// What reactors need to know of groups.
    pub(crate) group_states: GroupStates,
    /// The latest grace period that all reactors are to make (`sw_ctx`).
    grace_period: AtomicU64,
    pub(crate) stats: Stats,
    /// How many requests may be in flight: per context without elevator, in all with one. A hint that may lag.
    depth: AtomicU32,
    /// The elevator's own limit, for observers.
    elevator_limit: AtomicU32,
    depth_default: u32,
    pub(crate) polling: Polling,
}

/// A reactor's handle of a queue. Attach it on the reactor's own thread.
pub struct QueueHandle {
    pub(crate) queue: Arc<Queue>,
    pub(crate) id: ReactorId,
    pub(crate) mailbox: mpsc::Receiver<Mail>,
    pub(crate) inserts: spsc::Producer<Box<Request>>,
    pub(crate) reports: spsc::Producer<Report>,
}

/// Permission to issue, and perhaps to start, requests; [`Queue::leave`] ends it.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueRef {
    /// Requests may be started and issued.
    Free,
    /// The queue is frozen: only started requests may be issued.
    Draining,
}

impl Queue {
    /// Makes a queue and a handle for each of its reactors, in order.
    ///
    /// # Errors
    /// If the configuration is not possible; the text names the object, the value and the limit.
    pub fn new(config: QueueConfig) -> Result<(Arc<Self>, Vec<QueueHandle>), ConfigError> {
        config.check()?;
        let reactors = config.reactors.len();
        let requests_max = reactors * config.requests_per_reactor as usize;
        let depth = config.depth_or_default();
        let tags = config.tags.at_least(depth);
        let reports_max = tags.depth() as usize * usize::from(config.hctxs);
        // The flush requests of each reactor.
        let disks: Box<[DiskSlot]> = (0..config.disks_max()).map(|_| DiskSlot::default()).collect();
        let flushes = disks.len() * flush::PER_DISK;
        let flushes_max = reactors * flushes;
        let inserts_max = requests_max + flushes;
        let (ins, inserts): (Vec<_>, Vec<_>) = (0..reactors).map(|_| spsc::ring(inserts_max)).unzip();
        let (outs, reports): (Vec<_>, Vec<_>) = (0..reactors).map(|_| spsc::ring(reports_max)).unzip();
        // One mailbox may hold every request and every flush.
        let mail_max = requests_max + flushes_max;
        let (senders, mailboxes): (Vec<_>, Vec<_>) = (0..reactors).map(|_| mpsc::channel(mail_max)).unzip();
        let reactor = |(reactor, mail): (&ReactorConfig, _)| ReactorEntry {
            is_event_loop: reactor.is_event_loop,
            mail,
            run: CachePadded::new(RunWork::new()),
            shard: CachePadded::new(Shard::new(config.groups.capacity() as u32)),
            answered: CachePadded::new(AtomicU64::new(u64::MAX)),
            grace_period_done: AtomicU64::new(UNATTACHED),
        };
        let entries = config.reactors.iter().zip(senders).map(reactor).collect();
        let groups = config.groups;
        let elevator = config.elevator.build(&Setup {
            limits: &config.limits,
            requests_max,
            groups: &groups,
        });
        let path = RequestPath::new(config.elevator, &groups);
        let group_states = GroupStates::new(&groups);
        let throttle = Throttle::new(&groups, requests_max + flushes_max, &config.limits);
        let stats = Stats::new(groups.capacity(), config.stats, config.clock);
        let watched = Arc::clone(&stats.watched);
        let shared_tags = match tags {
            TagMode::Shared(depth) => Some(Arc::new(SharedTags::new(depth, config.hctxs))),
            TagMode::PerHctx(_) => None,
        };
        let plain_max = if config.limits.boundary == 0 {
            config.limits.transfer_max.into()
        } else {
            0
        };
        let shares = shares(tags, config.elevator, config.disks.len(), requests_max);
        disks
            .iter()
            .zip(&config.disks)
            .for_each(|(slot, disk)| slot.set(disk));
        let queue = Arc::new(Self {
            name: config.name,
            plain_max,
            limits: config.limits,
            fitted_disks: AtomicU32::new(config.disks.len() as u32),
            disks,
            hctxs: config.hctxs,
            tag_mode: tags,
            requests_per_reactor: config.requests_per_reactor,
            merges: config.merges,
            #[cfg(feature = "baselines")]
            dispatch: config.dispatch,
            rerun: config.rerun,
            timeout: config.timeout,
            entries,
            is_ending: AtomicBool::new(false),
            has_lifted_caps: AtomicBool::new(false),
            gate: Gate::new(GateState {
                elevator,
                knows_groups: config.elevator.knows_groups,
                inserts,
                reports,
                in_flight: 0,
                depth_told: 0,
                shares,
                requeue_list: VecDeque::with_capacity(requests_max),
                leaving: VecDeque::with_capacity(groups.capacity()),
                throttle,
                targets: Targets::new(&groups, requests_max),
                passed: VecDeque::with_capacity(requests_max),
                watch: Watch::new(watched, &groups, config.stats != StatsMode::Off),
                groups,
            }),
            shared_tags,
            usage: FreezeState::new(reactors),
            issuing: FreezeState::new(reactors),
            path,
            elevator: Mutex::new(config.elevator),
            group_states,
            grace_period: AtomicU64::new(0),
            stats,
            depth: AtomicU32::new(depth),
            elevator_limit: AtomicU32::new(u32::MAX),
            depth_default: config.tags.depth(),
            polling: Polling::new(config.io_poll, config.poll_policy),
        });
        let handles = mailboxes.into_iter().zip(ins).zip(outs).enumerate();
        let handle = |(id, ((mailbox, inserts), reports))| QueueHandle {
            queue: Arc::clone(&queue),
            id: ReactorId(id as u16),
            mailbox,
            inserts,
            reports,
        };
        let handles = handles.map(handle).collect();
        Ok((queue, handles))
    }

    /// The queue's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the drive takes.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// All reactors, for kicks after a control operation.
    pub fn everybody(&self) -> ReactorSet {
        let mut all = ReactorSet::default();
        (0..self.entries.len()).for_each(|id| all.insert(ReactorId(id as u16)));
        all
    }

    /// Says how many requests have started and not ended.
    pub fn outstanding(&self) -> u64 {
        self.usage.outstanding()
    }

    /// Says how many requests have ended. The counters of their groups follow within moments.
    pub fn finished(&self) -> u64 {
        self.usage.finished()
    }

    /// How many requests may be in flight; see [`Queue::set_depth`].
    #[inline]
    pub fn depth(&self) -> u32 {
        self.depth.load(Ordering::Relaxed)
    }

    /// How many requests may be at the drive now: the depth, or fewer while groups compete below an elevator that
    /// bounds them (`bfq`).
    pub fn depth_limit(&self) -> u32 {
        self.depth().min(self.elevator_limit.load(Ordering::Relaxed))
    }

    /// Notes the limit of the elevator, for observers. It is written only when it changes.
    #[inline]
    pub(crate) fn note_elevator_limit(&self, limit: Option<u32>) {
        let limit = limit.unwrap_or(u32::MAX);
        // Relaxed on both sides: nothing else is read by it.
        if self.elevator_limit.load(Ordering::Relaxed) != limit {
            self.elevator_limit.store(limit, Ordering::Relaxed);
        }
    }

    /// The default depth.
    pub fn depth_default(&self) -> u32 {
        self.depth_default
    }

    /// The largest depth that [`Queue::set_depth`] accepts: the default, or the initial depth if that is larger.
    pub fn depth_max(&self) -> u32 {
        self.tag_mode.depth()
    }

    pub(crate) fn tag_mode(&self) -> TagMode {
        self.tag_mode
    }

    /// How many requests each reactor has.
    pub fn requests_per_reactor(&self) -> u32 {
        self.requests_per_reactor
    }

    /// How many requests there are in all, flushes included.
    pub(crate) fn requests_max(&self) -> usize {
        self.entries.len() * (self.requests_per_reactor as usize + self.disks.len() * flush::PER_DISK)
    }

    pub(crate) fn hctxs(&self) -> u16 {
        self.hctxs
    }

    pub(crate) fn reactors(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn merges(&self) -> bool {
        self.merges
    }

    #[inline]
    pub(crate) fn reactor(&self, id: ReactorId) -> &ReactorEntry {
        &self.entries[id.index()]
    }

    /// The reactor that owns the hardware context that `reactor` uses.
    pub(crate) fn hctx_owner(&self, reactor: ReactorId) -> ReactorId {
        ReactorId(reactor.0 % self.hctxs)
    }

    /// A reactor with an event loop, which always runs again, if there is one.
    pub(crate) fn event_loop(&self) -> Option<ReactorId> {
        self.entries
            .iter()
            .position(|reactor| reactor.is_event_loop)
            .map(|id| ReactorId(id as u16))
    }

    #[inline]
    pub(crate) fn is_scheduled(&self) -> bool {
        self.path.is_scheduled()
    }

    /// Says whether requests may have to go through the gate: all for an elevator, or some for caps.
    #[inline]
    pub(crate) fn is_gated(&self) -> bool {
        self.path.is_gated()
    }

    fn is_throttled(&self) -> bool {
        self.path.is_throttled()
    }

    /// Sends requests of groups with caps through the gate. This lasts until the next change of elevator: a
    /// reactor that has seen the mark may still be about to enter the gate, and the context that runs for it
    /// must look there.
    pub(crate) fn throttle_from_now_on(&self) {
        self.path.throttle();
    }

    /// Holds nothing back for caps any more: the queue is about to end. Kick everybody afterwards.
    pub fn end_caps(&self) {
        // Relaxed: whoever takes the run that follows sees it.
        self.is_ending.store(true, Ordering::Relaxed);
        self.run_all();
    }

    /// Lifts the caps, or puts them back in force. Requests that pass meanwhile are charged, so the averages
    /// hold afterwards. Kick everybody afterwards.
    pub fn lift_caps(&self, on: bool) {
        // Relaxed: whoever takes the run that follows sees it.
        self.has_lifted_caps.store(on, Ordering::Relaxed);
        if self.is_throttled() {
            self.run_all();
        }
    }

    /// Says whether started requests must end as soon as possible.
    pub(crate) fn is_draining(&self) -> bool {
        let ends = self.is_ending.load(Ordering::Relaxed) || self.has_lifted_caps.load(Ordering::Relaxed);
        ends || self.usage.is_frozen() && !self.issuing.is_frozen()
    }

    /// Requests one more grace period of all reactors. Returns its number.
    pub(crate) fn next_grace_period(&self) -> u64 {
        // Release: pairs with the Acquire in `wanted_grace_period`: a reactor that sees the grace period sees
        // the removals before it.
        let grace_period = self.grace_period.fetch_add(1, Ordering::Release) + 1;
        // Pairs with the fence in `attach_reactor`.
        fence(Ordering::SeqCst);
        grace_period
    }

    /// The latest grace period that was requested.
    #[inline]
    pub(crate) fn wanted_grace_period(&self) -> u64 {
        self.grace_period.load(Ordering::Acquire)
    }

    /// The latest grace period that all reactors have finished.
    pub(crate) fn grace_period_done(&self) -> u64 {
        // Acquire: pairs with the Release of each reactor that finished; the last effects of its requests are visible.
        let grace_period_done = self
            .entries
            .iter()
            .map(|reactor| reactor.grace_period_done.load(Ordering::Acquire));
        grace_period_done.min().unwrap_or(UNATTACHED)
    }

    /// Attaches a reactor: from here on its grace periods count. Returns the one to begin with.
    pub(crate) fn attach_reactor(&self, me: ReactorId) -> u64 {
        let grace_period_done = &self.reactor(me).grace_period_done;
        grace_period_done.store(self.wanted_grace_period(), Ordering::Relaxed);
        // Pairs with the fence in `next_grace_period`: either the thread that removes a group sees this reactor
        // attached, or the load below sees the grace period, and with it the removal.
        fence(Ordering::SeqCst);
        let grace_period = self.wanted_grace_period();
        grace_period_done.store(grace_period, Ordering::Relaxed);
        grace_period
    }

    /// What the reactors count.
    pub(crate) fn shards(&self) -> impl Iterator<Item = &Shard> + Clone {
        self.entries.iter().map(|reactor| &*reactor.shard)
    }

    /// Checks a submitter's bio against its disk and the drive.
    pub(crate) fn check_bio(&self, bio: &Bio, disk: &LocalDisk) -> Result<(), Status> {
        let mask = disk.block_mask;
        // A part of a mapped disk's bio has the data of the whole bio.
        let is_sound = !bio.flags.has(Flags::REST) && (bio.is_mapped() || bio.has_whole_data());
        if !is_sound || !disk.is_there() || (bio.offset | bio.len) & mask != 0 {
            return Err(Status::Invalid);
        }
        self.limits.check_bio(bio, disk.size, disk.is_read_only)
    }

    /// Enters to start requests; `None` while frozen or quiesced.
    #[inline]
    pub(crate) fn enter_to_start(&self, me: ReactorId, requests: u64) -> Option<QueueRef> {
        self.usage.enter(me.index()).then(|| {
            self.usage.add_started(me.index(), requests);
            QueueRef::Free
        })
    }

    /// Counts requests that `me` starts between entering and leaving.
    #[inline]
    pub(crate) fn count_started(&self, me: ReactorId, requests: u64) {
        self.usage.add_started(me.index(), requests);
    }

    /// Enters to issue requests that have started; `None` while quiesced.
    #[inline]
    pub(crate) fn enter_to_issue(&self, me: ReactorId) -> Option<QueueRef> {
        if self.usage.enter(me.index()) {
            return Some(QueueRef::Free);
        }
        self.issuing.enter(me.index()).then_some(QueueRef::Draining)
    }

    /// Leaves the queue.
    #[inline]
    pub(crate) fn leave(&self, me: ReactorId, entered: QueueRef) {
        match entered {
            QueueRef::Free => self.usage.exit(me.index()),
            QueueRef::Draining => self.issuing.exit(me.index()),
        }
    }

    /// Counts requests that have ended, for the drain.
    #[inline]
    pub(crate) fn count_finished(&self, me: ReactorId, requests: u64) {
        self.usage.add_finished(me.index(), requests);
    }

    /// Leaves the gate from a control operation. If a reactor came meanwhile, every context runs, so that its
    /// work is seen. The caller must kick everybody.
    pub(crate) fn leave_gate(&self, sched: blkmq_sync::gate::GateGuard<'_, GateState>) {
        if sched.leave_owing() {
            self.run_all();
        }
    }
}

/// The finished grace period of a handle that is not attached: it counts as all grace periods.
pub(crate) const UNATTACHED: u64 = u64::MAX;

/// Disks have a share of the depth if the tags are shared, unless the elevator divides the drive by itself.
fn shares(tags: TagMode, elevator: &ElevatorType, disks: usize, requests_max: usize) -> Shares {
    let is_due = matches!(tags, TagMode::Shared(_)) && elevator.is_some() && !elevator.knows_groups;
    Shares::new(if is_due { disks } else { 0 }, requests_max)
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}
