//! Gives out requests: which queue may be next, which of its requests that is, and what it counts as. `turn` does so in its own
//! way where a turn is more than one request.

use super::super::slots::SlotId;
use super::{Bfq, MOVES_NO_DATA, PASSED_OVER, wf2q};
use crate::ids::GroupId;
use crate::request::Request;
use crate::sched::elevator::Elevator;
use crate::time::Nanos;

impl Bfq {
    /// Gives out the next request where a turn is one request.
    pub(super) fn dispatch_one(&mut self) -> Option<Box<Request>> {
        let id = self.pick()?;
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
    pub(super) fn pick(&mut self) -> Option<usize> {
        loop {
            let has_room = self.has_room() || self.may_pass();
            let (served_at, now) = (&self.last_class_at, self.now);
            let leaf = has_room.then(|| {
                self.wf2q
                    .pick(|group| now.since(served_at[group]) >= LAST_CLASS_WAIT)
            });
            let Some(leaf) = leaf.flatten() else {
                self.is_held = self.queued() > 0;
                if !self.is_held || !self.is_hold_over() {
                    return None;
                }
                continue;
            };
            self.is_held = false;
            let id = self.wf2q.leaf_of(leaf);
            let key = self.clients[id].key();
            if key.is_idle_class() {
                self.last_class_at[key.group().index()] = now;
            }
            return Some(id);
        }
    }

    /// All that waits is held. Says whether it is so no longer: those for whom it was are gone, or a probe begins.
    #[cold]
    pub(super) fn is_hold_over(&mut self) -> bool {
        if self.room.is_alone() {
            return false;
        }
        if self.dismiss_absent() {
            return true;
        }
        self.depth.note_held_back();
        let (holder, others) = (self.wf2q.holder(), self.others_in_flight());
        let is_over = self.room.note_held_back(&self.wf2q, holder, others, self.now);
        self.wf2q.set_open(is_over);
        is_over
    }

    /// Says whether those who are not passed over may have one more in flight.
    #[inline]
    pub(super) fn has_room(&self) -> bool {
        self.room.permits(self.others_in_flight()) || self.wf2q.reach_now() == 0
    }

    /// There is no room. Says whether the next one does not need it: it is passed over, or came back within its due.
    #[cold]
    pub(super) fn may_pass(&mut self) -> bool {
        self.wf2q.is_next_passed_over() || self.wf2q.is_next_urgent()
    }

    /// What is in flight of those who are not passed over.
    #[inline]
    pub(super) fn others_in_flight(&self) -> u32 {
        self.in_flight - self.passed_in_flight
    }

    /// Looks whether a probe goes on to its next phase.
    #[inline]
    pub(super) fn look_at_room(&mut self) {
        if self.room.look(&mut self.wf2q, self.in_flight, self.now) {
            self.wf2q.set_open(self.room.is_open());
            self.depth.interrupt();
        }
    }

    /// So long a group that has nothing is waited for at most.
    #[inline]
    pub(super) fn patience_on_flash(&self) -> Nanos {
        self.tunables.slice_idle.min(PATIENCE)
    }

    pub(super) fn dismiss_absent(&mut self) -> bool {
        let (now, patience) = (self.now, self.patience_on_flash());
        let (idling, clients) = (&mut self.idling, &self.clients);
        let groups = self.last_class_at.len();
        idling.look_again();
        self.wf2q.dismiss(|id| {
            let group = match wf2q::leaf_number(id, groups) {
                Some(leaf) => clients[leaf].key().group(),
                None => GroupId(id.index() as u32),
            };
            idling.is_gone(id, group, patience, now)
        })
    }

    /// Takes a request out of the queue that is being served.
    pub(super) fn take(&mut self, id: usize, slot: SlotId) -> Box<Request> {
        let queue = &mut self.clients[id];
        let came_back = queue.requests.first_requeued() == Some(slot);
        let mut rq = queue.requests.take(&mut self.held, slot);
        queue.in_flight += 1;
        self.in_flight += 1;
        rq.seal();
        rq.sched_data = id as u32;
        if rq.charged_bytes(self.held.limits()) == 0 {
            rq.sched_data |= MOVES_NO_DATA;
        }
        let is_passed = self.room.has_passed() && self.wf2q.is_passed_over(self.wf2q.leaf(id));
        if is_passed {
            rq.sched_data |= PASSED_OVER;
            self.passed_in_flight += 1;
        }
        self.room.taken(is_passed, self.now);
        // What came back was paid for when it went out first.
        if !came_back {
            let cost = self.cost(&rq);
            self.clients[id].history.served(cost);
            self.wf2q.serve(self.wf2q.leaf(id), cost);
        }
        rq
    }

    /// Which request of a queue is next: what came back, then what has waited too long, then, where distance matters, the
    /// nearest one.
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

    /// What a queue is to be given in its next turn, if it has anything.
    #[inline]
    pub(super) fn next_budget(&self, id: usize) -> Option<u32> {
        if self.has_turns() {
            return (!self.clients[id].requests.is_empty()).then(|| self.turn_budget(id));
        }
        let slot = self.next_request(id)?;
        Some(self.cost(self.held.slots.rq(slot)))
    }

    /// What a request counts as, in bytes: those that the drive moves, a transfer at most, or would have moved meanwhile if it moves
    /// none; at least a block; and what the request itself is said to cost.
    #[inline]
    pub(super) fn cost(&self, rq: &Request) -> u32 {
        let bytes = match rq.charged_bytes(self.held.limits()) {
            0 => self.rate.cost_without_data(),
            moved => moved.min(u64::from(self.cost_max)),
        };
        (bytes as u32).max(COST_MIN) + self.tunables.request_cost
    }
}

/// So long a group that has nothing is waited for at most.
const PATIENCE: Nanos = Nanos::from_millis(2);
/// So long a group's clients of the idle class wait behind the others, then one turn is theirs.
const LAST_CLASS_WAIT: Nanos = Nanos::from_millis(200);
/// What a request counts as at least.
const COST_MIN: u32 = 4096;
