//! The slots of an elevator: a table made at set-up that holds its requests, and FIFO lists that link
//! slots by number. `index` sorts the same slots by position. With both, an elevator allocates nothing
//! per request.

use crate::request::Request;
use crate::time::Instant;

/// The number of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SlotId(pub(super) u32);

/// A fixed number of places for requests.
#[derive(Debug)]
pub(super) struct Slots {
    table: Vec<Slot>,
    /// The first of the unused slots, which are linked by `next`.
    unused: u32,
    used: usize,
    /// Number of the next arrival.
    arrivals: u64,
}

#[derive(Debug)]
struct Slot {
    rq: Option<Box<Request>>,
    /// The request's end on the queue; kept here so that a search for neighbours does not touch the request.
    end: u64,
    arrived: Arrival,
    prev: u32,
    next: u32,
}

/// When a request came in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Arrival {
    /// The time.
    pub(super) at: Instant,
    /// The order among arrivals of the same time.
    pub(super) number: u64,
}

impl Slots {
    /// Makes `slots_max` empty slots.
    pub(super) fn new(slots_max: usize) -> Self {
        let count = u32::try_from(slots_max).expect("slots are numbered by 32 bits");
        assert!(count < NONE, "{count} slots: one number is needed for none");
        let slot = |number: u32| Slot {
            rq: None,
            end: 0,
            arrived: Arrival::default(),
            prev: NONE,
            next: if number + 1 < count { number + 1 } else { NONE },
        };
        Self {
            table: (0..count).map(slot).collect(),
            unused: if count == 0 { NONE } else { 0 },
            used: 0,
            arrivals: 0,
        }
    }

    /// How many slots hold a request.
    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// Puts a request into an empty slot, as the latest arrival.
    ///
    /// # Panics
    /// If all slots are in use: the caller must not insert more requests than the table was made for.
    #[inline]
    pub(super) fn put(&mut self, rq: Box<Request>, at: Instant) -> SlotId {
        let number = self.unused;
        assert!(
            number != NONE,
            "insert into a full elevator ({} requests)",
            self.used
        );
        let slot = &mut self.table[number as usize];
        self.unused = slot.next;
        slot.end = rq.position_end();
        slot.rq = Some(rq);
        slot.arrived = Arrival {
            at,
            number: self.arrivals,
        };
        self.arrivals += 1;
        self.used += 1;
        SlotId(number)
    }

    /// Takes a request out of its slot, which must be on no list.
    #[inline]
    pub(super) fn take(&mut self, id: SlotId) -> Box<Request> {
        let slot = &mut self.table[id.index()];
        let rq = slot.rq.take().expect("take from an empty slot");
        slot.next = self.unused;
        self.unused = id.0;
        self.used -= 1;
        rq
    }

    /// The request in a slot.
    #[inline]
    pub(super) fn rq(&self, id: SlotId) -> &Request {
        self.table[id.index()]
            .rq
            .as_ref()
            .expect("look into an empty slot")
    }

    /// Changes the request in a slot by a merge, and updates the slot's end.
    #[inline]
    pub(super) fn change<R>(&mut self, id: SlotId, change: impl FnOnce(&mut Request) -> R) -> R {
        let slot = &mut self.table[id.index()];
        let rq = slot.rq.as_mut().expect("change of an empty slot");
        let result = change(rq);
        slot.end = rq.position_end();
        result
    }

    /// The byte on the queue after the request's last one.
    #[inline]
    pub(super) fn end(&self, id: SlotId) -> u64 {
        self.table[id.index()].end
    }

    /// The arrival of the request, or the earliest one of the requests merged into it.
    #[inline]
    pub(super) fn arrived(&self, id: SlotId) -> Arrival {
        self.table[id.index()].arrived
    }

    /// Asserts that each slot is either on the list of unused slots or holds a request, with its right end.
    pub(super) fn check(&self) {
        let mut unused = 0;
        let mut at = self.unused;
        while at != NONE {
            let slot = &self.table[at as usize];
            assert!(
                slot.rq.is_none(),
                "slot {at} is listed as unused and holds a request"
            );
            unused += 1;
            assert!(unused <= self.table.len(), "the list of unused slots has a loop");
            at = slot.next;
        }
        assert_eq!(unused + self.used, self.table.len(), "unused and used slots");
        for (number, slot) in self.table.iter().enumerate() {
            let Some(rq) = &slot.rq else { continue };
            assert_eq!(slot.end, rq.position_end(), "end known for slot {number}");
            assert!(
                slot.arrived.number < self.arrivals,
                "arrival {} of slot {number} lies in the future",
                slot.arrived.number
            );
        }
    }
}

/// A list of slots in the order of arrival.
#[derive(Debug)]
pub(super) struct Fifo {
    first: u32,
    last: u32,
    len: usize,
}

impl Fifo {
    /// Makes an empty list.
    pub(super) const fn new() -> Self {
        Self {
            first: NONE,
            last: NONE,
            len: 0,
        }
    }

    /// How many slots are on it.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The earliest arrival.
    #[inline]
    pub(super) fn first(&self) -> Option<SlotId> {
        (self.first != NONE).then_some(SlotId(self.first))
    }

    /// Puts the latest arrival at the end.
    #[inline]
    pub(super) fn push(&mut self, slots: &mut Slots, id: SlotId) {
        self.link(slots, self.last, id.0);
        self.link(slots, id.0, NONE);
        self.len += 1;
    }

