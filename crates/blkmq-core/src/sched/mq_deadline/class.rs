//! Decides the order within one priority class: batches in ascending position, cut short by deadlines.
//! `mod` gives each class its turn; `slots` and `index` hold the requests of all classes.

use super::tunables::Tunables;
use crate::bio::Op;
use crate::limits::Limits;
use crate::merge::{self, Fit};
use crate::request::Request;
use crate::sched::Inserted;
use crate::sched::index::{Chunks, Index, Place};
use crate::sched::slots::{Fifo, SlotId, Slots};
use crate::time::Instant;

/// The memory that the classes of an elevator share.
#[derive(Debug)]
pub(super) struct Held {
    slots: Slots,
    chunks: Chunks,
    limits: Limits,
}

impl Held {
    /// Makes the memory for `requests_max` requests in `classes` classes.
    pub(super) fn new(limits: Limits, requests_max: usize, classes: usize) -> Self {
        Self {
            slots: Slots::new(requests_max),
            chunks: Chunks::new(requests_max, classes * SIDES),
            limits,
        }
    }

    /// Merges a request into the queued one `id`, which it touches at the given end, or gives it back.
    fn try_merge(&mut self, id: SlotId, rq: Box<Request>, end: Fit) -> Result<(), Box<Request>> {
        let limits = &self.limits;
        self.slots
            .change(id, |queued| merge::try_merge(queued, rq, limits))
            .map(|fit| debug_assert_eq!(fit, end, "a merge at the other end"))
    }

    /// How many requests are held.
    pub(super) fn count(&self) -> usize {
        self.slots.used()
    }

    /// Asserts that the classes hold all the requests there are, `count`, in all the chunks in use.
    pub(super) fn check(&self, count: usize, chunks: usize) {
        assert_eq!(count, self.slots.used(), "requests in classes and in slots");
        self.slots.check();
        self.chunks.check(chunks);
    }
}

/// One priority class.
#[derive(Debug)]
pub(super) struct Class {
    /// What came back from the driver, in the order in which it came.
    requeued: Fifo,
    sides: [Side; SIDES],
    batch: Batch,
    /// Batches of reads since writes began to wait.
    reads_ahead: u64,
}

/// The requests of one direction.
#[derive(Debug)]
struct Side {
    by_arrival: Fifo,
    by_position: Index,
    /// Position of the request that was dispatched last: where the sweep stands.
    swept: u64,
}

/// A run of requests in one direction and in ascending position.
#[derive(Clone, Copy, Debug)]
struct Batch {
    side: usize,
    /// So far; `u64::MAX` before the first batch.
    dispatched: u64,
}

