//! Dispatch: which queue comes next, which of its requests, and what the request costs. `turn` decides
//! this differently where a turn is more than one request.

use super::super::slots::SlotId;
use super::{APART_MAX, Bfq, IS_APART, IS_COPY, IS_LONGER, MOVES_NO_DATA, wf2q};
use crate::bio::Flags;
use crate::ids::GroupId;
use crate::request::Request;
use crate::sched::elevator::Elevator;
use crate::time::Nanos;

/// Whose turn may come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turns {
    All,
    /// Those of clients that return within their due, whatever the depth.
    Urgent,
}

impl Bfq {
    /// Dispatches the next request where a turn is one request.
    pub(super) fn dispatch_one(&mut self, turns: Turns) -> Option<Box<Request>> {
        let id = self.pick(turns)?;
        if self.idling.holds() {
            self.end_hold();
        }
        let slot = self
            .next_request(id)
            .expect("the queue whose turn it is has requests");
        let rq = self.take(id, slot);
        let budget = self.next_budget(id);
        self.wf2q.release(self.wf2q.leaf(id), budget);
        if self.tunables.low_latency {
            self.weigh(id);
        }
        Some(rq)
    }

    pub(super) fn end_hold(&mut self) {
        let ended = self.idling.end_hold(self.now);
        self.idled.extend(ended);
    }

    /// Chooses the queue whose turn it is.
    pub(super) fn pick(&mut self, turns: Turns) -> Option<usize> {
        loop {
            let (served_at, now) = (&self.last_class_at, self.now);
            let last_class_due = |group: usize| now.since(served_at[group]) >= LAST_CLASS_WAIT;
            let Some(leaf) = self.wf2q.pick(last_class_due) else {
                self.is_held = self.queued() > 0;
                if !self.is_held || !self.is_hold_over() {
                    return None;
                }
                continue;
            };
            self.is_held = false;
            let id = self.wf2q.leaf_of(leaf);
            if self.fills_depth(id) {
                self.park(id);
                if turns == Turns::Urgent && !self.wf2q.is_next_urgent() {
                    return None;
                }
                continue;
            }
            let key = self.clients[id].key();
            if key.is_idle_class() {
                self.last_class_at[key.group().index()] = now;
            }
            return Some(id);
        }
    }

    /// Handles that all waiting requests are held. Says whether this has ended: the members for which they were
    /// held are gone, or a probe begins.
    #[cold]
    pub(super) fn is_hold_over(&mut self) -> bool {
        if self.probing.is_alone() || self.probing.is_open() {
            return false;
        }
        if self.dismiss_absent() {
            return true;
        }
        let holder = self.wf2q.holder();
        let is_over = self.probing.begin_if_due(&self.wf2q, holder, self.now);
        self.wf2q.set_open(is_over);
        is_over
    }

    /// Checks whether a probe begins or enters its next phase.
    #[inline]
    pub(super) fn look_at_probe(&mut self) {
        let now = self.now;
        if self.probing.look(
            &mut self.wf2q,
            self.in_flight - self.out_apart,
            &self.overdue,
            now,
        ) {
            self.wf2q.set_open(self.probing.is_open());
            self.depth.interrupt();
        }
    }

    /// How long a group without requests is waited for at most: for about as long as a request takes. A group that
    /// thinks for longer spends most of its time elsewhere, and waiting would gain it little.
    #[inline]
    pub(super) fn patience_on_flash(&self) -> Nanos {
        let usual = self.overdue.usual().clamp(PATIENCE_MIN, PATIENCE_MAX);
        self.tunables.slice_idle.min(usual)
    }

    pub(super) fn dismiss_absent(&mut self) -> bool {
        let (now, patience) = (self.now, self.patience_on_flash());
        let in_flight = self.punctual() + self.out_apart;
        let (idling, clients, groups_out) = (&mut self.idling, &self.clients, &mut self.groups_out);
        let (overdue, slow) = (&self.overdue, &self.slow);
        let groups = self.last_class_at.len();
        let stalled_after = self.overdue.patience();
        idling.look_again();
        self.wf2q.dismiss(|id, served, is_busy| {
            let group = match wf2q::leaf_number(id, groups) {
                Some(leaf) => clients[leaf].key().group(),
                None => GroupId(id.index() as u32),
            };
            if is_busy {
                // Others are charged by what they move, and would wait for what moves nothing and may take any time;
                // a slow queue would have no more for it.
                if clients.has_only_exempt_out(group) {
                    return true;
                }
                // Watched one after the other, many that hang again and again would have the rest wait for all of them. In a
                // pause of the drive everything is late, and nobody is slower for that.
                let out = &mut groups_out[group.index()];
                if slow.is_suspect(group.index()) && out.hangs(overdue) {
                    return true;
                }
                let is_alone_out = || out.in_flight >= in_flight;
                return idling.is_stalled((id, served), is_alone_out, stalled_after, now);
            }
            idling.is_gone(id, group, patience, now)
        })
    }

