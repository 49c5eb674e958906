//! A request: the bios merged into it, in order, and its states from submission to completion. Boxes of
//! requests are made at set-up, one for every bio part that may be under way. They move from the
//! submitter's pool through `plug`, elevator and `hw_ctx`, and return with the completion. The owner of
//! the box owns the request.

use blkmq_sync::prefetch;

use crate::bio::{Bio, Flags, Lent, Op, Prio, Status, Submission};
use crate::ids::{DiskId, GroupId, ReactorId, Tag};
use crate::limits::Limits;
use crate::stat::stamp::Stamp;
use crate::time::Instant;

/// The state of a request.
///
/// ```text
///  Free ─► Staged ─► Inserted ─► Dispatched ─► InFlight ─► Free
///            │                      ▲  ▲           │
///            └──── (no elevator) ───┘  └─ requeue ─┘
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// In its owner's pool.
    #[default]
    Free,
    /// In a plug, on an insert list, or held for a cap of its group.
    Staged,
    /// In the elevator.
    Inserted,
    /// Dispatched by the elevator, not yet issued or pushed back by the driver.
    Dispatched,
    /// With the driver.
    InFlight,
}

/// One or more merged bios on their way to the driver.
///
/// Fields are ordered by their users: those that the elevator, the gate's holder and the completion read and
/// write are in the first two cache lines, which are fetched as a pair; the bio's head is in the second. The
/// other lines stay with the submitter's core if neither a merge nor the driver needs them.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub struct Request {
    /// First byte on the queue: the disk's base and the offset on the disk.
    pub(crate) position: u64,
    /// Bytes of all the bios.
    pub(crate) len: u64,
    /// When the owner's plug was flushed.
    pub(crate) inserted_at: Instant,
    /// When the driver took it.
    pub(crate) issued_at: Instant,
    /// When its completion was reaped.
    pub(crate) completed_at: Instant,
    /// The gate holder's values at dispatch, for the statistics.
    pub(crate) stamp: Stamp,
    /// The elevator's own, from insertion to the report of the end: for example, the queue of this request.
    pub(crate) sched_data: u32,
    pub(crate) tag: Tag,
    pub(crate) status: Status,
    /// Bios in this request, at least 1.
    pub(crate) bios: u32,
    pub(crate) segments: u32,
    /// The latest grace period of its owner's that has seen it in the pool (`sw_ctx`), the lower bits of its number.
    pub(crate) grace_period: u32,
    pub(crate) owner: ReactorId,
    pub(crate) state: State,
    sealed: bool,
    /// A flush of the engine's own: goes past the elevator, is completed by `flush`.
    pub(crate) is_flush: bool,
    /// Given out by an elevator, which is to be told of the end.
    pub(crate) from_elevator: bool,
    /// Counted by `target`, which is to be told of the end.
    pub(crate) is_targeted: bool,
    pub(crate) retries: u8,
    /// The group that its owner has counted it for, if requests were short when it was taken (`sw_ctx`).
    pub(crate) held_by: Option<GroupId>,
    pub(crate) bio: Bio,
    /// If the driver ended it with an error or a requeue: bytes from its beginning that are done.
    pub(crate) done: u64,
    /// Merged in front of `bio`, in order.
    before: Option<Box<Request>>,
    /// Merged behind `bio`: the latest first until [`Request::seal`] puts it in order.
    after: Option<Box<Request>>,
    /// The next one of the list that this request is merged into.
    next: Option<Box<Request>>,
}

impl Request {
    /// Makes a free request of `owner`, as part of set-up.
    pub(crate) fn free(owner: ReactorId) -> Box<Self> {
        Box::new(Self {
            owner,
            ..Self::default()
        })
    }

    /// Copies the parts that a driver uses: for a driver on another thread. The memory of the bios is the
    /// original's, which must outlive the copy in that driver.
    pub(crate) fn copy_for_driver(&self) -> Self {
        let copy = |rq: &Option<Box<Self>>| rq.as_ref().map(|rq| Box::new(rq.copy_for_driver()));
        Self {
            position: self.position,
            len: self.len,
            tag: self.tag,
            bios: self.bios,
            segments: self.segments,
            owner: self.owner,
            state: self.state,
            sealed: self.sealed,
            is_flush: self.is_flush,
            from_elevator: self.from_elevator,
            bio: self.bio.clone(),
            before: copy(&self.before),
            after: copy(&self.after),
            next: copy(&self.next),
            ..Self::default()
        }
    }

    /// Prefetches the two cache lines that the next owner of this request will write.
    #[inline]
    pub(crate) fn fetch(&self) {
        prefetch::for_write(&self.position);
        prefetch::for_write(&self.segments);
    }

