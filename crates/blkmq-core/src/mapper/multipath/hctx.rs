//! One hardware context of a multipath queue: it passes each request to the driver of one path, and
//! handles the completion. `hw_ctx` calls it like any driver; it calls the paths' drivers. `look` updates
//! it, `check` sends its probes.

mod check;
mod ends;
mod look;

use std::sync::Arc;

use crate::bio::{Bio, Status};
use crate::driver::{Demand, Done, HctxDriver, IdlePolled, Issued, TimedOut};
use crate::ids::{Cookie, HctxId};
use crate::request::Request;
use crate::time::{Instant, Nanos};

use self::check::Checker;
use super::choice::Choice;
use super::detour::{ByWorker, Detour, Job};
use super::shard::Shard;
use super::shared::{List, Multipath, View};
use super::{PATHS_MAX, PathId, paths_in};

/// Opens, on the reactor of a hardware context, what the context needs from outside.
pub trait Opener {
    /// Opens the path's driver, for one tag more than the queue has; none if that fails.
    fn open(&mut self, path: PathId) -> Option<Box<dyn HctxDriver>>;

    /// Makes a read that shows whether the path works. Its memory stays valid until the path's driver no
    /// longer uses it.
    fn probe(&mut self, path: PathId) -> Bio;

    /// Called when the context ends while a driver has a probe: the memory of probes must stay valid for ever.
    fn keep_memory(&mut self);

    /// Opens the context's side of a worker; none if there is none.
    fn detour(&mut self) -> Option<Box<dyn Detour>> {
        None
    }
}

/// One hardware context of a multipath queue.
pub struct MultipathHctx {
    shared: Arc<Multipath>,
    /// This context's copy of the table.
    view: View,
    /// How the next request's path is chosen.
    choice: Choice,
    /// Paths of the current group that are usable and have a driver here.
    usable: List,
    /// What the end of a request has to check: a bit for each path that was not committed, [`DETOURS`].
    attention: u64,
    /// Requests go to the worker before they go to a path.
    inserts_by_detour: bool,
    /// The paths' drivers.
    lowers: [Option<Box<dyn HctxDriver>>; PATHS_MAX],
    /// Drivers that need polling while they have no requests, a bit each.
    restless: u32,
    shard: Arc<Shard>,
    /// By tag: requests that a path has. The upper tag is also the lower one.
    frames: Box<[Frame]>,
    opener: Box<dyn Opener>,
    hctx: HctxId,
    /// Paths with a driver, a bit each, and the removed ones among them.
    opened: u32,
    leaving: u32,
    /// Requests that were pushed back may be issued now.
    has_room: bool,
    polled: bool,
    /// To be reported at the next reap.
    late: Vec<Done>,
    /// Requests that did not end well: how many bytes of each are done. They are queried at once, so there are few.
    partial: Vec<(Cookie, u64)>,
    /// The time of the latest reap.
    now: Instant,
    /// Only the first context has one.
    checker: Option<Checker>,
    detour: Option<Box<dyn Detour>>,
    /// Requests that the worker asked to issue, and those of them that found no room.
    inserted: Vec<Cookie>,
    waiting: Vec<Cookie>,
    retry_at: Option<Instant>,
}

/// The record of one request.
#[derive(Clone, Copy, Debug)]
struct Frame {
    cookie: u64,
    start: Instant,
    bytes: u64,
    stage: Stage,
    path: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// No request.
    Free,
    /// At the worker, before it is issued.
    Inserting,
    /// At the worker, which issues it to the path.
    ByWorker,
    /// At the path.
    Issued,
}

impl MultipathHctx {
    /// Chooses a path for the first request of a batch, or while paths have a cost; notices changes of the table.
    #[inline(never)]
    fn choose(&mut self, bytes: u64, now: Instant) -> Option<usize> {
        if self.view.epoch != self.shared.epoch() {
            self.look(now);
        }
        if self.inserts_by_detour() {
            return None;
        }
        self.choice.compare(bytes, now)
    }

    /// A path's driver, which must be there.
    #[inline(always)]
    fn driver(&mut self, path: usize) -> &mut dyn HctxDriver {
        let driver = self.lowers[path % PATHS_MAX].as_mut();
        &mut **driver.expect("a path that is chosen has a driver")
    }

    /// Handles every answer but the common one.
    #[inline(never)]
    fn answered(
        &mut self,
        path: usize,
        rq: &Request,
        cookie: Cookie,
        answer: Issued,
        last: bool,
        now: Instant,
    ) -> Issued {
        let (path, answer) = match answer {
            Issued::Resource | Issued::DeviceResource => self.try_others(path, answer, rq, cookie, last, now),
            taken => (path, taken),
        };
        match answer {
            Issued::Queued => {
                self.start(path, rq, cookie, now);
                self.attention |= 1 << path;
                if last {
                    // This path's driver knows by `last`.
                    self.attention &= !(1 << path);
                    self.commit();
                }
                Issued::Queued
            }
            Issued::Done(status) => {
                self.shard.paths[path].count(rq.len());
                self.note_partial(path, cookie, status);
                self.choice.ended_at_once(path);
                if last {
                    self.commit();
                }
                let status = self.classify(path, status, now);
                self.end_inline(cookie, status)
            }
            busy => self.refuse(cookie, busy, now),
        }
    }

