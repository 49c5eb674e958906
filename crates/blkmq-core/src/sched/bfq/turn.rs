//! Decides how long one queue has the drive, where a turn is a budget of its requests and not one: on a drive that seeks,
//! for neighbours to be served together, and with `strict_guarantees`. `mod` asks it for the next request.

use super::Bfq;
use crate::request::Request;
use crate::time::Instant;

/// The turn of one queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    pub(super) queue: usize,
    began: Instant,
    /// What the queue may still be served.
    left: u32,
    served: u64,
    /// While the queue is empty and the drive waits for its next request: until when.
    pub(super) waits_until: Option<Instant>,
}

impl Turn {
    /// Whether it has given out a request.
    #[inline]
    pub(super) fn has_served(self) -> bool {
        self.served > 0
    }
}

impl Bfq {
    /// Gives out the next request of the turn, or begins another one's.
    pub(super) fn dispatch_in_turn(&mut self) -> Option<Box<Request>> {
        if self.tunables.strict_guarantees && self.in_flight > 0 {
            return None;
        }
        loop {
            let Some(turn) = self.turn else {
                self.begin_turn()?;
                continue;
            };
            let Some(slot) = self.next_request(turn.queue) else {
                if self.waits_for(turn) {
                    return None;
                }
                self.end_turn();
                continue;
            };
            let cost = self.cost(self.held.slots.rq(slot));
            let is_over = cost > turn.left || self.now.since(turn.began) >= self.tunables.timeout_sync;
            if is_over && turn.has_served() {
                self.end_turn();
                continue;
            }
            let turn = self.turn.as_mut().expect("looked at above");
            turn.left = turn.left.saturating_sub(cost);
            turn.served += u64::from(cost);
            turn.waits_until = None;
            let queue = turn.queue;
            return Some(self.take(queue, slot));
        }
    }

    /// Learns that a request of a queue has ended: the wait for its next one begins.
    pub(super) fn completed_in_turn(&mut self, id: usize) {
        let queue = &self.clients[id];
        let is_dry = queue.requests.is_empty() && queue.in_flight == 0;
        let until = self.now + self.tunables.slice_idle;
        if let Some(turn) = self.turn.as_mut().filter(|turn| turn.queue == id && is_dry) {
            turn.waits_until = Some(until);
        }
    }

    /// The budget of a queue's next turn.
    pub(super) fn turn_budget(&self, _id: usize) -> u32 {
        if self.tunables.max_budget > 0 {
            return self.tunables.max_budget as u32;
        }
        BUDGET_DEFAULT
    }

    /// Ends the turn, if there is one: the others are asked again.
    pub(super) fn end_turn(&mut self) {
        let Some(turn) = self.turn.take() else {
            return;
        };
        let budget = self.next_budget(turn.queue);
        self.wf2q.release(self.wf2q.leaf(turn.queue), budget);
    }

    fn begin_turn(&mut self) -> Option<()> {
        let queue = self.pick()?;
        self.turn = Some(Turn {
            queue,
            began: self.now,
            left: self.turn_budget(queue),
            served: 0,
            waits_until: None,
        });
        Some(())
    }

    /// Whether the drive waits for the next request of a queue whose turn it is and that has none: while others of it are
    /// in flight, and for `slice_idle` after that.
    fn waits_for(&self, turn: Turn) -> bool {
        let queue = &self.clients[turn.queue];
        if !queue.key().is_sync() || self.tunables.slice_idle.0 == 0 || turn.left == 0 {
            return false;
        }
        queue.in_flight > 0 || turn.waits_until.is_some_and(|until| self.now < until)
    }
}

/// The budget until the drive's rate is known: 8 MiB.
const BUDGET_DEFAULT: u32 = 8 << 20;
