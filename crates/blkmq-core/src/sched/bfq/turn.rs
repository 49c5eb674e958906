//! The turn of one queue, where a turn is a budget of requests and not a single one: on a drive that seeks, to
//! serve neighbours together, and with `strict_guarantees`.
//! `mod` asks it for the next request.
//!
//! ```text
//!            has a request                        is empty, worth waiting for
//!  begin ─► gives them out ◄──────────────────────────────► waits (others' requests may be injected)
//!            │ budget used up, too long, empty                 │ slice_idle over
//!            └───────────────────► end: learn, charge time ◄───┘
//! ```

use super::Bfq;
use super::clients::Key;
use super::dispatch::Turns;
use super::history::TurnEnd;
use crate::request::Request;
use crate::time::{Instant, Nanos};

/// The turn of one queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    pub(super) queue: usize,
    /// When it began, or when the drive finished the requests that it had before.
    began: Instant,
    /// Whether a request of it has ended.
    is_under_way: bool,
    /// The rest of its budget.
    left: u32,
    served: u64,
    /// Its charge beyond its requests, for the time that it took.
    surcharge: u64,
    /// Whether the queue is empty and the drive waits for its next request. Meanwhile `wf2q` does not regard the
    /// queue as served.
    pub(super) is_waiting: bool,
    /// When the wait ends; `None` while requests of the queue are in flight, since the wait begins at their end.
    waits_until: Option<Instant>,
    /// Since when the drive has had no request of the queue in this wait.
    idle_since: Option<Instant>,
    /// Requests of other queues that were dispatched during this wait.
    injected: u32,
}

/// The measured rate of the drive.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    /// Bytes per second of queues that do not seek: a moving mean; 0 while unknown.
    rate: u64,
}

/// The queue of the latest request in each area of the drive: a small table with overwriting.
#[derive(Debug)]
pub(super) struct Neighbours {
    last: Vec<u32>,
}

impl Turn {
    /// When the wait for its queue ends, also if a request of it never does.
    pub(super) fn waits_until(self, timeout: Nanos) -> Option<Instant> {
        let at_last = self.is_waiting.then(|| self.began + timeout);
        self.waits_until.or(at_last)
    }

    /// Whether it has dispatched a request.
    #[inline]
    pub(super) fn has_served(self) -> bool {
        self.served > 0
    }
}

impl Bfq {
    /// Says whether nothing goes out before the end of what is out, unless that is overdue.
    #[inline]
    pub(super) fn waits_for_all(&self) -> bool {
        self.tunables.strict_guarantees && self.punctual() > 0
    }

    /// Dispatches the next request of the turn, or begins the turn of another queue.
    pub(super) fn dispatch_in_turn(&mut self) -> Option<Box<Request>> {
        if self.waits_for_all() {
            return None;
        }
        loop {
            let Some(turn) = self.turn else {
                self.begin_turn()?;
                continue;
            };
            let Some(slot) = self.next_request(turn.queue) else {
                if self.waits_for(turn) {
                    return self.inject();
                }
                self.end_turn(self.why_dry(turn));
                continue;
            };
            if self.fills_depth(turn.queue) {
                self.end_turn(TurnEnd::Timeout);
                continue;
            }
            let cost = self.cost(self.held.slots.rq(slot));
            if turn.has_served() && cost > turn.left {
                self.end_turn(TurnEnd::Exhausted);
                continue;
            }
            if turn.has_served() && self.now.since(turn.began) >= self.tunables.timeout_sync {
                self.end_turn(TurnEnd::Timeout);
                continue;
            }
            let turn = self.turn.as_mut().expect("looked at above");
            turn.left = turn.left.saturating_sub(cost);
            turn.served += u64::from(cost);
            let queue = turn.queue;
            return Some(self.take(queue, slot));
        }
    }

    /// The queue for a request at `position` of the queue `id`: another queue if both work together. Clients
    /// that read one area in turn share one queue meanwhile; otherwise the drive would wait for one client while
    /// the next request comes from another.
    pub(super) fn cooperator(&mut self, id: usize, position: u64) -> usize {
        let key = self.clients[id].key();
        let cooperator = match self.clients.cooperator(id) {
            Some(cooperator) if !self.clients[cooperator].history.is_seeky() => Some(cooperator),
            _ => {
                self.clients.part(id);
                let last = self.neighbours.last_at(key, position).filter(|&last| last != id);
                let joins = last.filter(|&last| self.works_with(id, last, position));
                joins.inspect(|&last| self.clients.join(id, last))
            }
        };
        let id = cooperator.unwrap_or(id);
        self.neighbours.note(key, position, id);
        id
    }

    /// Whether a request of one queue at `position` continues the requests of another queue.
    fn works_with(&self, id: usize, other: usize, position: u64) -> bool {
        let (own, other) = (&self.clients[id], &self.clients[other]);
        own.key().is_sync()
            && other.has_key()
            && own.key().may_join(other.key())
            && other
                .history
                .end()
                .is_some_and(|end| position.abs_diff(end) <= NEAR)
            && !own.history.is_seeky()
            && !other.history.is_seeky()
    }

