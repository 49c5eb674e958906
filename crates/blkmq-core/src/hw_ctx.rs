//! A hardware context: the requests that are at the driver, and those held back in front of it. `local`
//! issues to it and takes completions from it. One reactor owns a hardware context, so nothing here is
//! shared except a shared tag set.

use std::collections::VecDeque;

use crate::bio::Status;
use crate::driver::{Demand, DisksError, Done, HctxDriver, Issued, TimedOut};
use crate::ids::{Cookie, DiskId, HctxId, Tag};
use crate::poll::{Policy, Predictor, Setting, Verdict, Wait, Waited, WakeLatency, verdict_at};
use crate::qos::tag_share::TagError;
use crate::qos::tag_wait_list::TagWaitList;
use crate::request::{Request, State};
use crate::tag::{TagRequest, Tags};
use crate::time::{Instant, Nanos};
use crate::trace::{Step, Tracer};

/// A way into the driver: its requests in flight by tag, and its dispatch list.
pub(crate) struct HwCtx {
    pub(crate) id: HctxId,
    pub(crate) driver: Box<dyn HctxDriver>,
    tags: Tags,
    slots: Box<[TagSlot]>,
    pub(crate) in_flight: u32,
    /// How many requests the driver has taken since set-up.
    pub(crate) issued: u64,
    /// Requests past the elevator that the driver, or a missing tag, pushed back; they go before all others.
    pub(crate) dispatch: VecDeque<Box<Request>>,
    /// Requests of disks that had used up their share of shared tags.
    tag_wait_list: TagWaitList<Box<Request>>,
    time_limit: Nanos,
    /// When to look for requests that have passed the time limit.
    next_timeout: Option<Instant>,
    /// The next slot of the search for expired requests, and the earliest time limit among those not expired.
    looked: (usize, Option<Instant>),
    /// The latest value of `issued` that `is_still` saw, and when it first saw that value.
    last_issued: (u64, Instant),
    /// Predicts completions, to decide how to wait for them.
    pub(crate) predictor: Predictor,
    /// The last argument of the driver's `set_polled`; `is_polled` is its result.
    asked_to_poll: bool,
    is_polled: bool,
    /// The driver needs `reap` even while it has no request.
    pub(crate) needs_idle_poll: bool,
    /// Records issued requests.
    pub(crate) tracer: Option<Tracer>,
}

/// The state of one tag.
#[derive(Default)]
struct TagSlot {
    rq: Option<Box<Request>>,
    /// Number of uses of the slot: part of the cookie, so that a late completion is recognised.
    generation: u32,
    expires: Instant,
}

/// The result of issuing a request.
pub(crate) enum Outcome {
    /// The driver has it.
    Queued,
    /// It has ended already.
    Ended { rq: Box<Request>, status: Status },
    /// It is at the head of the dispatch list; nothing more should be issued now.
    PushedBack(Hold),
    /// Its disk has used up its share of shared tags: the request is kept, and issued when another one of the
    /// disk has completed. Requests of other disks may be issued.
    NeedsTag,
}

/// Why a request was pushed back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// No tag: a completion (here, or of another context with shared tags) frees one. Or the share of shared tags is
    /// reached: a completion here makes room.
    Tag,
    /// A resource that nobody announces.
    Resource,
    /// A resource that a request in flight here will free.
    DeviceResource,
}

impl HwCtx {
    pub(crate) fn new(
        id: HctxId,
        mut driver: Box<dyn HctxDriver>,
        tags: Tags,
        depth: u32,
        requests: usize,
        limit: Nanos,
    ) -> Self {
        Self {
            id,
            needs_idle_poll: driver.idle_polled().is_some(),
            driver,
            tag_wait_list: TagWaitList::new(tags.disks(), requests),
            tags,
            slots: (0..depth).map(|_| TagSlot::default()).collect(),
            in_flight: 0,
            issued: 0,
            dispatch: VecDeque::with_capacity(requests),
            time_limit: limit,
            next_timeout: None,
            looked: (0, None),
            last_issued: (0, Instant(0)),
            predictor: Predictor::new(depth),
            asked_to_poll: false,
            is_polled: false,
            tracer: None,
        }
    }

