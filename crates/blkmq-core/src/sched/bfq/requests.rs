//! The requests of one queue in their order (by position, but the oldest first once it has waited for too
//! long), and their merges.
//! `clients` keeps one such set for each queue; `order` and `slots` hold the requests.

use super::order::{Gap, Order, Root};
use super::tunables::Tunables;
use crate::limits::Limits;
use crate::merge::{self, Fit};
use crate::request::Request;
use crate::sched::elevator::Inserted;
use crate::sched::slots::{Fifo, SlotId, Slots};
use crate::time::{Instant, Nanos};

/// The memory that all queues of an elevator share.
#[derive(Debug)]
pub(super) struct RequestMemory {
    pub(super) slots: Slots,
    order: Order,
    limits: Limits,
}

/// The requests of one queue.
#[derive(Debug)]
pub(super) struct Requests {
    /// Requests that were requeued, in the order in which they came back.
    requeued: Fifo,
    by_arrival: Fifo,
    by_position: Root,
    /// The end of the request that was dispatched last: the assumed position of the drive's head.
    swept: u64,
}

impl RequestMemory {
    /// Makes the memory for `requests_max` requests.
    pub(super) fn new(limits: Limits, requests_max: usize) -> Self {
        Self {
            slots: Slots::new(requests_max),
            order: Order::new(requests_max),
            limits,
        }
    }

    /// The drive's limits.
    #[inline]
    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Merges a request into the queued one `id`, which it touches at the given end, or returns it.
    #[inline]
    fn try_merge(&mut self, id: SlotId, rq: Box<Request>, end: Fit) -> Result<(), Box<Request>> {
        let limits = &self.limits;
        self.slots
            .change(id, |queued| merge::try_merge(queued, rq, limits))
            .map(|fit| debug_assert_eq!(fit, end, "a merge at the other end"))
    }
}

impl Requests {
    /// An empty set.
    pub(super) const fn new() -> Self {
        Self {
            requeued: Fifo::new(),
            by_arrival: Fifo::new(),
            by_position: Root::EMPTY,
            swept: 0,
        }
    }

    /// How many there are.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.requeued.len() + self.by_arrival.len()
    }

    /// Says whether there is none.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.by_arrival.first().is_none() && self.requeued.first().is_none()
    }

    /// Inserts a request: merges it with a neighbour, or puts it at its position and last in arrival order.
    #[inline]
    pub(super) fn insert(&mut self, held: &mut RequestMemory, rq: Box<Request>, now: Instant) -> Inserted {
        let position = rq.position();
        let gap = held.order.gap(self.by_position, position);
        let rq = match self.merge(held, gap, rq) {
            Ok(()) => return Inserted::Merged,
            Err(rq) => rq,
        };
        let id = held.slots.put(rq, now);
        self.by_arrival.push(&mut held.slots, id);
        held.order.insert(&mut self.by_position, gap, position, id);
        Inserted::Queued
    }

    /// Requeues a request: it is dispatched before all that were not dispatched yet.
    pub(super) fn requeue(&mut self, held: &mut RequestMemory, rq: Box<Request>, now: Instant) {
        let id = held.slots.put(rq, now);
        self.requeued.push(&mut held.slots, id);
    }

    /// The first requeued request.
    #[inline]
    pub(super) fn first_requeued(&self) -> Option<SlotId> {
        self.requeued.first()
    }

    /// The oldest request that was not dispatched yet.
    #[inline]
    pub(super) fn oldest(&self) -> Option<SlotId> {
        self.by_arrival.first()
    }

    /// The oldest request, if it has waited for `expire`.
    #[inline]
    pub(super) fn expired(&self, held: &RequestMemory, expire: Nanos, now: Instant) -> Option<SlotId> {
        let oldest = self.by_arrival.first()?;
        (now.since(held.slots.arrived(oldest).at) >= expire).then_some(oldest)
    }

    /// The request nearest to the head: ahead of it, or behind it within `back_seek_max`, where distance counts
    /// `back_seek_penalty` times. If there is none, the sweep restarts at the lowest position.
    pub(super) fn nearest(&self, held: &RequestMemory, tunables: &Tunables) -> Option<SlotId> {
        let ahead = held.order.first_from(self.by_position, self.swept);
        let behind = held
            .order
            .last_before(self.by_position, self.swept)
            .filter(|&id| {
                let back = self.swept - held.order.key(id);
                let forth = ahead.map_or(u64::MAX, |ahead| held.order.key(ahead) - self.swept);
                back <= tunables.back_seek_max && back.saturating_mul(tunables.back_seek_penalty) < forth
            });
        behind
            .or(ahead)
            .or_else(|| held.order.first_from(self.by_position, 0))
    }

    /// Takes out the request `id`.
    #[inline]
    pub(super) fn take(&mut self, held: &mut RequestMemory, id: SlotId) -> Box<Request> {
        if self.requeued.first() == Some(id) {
            self.requeued.remove(&mut held.slots, id);
            return held.slots.take(id);
        }
        self.by_arrival.remove(&mut held.slots, id);
        held.order.remove(&mut self.by_position, id);
        let rq = held.slots.take(id);
        self.swept = rq.position_end();
        rq
    }

    /// Merges a request with one of the neighbours of its position, or returns it.
    #[inline]
    fn merge(
        &mut self,
        held: &mut RequestMemory,
        gap: Gap,
        mut rq: Box<Request>,
    ) -> Result<(), Box<Request>> {
        let (position, end) = (rq.position(), rq.position_end());
        if let Some(id) = gap.before.filter(|&id| held.slots.end(id) == position) {
            match held.try_merge(id, rq, Fit::Back) {
                Ok(()) => {
                    self.close_gap(held, id, gap.behind);
                    return Ok(());
                }
                Err(refused) => rq = refused,
            }
        }
        let Some(id) = gap.behind.filter(|&id| held.order.key(id) == end) else {
            return Err(rq);
        };
        held.try_merge(id, rq, Fit::Front)?;
        held.order.lower_key(id, position);
        Ok(())
    }

    /// After a back merge into `id`: also merges the request behind it, if both now touch.
    fn close_gap(&mut self, held: &mut RequestMemory, id: SlotId, behind: Option<SlotId>) {
        let Some(later) = behind.filter(|&later| held.slots.end(id) == held.order.key(later)) else {
            return;
        };
        let (queued, next) = (held.slots.rq(id), held.slots.rq(later));
        if merge::fit(queued, next, &held.limits) != Some(Fit::Back) {
            return;
        }
        held.order.remove(&mut self.by_position, later);
        self.by_arrival.fold(&mut held.slots, id, later);
        let later = held.slots.take(later);
        held.slots.change(id, |queued| queued.absorb_back(later));
    }

    /// Asserts that both orders hold the same requests; visits all of them.
    pub(super) fn check(&self, held: &RequestMemory, mut visit: impl FnMut(&Request)) {
        self.requeued.check(&held.slots);
        self.by_arrival.check(&held.slots);
        held.order.check(self.by_position);
        let mut listed: Vec<SlotId> = self.by_arrival.iter(&held.slots).collect();
        let mut sorted = held.order.list(self.by_position);
        for &id in &sorted {
            assert_eq!(
                held.slots.rq(id).position(),
                held.order.key(id),
                "position of slot {}",
                id.0
            );
        }
        listed.sort_unstable();
        sorted.sort_unstable();
        assert_eq!(listed, sorted, "slots by arrival and by position");
        for id in self.requeued.iter(&held.slots).chain(listed) {
            visit(held.slots.rq(id));
        }
    }
}