    /// Fills a free request with one bio.
    #[inline(always)]
    pub(crate) fn start(&mut self, bio: Bio, base: u64) {
        self.start_empty(base + bio.offset, bio.len, bio.segments());
        self.bio = bio;
        // Written only if necessary: a small store would delay a copy of the bio soon after it (store
        // forwarding).
        if !self.bio.status.is_ok() {
            self.bio.status = Status::Ok;
        }
    }

    /// Fills a free request with one bio, which is written in its place.
    #[inline(always)]
    pub(crate) fn start_new(&mut self, new: &Submission, base: u64) {
        self.start_empty(base + new.offset, new.len, 1);
        new.put_into(&mut self.bio);
    }

    /// Everything but the bio.
    #[inline(always)]
    fn start_empty(&mut self, position: u64, len: u64, segments: u32) {
        debug_assert_eq!(self.state, State::Free, "start of a request that is under way");
        self.position = position;
        self.len = len;
        self.segments = segments;
        self.bios = 1;
        self.state = State::Staged;
        self.sealed = false;
        self.is_flush = false;
        self.from_elevator = false;
        self.retries = 0;
        self.stamp = Stamp::default();
        self.status = Status::Ok;
        self.inserted_at = NOT_INSERTED;
        self.done = 0;
    }

    /// Makes a request outside any queue, for tests of elevators and drivers.
    pub fn for_test(owner: ReactorId, bio: Bio, base: u64) -> Box<Self> {
        let mut rq = Self::free(owner);
        rq.start(bio, base);
        rq
    }

    /// The same request as an elevator gives it out, for tests of drivers.
    pub fn ordered_for_test(mut self: Box<Self>) -> Box<Self> {
        self.from_elevator = true;
        self
    }

    /// Makes a request outside any queue: a driver's own, for the drivers below it.
    pub(crate) fn outside(bio: Bio) -> Box<Self> {
        let mut rq = Self::free(ReactorId(0));
        rq.start(bio, 0);
        rq.seal();
        rq
    }

    /// The operation.
    pub fn op(&self) -> Op {
        self.bio.op
    }

    /// The modifiers.
    pub fn flags(&self) -> Flags {
        self.bio.flags
    }

    /// Says whether it is synchronous, see [`Bio::is_sync`].
    #[inline]
    pub fn is_sync(&self) -> bool {
        self.bio.is_sync()
    }

    /// The disk.
    pub fn disk(&self) -> DiskId {
        self.bio.disk
    }

    /// The group.
    pub fn group(&self) -> GroupId {
        self.bio.group
    }

    /// The priority.
    pub fn prio(&self) -> Prio {
        self.bio.prio
    }

    /// First byte on the disk.
    pub fn offset(&self) -> u64 {
        self.before
            .as_ref()
            .map_or(self.bio.offset, |first| first.bio.offset)
    }

    /// Bytes in all.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Its bytes for byte caps: the bytes that the drive must read or write. Discards, zeroing
    /// that only marks the range, and flushes count only as requests (see [`Request::bio_count`]).
    #[inline]
    pub fn charged_bytes(&self, limits: &Limits) -> u64 {
        match self.op() {
            Op::Read | Op::Write => self.len,
            Op::WriteZeroes if limits.writes_zeroes(self.flags()) => self.len,
            Op::WriteZeroes | Op::Discard | Op::Flush => 0,
        }
    }

    /// The same with what the driver writes beside: one that copies its range ([`Flags::TASK`]) moves it twice.
    #[inline]
    pub fn moved_bytes(&self, limits: &Limits) -> u64 {
        self.charged_bytes(limits) << u32::from(self.flags().has(Flags::TASK))
    }

    /// Says whether the request has no range (a flush).
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// First byte on the queue; elevators sort by it.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The byte on the queue after the last one.
    pub fn position_end(&self) -> u64 {
        self.position + self.len
    }

    /// How many bios it carries.
    pub fn bio_count(&self) -> u32 {
        self.bios
    }

    /// How many pieces of memory it carries.
    pub fn segment_count(&self) -> u32 {
        self.segments
    }

    /// The reactor that submitted it.
    pub fn owner(&self) -> ReactorId {
        self.owner
    }

    /// The tag, while in flight.
    pub fn tag(&self) -> Tag {
        self.tag
    }

    /// When it was inserted (its plug flushed).
    pub fn inserted_at(&self) -> Instant {
        self.inserted_at
    }

    /// Says whether an elevator has given it out, which orders by holding back what the drive has no room for.
    #[inline]
    pub fn is_ordered(&self) -> bool {
        self.from_elevator
    }

    /// When it was issued to the driver, while in flight.
    pub fn issued_at(&self) -> Instant {
        self.issued_at
    }

