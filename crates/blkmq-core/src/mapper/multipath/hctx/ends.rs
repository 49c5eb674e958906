//! Completions of requests at their paths: each is reported unchanged, or the path has failed and another
//! carries the request.

use crate::bio::Status;
use crate::driver::{Demand, Done, HctxDriver, Issued};
use crate::ids::{Cookie, Tag};
use crate::request::Request;
use crate::time::Instant;

use super::super::detour::Job;
use super::super::{PathId, paths_in};
use super::{Frame, MultipathHctx, Stage};

impl MultipathHctx {
    /// Notes that a path's driver has taken a request.
    pub(super) fn start(&mut self, path: usize, rq: &Request, cookie: Cookie, now: Instant) {
        let bytes = rq.len();
        let frame = &mut self.frames[cookie.tag().index()];
        debug_assert_ne!(frame.stage, Stage::Issued, "{cookie:?}: a tag used twice");
        *frame = Frame {
            cookie: cookie.raw(),
            start: now,
            bytes,
            stage: Stage::Issued,
            path: path as u8,
        };
        let line = &self.shard.paths[path];
        line.count(bytes);
        line.start(bytes);
        self.choice.started(path, now);
    }

    /// The record of a request, unless its tag is used by a later one.
    pub(super) fn frame(&self, cookie: Cookie) -> Option<Frame> {
        let frame = self.frames.get(cookie.tag().index())?;
        (frame.stage != Stage::Free && frame.cookie == cookie.raw()).then_some(*frame)
    }

    /// Removes the record of a request that is no longer with its path.
    pub(super) fn take_frame(&mut self, cookie: Cookie) -> Option<Frame> {
        self.take_frame_at(cookie, Stage::Issued)
    }

    fn take_frame_at(&mut self, cookie: Cookie, stage: Stage) -> Option<Frame> {
        let frame = self.frame(cookie).filter(|frame| frame.stage == stage)?;
        self.frames[cookie.tag().index()] = Frame::FREE;
        self.shard.paths[usize::from(frame.path)].end(frame.bytes);
        Some(frame)
    }

    /// Takes completions from the paths.
    pub(super) fn reap_paths(&mut self, now: Instant, done: &mut Vec<Done>) {
        self.choice.end_batch();
        let mut back = 0;
        for path in self.active_paths() {
            let first = done.len();
            let Some(driver) = &mut self.lowers[path] else {
                continue;
            };
            driver.reap(now, done);
            let has_room = self.restless & 1 << path != 0 && wants_rerun(&mut **driver);
            self.has_room |= has_room;
            back |= u32::from(has_room) << path;
            if done.len() > first {
                self.ended(path, first, now, done);
            }
        }
        if let Some(checker) = self.checker.as_mut().filter(|_| back != 0) {
            // For example, a connection is back: no reason to wait for the next probe's time.
            self.shared.check_now(back, now);
            checker.look_now();
        }
    }

    /// Handles completions that one path has reported, from `first` on.
    fn ended(&mut self, path: usize, first: usize, now: Instant, done: &mut Vec<Done>) {
        let (mut start, mut count) = (now, 0);
        let mut at = first;
        while let Some(&Done { cookie, status }) = done.get(at) {
            if self.is_probe(cookie.tag()) {
                done.remove(at);
                self.probe_ended(path, cookie, status, now);
                continue;
            }
            let Some(frame) = self.take_frame(cookie) else {
                // Stale: nothing waits for it.
                done.remove(at);
                continue;
            };
            (start, count) = (start.min(frame.start), count + 1);
            self.note_partial(path, cookie, status);
            done[at].status = self.classify(path, status, now);
            at += 1;
        }
        if count > 0 {
            let average = self.choice.ended(path, start, count, now);
            self.shard.paths[path].service_ns.set(average.0);
            self.retry_at = self.retry_at.map(|_| now);
        }
        if self.has_detours() {
            self.send_ends(first, done);
        }
    }

    /// Saves how much of a request is done that did not end well on a path: another path carries the rest.
    pub(super) fn note_partial(&mut self, path: usize, cookie: Cookie, status: Status) {
        if !status.is_ok()
            && let bytes = self.driver(path).done_before(cookie)
            && bytes > 0
        {
            self.partial.push((cookie, bytes));
        }
    }

