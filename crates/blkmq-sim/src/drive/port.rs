//! Decides how the core meets a modelled drive: one [`Port`] per hardware context, each call shown to the oracle.

use std::rc::Rc;

use blkmq_core::driver::{Done, Driver, Issued, TimedOut};
use blkmq_core::ids::{Cookie, HctxId};
use blkmq_core::request::Request;
use blkmq_core::time::Instant;

use crate::history::{Answer, Fact};
use crate::stage::Stage;

/// One hardware context's driver.
#[derive(Debug)]
pub struct Port {
    hctx: HctxId,
    stage: Rc<Stage>,
}

impl Port {
    /// Makes the driver of `hctx`.
    pub fn new(hctx: HctxId, stage: Rc<Stage>) -> Self {
        Self { hctx, stage }
    }

    fn count(&self, issued: u64, reaped: u64) {
        let mut work = self.stage.work.get();
        work.issued += issued;
        work.reaped += reaped;
        self.stage.work.set(work);
    }
}

impl Driver for Port {
    fn issue(&mut self, rq: &Request, cookie: Cookie, last: bool, _now: Instant) -> Issued {
        let stage = &self.stage;
        stage.run_meanwhile();
        stage.advance_drive();
        let mut oracle = stage.oracle.borrow_mut();
        oracle.issue(self.hctx, rq, cookie);
        let answer = stage
            .drive
            .borrow_mut()
            .issue(self.hctx.0, rq, cookie, &mut *oracle);
        oracle.answered(self.hctx, rq, cookie, answer);
        drop(oracle);
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
        let stage = &self.stage;
        let mut oracle = stage.oracle.borrow_mut();
        let mut drive = stage.drive.borrow_mut();
        drive.commit(self.hctx.0, stage.now.get(), &mut *oracle);
    }

    fn reap(&mut self, _now: Instant, done: &mut Vec<Done>) {
        let stage = &self.stage;
        stage.advance_drive();
        let first = done.len();
        stage.drive.borrow_mut().reap(self.hctx.0, done);
        for &end in &done[first..] {
            stage.oracle.borrow_mut().done(self.hctx, end);
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

    fn next_event(&self) -> Option<Instant> {
        let drive = self.stage.drive.borrow();
        if drive.has_interrupts() {
            return None;
        }
        drive.next_event(self.hctx.0, self.stage.now.get())
    }

    fn timed_out(&mut self, cookie: Cookie) -> TimedOut {
        let stage = &self.stage;
        let answer = stage.drive.borrow_mut().timed_out(self.hctx.0, cookie);
        stage.oracle.borrow_mut().timed_out(self.hctx, cookie, answer);
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