    /// Visits the bios in the order of their offsets. The request must be sealed, as it is when a driver sees it.
    pub fn for_each_bio(&self, mut visit: impl FnMut(&Bio)) {
        debug_assert!(self.sealed || self.after.is_none(), "bios of an unsealed request");
        self.for_each_part(|part| visit(&part.bio));
    }

    /// Visits this request and those that are merged into it, in the order of their offsets.
    pub(crate) fn for_each_part(&self, mut visit: impl FnMut(&Self)) {
        let mut at = self.before.as_deref();
        while let Some(rq) = at {
            visit(rq);
            at = rq.next.as_deref();
        }
        visit(self);
        if !self.sealed {
            return visit_from_the_end(self.after.as_deref(), &mut visit);
        }
        let mut at = self.after.as_deref();
        while let Some(rq) = at {
            visit(rq);
            at = rq.next.as_deref();
        }
    }

    /// Returns the piece of memory of a request that has only one, the common case.
    #[inline]
    pub fn single_piece(&self) -> Option<Lent> {
        if self.bios != 1 || self.segments != 1 {
            return None;
        }
        self.bio.pieces().next()
    }

    /// Visits the pieces of memory in order. The request must be sealed, as it is when a driver sees it.
    pub fn for_each_piece(&self, mut visit: impl FnMut(Lent)) {
        self.for_each_bio(|bio| bio.pieces().for_each(&mut visit));
    }

    /// Appends `later`, which starts where this request ends. The caller has asked `merge` whether it may.
    pub(crate) fn absorb_back(&mut self, mut later: Box<Request>) {
        debug_assert_eq!(
            self.position_end(),
            later.position,
            "back merge of what does not follow"
        );
        self.count_in(&later);
        later.seal();
        let (mut first, mut rest) = later.unchain();
        loop {
            let next = first.next.take();
            first.next = self.after.take();
            self.after = Some(first);
            match next.or_else(|| rest.take()) {
                Some(rq) => first = rq,
                None => return,
            }
        }
    }

    /// Puts `earlier`, which ends where this request starts, in front. The caller has asked `merge` whether it may.
    pub(crate) fn absorb_front(&mut self, mut earlier: Box<Request>) {
        debug_assert_eq!(
            earlier.position_end(),
            self.position,
            "front merge of what does not precede"
        );
        self.count_in(&earlier);
        self.position = earlier.position;
        earlier.seal();
        let (first, rest) = earlier.unchain();
        let old = self.before.replace(first);
        let mut end = &mut self.before;
        for list in [rest, old] {
            while let Some(rq) = end {
                end = &mut rq.next;
            }
            *end = list;
        }
    }

    /// Fixes the order of the bios: from here on the request is not merged with any other.
    #[inline(always)]
    pub(crate) fn seal(&mut self) {
        if !self.sealed && self.bios > 1 {
            self.put_in_order();
        }
        self.sealed = true;
    }

    fn put_in_order(&mut self) {
        let mut ordered = None;
        let mut at = self.after.take();
        while let Some(mut rq) = at {
            at = rq.next.take();
            rq.next = ordered;
            ordered = Some(rq);
        }
        self.after = ordered;
    }

    /// Marks it as in flight, with this tag.
    #[inline(always)]
    pub(crate) fn begin(&mut self, tag: Tag, now: Instant) {
        self.seal();
        self.tag = tag;
        self.issued_at = now;
        self.state = State::InFlight;
    }

    /// Says whether the request may still be merged, by its own state.
    pub(crate) fn is_mergeable(&self) -> bool {
        !self.sealed && !self.bio.flags.has_any(Self::NEVER_MERGED) && self.bio.op != Op::Flush
    }

    /// Takes out the bios within the first [`Request::done`] bytes, except the last bio of the request, and
    /// passes their boxes to `take`, in order. The request then begins behind them.
    pub(crate) fn take_done(mut self: Box<Self>, mut take: impl FnMut(Box<Request>)) -> Box<Self> {
        let mut left = std::mem::take(&mut self.done);
        while self.bios > 1 {
            let first = match &self.before {
                Some(first) => &first.bio,
                None => &self.bio,
            };
            let (bytes, segments) = (first.len, first.segments());
            if bytes > left {
                break;
            }
            left -= bytes;
            let rest = (self.position + bytes, self.len - bytes);
            let counts = (self.bios - 1, self.segments.saturating_sub(segments).max(1));
            let mut first = match self.before.take() {
                Some(mut first) => {
                    self.before = first.next.take();
                    first
                }
                None => {
                    let mut head = self.after.take().expect("more bios than one");
                    head.after = head.next.take();
                    head.take_place_of(&self);
                    std::mem::replace(&mut self, head)
                }
            };
            (self.position, self.len) = rest;
            (self.bios, self.segments) = counts;
            first.bios = 1;
            take(first);
        }
        self
    }

