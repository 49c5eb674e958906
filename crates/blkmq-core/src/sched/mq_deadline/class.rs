//! One priority class of mq-deadline: batches in ascending position, cut short by deadlines. `mod` gives
//! each class its turn; `request_list` keeps the requests of each direction.

use super::tunables::Tunables;
use crate::bio::Op;
use crate::request::Request;
use crate::sched::elevator::Inserted;
use crate::sched::index::Cursor;
use crate::sched::request_list::{RequestList, RequestMemory};
use crate::sched::slots::Fifo;
use crate::time::Instant;

/// One priority class.
#[derive(Debug)]
pub(super) struct Class {
    /// Requests that were requeued, in the order in which they came back.
    requeued: Fifo,
    sides: [RequestList; SIDES],
    /// By side, the position of the request that was dispatched last: the position of the sweep.
    swept: [u64; SIDES],
    batch: Batch,
    /// Batches of reads since writes began to wait.
    reads_ahead: u64,
}

/// A run of requests in one direction and in ascending position.
#[derive(Clone, Copy, Debug)]
struct Batch {
    side: usize,
    /// Requests dispatched so far; `u64::MAX` before the first batch.
    dispatched: u64,
}

impl Class {
    /// Makes an empty class.
    pub(super) fn new(held: &mut RequestMemory) -> Self {
        Self {
            requeued: Fifo::new(),
            sides: std::array::from_fn(|_| RequestList::new(held)),
            swept: [0; SIDES],
            batch: Batch {
                side: READS,
                dispatched: u64::MAX,
            },
            reads_ahead: 0,
        }
    }

    /// Says whether the class holds nothing.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        let [reads, writes] = &self.sides;
        reads.is_empty() && writes.is_empty() && self.requeued.first().is_none()
    }

    /// The arrival of the oldest request.
    #[inline]
    pub(super) fn oldest(&self, held: &RequestMemory) -> Option<Instant> {
        let [reads, writes] = &self.sides;
        let heads = [self.requeued.first(), reads.oldest(), writes.oldest()];
        let arrivals = heads.into_iter().flatten();
        arrivals.map(|id| held.slots.arrived(id).at).min()
    }

    /// Inserts a request: merges it with a neighbour, or puts it at its position and last in arrival order.
    pub(super) fn insert(
        &mut self,
        held: &mut RequestMemory,
        rq: Box<Request>,
        tunables: &Tunables,
        now: Instant,
    ) -> Inserted {
        self.sides[side_of(&rq)].insert(held, rq, tunables.front_merges, now)
    }

    /// Requeues a request: it is dispatched before all that were not dispatched yet.
    pub(super) fn requeue(&mut self, held: &mut RequestMemory, rq: Box<Request>, now: Instant) -> Inserted {
        let id = held.slots.put(rq, now);
        self.requeued.push(&mut held.slots, id);
        Inserted::Queued
    }

    /// Dispatches the next request.
    ///
    /// # Panics
    /// If the class is empty.
    pub(super) fn dispatch(
        &mut self,
        held: &mut RequestMemory,
        tunables: &Tunables,
        now: Instant,
    ) -> Box<Request> {
        if let Some(id) = self.requeued.first() {
            self.requeued.remove(&mut held.slots, id);
            return held.slots.take(id);
        }
        let cursor = self.next_of_batch(held, tunables);
        let cursor = cursor.unwrap_or_else(|| self.begin_batch(held, tunables, now));
        self.batch.dispatched += 1;
        let rq = self.sides[self.batch.side].take_out(held, cursor);
        self.swept[self.batch.side] = rq.position();
        rq
    }

    /// The next request of the current batch, if the batch continues.
    fn next_of_batch(&self, held: &RequestMemory, tunables: &Tunables) -> Option<Cursor> {
        let goes_on = self.batch.dispatched < tunables.fifo_batch;
        goes_on.then(|| self.next(held, self.batch.side)).flatten()
    }

    /// Chooses a direction and the first request of its batch: at the sweep, unless a deadline has passed or
    /// nothing lies ahead.
    fn begin_batch(&mut self, held: &RequestMemory, tunables: &Tunables, now: Instant) -> Cursor {
        let side = self.choose_side(tunables);
        self.batch = Batch { side, dispatched: 0 };
        let expire = [tunables.read_expire, tunables.write_expire][side];
        let line = &self.sides[side];
        let oldest = line.oldest().expect("a batch of a side that has requests");
        let expired = now.since(held.slots.arrived(oldest).at) >= expire;
        let swept_to = if expired { None } else { self.next(held, side) };
        swept_to.unwrap_or_else(|| line.place_of(held, oldest))
    }

    /// The first request of a side at the sweep or ahead of it.
    #[inline]
    fn next(&self, held: &RequestMemory, side: usize) -> Option<Cursor> {
        self.sides[side].first_from(held, self.swept[side])
    }

    /// Reads go first, but only `writes_starved` times in a row while writes wait.
    fn choose_side(&mut self, tunables: &Tunables) -> usize {
        let [reads, writes] = &self.sides;
        if reads.is_empty() || !writes.is_empty() && self.reads_ahead >= tunables.writes_starved {
            self.reads_ahead = 0;
            return WRITES;
        }
        self.reads_ahead += u64::from(!writes.is_empty());
        READS
    }

    /// Breaks the class, for the test of the check.
    #[cfg(test)]
    pub(super) fn lose_one_by_arrival(&mut self, held: &mut RequestMemory) {
        self.sides[READS].lose_one_by_arrival(held);
    }

    /// Asserts that the class `number` holds its own requests in order; returns how many, and the chunks in
    /// use.
    pub(super) fn check(&self, held: &RequestMemory, number: usize) -> (usize, usize) {
        self.requeued.check(&held.slots);
        for id in self.requeued.iter(&held.slots) {
            let class = held.slots.rq(id).prio().class as usize;
            assert_eq!(class, number, "class of requeued slot {}", id.0);
        }
        let (mut count, mut chunks) = (self.requeued.len(), 0);
        for (side, line) in self.sides.iter().enumerate() {
            chunks += line.check(held, |rq| {
                (rq.prio().class as usize, side_of(rq)) == (number, side)
            });
            count += line.len();
        }
        (count, chunks)
    }
}

/// All requests that are not reads wait with the writes.
#[inline]
fn side_of(rq: &Request) -> usize {
    if rq.op() == Op::Read { READS } else { WRITES }
}

/// Reads, and all else.
pub(super) const SIDES: usize = 2;
const READS: usize = 0;
const WRITES: usize = 1;