    /// Offers the request to the other usable paths, since this one is busy. Returns the path that took it,
    /// or the first path's answer.
    fn try_others(
        &mut self,
        busy: usize,
        refusal: Issued,
        rq: &Request,
        cookie: Cookie,
        last: bool,
        now: Instant,
    ) -> (usize, Issued) {
        let usable = self.usable;
        for path in usable.iter().filter(|path| *path != busy) {
            match self.driver(path).issue(rq, cookie, last, now) {
                Issued::Resource | Issued::DeviceResource => {}
                taken => return (path, taken),
            }
        }
        (busy, refusal)
    }

    /// Issues a request for which there is no path at once: over the worker, or not at all.
    #[inline(never)]
    fn issue_elsewhere(&mut self, rq: &Request, cookie: Cookie, last: bool, now: Instant) -> Issued {
        if self.inserts_by_detour() {
            return self.issue_by_detour(rq, cookie, last, now);
        }
        if self.has_paths_elsewhere() || self.view.holds {
            return self.refuse(cookie, Issued::Resource, now);
        }
        self.end_inline(cookie, Status::Transport)
    }

    /// Refuses a request, unless the context has it already: a request that has come back from the worker
    /// waits here. Detours may have been switched off meanwhile.
    fn refuse(&mut self, cookie: Cookie, refusal: Issued, now: Instant) -> Issued {
        let frame = self.frame(cookie);
        if frame.is_none_or(|frame| frame.stage != Stage::Inserting) {
            return refusal;
        }
        self.waiting.push(cookie);
        self.retry_at = Some(now + RETRY);
        Issued::Queued
    }

    /// Sends a request to the worker the first time; when the worker has returned it, issues it to a path.
    fn issue_by_detour(&mut self, rq: &Request, cookie: Cookie, last: bool, now: Instant) -> Issued {
        let frame = &mut self.frames[cookie.tag().index()];
        if frame.stage != Stage::Inserting || frame.cookie != cookie.raw() {
            if self.view.detours.issue
                && let Some(path) = self.choice.compare(rq.len(), now)
            {
                self.send_to_issue(path, rq, cookie, now);
                return Issued::Queued;
            }
            self.frames[cookie.tag().index()] = Frame {
                cookie: cookie.raw(),
                stage: Stage::Inserting,
                ..Frame::FREE
            };
            self.send(Job::Insert(cookie));
            return Issued::Queued;
        }
        self.issue_straight(rq, cookie, last, now)
    }

    /// Sends a request to the worker, to issue it to a path.
    fn send_to_issue(&mut self, path: usize, rq: &Request, cookie: Cookie, now: Instant) {
        self.start(path, rq, cookie, now);
        self.frames[cookie.tag().index()].stage = Stage::ByWorker;
        let serial = self.view.serials[path];
        self.send(Job::Issue(ByWorker {
            cookie,
            path: PathId(path as u8),
            serial,
            rq: rq.copy_for_driver(),
        }));
    }

    /// Issues a request that came back from the worker. If it finds no room, it waits here.
    fn issue_straight(&mut self, rq: &Request, cookie: Cookie, last: bool, now: Instant) -> Issued {
        let answer = match self.choice.compare(rq.len(), now) {
            Some(path) => {
                let answer = self.driver(path).issue(rq, cookie, last, now);
                self.answered(path, rq, cookie, answer, last, now)
            }
            None if self.has_paths_elsewhere() || self.view.holds => {
                self.refuse(cookie, Issued::Resource, now)
            }
            None => self.end_inline(cookie, Status::Transport),
        };
        if let Issued::Done(_) = answer {
            self.frames[cookie.tag().index()] = Frame::FREE;
        }
        answer
    }

    /// Says whether a request goes to the worker before it goes to a path.
    #[inline]
    fn inserts_by_detour(&self) -> bool {
        cfg!(feature = "baselines") && self.inserts_by_detour
    }

    /// Says whether any part of a request's way goes over the worker.
    #[inline]
    fn has_detours(&self) -> bool {
        cfg!(feature = "baselines") && self.attention & DETOURS != 0
    }

    /// Says whether the table has usable paths that this context could not open.
    fn has_paths_elsewhere(&self) -> bool {
        self.view.usable.len() > self.usable.len()
    }

    fn send(&mut self, job: Job) {
        let detour = self.detour.as_mut();
        detour
            .expect("a detour is taken only where there is one")
            .send(job);
    }
}