    /// Takes a slot off, wherever it stands.
    #[inline]
    pub(super) fn remove(&mut self, slots: &mut Slots, id: SlotId) {
        let Slot { prev, next, .. } = slots.table[id.index()];
        self.link(slots, prev, next);
        self.len -= 1;
    }

    /// Removes `merged`; `keeper`, which is on the list too, takes its arrival and place if these are earlier.
    pub(super) fn fold(&mut self, slots: &mut Slots, keeper: SlotId, merged: SlotId) {
        let earlier = slots.arrived(merged);
        if earlier.number > slots.arrived(keeper).number {
            self.remove(slots, merged);
            return;
        }
        self.remove(slots, keeper);
        slots.table[keeper.index()].arrived = earlier;
        let Slot { prev, next, .. } = slots.table[merged.index()];
        self.link(slots, prev, keeper.0);
        self.link(slots, keeper.0, next);
    }

    /// The slots in order.
    pub(super) fn iter<'a>(&self, slots: &'a Slots) -> impl Iterator<Item = SlotId> + use<'a> {
        let step = |at: u32| (at != NONE).then_some(SlotId(at));
        std::iter::successors(step(self.first), move |id| step(slots.table[id.index()].next))
    }

    /// Asserts that the links agree in both directions and that the order is that of arrival.
    pub(super) fn check(&self, slots: &Slots) {
        let (mut prev, mut latest, mut count) = (NONE, None, 0);
        for id in self.iter(slots) {
            count += 1;
            assert!(
                count <= self.len,
                "a list of {} has more slots or a loop",
                self.len
            );
            let slot = &slots.table[id.index()];
            assert!(slot.rq.is_some(), "listed slot {} is empty", id.0);
            assert_eq!(slot.prev, prev, "link back from slot {}", id.0);
            assert!(
                latest < Some(slot.arrived.number),
                "order of arrival at slot {}",
                id.0
            );
            latest = Some(slot.arrived.number);
            prev = id.0;
        }
        assert_eq!((count, prev), (self.len, self.last), "length and end of a list");
    }

    /// Makes `b` follow `a`; `NONE` stands for the list itself.
    #[inline]
    fn link(&mut self, slots: &mut Slots, a: u32, b: u32) {
        match slots.table.get_mut(a as usize) {
            Some(slot) => slot.next = b,
            None => self.first = b,
        }
        match slots.table.get_mut(b as usize) {
            Some(slot) => slot.prev = a,
            None => self.last = a,
        }
    }
}

impl SlotId {
    fn index(self) -> usize {
        self.0 as usize
    }
}

/// No slot: the end of a list.
const NONE: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bio::Bio;
    use crate::ids::ReactorId;

    fn filled(slots_max: usize) -> (Slots, Fifo, Vec<SlotId>) {
        let (mut slots, mut fifo) = (Slots::new(slots_max), Fifo::new());
        let ids = (0..slots_max as u64)
            .map(|n| {
                let bio = Bio {
                    offset: n * 8192,
                    len: 4096,
                    ..Bio::default()
                };
                let id = slots.put(Request::for_test(ReactorId(0), bio, 0), Instant(n));
                fifo.push(&mut slots, id);
                id
            })
            .collect();
        (slots, fifo, ids)
    }

    fn order(slots: &Slots, fifo: &Fifo) -> Vec<u64> {
        slots.check();
        fifo.check(slots);
        fifo.iter(slots)
            .map(|id| slots.rq(id).position() / 8192)
            .collect()
    }

    #[test]
    fn list_keeps_the_order_of_arrival_when_its_first_last_and_middle_leave() {
        let (mut slots, mut fifo, ids) = filled(5);
        for (leaves, left) in [(2, vec![0, 1, 3, 4]), (0, vec![1, 3, 4]), (4, vec![1, 3])] {
            fifo.remove(&mut slots, ids[leaves]);
            slots.take(ids[leaves]);
            assert_eq!(order(&slots, &fifo), left);
        }
    }

    #[test]
    fn request_that_absorbs_an_earlier_arrival_takes_its_place() {
        let (mut slots, mut fifo, ids) = filled(5);
        fifo.fold(&mut slots, ids[3], ids[1]);
        slots.take(ids[1]);
        assert_eq!(order(&slots, &fifo), [0, 3, 2, 4]);
        assert_eq!(slots.arrived(ids[3]).at, Instant(1));
    }

    #[test]
    fn request_that_absorbs_a_later_arrival_stays_where_it_is() {
        let (mut slots, mut fifo, ids) = filled(3);
        fifo.fold(&mut slots, ids[0], ids[1]);
        slots.take(ids[1]);
        assert_eq!(order(&slots, &fifo), [0, 2]);
    }

    #[test]
    fn arrival_can_be_folded_into_its_neighbour_on_the_list() {
        let (mut slots, mut fifo, ids) = filled(3);
        fifo.fold(&mut slots, ids[1], ids[0]);
        slots.take(ids[0]);
        assert_eq!(order(&slots, &fifo), [1, 2]);
    }

    #[test]
    fn slots_are_used_again() {
        let (mut slots, mut fifo, ids) = filled(2);
        fifo.remove(&mut slots, ids[0]);
        let rq = slots.take(ids[0]);
        let id = slots.put(rq, Instant(9));
        fifo.push(&mut slots, id);
        assert_eq!(order(&slots, &fifo), [1, 0]);
    }

    #[test]
    #[should_panic(expected = "full elevator (2 requests)")]
    fn more_requests_than_agreed_are_refused_loudly() {
        let (mut slots, ..) = filled(2);
        slots.put(Request::for_test(ReactorId(0), Bio::default(), 0), Instant(0));
    }
}