    /// Ends the wait: the queue whose turn it is has a request again.
    pub(super) fn resume_turn(&mut self) {
        self.count_idle();
        let turn = self.turn.as_mut().expect("a turn goes on");
        debug_assert!(turn.is_waiting);
        turn.is_waiting = false;
        turn.waits_until = None;
        turn.injected = 0;
        let leaf = self.wf2q.leaf(turn.queue);
        self.wf2q.seize(leaf);
    }

    /// Begins the wait for a queue's next request after its last one ended, if its turn is not over.
    pub(super) fn dried_in_turn(&mut self, id: usize) {
        let until = self.now + self.patience(id);
        if let Some(turn) = self
            .turn
            .as_mut()
            .filter(|turn| turn.queue == id && turn.is_waiting)
        {
            turn.waits_until = Some(until);
            turn.idle_since = Some(self.now);
        }
    }

    /// Records the group and the length of a finished wait until the next query.
    fn count_idle(&mut self) {
        let Some(turn) = &mut self.turn else { return };
        let Some(since) = turn.idle_since.take() else {
            return;
        };
        let (group, time) = (self.clients[turn.queue].key().group(), self.now.since(since));
        match self.idled.iter_mut().find(|(known, _)| *known == group) {
            Some((_, sum)) => *sum += time,
            None => self.idled.push((group, time)),
        }
    }

    /// Handles the end of a request: time that the drive spent on earlier requests of other queues does not
    /// count for the turn.
    #[inline]
    pub(super) fn ended_in_turn(&mut self, id: usize) {
        let now = self.now;
        if let Some(turn) = self.turn.as_mut().filter(|turn| !turn.is_under_way) {
            turn.is_under_way = turn.queue == id;
            if !turn.is_under_way {
                turn.began = now;
            }
        }
    }

    /// The budget of a queue's next turn.
    pub(super) fn turn_budget(&self, id: usize) -> u32 {
        self.clients[id].history.budget(self.budget_max())
    }

    /// Ends the current turn, if any: updates the estimates, charges the turn, and lets `wf2q` choose again.
    pub(super) fn end_turn(&mut self, why: TurnEnd) {
        self.count_idle();
        let Some(turn) = self.turn.take() else {
            return;
        };
        let max = self.budget_max();
        if !turn.is_waiting {
            let surcharge = self.charge_time(turn);
            let elapsed = self.now.since(turn.began);
            let is_full = matches!(why, TurnEnd::Exhausted | TurnEnd::Timeout);
            if is_full && elapsed >= SLOW_KNOWN && surcharge == 0 {
                self.pace.learn(turn.served, elapsed);
            }
        }
        let queue = &mut self.clients[turn.queue];
        queue
            .history
            .turn_ended(why, turn.served, queue.in_flight > 0, max);
        if !turn.is_waiting {
            let budget = self.next_budget(turn.queue);
            self.wf2q.release(self.wf2q.leaf(turn.queue), budget);
        }
        self.weigh(turn.queue);
    }

    /// Charges a queue that seeks, or is slow for another reason, for the time that it takes from the others, as
    /// if it had used that time well; returns the charge so far. The queue is being served.
    fn charge_time(&mut self, turn: Turn) -> u64 {
        let timeout = self.tunables.timeout_sync;
        let elapsed = self.now.since(turn.began).min(timeout);
        let in_time = (u128::from(self.budget_max()) * u128::from(elapsed.0) / u128::from(timeout.0)) as u64;
        let is_slow = elapsed >= SLOW_KNOWN && turn.served < in_time / 2;
        if !self.rotational || !(is_slow || self.clients[turn.queue].history.is_seeky()) {
            return turn.surcharge;
        }
        let due = in_time.saturating_sub(turn.served + turn.surcharge);
        self.wf2q.serve(self.wf2q.leaf(turn.queue), due as u32);
        turn.surcharge + due
    }

    fn begin_turn(&mut self) -> Option<()> {
        let queue = self.pick(Turns::All)?;
        self.turn = Some(Turn {
            queue,
            began: self.now,
            is_under_way: false,
            left: self.turn_budget(queue),
            served: 0,
            surcharge: 0,
            is_waiting: false,
            waits_until: None,
            idle_since: None,
            injected: 0,
        });
        Some(())
    }

    /// The reason why a turn ends whose queue is empty and not waited for any longer.
    fn why_dry(&self, turn: Turn) -> TurnEnd {
        if turn.left == 0 {
            TurnEnd::Exhausted
        } else if self.is_over(turn) {
            TurnEnd::Timeout
        } else if turn.is_waiting {
            TurnEnd::TooIdle
        } else {
            TurnEnd::Dry
        }
    }

    fn is_over(&self, turn: Turn) -> bool {
        turn.left == 0 || self.now.since(turn.began) >= self.tunables.timeout_sync
    }