impl Class {
    /// Makes an empty class.
    pub(super) fn new(held: &mut Held) -> Self {
        Self {
            requeued: Fifo::new(),
            sides: std::array::from_fn(|_| Side::new(held)),
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

    /// When the request came in that is here for the longest.
    #[inline]
    pub(super) fn oldest(&self, held: &Held) -> Option<Instant> {
        let [reads, writes] = &self.sides;
        let heads = [&self.requeued, &reads.by_arrival, &writes.by_arrival];
        let arrivals = heads.into_iter().filter_map(Fifo::first);
        arrivals.map(|id| held.slots.arrived(id).at).min()
    }

    /// Takes a request in: merges it with a neighbour, or puts it at its position and behind all that came
    /// before.
    pub(super) fn insert(
        &mut self,
        held: &mut Held,
        rq: Box<Request>,
        tunables: &Tunables,
        now: Instant,
    ) -> Inserted {
        self.sides[side_of(&rq)].insert(held, rq, tunables.front_merges, now)
    }

    /// Takes a request in that was dispatched before: it goes out before everything that was not.
    pub(super) fn requeue(&mut self, held: &mut Held, rq: Box<Request>, now: Instant) -> Inserted {
        let id = held.slots.put(rq, now);
        self.requeued.push(&mut held.slots, id);
        Inserted::Queued
    }

    /// Gives out the next request.
    ///
    /// # Panics
    /// If the class is empty.
    pub(super) fn dispatch(&mut self, held: &mut Held, tunables: &Tunables, now: Instant) -> Box<Request> {
        if let Some(id) = self.requeued.first() {
            self.requeued.remove(&mut held.slots, id);
            return held.slots.take(id);
        }
        let place = self.next_of_batch(held, tunables);
        let place = place.unwrap_or_else(|| self.begin_batch(held, tunables, now));
        self.batch.dispatched += 1;
        self.sides[self.batch.side].take_out(held, place)
    }

    /// The next request of the batch that goes on, if it does.
    fn next_of_batch(&self, held: &Held, tunables: &Tunables) -> Option<Place> {
        let goes_on = self.batch.dispatched < tunables.fifo_batch;
        goes_on.then(|| self.sides[self.batch.side].next(held)).flatten()
    }

    /// Chooses a direction and where its batch begins: at the sweep, unless a deadline has passed or nothing
    /// lies ahead.
    fn begin_batch(&mut self, held: &Held, tunables: &Tunables, now: Instant) -> Place {
        let side = self.choose_side(tunables);
        self.batch = Batch { side, dispatched: 0 };
        let expire = [tunables.read_expire, tunables.write_expire][side];
        let side = &self.sides[side];
        let oldest = side
            .by_arrival
            .first()
            .expect("a batch of a side that has requests");
        let expired = now.since(held.slots.arrived(oldest).at) >= expire;
        let swept_to = if expired { None } else { side.next(held) };
        swept_to.unwrap_or_else(|| side.place_of(held, oldest))
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
    pub(super) fn lose_one_by_arrival(&mut self, held: &mut Held) {
        let reads = &mut self.sides[READS].by_arrival;
        let first = reads.first().expect("a read to lose");
        reads.remove(&mut held.slots, first);
    }

    /// Asserts that the class `number` holds its own requests in order; returns how many, and the chunks in
    /// use.
    pub(super) fn check(&self, held: &Held, number: usize) -> (usize, usize) {
        self.requeued.check(&held.slots);
        for id in self.requeued.iter(&held.slots) {
            let class = held.slots.rq(id).prio().class as usize;
            assert_eq!(class, number, "class of requeued slot {}", id.0);
        }
        let (mut count, mut chunks) = (self.requeued.len(), 0);
        for (number_of_side, side) in self.sides.iter().enumerate() {
            chunks += side.check(held, number, number_of_side);
            count += side.by_arrival.len();
        }
        (count, chunks)
    }
}

impl Side {
    fn new(held: &mut Held) -> Self {
        Self {
            by_arrival: Fifo::new(),
            by_position: Index::new(&mut held.chunks),
            swept: 0,
        }
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.by_arrival.first().is_none()
    }

    /// The first request at the sweep or ahead of it.
    #[inline]
    fn next(&self, held: &Held) -> Option<Place> {
        self.by_position.first_from(&held.chunks, self.swept)
    }

    fn place_of(&self, held: &Held, id: SlotId) -> Place {
        let position = held.slots.rq(id).position();
        self.by_position.find(&held.chunks, position, id)
    }

    fn insert(&mut self, held: &mut Held, rq: Box<Request>, front_merges: bool, now: Instant) -> Inserted {
        let position = rq.position();
        let place = self.by_position.place_for(&held.chunks, position);
        let rq = match self.merge(held, place, rq, front_merges) {
            Ok(()) => return Inserted::Merged,
            Err(rq) => rq,
        };
        let id = held.slots.put(rq, now);
        self.by_arrival.push(&mut held.slots, id);
        self.by_position.insert(&mut held.chunks, place, position, id);
        Inserted::Queued
    }

    /// Merges a request with the one before or behind its place, or gives it back. Nobody farther away is
    /// asked.
    #[inline]
    fn merge(
        &mut self,
        held: &mut Held,
        place: Place,
        mut rq: Box<Request>,
        front: bool,
    ) -> Result<(), Box<Request>> {
        let (position, end) = (rq.position(), rq.position_end());
        let behind = self.by_position.entry_at(&held.chunks, place);
        if let Some(id) = self
            .before(held, place)
            .filter(|&id| held.slots.end(id) == position)
        {
            match held.try_merge(id, rq, Fit::Back) {
                Ok(()) => {
                    behind.inspect(|&behind| self.close_gap(held, id, behind));
                    return Ok(());
                }
                Err(refused) => rq = refused,
            }
        }
        let behind = behind
            .filter(|_| front)
            .map(|at| (at, self.by_position.entry(&held.chunks, at)));
        let Some((at, (_, id))) = behind.filter(|&(_, (start, _))| start == end) else {
            return Err(rq);
        };
        held.try_merge(id, rq, Fit::Front)?;
        self.by_position.lower_key(&mut held.chunks, at, position);
        Ok(())
    }

    #[inline]
    fn before(&self, held: &Held, place: Place) -> Option<SlotId> {
        let before = self.by_position.before(&held.chunks, place)?;
        Some(self.by_position.entry(&held.chunks, before).1)
    }

    /// After a back merge into `id`: merges the request behind it too, if it has come to touch it.
    fn close_gap(&mut self, held: &mut Held, id: SlotId, behind: Place) {
        let (position, later) = self.by_position.entry(&held.chunks, behind);
        let (queued, next) = (held.slots.rq(id), held.slots.rq(later));
        if held.slots.end(id) != position || merge::fit(queued, next, &held.limits) != Some(Fit::Back) {
            return;
        }
        self.by_position.remove(&mut held.chunks, behind);
        self.by_arrival.fold(&mut held.slots, id, later);
        let later = held.slots.take(later);
        held.slots.change(id, |queued| queued.absorb_back(later));
    }

    fn take_out(&mut self, held: &mut Held, place: Place) -> Box<Request> {
        let (position, _) = self.by_position.entry(&held.chunks, place);
        let id = self.by_position.remove(&mut held.chunks, place);
        self.by_arrival.remove(&mut held.slots, id);
        self.swept = position;
        held.slots.take(id)
    }

    /// Asserts that both orders hold the same requests, all of them of this class and direction, and returns
    /// the chunks in use.
    fn check(&self, held: &Held, class: usize, side: usize) -> usize {
        self.by_arrival.check(&held.slots);
        let chunks = self.by_position.check(&held.chunks);
        let mut listed: Vec<SlotId> = self.by_arrival.iter(&held.slots).collect();
        let mut sorted: Vec<SlotId> = self.by_position.iter(&held.chunks).map(|(_, id)| id).collect();
        listed.sort_unstable();
        sorted.sort_unstable();
        assert_eq!(listed, sorted, "slots by arrival and by position");
        for (position, id) in self.by_position.iter(&held.chunks) {
            let rq = held.slots.rq(id);
            assert_eq!(rq.position(), position, "position of slot {}", id.0);
            assert_eq!(
                (rq.prio().class as usize, side_of(rq)),
                (class, side),
                "kind of slot {}",
                id.0
            );
        }
        chunks
    }
}

/// Whatever is not a read waits with the writes.
#[inline]
fn side_of(rq: &Request) -> usize {
    if rq.op() == Op::Read { READS } else { WRITES }
}

const SIDES: usize = 2;
const READS: usize = 0;
const WRITES: usize = 1;