    /// Takes the place of `other` as the head of all bios: copies its state and everything that concerns all bios.
    fn take_place_of(&mut self, other: &Self) {
        self.inserted_at = other.inserted_at;
        self.issued_at = other.issued_at;
        self.completed_at = other.completed_at;
        self.stamp = other.stamp;
        self.sched_data = other.sched_data;
        self.tag = other.tag;
        self.status = other.status;
        self.state = other.state;
        self.sealed = other.sealed;
        self.is_flush = other.is_flush;
        self.from_elevator = other.from_elevator;
        self.is_targeted = other.is_targeted;
        self.retries = other.retries;
    }

    /// Takes a finished request apart: passes every box, in order, with its bio still inside, to `take`.
    #[inline]
    pub(crate) fn take_apart(mut self: Box<Self>, mut take: impl FnMut(Box<Request>)) {
        if self.bios == 1 {
            take(self);
            return;
        }
        self.seal();
        let after = self.after.take();
        let mut each = |mut list: Option<Box<Request>>| {
            while let Some(mut rq) = list {
                list = rq.next.take();
                take(rq);
            }
        };
        each(self.before.take());
        self.bios = 1;
        each(Some(self));
        each(after);
    }

    fn count_in(&mut self, other: &Request) {
        debug_assert!(
            self.is_mergeable() && other.is_mergeable(),
            "merge of {self:?} with {other:?}"
        );
        self.len += other.len;
        self.segments += other.segments;
        self.bios += other.bios;
        self.inserted_at = self.inserted_at.min(other.inserted_at);
    }

    /// Splits a sealed request into two ordered lists of single boxes: those up to and including itself, and those behind.
    fn unchain(mut self: Box<Self>) -> (Box<Request>, Option<Box<Request>>) {
        let rest = self.after.take();
        let Some(mut first) = self.before.take() else {
            return (self, rest);
        };
        let mut end = &mut first.next;
        while let Some(rq) = end {
            end = &mut rq.next;
        }
        *end = Some(self);
        (first, rest)
    }

    const NEVER_MERGED: Flags = Flags(Flags::NO_MERGE.0 | Flags::PREFLUSH.0 | Flags::FUA.0);
}

/// `inserted_at` of a request outside of elevators whose plug was not flushed: later than any other, so that a
/// merge takes the other's.
pub(crate) const NOT_INSERTED: Instant = Instant(u64::MAX);

/// Visits a list from its end.
fn visit_from_the_end(rq: Option<&Request>, visit: &mut impl FnMut(&Request)) {
    if let Some(rq) = rq {
        visit_from_the_end(rq.next.as_deref(), visit);
        visit(rq);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rq(block: u64) -> Box<Request> {
        Request::for_test(
            ReactorId(0),
            Bio {
                offset: block * 512,
                len: 512,
                cookie: block,
                ..Bio::default()
            },
            0,
        )
    }

    fn order(rq: &mut Request) -> Vec<u64> {
        rq.seal();
        let mut seen = Vec::new();
        rq.for_each_bio(|bio| seen.push(bio.cookie));
        seen
    }

    #[test]
    fn bios_stay_in_order_through_merges_of_merges() {
        let mut left = rq(2);
        left.absorb_back(rq(3));
        left.absorb_front(rq(1));
        let mut right = rq(6);
        right.absorb_front(rq(5));
        right.absorb_front(rq(4));
        right.absorb_back(rq(7));
        let mut all = rq(0);
        left.absorb_back(right);
        all.absorb_back(left);
        assert_eq!((all.bio_count(), all.len(), all.position()), (8, 8 * 512, 0));
        assert_eq!(order(&mut all), [0, 1, 2, 3, 4, 5, 6, 7]);
        let mut boxes = Vec::new();
        all.take_apart(|rq| boxes.push(rq.bio.cookie));
        assert_eq!(boxes, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn front_merge_of_a_merged_request_keeps_order() {
        let mut front = rq(1);
        front.absorb_back(rq(2));
        front.absorb_front(rq(0));
        let mut back = rq(4);
        back.absorb_front(rq(3));
        back.absorb_front(front);
        assert_eq!(back.offset(), 0);
        assert_eq!(order(&mut back), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn fields_that_the_gates_holder_touches_are_one_pair_of_lines() {
        let offsets = [
            std::mem::offset_of!(Request, retries),
            std::mem::offset_of!(Request, bio)
                + std::mem::offset_of!(Bio, group)
                + size_of::<crate::ids::GroupId>(),
        ];
        assert!(offsets.iter().all(|end| *end <= 128), "{offsets:?}");
        assert_eq!(align_of::<Request>(), 128);
        assert_eq!(
            std::mem::offset_of!(Request, segments),
            64,
            "begin of the second line"
        );
    }
}