impl HctxDriver for MultipathHctx {
    #[inline]
    fn issue(&mut self, rq: &Request, cookie: Cookie, last: bool, now: Instant) -> Issued {
        let path = match self.choice.turn(now) {
            Some(path) => path,
            None => match self.choose(rq.len(), now) {
                Some(path) => path,
                None => return self.issue_elsewhere(rq, cookie, last, now),
            },
        };
        let answer = self.driver(path).issue(rq, cookie, last, now);
        if answer == Issued::Done(Status::Ok) && self.attention == 0 {
            self.shard.paths[path % PATHS_MAX].count(rq.len());
            self.choice.ended_at_once(path);
            return answer;
        }
        self.answered(path, rq, cookie, answer, last, now)
    }

    fn commit(&mut self) {
        let paths = (self.attention & UNCOMMITTED) as u32;
        self.attention &= !UNCOMMITTED;
        for path in paths_in(paths) {
            if let Some(driver) = &mut self.lowers[path] {
                driver.commit();
            }
        }
    }

    fn reap(&mut self, now: Instant, done: &mut Vec<Done>) {
        self.now = now;
        if self.view.epoch != self.shared.epoch() {
            self.look(now);
        }
        done.append(&mut self.late);
        self.partial.clear();
        self.reap_paths(now, done);
        self.take_from_worker(now, done);
        if self.checker.as_ref().is_some_and(|checker| checker.is_due(now)) {
            self.tend(now);
        }
        if self.leaving != 0 {
            self.close_leaving();
        }
    }

    fn idle_polled(&mut self) -> Option<&mut dyn IdlePolled> {
        Some(self)
    }

    fn done_before(&mut self, cookie: Cookie) -> u64 {
        let known = self.partial.iter().position(|(partial, _)| *partial == cookie);
        known.map_or(0, |place| self.partial.swap_remove(place).1)
    }

    fn next_event(&self) -> Option<Instant> {
        if !self.late.is_empty() || !self.inserted.is_empty() {
            return Some(Instant(0));
        }
        let lowers = self.active_paths().filter_map(|path| {
            let driver = self.lowers[path].as_ref();
            driver.and_then(|driver| driver.next_event())
        });
        let checks = self.checker.as_ref().and_then(Checker::next_event);
        lowers.chain(checks).chain(self.retry_at).min()
    }

    fn set_polled(&mut self, on: bool) -> bool {
        let (mut all, mut any) = (true, false);
        for driver in self.lowers.iter_mut().flatten() {
            let polled = driver.set_polled(on);
            all &= polled;
            any |= polled;
        }
        self.polled = on && all;
        if on && !all {
            // If one driver must be waited for, all are waited for.
            let drivers = self.lowers.iter_mut().flatten();
            drivers.for_each(|driver| {
                driver.set_polled(false);
            });
        }
        // When polling is switched off, a path is polled until the requests that it cannot announce have ended.
        self.polled || (!on && any)
    }

    /// If the path's driver gives up the request, the path is marked failed, and another carries the request.
    fn timed_out(&mut self, cookie: Cookie) -> TimedOut {
        let Some(frame) = self.frame(cookie).filter(|frame| frame.stage == Stage::Issued) else {
            return TimedOut::Wait;
        };
        let path = usize::from(frame.path);
        if self.driver(path).timed_out(cookie) == TimedOut::Wait {
            return TimedOut::Wait;
        }
        self.take_frame(cookie);
        self.choice.end_batch();
        let status = self.classify(path, Status::Timeout, self.now);
        self.late.push(Done { cookie, status });
        // The request's end is reported, and not counted as the queue's own verdict.
        TimedOut::Wait
    }
}

impl IdlePolled for MultipathHctx {
    fn next_demand(&mut self) -> Option<Demand> {
        let reissue = self.inserted.pop().map(Demand::Reissue);
        reissue.or_else(|| std::mem::take(&mut self.has_room).then_some(Demand::Rerun))
    }
}

impl Drop for MultipathHctx {
    fn drop(&mut self) {
        if self.is_probing() {
            self.opener.keep_memory();
        }
        for path in paths_in(self.opened) {
            self.shared.release(PathId(path as u8));
        }
        self.shared.close(self.hctx);
    }
}

impl Frame {
    const FREE: Self = Self {
        cookie: 0,
        start: Instant(0),
        bytes: 0,
        stage: Stage::Free,
        path: 0,
    };
}

/// In [`MultipathHctx::attention`]: the paths that were not committed; ends go over the worker.
const UNCOMMITTED: u64 = u32::MAX as u64;
const DETOURS: u64 = 1 << 32;
/// When a request that was inserted by the worker and found no room is tried again, if no other request ends before.
const RETRY: Nanos = Nanos::from_millis(3);
