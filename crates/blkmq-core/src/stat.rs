//! Statistics without cost for other threads: each reactor adds to its own shard with plain stores, and a
//! reader adds the shards up. `sw_ctx` counts ends of bios, the other modules their own events; what only
//! the gate's holder can know is in `watch`.
//!
//! A request carries stamps (when it was inserted, issued, ended; which group was dispatched before it). A
//! reactor that holds no lock counts it when it is inserted and when it ends. [`StatsMode`] has other ways,
//! for comparison.

mod counts;
mod ends;
mod histogram;
mod of_queue;
pub mod stamp;
#[cfg(test)]
mod tests;
mod watch;

use blkmq_sync::counter::Counter;

pub use self::histogram::Histogram;
use self::histogram::HistogramShard;
use self::stamp::Stamp;
use self::watch::{OTHERS, OWNERS_MAX};
pub(crate) use self::watch::{Watch, Watched};
use crate::bio::{Direction, Flags, Op};
use crate::ids::GroupId;
use crate::poll::PollShard;
use crate::request::Request;
use crate::sched::Note;
use crate::time::{Instant, Nanos};

/// Who counts the statistics of groups, and when. A tunable of a queue, for measurement: the default is for use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StatsMode {
    /// No one: the counters of groups stay 0. Events are counted, because the engine needs some of them.
    Off,
    /// Each reactor counts its own requests, outside the gate.
    #[default]
    Outside,
    /// The gate's holder counts for all, at insertion, dispatch and end, if there is an elevator: as
    /// schedulers do that keep their statistics under their lock.
    #[cfg(feature = "baselines")]
    UnderGate,
    /// The same, and each update reads the clock, as bfq did until Linux 4.14: for measuring what that cost.
    #[cfg(feature = "baselines")]
    UnderGateTimed,
}

impl StatsMode {
    /// Says whether the gate's holder counts for all.
    #[inline]
    pub(crate) fn is_under_gate(self) -> bool {
        #[cfg(feature = "baselines")]
        return matches!(self, Self::UnderGate | Self::UnderGateTimed);
        #[cfg(not(feature = "baselines"))]
        return false;
    }

    /// Says whether each update reads the clock.
    #[inline]
    pub(crate) fn is_timed(self) -> bool {
        #[cfg(feature = "baselines")]
        return self == Self::UnderGateTimed;
        #[cfg(not(feature = "baselines"))]
        return false;
    }
}

