//! The bfq elevator: requests in the order of the shares of their groups and clients.
//! The gate's holder calls it (see `sched`). `wf2q` decides whose turn it is, in virtual time; the rest is policy.
//!
//! ```text
//!  insert ─► clients: whose queue? ─► requests: merge, position, arrival ─► (was empty) wf2q: activate
//!  dispatch ◄─ requests: which one? ◄─ turn, if the drive seeks ◄─ wf2q: which queue? ◄─ depth: may anything go?
//! ```
//! On a drive that does not seek, a turn is one request. On a drive that seeks, or with `strict_guarantees`,
//! a turn is a budget of requests of one queue (`turn`). `docs/schedulers/bfq.md` compares this with Linux.

mod clients;
mod contention;
mod dispatch;
mod group_aware;
mod heap;
mod history;
mod idling;
mod order;
mod parked;
mod probing;
mod rate;
mod requests;
mod slow;
#[cfg(test)]
mod tests;
mod tunables;
mod turn;
mod wf2q;

use self::clients::{Clients, Key};
use self::contention::Contention;
use self::dispatch::Turns;
use self::history::TurnEnd;
use self::idling::Idling;
use self::parked::{GroupOut, RESERVE_MAX, RESERVE_PART};
use self::probing::Probing;
use self::rate::Rate;
use self::requests::RequestMemory;
use self::slow::SlowQueues;
use self::tunables::Tunables;
use self::turn::{Neighbours, Pace, Turn};
use self::wf2q::Wf2q;
use super::depth::DepthLaw;
use super::overdue::Overdue;
use crate::bio::Class;
use crate::group::GroupTree;
use crate::ids::GroupId;
use crate::limits::Limits;
use crate::request::Request;
use crate::sched::elevator::{Elevator, GroupAware, InsertAt, Inserted, Note, TunableError};
use crate::sched::registry::ElevatorType;
use crate::time::{Instant, Nanos};

/// Shares by weight, of groups and of their clients.
pub const BFQ: &ElevatorType = &ElevatorType {
    name: "bfq",
    help: "shares the drive by weight between groups, and between the clients of a group",
    knows_groups: true,
    build: Some(|setup| Box::new(Bfq::new(setup.limits.clone(), setup.requests_max, setup.groups))),
};

/// The bfq elevator.
///
/// It allocates at set-up: about 650 bytes per request, without the request itself, and about 170 per group.
#[derive(Debug)]
pub struct Bfq {
    held: RequestMemory,
    clients: Clients,
    wf2q: Wf2q,
    contention: Contention,
    depth: DepthLaw,
    idling: Idling,
    rate: Rate,
    probing: Probing,
    /// At the last dispatch all waiting requests were held for a slower group or client.
    is_held: bool,
    tunables: Tunables,
    /// Whether the drive seeks.
    rotational: bool,
    /// The current turn, if turns are more than one request.
    turn: Option<Turn>,
    pace: Pace,
    neighbours: Neighbours,
    /// Requests dispatched that have not ended: all, and those of each group's own clients.
    in_flight: u32,
    groups_out: Vec<GroupOut>,
    /// Those among them that are out for much longer than usual: nothing is held for them.
    overdue: Overdue,
    /// Those queues whose requests take far longer than others', and how many of theirs are out: nothing counts these.
    slow: SlowQueues,
    out_apart: u32,
    /// The queue's depth, and what of it is kept for others until it is known whether requests hang.
    queue_depth: u32,
    depth_reserve: u32,
    /// Groups with queues that have requests and whose turn does not come: see [`Bfq::fills_depth`]. Room for all.
    parking: Vec<usize>,
    may_unpark: bool,
    /// By group, when its clients of the idle class had their last turn.
    last_class_at: Vec<Instant>,
    /// The groups for which the drive idled, and for how long, since the last query. Room for each group.
    idled: Vec<(GroupId, Nanos)>,
    /// The cost of the largest request.
    cost_max: u32,
    /// The latest time seen: clocks of different reactors may differ by some nanoseconds.
    now: Instant,
}