    /// Whether the drive waits for the next request of the empty queue whose turn it is: while requests of the
    /// queue are in flight, and for some time after that.
    fn waits_for(&mut self, turn: Turn) -> bool {
        let queue = &self.clients[turn.queue];
        let pays =
            queue.key().is_sync() && (self.tunables.strict_guarantees || self.thinks_short(turn.queue));
        if !pays || self.is_over(turn) || self.tunables.slice_idle == Nanos::ZERO {
            return false;
        }
        let in_flight = queue.in_flight;
        if in_flight == 0 && turn.waits_until.is_some_and(|until| self.now >= until) {
            return false;
        }
        if !turn.is_waiting {
            let surcharge = self.charge_time(turn);
            self.wf2q.release(self.wf2q.leaf(turn.queue), None);
            let until = (in_flight == 0).then(|| self.now + self.patience(turn.queue));
            let turn = self.turn.as_mut().expect("its turn");
            turn.surcharge = surcharge;
            turn.is_waiting = true;
            turn.waits_until = until;
            turn.idle_since = (in_flight == 0).then_some(self.now);
        }
        true
    }

    /// In each wait for a queue whose mean think time is long, dispatches one request of another queue: it
    /// ends before the wait is over, or shortly after.
    fn inject(&mut self) -> Option<Box<Request>> {
        let turn = self.turn.as_mut()?;
        let think = &self.clients[turn.queue].history;
        let is_long = think.thinks_longer_than(Nanos(self.tunables.slice_idle.0 / INJECT_PART));
        if self.tunables.strict_guarantees || turn.injected >= INJECTED_MAX || !is_long {
            return None;
        }
        turn.injected += 1;
        let injected = self.dispatch_one(Turns::All);
        if injected.is_none() {
            self.turn.as_mut().expect("its turn").injected -= 1;
        }
        injected
    }

    /// How long the drive waits for a queue; only briefly for a queue that seeks.
    fn patience(&self, id: usize) -> Nanos {
        let idle = self.tunables.slice_idle;
        let is_seeky = self.clients[id].history.is_seeky() && !self.tunables.strict_guarantees;
        if is_seeky { idle.min(PATIENCE_SEEKY) } else { idle }
    }

    fn thinks_short(&self, id: usize) -> bool {
        !self.clients[id].history.thinks_longer_than(self.patience(id))
    }

    /// The largest budget: the tunable's value, or what the drive does in the longest turn.
    fn budget_max(&self) -> u32 {
        if self.tunables.max_budget > 0 {
            return self.tunables.max_budget as u32;
        }
        if self.pace.rate == 0 {
            return BUDGET_DEFAULT;
        }
        let bytes = u128::from(self.pace.rate) * u128::from(self.tunables.timeout_sync.0) / 1_000_000_000;
        bytes.clamp(u128::from(BUDGET_MIN), u128::from(BUDGET_LARGEST)) as u32
    }
}

impl Neighbours {
    pub(super) fn new() -> Self {
        Self {
            last: vec![u32::MAX; AREAS],
        }
    }

    /// The queue of the latest remembered request at this position or shortly before it.
    fn last_at(&self, key: Key, position: u64) -> Option<usize> {
        let area = position >> AREA_BITS;
        let last = [area, area.wrapping_sub(1)].map(|area| self.last[Self::place(key, area)]);
        last.into_iter().find(|&id| id != u32::MAX).map(|id| id as usize)
    }

    /// Remembers the queue of a request.
    pub(super) fn note(&mut self, key: Key, position: u64, id: usize) {
        self.last[Self::place(key, position >> AREA_BITS)] = id as u32;
    }

    fn place(key: Key, area: u64) -> usize {
        let group = u64::from(key.group().0) << 40;
        ((area ^ group).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % AREAS
    }
}

impl Pace {
    fn learn(&mut self, bytes: u64, time: Nanos) {
        let rate = (u128::from(bytes) * 1_000_000_000 / u128::from(time.0.max(1))) as u64;
        self.rate = if self.rate == 0 {
            rate
        } else {
            (self.rate * 7 + rate) / 8
        };
    }
}

/// The largest budget until the drive's rate is known: 8 MiB.
const BUDGET_DEFAULT: u32 = 8 << 20;
/// Bounds of the budget by the drive's rate.
const BUDGET_MIN: u32 = 256 << 10;
const BUDGET_LARGEST: u32 = 256 << 20;
/// Clients that read within this distance read the same area: 1 MiB.
const NEAR: u64 = 1 << AREA_BITS;
const AREA_BITS: u32 = 20;
/// Areas that are remembered.
const AREAS: usize = 256;
/// Least length of a turn that measures the rate.
const SLOW_KNOWN: Nanos = Nanos::from_millis(20);
/// How long the drive waits for a queue that seeks.
const PATIENCE_SEEKY: Nanos = Nanos::from_millis(2);
/// Requests of other queues in one wait.
const INJECTED_MAX: u32 = 1;
/// A think time is long if it exceeds this part of `slice_idle`.
const INJECT_PART: u64 = 4;