macro_rules! counters {
    ($(#[$shard_doc:meta])* $shard:ident, $(#[$sum_doc:meta])* $sum:ident { $($(#[$doc:meta])* $field:ident,)* }) => {
        $(#[$shard_doc])*
        #[derive(Debug, Default)]
        pub(crate) struct $shard { $(pub(crate) $field: Counter,)* }

        $(#[$sum_doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $sum { $($(#[$doc])* pub $field: u64,)* }

        impl $sum {
            fn fold(&mut self, shard: &$shard) { $(self.$field += shard.$field.get();)* }

            #[allow(dead_code, reason = "not all counters are moved")]
            fn set(&self, shard: &$shard) { $(shard.$field.set(self.$field);)* }

            #[allow(dead_code, reason = "not all counters are handed over")]
            fn each(&mut self, visit: &mut dyn FnMut(&mut u64)) { $(visit(&mut self.$field);)* }

            /// Adds another sum.
            pub fn add(&mut self, other: &Self) { $(self.$field += other.$field;)* }

            /// Lists the counters with their names.
            pub fn fields(&self) -> Vec<(&'static str, u64)> { vec![$((stringify!($field), self.$field)),*] }
        }
    };
}

counters! {
    /// One reactor's part of the counters of one group and direction.
    DirectionShard,
    /// What one group did in one direction, since the queue was made. All counters are monotone.
    DirectionStats {
        /// Bios that were inserted (`io_serviced`). Bios that bypass the elevator, or have none, are counted
        /// here when they end.
        inserted,
        /// Bios that ended, with any status.
        ios,
        /// Bytes of the bios that ended.
        bytes,
        /// Bios that ended with an error.
        errors,
        /// Bios that were part of another bio's request, counted when it ended.
        merged,
        /// Time from insertion to issue, in nanoseconds, over all bios.
        wait_ns,
        /// Time from issue to the observed end, in nanoseconds, over all bios.
        service_ns,
    }
}

counters! {
    /// One reactor's part of the queue's counters of events.
    EventShard,
    /// How often events of the engine happened, since the queue was made. All counters are monotone.
    EventStats {
        /// Requests issued to the driver.
        issued,
        /// Requests that the driver pushed back for lack of a resource.
        pushed_back,
        /// Requests that the driver ended and asked to requeue.
        requeued,
        /// Requests that passed the time limit.
        timed_out,
        /// Bios that were split.
        split,
        /// Flush requests issued.
        flushes,
        /// Times a reactor entered the gate.
        gate_entered,
        /// Times a reactor found the gate held and continued.
        gate_skipped,
        /// Passes through the elevator; more than `gate_entered` when the holder checked again for others' work.
        gate_passes,
        /// Runs of a hardware context that were executed.
        runs,
        /// Runs for which the owning reactor had to be notified (idle to queued).
        runs_scheduled,
        /// Requests or ends handed to another reactor.
        handed_over,
    }
}

counters! {
    /// One reactor's part of the counters of a group's dispatches.
    QueueShard,
    /// The length of a group's queue, observed at each dispatch of one of its requests.
    QueueStats {
        /// Sum of the queued bios over all dispatches.
        queued_sum,
        /// Dispatches.
        samples,
    }
}

/// What one group did, since the queue was made. All but `queued` is monotone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupStats {
    kinds: [DirectionStats; KINDS],
    /// Bios in the elevator now, a gauge.
    pub queued: u64,
    /// Lengths of the group's queue at dispatch.
    pub queue: QueueStats,
    /// Time from the insertion of a first request to the dispatch of one, in nanoseconds.
    pub group_wait_ns: u64,
    /// Time without requests in the elevator, in nanoseconds, up to the latest insertion.
    pub empty_ns: u64,
    /// Time that the elevator let the drive idle for the group, on purpose, in nanoseconds.
    pub idle_ns: u64,
    /// Time from a dispatch of the group to the next one of another group, in nanoseconds.
    pub turn_ns: u64,
    /// How often the group's last request left the elevator.
    pub dequeues: u64,
    /// Time from insertion to issue, of each bio that waited at all.
    pub wait: Histogram,
    /// Time from issue to end, of each bio.
    pub device: Histogram,
}

impl GroupStats {
    /// Returns the counters of one direction.
    pub fn of(&self, direction: Direction) -> DirectionStats {
        let mut sum = self.kinds[direction as usize];
        if matches!(direction, Direction::Write | Direction::Discard) {
            sum.add(&self.kinds[direction as usize + ASYNC]);
        }
        sum
    }

    /// Returns, of all directions, the counters of bios that nobody waited for (see [`crate::bio::Flags::ASYNC`]).
    pub fn asynchronous(&self) -> DirectionStats {
        sum(&self.kinds[Direction::COUNT..])
    }

    /// Returns, of all directions, the counters of bios that somebody waited for.
    pub fn synchronous(&self) -> DirectionStats {
        sum(&self.kinds[..Direction::COUNT])
    }

    /// Returns the counters of all directions together.
    pub fn total(&self) -> DirectionStats {
        sum(&self.kinds)
    }

    /// Adds another group's statistics.
    pub fn add(&mut self, other: &Self) {
        let pairs = self.kinds.iter_mut().zip(&other.kinds);
        pairs.for_each(|(sum, one)| sum.add(one));
        self.queue.add(&other.queue);
        self.queued += other.queued;
        self.group_wait_ns += other.group_wait_ns;
        self.empty_ns += other.empty_ns;
        self.idle_ns += other.idle_ns;
        self.turn_ns += other.turn_ns;
        self.dequeues += other.dequeues;
        self.wait.add(&other.wait);
        self.device.add(&other.device);
    }
}

/// How long requests of groups waited while other requests went ahead: each request's wait counts
/// for the group whose request was dispatched just before it. So the sum of a row is what its group waited in
/// the elevator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delays {
    /// Which group waited, behind which, for how long; each pair once. The first 16 top-level groups have an
    /// entry of their own, and so have the first 16 nested ones that did I/O, until they are removed; further nested
    /// ones are counted with their top-level group. `None` is all others.
    pub pairs: Vec<(Option<GroupId>, Option<GroupId>, Nanos)>,
}

/// All counters of one reactor for one queue.
#[derive(Debug)]
pub(crate) struct Shard {
    groups: Box<[GroupShard]>,
    /// In nanoseconds: a row for each waiting group, a column for each group that it waited behind.
    delays: Box<[Counter]>,
    pub(crate) events: EventShard,
    pub(crate) poll: PollShard,
}

/// One reactor's counters of one group.
#[derive(Debug, Default)]
struct GroupShard {
    /// By direction, requests that somebody waits for; then writes and discards that nobody waits for.
    kinds: [DirectionShard; KINDS],
    queue: QueueShard,
    wait: HistogramShard,
    device: HistogramShard,
}

impl Shard {
    pub(crate) fn new(groups: u32) -> Self {
        Self {
            groups: (0..groups).map(|_| Default::default()).collect(),
            delays: (0..COLUMNS * COLUMNS).map(|_| Counter::new()).collect(),
            events: EventShard::default(),
            poll: PollShard::default(),
        }
    }

    /// Counts the insertion of requests into an elevator; neighbours of one group and kind are counted together.
    pub(crate) fn count_inserts(&self, list: &[Box<Request>]) {
        let like = |rq: &Request| (rq.bio.group, rq.bio.op, rq.bio.flags);
        for run in list.chunk_by(|one, next| like(one) == like(next)) {
            let (group, op, flags) = like(&run[0]);
            let bios = run.iter().map(|rq| u64::from(rq.bios)).sum();
            self.groups[group.index()].kinds[kind_of(op, flags)]
                .inserted
                .add(bios);
        }
    }

    /// Counts the insertion of a request into an elevator.
    #[inline]
    pub(crate) fn count_insert(&self, rq: &Request) {
        let kinds = &self.groups[rq.bio.group.index()].kinds;
        kinds[kind_of(rq.bio.op, rq.bio.flags)]
            .inserted
            .add(rq.bios.into());
    }

    /// Counts, at the end of a request of several bios, what concerns the request as a whole; the ends of its
    /// bios are counted as parts.
    pub(crate) fn count_merged(&self, rq: &Request) {
        let group = &self.groups[rq.bio.group.index()];
        group.kinds[kind_of(rq.bio.op, rq.bio.flags)]
            .merged
            .add(u64::from(rq.bios) - 1);
        count_queue(group, rq.stamp);
    }

    /// Counts that a bio was merged whose request continues without it.
    pub(crate) fn count_part(&self, rq: &Request) {
        self.groups[rq.bio.group.index()].kinds[kind_of(rq.bio.op, rq.bio.flags)]
            .merged
            .add(1);
    }

    /// Counts the end of a whole request from the note that the gate's holder gets.
    #[inline]
    pub(crate) fn count_note(&self, note: &Note) {
        let group = &self.groups[note.group.index()];
        let counters = &group.kinds[note.direction as usize + if note.is_sync { 0 } else { ASYNC }];
        let (wait, device) = (
            note.issued_at.since(note.inserted_at),
            note.completed_at.since(note.issued_at),
        );
        counters.ios.add(note.bios.into());
        counters.bytes.add(note.bytes);
        counters.merged.add(u64::from(note.bios) - 1);
        counters.wait_ns.add(wait.0 * u64::from(note.bios));
        counters.service_ns.add(device.0 * u64::from(note.bios));
        for _ in 0..note.bios {
            group.device.record(device);
            if wait != Nanos::ZERO {
                group.wait.record(wait);
            }
        }
        self.count_delay(note.stamp, Nanos(wait.0 * u64::from(note.bios)));
        count_queue(group, note.stamp);
    }

    #[inline]
    fn count_delay(&self, stamp: Stamp, wait: Nanos) {
        let row = usize::from(stamp.column()) * COLUMNS;
        self.delays[row + usize::from(stamp.ahead())].add(wait.0);
    }
}

/// What is counted for a queue outside its reactors' shards, and the functions that read all counters.
#[derive(Debug)]
pub(crate) struct Stats {
    pub(crate) mode: StatsMode,
    /// The clock that [`StatsMode::UnderGateTimed`] reads.
    clock: fn() -> Instant,
    pub(crate) watched: std::sync::Arc<Watched>,
    /// What the gate's holder counts for all, in those modes.
    pub(crate) under_gate: Shard,
    /// What removed groups did, by the parents that they had; their times are in `buried_times`.
    buried: Shard,
    buried_times: Watched,
}

impl Stats {
    pub(crate) fn new(groups: usize, mode: StatsMode, clock: fn() -> Instant) -> Self {
        let under_gate = if mode.is_under_gate() { groups } else { 0 };
        Self {
            mode,
            clock,
            watched: std::sync::Arc::new(Watched::new(groups)),
            under_gate: Shard::new(under_gate as u32),
            buried: Shard::new(groups as u32),
            buried_times: Watched::new(groups),
        }
    }

    /// The time of an update: the batch's time, or the clock's.
    #[inline]
    pub(crate) fn time_of_update(&self, batch: Instant) -> Instant {
        if self.mode.is_timed() {
            (self.clock)()
        } else {
            batch
        }
    }

    /// What a group did, without groups below it.
    pub(crate) fn own<'a>(&'a self, shards: impl Iterator<Item = &'a Shard>, id: GroupId) -> GroupStats {
        fold(shards.chain([&self.under_gate]), &self.watched, id)
    }

    /// What removed groups did that were part of this one.
    pub(crate) fn of_the_gone(&self, id: GroupId) -> GroupStats {
        fold(std::iter::once(&self.buried), &self.buried_times, id)
    }

    /// Adds what a group and its removed groups did to its parent's removed groups, and clears it. Called
    /// inside the gate, for a group that no reactor counts for any more: so the caller owns its counters.
    pub(crate) fn bury<'a>(
        &'a self,
        shards: impl Iterator<Item = &'a Shard> + Clone,
        id: GroupId,
        parent: GroupId,
    ) {
        let mut dead = self.of_the_gone(parent);
        dead.add(&self.own(shards.clone(), id));
        dead.add(&self.of_the_gone(id));
        for shard in shards.chain([&self.under_gate, &self.buried]) {
            GroupStats::default().set(shard, id);
        }
        GroupStats::default().set_times(&self.watched, id);
        GroupStats::default().set_times(&self.buried_times, id);
        dead.set(&self.buried, parent);
        dead.set_times(&self.buried_times, parent);
    }

    /// Which group waited behind which.
    pub(crate) fn delays<'a>(&'a self, shards: impl Iterator<Item = &'a Shard>) -> Delays {
        let mut sums = [0; COLUMNS * COLUMNS];
        for shard in shards.chain([&self.under_gate]) {
            let pairs = sums.iter_mut().zip(&shard.delays);
            pairs.for_each(|(sum, counter)| *sum += counter.get());
        }
        let who = |column: usize| {
            let owner = self.watched.columns.get(column - 1)?.get();
            u32::try_from(owner.checked_sub(1)?).ok().map(GroupId)
        };
        let cells = (1..COLUMNS).flat_map(|row| (1..COLUMNS).map(move |column| (row, column)));
        // Removed groups are among the others: one sum.
        let mut pairs: Vec<(Option<GroupId>, Option<GroupId>, Nanos)> = Vec::new();
        for (row, column) in cells.filter(|(row, column)| sums[row * COLUMNS + column] > 0) {
            let (of, behind, waited) = (who(row), who(column), Nanos(sums[row * COLUMNS + column]));
            match pairs.iter_mut().find(|pair| (pair.0, pair.1) == (of, behind)) {
                Some(pair) => pair.2 += waited,
                None => pairs.push((of, behind, waited)),
            }
        }
        Delays { pairs }
    }
}