impl Bfq {
    /// Makes an elevator that holds up to `requests_max` requests, in flight or not, of these groups, and merges within
    /// `limits`.
    pub fn new(limits: Limits, requests_max: usize, groups: &GroupTree) -> Self {
        let capacity = groups.capacity();
        // Twice: a request may be reused, for another client, before its end has been reported.
        let queues = 2 * requests_max.max(1);
        let rotational = limits.rotational;
        let mut bfq = Self {
            clients: Clients::new(queues),
            wf2q: Wf2q::new(capacity, queues),
            contention: Contention::new(capacity),
            depth: DepthLaw::new(requests_max.max(1) as u32),
            idling: Idling::new(capacity + queues),
            rate: Rate::default(),
            probing: Probing::new(capacity + queues),
            is_held: false,
            tunables: Tunables::new(rotational),
            rotational,
            turn: None,
            pace: Pace::default(),
            neighbours: Neighbours::new(),
            in_flight: 0,
            groups_out: vec![GroupOut::default(); capacity],
            overdue: Overdue::default(),
            slow: SlowQueues::new(queues, capacity),
            out_apart: 0,
            queue_depth: u32::MAX,
            depth_reserve: 0,
            parking: Vec::with_capacity(capacity),
            may_unpark: false,
            last_class_at: vec![Instant(0); capacity],
            idled: Vec::with_capacity(capacity),
            cost_max: limits.transfer_max,
            now: Instant(0),
            held: RequestMemory::new(limits, requests_max),
        };
        for (id, node) in groups.iter() {
            bfq.group_set(id, node);
        }
        bfq
    }

    /// Whether a turn is a budget of requests, not a single one.
    #[inline]
    fn has_turns(&self) -> bool {
        self.rotational || self.tunables.strict_guarantees
    }

    /// Handles the first request of a queue that was empty.
    #[inline]
    fn wake(&mut self, id: usize) {
        let was_idle = self.clients.begin(id);
        if was_idle {
            let (patience, now) = (self.patience_on_flash(), self.now);
            let idling = &mut self.idling;
            self.wf2q.begin(self.wf2q.leaf(id), |member, served| {
                idling.came(member, served, patience, now)
            });
            let key = self.clients[id].key();
            self.contention.begin(key.group(), key.client());
            self.tell_depth();
            if self.learns() {
                self.learn_of_return(id);
            }
        }
        let has_turn = self.turn.is_some_and(|turn| turn.queue == id);
        if has_turn && !self.turn.is_some_and(|turn| turn.is_waiting) {
            return;
        }
        let budget = self.next_budget(id).expect("a queue that wakes has a request");
        let is_urgent = self.clients[id].key().is_sync();
        self.wf2q.activate(self.wf2q.leaf(id), budget, is_urgent);
        if has_turn {
            self.resume_turn();
        }
    }

    /// Whether the history of clients is used.
    #[inline]
    fn learns(&self) -> bool {
        self.has_turns() || self.tunables.low_latency
    }

    /// Handles the return of a queue after a pause, or its first use.
    fn learn_of_return(&mut self, id: usize) {
        let key = self.clients[id].key();
        let history = &mut self.clients[id].history;
        if self.tunables.low_latency && key.is_sync() && key.class() == Class::Be as usize {
            history.start_raising(self.now);
        }
        history.woke(self.now, Nanos(self.tunables.slice_idle.0 * 2));
        self.weigh(id);
    }

    /// Updates the weight of a queue.
    fn weigh(&mut self, id: usize) {
        if !self.tunables.low_latency {
            self.clients[id].history.end_raising();
        }
        let queue = &mut self.clients[id];
        let weight = queue.key().weight() * queue.history.factor(self.now);
        self.wf2q.set_weight(self.wf2q.leaf(id), weight);
    }