    /// Makes room for `disks` disks. Nothing may be in flight.
    pub(crate) fn fit_disks(&mut self, disks: usize, requests: usize) {
        self.tags.fit_disks(disks);
        debug_assert!(self.tag_wait_list.is_empty(), "held on a drained queue");
        self.tag_wait_list = TagWaitList::new(self.tags.disks(), requests);
    }

    pub(crate) fn refresh_disks(&mut self) -> Result<(), DisksError> {
        self.driver.refresh_disks()
    }

    /// Switches polling on or off; without it the driver announces completions. After polling is switched off,
    /// the driver is asked again until the requests that were in flight have completed.
    #[inline]
    pub(crate) fn poll_if(&mut self, on: bool) {
        if on != self.asked_to_poll || (self.is_polled && !on) {
            self.asked_to_poll = on;
            self.is_polled = self.driver.set_polled(on);
        }
    }

    /// Says whether completions are found by polling alone.
    #[inline]
    pub(crate) fn is_polled(&self) -> bool {
        self.is_polled
    }

    /// Decides how the reactor waits for the requests in flight here.
    pub(crate) fn verdict(
        &mut self,
        wait: Wait,
        policy: Policy,
        host: &mut WakeLatency,
        now: Instant,
    ) -> Verdict {
        if self.in_flight == 0 {
            return Verdict::Block;
        }
        if !self.is_polled
            && let Some(at) = self.driver.next_event()
        {
            return verdict_at(at, wait, host, now);
        }
        let setting = Setting {
            wait,
            policy,
            is_polled: self.is_polled,
        };
        self.predictor.verdict(setting, host, now)
    }

    /// Says whether requests are in flight, and the last was issued so long ago that none is expected to
    /// complete within one poll. Call it at each wait.
    pub(crate) fn is_still(&mut self, now: Instant) -> bool {
        if self.last_issued.0 != self.issued {
            self.last_issued = (self.issued, now);
        }
        self.in_flight > 0 && now.since(self.last_issued.1) > STILL
    }

    /// Notes how the reactor spent its time until `until`.
    pub(crate) fn waited(&mut self, how: Waited, until: Instant) {
        if self.in_flight > 0 {
            self.predictor.waited(how, until);
        }
    }

    /// Issues one request. `depth` bounds the requests in flight here.
    #[inline(always)]
    pub(crate) fn issue(&mut self, mut rq: Box<Request>, depth: u32, last: bool, now: Instant) -> Outcome {
        let hctx = self.id;
        let whose = || TagRequest {
            hctx,
            disk: rq.disk(),
            // Requests of the elevator have been counted, and flushes wait for no share.
            is_past_shares: rq.from_elevator || rq.is_flush,
        };
        let tag = match self.tags.take(depth, whose, now) {
            Ok(tag) => tag,
            Err(lack) => return self.wait_for_tag(rq, lack),
        };
        let slot = &mut self.slots[tag.index()];
        debug_assert!(slot.rq.is_none(), "tag {tag} given out while in use");
        slot.generation = slot.generation.wrapping_add(1);
        let cookie = Cookie::new(tag, slot.generation);
        rq.begin(tag, now);
        let answer = self.driver.issue(&rq, cookie, last, now);
        self.answered(rq, cookie, answer, now)
    }

    /// Issues requests in order while the driver completes each of them inline and without error.
    /// Returns their number, and the driver's answer to the next one, to be passed to
    /// [`HwCtx::answered`]; no answer, if there was no next one or no tag.
    ///
    /// A request that has completed needs its tag no more, so all of them use the same tag.
    #[inline(always)]
    pub(crate) fn issue_while_done(
        &mut self,
        list: &mut [Box<Request>],
        depth: u32,
        now: Instant,
    ) -> (usize, Option<(Cookie, Issued)>) {
        // Shared tags are counted per disk, so they cannot be reused in this way.
        let Some(tag) = self.tags.take_own(depth) else {
            return (0, None);
        };
        let count = list.len();
        let mut cookie = Cookie::new(tag, self.slots[tag.index()].generation);
        let mut next = (count, None);
        for (done, rq) in list.iter_mut().enumerate() {
            rq.inserted_at = now;
            rq.completed_at = now;
            rq.begin(tag, now);
            cookie = cookie.next();
            let answer = self.driver.issue(rq, cookie, done + 1 == count, now);
            if answer != Issued::Done(Status::Ok) || rq.bios != 1 {
                next = (done, Some((cookie, answer)));
                break;
            }
        }
        self.slots[tag.index()].generation = cookie.generation();
        self.issued += next.0 as u64;
        if let Some(tracer) = &self.tracer {
            tracer.each(Step::Issued, &list[..next.0], now);
        }
        if next.1.is_none() {
            self.tags.give_back(tag, DiskId(0));
        }
        next
    }