impl GroupStats {
    /// Sets all of a shard's counters of a group to the values of `self`.
    fn set(&self, shard: &Shard, id: GroupId) {
        let Some(group) = shard.groups.get(id.index()) else {
            return;
        };
        for (kind, part) in self.kinds.iter().zip(&group.kinds) {
            kind.set(part);
        }
        self.queue.set(&group.queue);
        group.wait.set(&self.wait);
        group.device.set(&self.device);
    }

    fn set_times(&self, watched: &Watched, id: GroupId) {
        let times = &watched.times[id.index()];
        times.group_wait_ns.set(self.group_wait_ns);
        times.empty_ns.set(self.empty_ns);
        times.idle_ns.set(self.idle_ns);
        times.turn_ns.set(self.turn_ns);
        times.dequeues.set(self.dequeues);
    }
}

/// Adds up one group's counters over some shards.
fn fold<'a>(shards: impl Iterator<Item = &'a Shard>, watched: &Watched, id: GroupId) -> GroupStats {
    let mut sum = GroupStats::default();
    for group in shards.filter_map(|shard| shard.groups.get(id.index())) {
        let pairs = sum.kinds.iter_mut().zip(&group.kinds);
        pairs.for_each(|(sum, part)| sum.fold(part));
        sum.queue.fold(&group.queue);
        sum.wait.fold(&group.wait);
        sum.device.fold(&group.device);
    }
    let times = &watched.times[id.index()];
    sum.queued = times.queued.get();
    sum.group_wait_ns = times.group_wait_ns.get();
    sum.empty_ns = times.empty_ns.get();
    sum.idle_ns = times.idle_ns.get();
    sum.turn_ns = times.turn_ns.get();
    sum.dequeues = times.dequeues.get();
    sum
}