    /// Counts a request that was issued at `issued_at` as no longer in flight.
    #[inline(always)]
    fn dec_in_flight(&mut self, sched_data: u32, issued_at: Instant) {
        self.in_flight -= 1;
        self.may_unpark = true;
        let queue = &mut self.clients[queue_of(sched_data)];
        let is_counted = sched_data & IS_APART == 0;
        let group = &mut self.groups_out[queue.group()];
        self.overdue
            .ended_of(&mut queue.late, queue.in_flight, issued_at, is_counted);
        self.overdue
            .ended_of(&mut group.late, group.in_flight, issued_at, false);
        queue.in_flight -= 1;
        group.in_flight -= 1;
        if sched_data & (MOVES_NO_DATA | IS_APART) != 0 {
            queue.in_flight_exempt -= 1;
            queue.out_apart -= u32::from(!is_counted);
            group.apart -= u32::from(!is_counted);
            self.out_apart -= u32::from(!is_counted);
        }
    }

    /// Takes back a request that was given out.
    #[cold]
    fn requeue(&mut self, rq: Box<Request>) -> Inserted {
        let id = queue_of(rq.sched_data);
        self.dec_in_flight(rq.sched_data, rq.issued_at);
        let was_empty = self.clients[id].requests.is_empty();
        self.clients[id].requests.requeue(&mut self.held, rq, self.now);
        if was_empty {
            self.wake(id);
        }
        Inserted::Queued
    }

    /// Makes a queue idle if it has no request left, waiting or in flight.
    #[inline]
    fn rest(&mut self, id: usize, ended_at: Instant) {
        let queue = &self.clients[id];
        if queue.in_flight == 0 && queue.requests.is_empty() {
            let key = queue.key();
            self.clients.end(id);
            self.contention.end(key.group(), key.client(), self.now);
            let (idling, now) = (&mut self.idling, self.now);
            let leaf = self.wf2q.leaf(id);
            self.wf2q
                .end(leaf, |member| idling.left(member, key.reactor(), ended_at, now));
            if self.learns() {
                self.clients[id].history.dried(self.now);
                self.dried_in_turn(id);
            }
        }
        self.tell_depth();
    }

    #[inline]
    fn tell_depth(&mut self) {
        let compete = self.contention.compete_at(self.now);
        self.depth.set_contended(compete, self.counted(), self.now);
    }

    /// The bound on the lead of one group over another, in bytes of the drive's time: what the drive does in
    /// LEAD_TIME. With turns, or if idling is off, no group is held for another, and only the order counts.
    fn lead_max(&self) -> u64 {
        if self.has_turns() || self.tunables.slice_idle == Nanos::ZERO {
            return 0;
        }
        self.rate.bytes_in(LEAD_TIME).max(LEAD_BYTES_MIN)
    }

    /// Whether the drive has as many requests as it may have: while groups compete, and of the queue's depth.
    #[inline]
    fn is_full(&self) -> bool {
        self.punctual() >= self.depth.limit() || self.is_at_reserve()
    }

    /// The requests in flight that the depth counts: neither of slow queues, nor overdue.
    #[inline]
    fn punctual(&self) -> u32 {
        self.overdue.punctual(self.counted())
    }

    /// The requests in flight of queues that are not slow.
    #[inline]
    fn counted(&self) -> u32 {
        self.in_flight - self.out_apart
    }

    #[inline]
    fn notice(&mut self, now: Instant) {
        self.now = self.now.max(now);
    }
}

/// The queue of a request, from the value that [`Bfq::take`] left in it.
#[inline]
fn queue_of(sched_data: u32) -> usize {
    (sched_data & !(MOVES_NO_DATA | IS_APART | IS_LONGER | IS_COPY)) as usize
}