    /// Decides what a status of a path's driver means.
    ///
    /// Errors of the medium or the target are final: another path leads to the same target. So is a lack of
    /// memory, which is this host's own. Any other error counts as a failure of the path, and the request
    /// must go over another.
    pub(super) fn classify(&mut self, path: usize, status: Status, now: Instant) -> Status {
        match status {
            Status::Ok | Status::Requeue => status,
            Status::Medium
            | Status::NoSpace
            | Status::NotSupported
            | Status::Invalid
            | Status::ReadOnly
            | Status::NoMemory => {
                self.shard.paths[path].errors.add(1);
                status
            }
            Status::Io | Status::Transport | Status::Timeout | Status::Shutdown => {
                self.shard.paths[path].errors.add(1);
                self.shared.failed(PathId(path as u8), status, now);
                // The next request must see the change.
                self.choice.end_batch();
                Status::Requeue
            }
        }
    }

    /// Ends a request that is being issued: here, or through the worker.
    pub(super) fn end_inline(&mut self, cookie: Cookie, status: Status) -> Issued {
        if !self.has_detours() {
            return Issued::Done(status);
        }
        let detours = self.view.detours;
        if detours.run {
            self.send(Job::Run);
        }
        if !detours.complete {
            return Issued::Done(status);
        }
        // Only the worker has it: a lookup of the tag finds nothing.
        self.frames[cookie.tag().index()] = Frame::FREE;
        self.send(Job::Complete(Done { cookie, status }));
        Issued::Queued
    }

    /// Sends ends, from `first` on, over the worker, which also runs the upper queue for each.
    fn send_ends(&mut self, first: usize, done: &mut Vec<Done>) {
        let detours = self.view.detours;
        for end in done.iter().skip(first) {
            if detours.complete {
                self.send(Job::Complete(*end));
            }
            if detours.run {
                self.send(Job::Run);
            }
        }
        if detours.complete {
            done.truncate(first);
        }
    }

    /// Takes what the worker has returned.
    pub(super) fn take_from_worker(&mut self, now: Instant, done: &mut Vec<Done>) {
        let Some(mut detour) = self.detour.take() else {
            return;
        };
        while let Some(job) = detour.take() {
            match job {
                Job::Insert(cookie) => {
                    self.given_back(cookie);
                    self.inserted.push(cookie);
                }
                Job::Complete(end) => done.push(self.classify_end(end, now)),
                Job::Issue(_) | Job::Run => {}
            }
        }
        self.detour = Some(detour);
        if self.has_room || self.retry_at.is_some_and(|at| at <= now) {
            self.retry_at = None;
            self.inserted.append(&mut self.waiting);
        }
        // They are taken from the end, and must be issued in order.
        self.inserted.reverse();
    }

    /// Handles a request that the worker has not issued: it had no room, or no driver. It must be issued here.
    fn given_back(&mut self, cookie: Cookie) {
        if self.take_frame_at(cookie, Stage::ByWorker).is_some() {
            self.choice.end_batch();
            self.frames[cookie.tag().index()] = Frame {
                cookie: cookie.raw(),
                stage: Stage::Inserting,
                ..Frame::FREE
            };
        }
    }

    /// Decides what an end means that the worker returns: it is the path's own if the worker issued the request.
    fn classify_end(&mut self, end: Done, now: Instant) -> Done {
        let Some(frame) = self.take_frame_at(end.cookie, Stage::ByWorker) else {
            return end;
        };
        let path = usize::from(frame.path);
        self.choice.end_batch();
        let average = self.choice.ended(path, frame.start, 1, now);
        self.shard.paths[path].service_ns.set(average.0);
        self.retry_at = self.retry_at.map(|_| now);
        Done {
            status: self.classify(path, end.status, now),
            ..end
        }
    }

    /// Paths whose drivers may have completions to report, a bit each.
    pub(super) fn active_mask(&self) -> u32 {
        let mut active = 0;
        for path in paths_in(self.opened) {
            let is_active = self.shard.paths[path].in_flight() > 0
                || self.restless & 1 << path != 0
                || self
                    .checker
                    .as_ref()
                    .is_some_and(|checker| checker.is_probing(path));
            active |= u32::from(is_active) << path;
        }
        active
    }

    fn is_probe(&self, tag: Tag) -> bool {
        self.checker.as_ref().is_some_and(|checker| checker.tag() == tag)
    }
}

/// Whether a path's driver has found room for requests that it pushed back.
fn wants_rerun(driver: &mut dyn HctxDriver) -> bool {
    let demand = driver.idle_polled().and_then(|driver| driver.next_demand());
    demand == Some(Demand::Rerun)
}
