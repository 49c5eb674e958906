//! The waiting requests of one kind in an elevator, by arrival and by position, each merged with its
//! neighbours. An elevator has a line for each kind; `slots` and `index` hold the requests of all lines.

use super::elevator::Inserted;
use super::index::{Chunks, Cursor, Index};
use super::slots::{Fifo, SlotId, Slots};
use crate::limits::Limits;
use crate::merge::{self, Fit};
use crate::request::Request;
use crate::time::Instant;

/// The memory that the lines of an elevator share.
#[derive(Debug)]
pub(super) struct RequestMemory {
    pub(super) slots: Slots,
    chunks: Chunks,
    limits: Limits,
}

impl RequestMemory {
    /// Makes the memory for `requests_max` requests in `lines` lines.
    pub(super) fn new(limits: Limits, requests_max: usize, lines: usize) -> Self {
        Self {
            slots: Slots::new(requests_max),
            chunks: Chunks::new(requests_max, lines),
            limits,
        }
    }

    /// How many requests are held.
    pub(super) fn count(&self) -> usize {
        self.slots.used()
    }

    /// Asserts that the lines hold all the requests there are, `count`, in all the chunks in use.
    pub(super) fn check(&self, count: usize, chunks: usize) {
        assert_eq!(count, self.slots.used(), "requests in lines and in slots");
        self.slots.check();
        self.chunks.check(chunks);
    }

    /// Merges a request into the queued one `id`, which it touches at the given end, or returns it.
    fn try_merge(&mut self, id: SlotId, rq: Box<Request>, end: Fit) -> Result<(), Box<Request>> {
        let limits = &self.limits;
        self.slots
            .change(id, |queued| merge::try_merge(queued, rq, limits))
            .map(|fit| debug_assert_eq!(fit, end, "a merge at the other end"))
    }
}

/// The requests of one kind.
#[derive(Debug)]
pub(super) struct RequestList {
    by_arrival: Fifo,
    by_position: Index,
}

impl RequestList {
    /// Makes an empty line.
    pub(super) fn new(held: &mut RequestMemory) -> Self {
        Self {
            by_arrival: Fifo::new(),
            by_position: Index::new(&mut held.chunks),
        }
    }

    /// Says whether it holds nothing.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.by_arrival.first().is_none()
    }

    /// How many requests it holds.
    pub(super) fn len(&self) -> usize {
        self.by_arrival.len()
    }

    /// The oldest request.
    #[inline]
    pub(super) fn oldest(&self) -> Option<SlotId> {
        self.by_arrival.first()
    }

    /// The first request at `position` or behind it.
    #[inline]
    pub(super) fn first_from(&self, held: &RequestMemory, position: u64) -> Option<Cursor> {
        self.by_position.first_from(&held.chunks, position)
    }

    /// Where a request of the line stands.
    pub(super) fn place_of(&self, held: &RequestMemory, id: SlotId) -> Cursor {
        let position = held.slots.rq(id).position();
        self.by_position.find(&held.chunks, position, id)
    }

    /// Inserts a request: merges it with a neighbour, or puts it at its position and last in arrival order.
    pub(super) fn insert(
        &mut self,
        held: &mut RequestMemory,
        rq: Box<Request>,
        front_merges: bool,
        now: Instant,
    ) -> Inserted {
        let position = rq.position();
        let cursor = self.by_position.cursor_for(&held.chunks, position);
        let rq = match self.merge(held, cursor, rq, front_merges) {
            Ok(()) => return Inserted::Merged,
            Err(rq) => rq,
        };
        let id = held.slots.put(rq, now);
        self.by_arrival.push(&mut held.slots, id);
        self.by_position.insert(&mut held.chunks, cursor, position, id);
        Inserted::Queued
    }

    /// Takes out the request at `cursor`.
    pub(super) fn take_out(&mut self, held: &mut RequestMemory, cursor: Cursor) -> Box<Request> {
        let id = self.by_position.remove(&mut held.chunks, cursor);
        self.by_arrival.remove(&mut held.slots, id);
        held.slots.take(id)
    }

    /// Takes out the oldest request.
    pub(super) fn take_oldest(&mut self, held: &mut RequestMemory) -> Option<Box<Request>> {
        let cursor = self.place_of(held, self.oldest()?);
        Some(self.take_out(held, cursor))
    }

    /// Asserts that both orders hold the same requests, all of them of this `kind`, and returns the chunks in use.
    pub(super) fn check(&self, held: &RequestMemory, is_of_kind: impl Fn(&Request) -> bool) -> usize {
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
            assert!(is_of_kind(rq), "kind of slot {}: {rq:?}", id.0);
        }
        chunks
    }

    /// Breaks the line, for the test of the check.
    #[cfg(test)]
    pub(super) fn lose_one_by_arrival(&mut self, held: &mut RequestMemory) {
        let first = self.by_arrival.first().expect("a request to lose");
        self.by_arrival.remove(&mut held.slots, first);
    }

    /// Merges a request with the one before or behind its place, or returns it. It tries only these two.
    #[inline]
    fn merge(
        &mut self,
        held: &mut RequestMemory,
        cursor: Cursor,
        mut rq: Box<Request>,
        front: bool,
    ) -> Result<(), Box<Request>> {
        let (position, end) = (rq.position(), rq.position_end());
        let behind = self.by_position.entry_at(&held.chunks, cursor);
        if let Some(id) = self
            .before(held, cursor)
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
    fn before(&self, held: &RequestMemory, cursor: Cursor) -> Option<SlotId> {
        let before = self.by_position.before(&held.chunks, cursor)?;
        Some(self.by_position.entry(&held.chunks, before).1)
    }

    /// After a back merge into `id`: also merges the request behind it, if both now touch.
    fn close_gap(&mut self, held: &mut RequestMemory, id: SlotId, behind: Cursor) {
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
}