    /// Dispatches a request of the queue that is being served.
    pub(super) fn take(&mut self, id: usize, slot: SlotId) -> Box<Request> {
        let queue = &mut self.clients[id];
        let came_back = queue.requests.first_requeued() == Some(slot);
        let group = &mut self.groups_out[queue.group()];
        self.overdue.issued_of(&mut queue.late, queue.in_flight);
        self.overdue.issued_of(&mut group.late, group.in_flight);
        let mut rq = queue.requests.take(&mut self.held, slot);
        queue.in_flight += 1;
        group.in_flight += 1;
        self.in_flight += 1;
        rq.seal();
        rq.sched_data = id as u32;
        if rq.flags().has_any(LONGER) {
            rq.sched_data |= IS_LONGER;
            self.overdue.issued();
        } else if self.is_apart(id) {
            rq.sched_data |= IS_APART;
            self.out_apart += 1;
            let queue = &mut self.clients[id];
            queue.out_apart += 1;
            self.groups_out[queue.group()].apart += 1;
        } else {
            self.overdue.issued();
        }
        if rq.charged_bytes(self.held.limits()) == 0 {
            rq.sched_data |= MOVES_NO_DATA;
        }
        if rq.flags().has(Flags::TASK) {
            rq.sched_data |= IS_COPY;
        }
        if rq.sched_data & (MOVES_NO_DATA | IS_APART) != 0 {
            self.clients[id].in_flight_exempt += 1;
        }
        let leaf = self.wf2q.leaf(id);
        self.probing.taken(&self.wf2q, leaf, self.now);
        // A requeued request was charged when it was dispatched first.
        if !came_back {
            let cost = self.cost(&rq);
            self.clients[id].history.served(cost);
            self.wf2q.serve(self.wf2q.leaf(id), cost);
        }
        rq
    }

    /// Says whether the depth does not count a queue's next request: the queue is slow, on a drive that does not seek.
    #[inline]
    fn is_apart(&self, id: usize) -> bool {
        self.slow.is_slow(id, self.clients[id].group()) && self.out_apart < APART_MAX && !self.has_turns()
    }

    /// The next request of a queue: a requeued one, then one that has waited too long, then, if distance matters,
    /// the nearest one.
    #[inline]
    pub(super) fn next_request(&self, id: usize) -> Option<SlotId> {
        let requests = &self.clients[id].requests;
        if let Some(slot) = requests.first_requeued() {
            return Some(slot);
        }
        if !self.rotational {
            return requests.oldest();
        }
        let expire = if self.clients[id].key().is_sync() {
            self.tunables.fifo_expire_sync
        } else {
            self.tunables.fifo_expire_async
        };
        let checked = self.turn.is_some_and(|turn| turn.has_served());
        let expired = if checked {
            None
        } else {
            requests.expired(&self.held, expire, self.now)
        };
        expired.or_else(|| requests.nearest(&self.held, &self.tunables))
    }

    /// The budget of a queue's next turn, if it has requests.
    #[inline]
    pub(super) fn next_budget(&self, id: usize) -> Option<u32> {
        if self.has_turns() {
            return (!self.clients[id].requests.is_empty()).then(|| self.turn_budget(id));
        }
        let slot = self.next_request(id)?;
        Some(self.cost(self.held.slots.rq(slot)))
    }

    /// The cost of a request, in bytes: the bytes that the drive moves, at most one transfer, or that it would
    /// have moved meanwhile if the request moves none; at least a block; plus the tunable cost of a request.
    #[inline]
    pub(super) fn cost(&self, rq: &Request) -> u32 {
        let bytes = match rq.moved_bytes(self.held.limits()) {
            0 => self.rate.cost_without_data(),
            moved => moved.min(u64::from(self.cost_max)),
        };
        (bytes as u32).max(COST_MIN) + self.tunables.request_cost
    }
}

/// Requests with these take longer than others of their kind.
const LONGER: Flags = Flags::FUA.with(Flags::PREFLUSH).with(Flags::TASK);
/// Bounds of the time for which a group without requests is waited for.
const PATIENCE_MIN: Nanos = Nanos::from_micros(200);
const PATIENCE_MAX: Nanos = Nanos::from_millis(2);
/// How long a group's clients of the idle class wait behind the others before they get one turn.
const LAST_CLASS_WAIT: Nanos = Nanos::from_millis(200);
/// Least cost of a request.
const COST_MIN: u32 = 4096;