impl Elevator for Bfq {
    fn name(&self) -> &'static str {
        BFQ.name
    }

    fn insert(&mut self, rq: Box<Request>, at: InsertAt, now: Instant) -> Inserted {
        self.notice(now);
        if at == InsertAt::Head {
            return self.requeue(rq);
        }
        let key = Key::of(&rq);
        let (id, is_new) = self.clients.claim(key);
        if is_new {
            self.slow.forget(id);
            let leaf = self.wf2q.leaf(id);
            self.wf2q
                .place_leaf(leaf, key.group().index(), key.class(), key.weight());
            self.idling.forget(leaf);
            self.probing.forget(&mut self.wf2q, leaf);
        }
        let id = if self.has_turns() {
            self.cooperator(id, rq.position())
        } else {
            id
        };
        let is_learnt = self.learns();
        let queue = &mut self.clients[id];
        if is_learnt {
            queue.history.inserted(rq.position(), rq.position_end());
        }
        let requests = &mut queue.requests;
        let was_empty = requests.is_empty();
        let inserted = requests.insert(&mut self.held, rq, self.now);
        if was_empty {
            self.wake(id);
        }
        inserted
    }

    fn dispatch(&mut self, now: Instant) -> Option<Box<Request>> {
        self.notice(now);
        self.look_at_probe();
        self.overdue.look(self.counted(), self.now);
        self.unpark();
        if self.is_full() {
            let urgent = self.dispatch_urgent(now);
            if urgent.is_none() && self.queued() > 0 && self.punctual() >= self.depth.limit() {
                self.depth.note_full();
            }
            return urgent;
        }
        if self.has_turns() {
            self.dispatch_in_turn()
        } else {
            self.dispatch_one(Turns::All)
        }
    }

    fn set_depth(&mut self, depth: u32) {
        self.queue_depth = depth;
        self.may_unpark = true;
        self.depth_reserve = (depth / RESERVE_PART).min(RESERVE_MAX);
    }

    fn completed(&mut self, note: &Note) {
        self.notice(note.completed_at);
        let id = queue_of(note.sched_data);
        let time = note.completed_at.since(note.issued_at);
        let bytes = match note.sched_data & MOVES_NO_DATA {
            0 => {
                let moved = note.bytes << u32::from(note.sched_data & IS_COPY != 0);
                moved.min(u64::from(self.cost_max))
            }
            _ => {
                // What takes much longer than usual does not take the drive all the time, or all others were slow.
                let time = time.min(self.overdue.longest_usual());
                let in_flight = self.punctual();
                let part = self
                    .depth
                    .part_of_drive(note.direction, note.bytes, time, in_flight);
                self.rate.learn_cost_without_data(part)
            }
        };
        // What moves no data takes any time, and what times out says nothing of the drive.
        let is_usual = !note.is_timed_out && note.sched_data & MOVES_NO_DATA == 0;
        if is_usual
            && note.sched_data & IS_LONGER == 0
            && let Some(least) = self.depth.least_time(note.direction, note.bytes)
        {
            let group = self.clients[id].group();
            self.slow.completed((id, group), time, least, self.now);
        } else {
            self.slow.look(self.now);
        }
        // A slow queue says nothing of it either, or the drive would seem slow to all.
        let is_counted = note.sched_data & IS_APART == 0;
        let mut is_of_drive = is_counted && !self.slow.is_slow(id, self.clients[id].group());
        self.dec_in_flight(note.sched_data, note.issued_at);
        if is_usual && is_of_drive {
            // Nor does a row of requests that hung for one reason.
            is_of_drive = self.overdue.learn(note.issued_at, time);
        }
        if self.is_held {
            self.idling.ended(self.overdue.patience(), self.now);
        }
        let leaf = self.wf2q.leaf(id);
        self.probing
            .ended(&self.wf2q, leaf, is_counted.then_some(time), self.now);
        self.look_at_probe();
        if is_of_drive {
            let is_elastic = || !self.wf2q.is_within_modest(leaf);
            self.depth.completed(
                note.direction,
                note.bytes,
                time,
                self.in_flight - self.out_apart,
                self.now,
                is_elastic,
            );
        }
        let cost = bytes + u64::from(self.tunables.request_cost);
        if self.rate.completed(cost, self.now) {
            self.wf2q.set_lead_max(self.lead_max());
            self.wf2q.set_rate(self.rate.bytes_per_second());
        }
        self.ended_in_turn(id);
        self.rest(id, note.completed_at);
    }

    fn queued(&self) -> usize {
        self.held.slots.used()
    }

    fn keeps_back(&self) -> bool {
        let is_full = self.is_full();
        let is_strict = self.waits_for_all();
        let waits = self.turn.is_some_and(|turn| turn.is_waiting);
        self.queued() > 0 && (is_full || is_strict || waits || self.is_held)
    }

    fn next_wakeup(&self) -> Option<Instant> {
        // If no other queue has a request, the length of the wait does not matter.
        let is_asked = self.queued() > 0;
        if !is_asked {
            return None;
        }
        let turn = self
            .turn
            .and_then(|turn| turn.waits_until(self.tunables.timeout_sync));
        // At the limit, a completion comes first, unless all that are out are late.
        let is_full = self.is_full() || self.waits_for_all();
        let turn = turn.filter(|_| !is_full);
        let idling = self.idling.next_wakeup().filter(|_| !is_full);
        let late = Some(self.overdue.epoch_ends()).filter(|at| is_full && *at > self.now);
        let wakeups = [
            turn,
            idling,
            late,
            self.probing.next_wakeup(&self.wf2q, &self.overdue),
        ];
        wakeups.into_iter().flatten().min()
    }

    fn depth_limit(&self) -> Option<u32> {
        Some(self.depth.limit())
    }

    fn tunables(&self) -> Vec<(&'static str, u64)> {
        self.tunables.list()
    }

    fn set_tunable(&mut self, name: &str, value: u64) -> Result<(), TunableError> {
        self.tunables.set(self.name(), name, value)?;
        self.end_turn(TurnEnd::Asked);
        self.wf2q.set_lead_max(self.lead_max());
        if self.lead_max() == 0 {
            self.probing.clear(&mut self.wf2q);
            self.end_hold();
        }
        let in_use: Vec<usize> = self.clients.iter().map(|(id, ..)| id).collect();
        in_use.into_iter().for_each(|id| self.weigh(id));
        Ok(())
    }

    fn group_aware(&mut self) -> Option<&mut dyn GroupAware> {
        Some(self)
    }

    fn check_invariants(&self) {
        self.clients.check();
        let served = self.turn.filter(|turn| !turn.is_waiting);
        let served = served.map(|turn| self.wf2q.leaf(turn.queue));
        self.wf2q.check(served);
        let (mut queued, mut in_flight) = (0, 0);
        for (id, key, queue) in self.clients.iter() {
            queue.requests.check(&self.held, |rq| {
                assert!(Key::of(rq).may_join(key), "a request of queue {id}")
            });
            queued += queue.requests.len();
            in_flight += queue.in_flight;
            let waits = self.wf2q.waits(self.wf2q.leaf(id));
            let has_turn = self.turn.is_some_and(|turn| turn.queue == id);
            let is_due = !queue.requests.is_empty() && !has_turn && !self.is_parked(id);
            assert_eq!(
                waits, is_due,
                "queue {id} waits for its turn exactly if it has something"
            );
        }
        assert_eq!(queued, self.queued(), "requests in queues and in slots");
        assert_eq!(in_flight, self.in_flight, "requests in flight");
        let of_groups: u32 = self.groups_out.iter().map(|out| out.in_flight).sum();
        assert_eq!(of_groups, in_flight, "requests in flight, by group");
        let apart: u32 = self.groups_out.iter().map(|out| out.apart).sum();
        assert_eq!(apart, self.out_apart, "requests of slow queues in flight");
        self.held.slots.check();
        let busy = self.clients.iter().filter(|(_, _, queue)| queue.is_busy());
        self.contention
            .check(busy.map(|(_, key, _)| (key.group(), key.client())));
    }
}

/// How far one group may be ahead of another: long enough for clients to respond to a batch of
/// completions, and too short for users to notice.
const LEAD_TIME: Nanos = Nanos::from_millis(1);
const LEAD_BYTES_MIN: u64 = 64 << 10;
/// Of slow queues, so many requests may be out beside those that the depth counts.
const APART_MAX: u32 = 64;
/// Bit of `sched_data`, next to the queue's number: the request moves no data.
const MOVES_NO_DATA: u32 = 1 << 31;
/// The next bit: the request is of a slow queue, so the depth does not count it.
const IS_APART: u32 = 1 << 30;
/// The next bit: the request takes longer by nature, since it is durable when it ends or is work of the driver's own, and
/// says nothing of its queue.
const IS_LONGER: u32 = 1 << 29;
/// The next bit: it moves its bytes twice.
const IS_COPY: u32 = 1 << 28;