    /// Handles the driver's answer to a request.
    #[inline(always)]
    pub(crate) fn answered(
        &mut self,
        mut rq: Box<Request>,
        cookie: Cookie,
        answer: Issued,
        now: Instant,
    ) -> Outcome {
        let tag = cookie.tag();
        match answer {
            Issued::Done(status) => {
                self.issued += 1;
                if let Some(tracer) = &self.tracer {
                    tracer.issued(&rq, now);
                }
                self.tags.give_back(tag, rq.disk());
                if !status.is_ok() {
                    rq.done = self.driver.done_before(cookie);
                }
                Outcome::Ended { rq, status }
            }
            Issued::Queued => {
                self.keep(rq, tag, now);
                Outcome::Queued
            }
            Issued::Resource => self.push_back(rq, tag, Hold::Resource),
            Issued::DeviceResource => self.push_back(rq, tag, Hold::DeviceResource),
        }
    }

    /// Appends the driver's completions to `done`. Says whether requests that were pushed back must be issued again
    /// for another reason than a completion.
    #[inline]
    pub(crate) fn reap(&mut self, now: Instant, done: &mut Vec<Done>) -> bool {
        self.driver.reap(now, done);
        self.needs_idle_poll && self.meet_demands(now, done)
    }

    /// Issues again the requests in flight that the driver asks for. Says whether it asks for a rerun.
    fn meet_demands(&mut self, now: Instant, done: &mut Vec<Done>) -> bool {
        let (mut any, mut wants_rerun) = (false, false);
        while let Some(demand) = self.driver.idle_polled().and_then(|driver| driver.next_demand()) {
            let Demand::Reissue(cookie) = demand else {
                wants_rerun = true;
                continue;
            };
            let slot = self.slots.get(cookie.tag().index());
            let slot = slot.filter(|slot| slot.generation == cookie.generation());
            let Some(rq) = slot.and_then(|slot| slot.rq.as_ref()) else {
                continue;
            };
            any = true;
            match self.driver.issue(rq, cookie, false, now) {
                Issued::Queued => {}
                Issued::Done(status) => done.push(Done { cookie, status }),
                refused => panic!("hctx {}: {refused:?} of a request that the driver has", self.id),
            }
        }
        if any {
            self.driver.commit();
        }
        wants_rerun
    }

    /// Takes the request that a driver's completion names; none if the cookie is stale.
    #[inline]
    pub(crate) fn take_done(&mut self, done: &Done, now: Instant) -> Option<Box<Request>> {
        let tag = done.cookie.tag();
        let slot = self.slots.get_mut(tag.index())?;
        if slot.generation != done.cookie.generation() {
            return None;
        }
        let mut rq = slot.rq.take()?;
        if !done.status.is_ok() {
            rq.done = self.driver.done_before(done.cookie);
        }
        self.predictor.completed(tag, now);
        self.release(tag, rq.disk());
        Some(rq)
    }

    /// Takes a request that has passed the time limit and that the driver has given up. Call it with the same
    /// time until it returns none: this is one pass over all slots.
    pub(crate) fn take_expired(&mut self, now: Instant) -> Option<Box<Request>> {
        if self.next_timeout.is_none_or(|at| at > now) {
            return None;
        }
        while let Some(slot) = self.slots.get_mut(self.looked.0) {
            let index = self.looked.0;
            self.looked.0 += 1;
            if slot.rq.is_none() {
                continue;
            }
            if slot.expires <= now {
                let tag = Tag(index as u32);
                if self.driver.timed_out(Cookie::new(tag, slot.generation)) == TimedOut::Ended {
                    let rq = slot.rq.take().expect("checked above");
                    self.predictor.forget(tag);
                    self.release(tag, rq.disk());
                    return Some(rq);
                }
                slot.expires = now + self.time_limit;
            }
            let earliest = self.looked.1.map_or(slot.expires, |e| e.min(slot.expires));
            self.looked.1 = Some(earliest);
        }
        // A request issued during the pass, maybe in a slot already visited, has its whole time left.
        let (_, earliest) = std::mem::take(&mut self.looked);
        self.next_timeout = earliest.or((self.in_flight > 0).then_some(now + self.time_limit));
        None
    }