fn sum(kinds: &[DirectionStats]) -> DirectionStats {
    let mut sum = DirectionStats::default();
    kinds.iter().for_each(|one| sum.add(one));
    sum
}

/// Counts the length of a group's queue at a dispatch, once for each request.
#[inline]
fn count_queue(group: &GroupShard, stamp: Stamp) {
    if stamp.queued() > 0 {
        group.queue.queued_sum.add(stamp.queued());
        group.queue.samples.add(1);
    }
}

/// Writes and discards that nobody waits for are counted separately.
#[inline]
fn kind_of(op: Op, flags: Flags) -> usize {
    op.direction() as usize + if op.is_sync(flags) { 0 } else { ASYNC }
}

/// Distance from a direction's counters to those of its asynchronous part: after the last direction, writes
/// come first.
const ASYNC: usize = Direction::COUNT - Direction::Write as usize;
const KINDS: usize = Direction::COUNT + ASYNC;
/// No stamp, the top-level groups with a column of their own, all others.
const COLUMNS: usize = OTHERS as usize + 1;
const _: () = assert!(COLUMNS == OWNERS_MAX + 2);

/// Adds up the events over all shards.
fn events<'a>(shards: impl Iterator<Item = &'a Shard>) -> EventStats {
    let mut sum = EventStats::default();
    shards.for_each(|shard| sum.fold(&shard.events));
    sum
}
