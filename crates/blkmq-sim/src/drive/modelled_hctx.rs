//! The driver through which the core uses a modelled drive: one [`ModelledHctx`] per hardware context,
//! which reports each call to the oracle, and below it a [`Way`] into the drive, or several paths with
//! one each.

use std::cell::RefCell;
use std::rc::Rc;

use blkmq_core::bio::Status;
use blkmq_core::driver::{Done, HctxDriver, IdlePolled, Issued, TimedOut};
use blkmq_core::ids::{Cookie, HctxId};
use blkmq_core::request::Request;
use blkmq_core::time::Instant;

use super::Drive;
use crate::history::{Answer, Fact};
use crate::stage::Stage;

/// A way into the drive, which the oracle does not observe.
#[derive(Debug)]
pub struct Way {
    drive: usize,
    way: u16,
    stage: Rc<Stage>,
}

impl Way {
    /// Makes the driver of a way into one of the drives.
    pub fn new(drive: usize, way: u16, stage: Rc<Stage>) -> Self {
        Self { drive, way, stage }
    }

    fn drive(&self) -> &RefCell<Drive> {
        &self.stage.drives[self.drive]
    }
}

impl HctxDriver for Way {
    /// Does not commit, whatever `last` says: the caller commits.
    fn issue(&mut self, rq: &Request, cookie: Cookie, _last: bool, _now: Instant) -> Issued {
        let mut oracle = self.stage.oracle.borrow_mut();
        let mut drive = self.drive().borrow_mut();
        drive.issue(self.way, rq, cookie, &mut *oracle)
    }

    fn commit(&mut self) {
        let mut oracle = self.stage.oracle.borrow_mut();
        let mut drive = self.drive().borrow_mut();
        drive.commit(self.way, self.stage.now.get(), &mut *oracle);
    }

    fn reap(&mut self, _now: Instant, done: &mut Vec<Done>) {
        self.drive().borrow_mut().reap(self.way, done);
    }

    fn next_event(&self) -> Option<Instant> {
        let drive = self.drive().borrow();
        if drive.has_interrupts() {
            return None;
        }
        drive.next_event(self.way, self.stage.now.get())
    }

    fn timed_out(&mut self, cookie: Cookie) -> TimedOut {
        self.drive().borrow_mut().timed_out(self.way, cookie)
    }
}

/// One hardware context's driver, as the core sees it.
pub struct ModelledHctx {
    queue: usize,
    hctx: HctxId,
    lower: Box<dyn HctxDriver>,
    stage: Rc<Stage>,
}

impl ModelledHctx {
    /// Makes the driver of `hctx` of a queue, from the driver below it.
    pub fn new(queue: usize, hctx: HctxId, lower: Box<dyn HctxDriver>, stage: Rc<Stage>) -> Self {
        Self {
            queue,
            hctx,
            lower,
            stage,
        }
    }

    fn count(&self, issued: u64, reaped: u64) {
        let mut work = self.stage.work.get();
        work.issued += issued;
        work.reaped += reaped;
        self.stage.work.set(work);
    }

    /// Above several paths some statuses must not appear.
    fn check_status(&self, status: Status) {
        let fault = self.stage.paths.as_ref().and_then(|paths| paths.fault_of(status));
        if let Some(fault) = fault {
            self.stage.oracle.borrow_mut().fail(fault);
        }
    }
}

impl HctxDriver for ModelledHctx {
    fn issue(&mut self, rq: &Request, cookie: Cookie, last: bool, now: Instant) -> Issued {
        let stage = Rc::clone(&self.stage);
        stage.run_meanwhile();
        stage.advance_drives();
        stage.oracle.borrow_mut().issue(self.queue, self.hctx, rq, cookie);
        let answer = self.lower.issue(rq, cookie, last, now);
        stage
            .oracle
            .borrow_mut()
            .answered(self.queue, self.hctx, rq, cookie, answer);
        if let Issued::Done(status) = answer {
            self.check_status(status);
        }
        stage.note(Fact::Issue {
            hctx: self.hctx,
            tag: cookie.tag(),
            op: rq.op(),
            disk: rq.disk(),
            offset: rq.offset(),
            len: rq.len(),
            bios: rq.bio_count(),
            answer: answer_of(answer),
        });
        self.count(1, 0);
        if last {
            self.commit();
        }
        answer
    }

    fn commit(&mut self) {
        self.lower.commit();
    }

    fn reap(&mut self, now: Instant, done: &mut Vec<Done>) {
        let stage = Rc::clone(&self.stage);
        stage.advance_drives();
        let first = done.len();
        self.lower.reap(now, done);
        for &end in &done[first..] {
            self.check_status(end.status);
            stage.oracle.borrow_mut().done(self.queue, self.hctx, end);
            stage.note(Fact::Done {
                hctx: self.hctx,
                tag: end.cookie.tag(),
                generation: end.cookie.generation(),
                status: end.status,
            });
        }
        self.count(0, (done.len() - first) as u64);
        stage.run_meanwhile();
    }

    fn idle_polled(&mut self) -> Option<&mut dyn IdlePolled> {
        self.lower.idle_polled()
    }

    fn next_event(&self) -> Option<Instant> {
        self.lower.next_event()
    }

    fn timed_out(&mut self, cookie: Cookie) -> TimedOut {
        let answer = self.lower.timed_out(cookie);
        let stage = &self.stage;
        stage
            .oracle
            .borrow_mut()
            .timed_out(self.queue, self.hctx, cookie, answer);
        stage.note(Fact::TimedOut {
            hctx: self.hctx,
            tag: cookie.tag(),
            ended: answer == TimedOut::Ended,
        });
        answer
    }
}

fn answer_of(answer: Issued) -> Answer {
    match answer {
        Issued::Queued => Answer::Queued,
        Issued::Done(status) => Answer::Done(status),
        Issued::Resource => Answer::Resource,
        Issued::DeviceResource => Answer::DeviceResource,
    }
}