    /// Appends a request to the dispatch list.
    pub(crate) fn add_to_dispatch_list(&mut self, mut rq: Box<Request>) {
        rq.state = State::Dispatched;
        self.tags.expect(rq.disk());
        self.dispatch.push_back(rq);
    }

    /// Says whether no request can be taken from the dispatch list.
    #[inline]
    pub(crate) fn dispatch_list_is_empty(&self) -> bool {
        self.dispatch.is_empty() && self.tag_wait_list.is_empty()
    }

    /// Takes the next request that was pushed back, or else a held one whose disk may have more tags.
    #[inline]
    pub(crate) fn next_from_dispatch_list(&mut self) -> Option<Box<Request>> {
        if let Some(rq) = self.dispatch.pop_front() {
            return Some(rq);
        }
        self.tag_wait_list.take(|disk| self.tags.has_room(disk))
    }

    /// How many tags that other contexts may wait for were freed since the last call.
    #[inline]
    pub(crate) fn take_freed(&mut self) -> u32 {
        self.tags.take_freed()
    }

    /// The time at which this context must run even if no event comes.
    pub(crate) fn next_event(&self) -> Option<Instant> {
        let timeout = if self.in_flight > 0 {
            self.next_timeout
        } else {
            None
        };
        match (self.driver.next_event(), timeout) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// The requests that the driver has.
    pub(crate) fn requests(&self) -> impl Iterator<Item = &Request> {
        let requests = self.slots.iter().filter_map(|slot| slot.rq.as_deref());
        // Not to the end of a large table for the sake of a few.
        requests.take(self.in_flight as usize)
    }

    /// Asserts that the counts agree with the tables.
    pub(crate) fn check_invariants(&self) {
        let held = self.slots.iter().filter(|slot| slot.rq.is_some()).count();
        assert_eq!(
            held, self.in_flight as usize,
            "hctx {}: slots in use against in flight",
            self.id
        );
        for (index, slot) in self.slots.iter().enumerate() {
            let Some(rq) = &slot.rq else { continue };
            assert_eq!(
                rq.state,
                State::InFlight,
                "hctx {}: state of tag {index}",
                self.id
            );
            assert_eq!(
                rq.tag.index(),
                index,
                "hctx {}: tag of the request in slot {index}",
                self.id
            );
        }
        for rq in self.dispatch.iter().chain(self.tag_wait_list.iter()) {
            assert_eq!(
                rq.state,
                State::Dispatched,
                "hctx {}: state on the dispatch list",
                self.id
            );
        }
    }

    #[inline]
    fn keep(&mut self, rq: Box<Request>, tag: Tag, now: Instant) {
        let expires = now + self.time_limit;
        let slot = &mut self.slots[tag.index()];
        slot.expires = expires;
        if let Some(tracer) = &self.tracer {
            tracer.issued(&rq, now);
        }
        self.predictor.issued(tag, rq.op(), rq.len(), now);
        slot.rq = Some(rq);
        self.in_flight += 1;
        self.issued += 1;
        if self.next_timeout.is_none() {
            self.next_timeout = Some(expires);
        }
    }

    #[inline]
    fn release(&mut self, tag: Tag, disk: DiskId) {
        self.in_flight -= 1;
        self.tags.give_back(tag, disk);
    }

    #[inline(never)]
    fn wait_for_tag(&mut self, mut rq: Box<Request>, lack: TagError) -> Outcome {
        rq.state = State::Dispatched;
        match lack {
            TagError::Tag => {
                self.dispatch.push_front(rq);
                Outcome::PushedBack(Hold::Tag)
            }
            TagError::OfDisk => {
                self.tag_wait_list.push(rq.disk(), rq);
                Outcome::NeedsTag
            }
        }
    }

    fn push_back(&mut self, mut rq: Box<Request>, tag: Tag, hold: Hold) -> Outcome {
        self.tags.give_back(tag, rq.disk());
        rq.state = State::Dispatched;
        self.dispatch.push_front(rq);
        Outcome::PushedBack(hold)
    }
}

/// Requests issued longer ago are not expected to complete within one poll, of some ten microseconds: the
/// reactor waits for other events as if these requests were not in flight.
const STILL: Nanos = Nanos::from_millis(1);
