//! Decides the way of a request through one hardware context: which path's driver it is given to, and what its end means.
//! `hw_ctx` calls it as it calls any driver; what it calls are others. `look` keeps it up to date, `check` probes for it.

mod check;
mod ends;
mod look;

use std::sync::Arc;

use crate::bio::{Bio, Status};
use crate::driver::{Done, HctxDriver, Issued, TimedOut};
use crate::ids::{Cookie, HctxId};
use crate::request::Request;
use crate::time::{Instant, Nanos};

use self::check::Checker;
use super::choice::Choice;
use super::detour::{ByWorker, Detour, Job};
use super::shard::Shard;
use super::shared::{List, Multipath, View};
use super::{PATHS_MAX, PathId, paths_in};

/// Opens, on the reactor of a hardware context, what that needs of the world.
pub trait Opener {
    /// Opens the path's driver, for one tag more than the queue has; none if that fails.
    fn open(&mut self, path: PathId) -> Option<Box<dyn HctxDriver>>;

    /// Makes a read that shows whether the path works. Its memory is there until the path's driver has let go of it.
    fn probe(&mut self, path: PathId) -> Bio;

    /// The context ends while a probe is with a driver: the memory of probes has to stay for ever.
    fn keep_memory(&mut self);

    /// Opens the context's side of a worker; none if there is none.
    fn detour(&mut self) -> Option<Box<dyn Detour>> {
        None
    }
}

/// One hardware context of a multipath queue.
pub struct MultipathHctx {
    shared: Arc<Multipath>,
    /// What is known of the table.
    view: View,
    /// How the next request's path is found.
    choice: Choice,
    /// Paths of the current group that are usable and have a driver here.
    usable: List,
    /// What the end of a request has to look at: a bit for each path that was not committed,
    /// [`DETOURS`].
    attention: u64,
    /// Requests go to the worker before they go to a path.
    inserts_by_detour: bool,
    /// The paths' drivers.
    lowers: [Option<Box<dyn HctxDriver>>; PATHS_MAX],
    /// Those of them that want to be looked after while they have nothing, a bit each.
    restless: u32,
    shard: Arc<Shard>,
    /// By tag: what is with a path. The upper tag is the lower one.
    frames: Box<[Frame]>,
    opener: Box<dyn Opener>,
    hctx: HctxId,
    /// Paths with a driver, a bit each, and those of them that were removed.
    opened: u32,
    leaving: u32,
    /// What was pushed back may be issued now.
    has_room: bool,
    polled: bool,
    /// To be reported at the next reap.
    late: Vec<Done>,
    /// Of what has ended otherwise than well: how much of it is done. Asked for at once, so there are few.
    partial: Vec<(Cookie, u64)>,
    /// The time of the latest reap.
    now: Instant,
    /// The first context's alone.
    checker: Option<Checker>,
    detour: Option<Box<dyn Detour>>,
    /// Requests that the worker wants issued, and those of them that found no room.
    inserted: Vec<Cookie>,
    waiting: Vec<Cookie>,
    retry_at: Option<Instant>,
}

/// What is remembered of a request.
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
    /// Nobody's.
    Free,
    /// On its way over the worker, to be issued.
    Inserting,
    /// With the worker, which issues it to the path.
    ByWorker,
    /// With the path.
    Issued,
}

impl MultipathHctx {
    /// Chooses a path for the first request of a batch, or while paths cost something; what has
    /// changed of the table is seen here.
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

    /// A path's driver, which the caller knows to be there.
    #[inline(always)]
    fn driver(&mut self, path: usize) -> &mut dyn HctxDriver {
        let driver = self.lowers[path % PATHS_MAX].as_mut();
        &mut **driver.expect("a path that is chosen has a driver")
    }

    /// Deals with every answer but the plain one.
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
                    // Its own driver knows.
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
                let status = self.judge(path, status, now);
                self.end_inline(cookie, status)
            }
            busy => self.refuse(cookie, busy, now),
        }
    }

    /// Offers the request to the other usable paths, since this one is busy. Returns who took it, or the answer of the first.
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

    /// Issues what cannot be given to a path at once: over the worker, or there is no path.
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

    /// Does not take a request, unless the context has it already: one that has come back from the worker waits here. Detours may
    /// have been switched off meanwhile.
    fn refuse(&mut self, cookie: Cookie, refusal: Issued, now: Instant) -> Issued {
        let frame = self.frame(cookie);
        if frame.is_none_or(|frame| frame.stage != Stage::Inserting) {
            return refusal;
        }
        self.waiting.push(cookie);
        self.retry_at = Some(now + RETRY);
        Issued::Queued
    }

    /// The first time, a request goes to the worker; when that has sent it back, to a path.
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

    /// Has the worker issue a request to a path.
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

    /// Issues a request that comes back from the worker. What finds no room waits here.
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

    /// The table has usable paths that this context could not open.
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

    fn needs_idle_poll(&self) -> bool {
        true
    }

    fn wants_rerun(&mut self) -> bool {
        std::mem::take(&mut self.has_room)
    }

    fn done_before(&mut self, cookie: Cookie) -> u64 {
        let known = self.partial.iter().position(|(partial, _)| *partial == cookie);
        known.map_or(0, |place| self.partial.swap_remove(place).1)
    }

    fn next_reissue(&mut self) -> Option<Cookie> {
        self.inserted.pop()
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
            // One that has to be waited for is enough to wait for all.
            let drivers = self.lowers.iter_mut().flatten();
            drivers.for_each(|driver| {
                driver.set_polled(false);
            });
        }
        // Switched off, a path is looked at until what it could not announce any more has ended.
        self.polled || (!on && any)
    }

    /// A path that has let go of a request is judged failed, and the request goes over another.
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
        let status = self.judge(path, Status::Timeout, self.now);
        self.late.push(Done { cookie, status });
        // Its end is reported, and not counted as the queue's own verdict.
        TimedOut::Wait
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
/// When a request that was inserted by the worker and found no room is tried again, if nothing ends before.
const RETRY: Nanos = Nanos::from_millis(3);
