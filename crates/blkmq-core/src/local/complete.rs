//! Completion: a request that the driver is done with is reported to the elevator, and requeued or
//! returned to its owner.

use super::LocalQueue;
use crate::bio::Status;
use crate::gate::Report;
use crate::ids::HctxId;
#[cfg(feature = "baselines")]
use crate::queue::Dispatch;
use crate::queue::{Effects, Mail};
use crate::request::{NOT_INSERTED, Request, State};
use crate::sched::Note;
use crate::time::Instant;
use crate::trace::Step;

impl LocalQueue {
    /// Takes the driver's completions and the requests that have timed out. Says whether the context has to be run.
    #[inline]
    pub(super) fn reap(&mut self, now: Instant, fx: &mut Effects) -> bool {
        let hw = self.hw.as_mut().expect("the caller has looked");
        if hw.in_flight == 0 && !hw.needs_idle_poll {
            return false;
        }
        let mut done = std::mem::take(&mut self.done);
        let mut any = hw.reap(now, &mut done);
        let mut own_done = std::mem::take(&mut self.own_done);
        for done in done.drain(..) {
            let hw = self.hw.as_mut().expect("looked at above");
            let Some(mut rq) = hw.take_done(&done, now) else {
                continue;
            };
            any = true;
            let is_plain = done.status.is_ok() && rq.bios == 1 && !rq.from_elevator && !rq.is_flush;
            if is_plain && rq.owner == self.me {
                rq.completed_at = now;
                own_done.push(rq);
            } else {
                self.completed(rq, done.status, now, fx);
            }
        }
        self.end_bios(own_done, fx);
        self.done = done;
        if let Some(hw) = &mut self.hw {
            hw.predictor.looked(now);
            hw.predictor.show(&self.queue.reactor(self.me).shard.poll);
        }
        any |= self.expire(now, fx);
        #[cfg(feature = "baselines")]
        if any && self.queue.is_scheduled() && self.queue.dispatch == Dispatch::EveryContext {
            self.run_other_contexts(fx);
        }
        any && (self.queue.is_gated() || self.hw.as_ref().is_some_and(|hw| !hw.dispatch_list_is_empty()))
    }

    /// Ends the bios of requests that completed without error (`SwCtx::end_bios` says which), and keeps
    /// the list's memory.
    #[inline]
    pub(super) fn end_bios(&mut self, mut list: Vec<Box<Request>>, fx: &mut Effects) {
        let count = list.len();
        if count > 0 {
            if let Some(tracer) = &self.tracer {
                tracer.each(Step::Completed, &list, list[0].completed_at);
            }
            self.queue.count_finished(self.me, count as u64);
            self.sw.end_bios(&self.queue, &mut list, count, fx);
        }
        self.own_done = list;
    }

    #[inline]
    pub(super) fn expire(&mut self, now: Instant, fx: &mut Effects) -> bool {
        let mut any = false;
        while let Some(rq) = self.hw.as_mut().and_then(|hw| hw.take_expired(now)) {
            any = true;
            self.shard().events.timed_out.add(1);
            self.completed(rq, Status::Timeout, now, fx);
        }
        any
    }

    /// Handles a request that the driver is done with: reports it, and ends or requeues it.
    #[inline]
    pub(super) fn completed(&mut self, mut rq: Box<Request>, status: Status, now: Instant, fx: &mut Effects) {
        let again = status == Status::Requeue && rq.retries < REQUEUES_MAX;
        if rq.from_elevator {
            let report = if again {
                Report::Requeued(rq.disk(), rq.is_targeted.then(|| (rq.group(), rq.issued_at)))
            } else {
                Report::Ended(Note::of(&rq, now).with(status), rq.disk())
            };
            let pushed = self.reports.push(report);
            assert!(
                pushed.is_ok(),
                "reactor {}: more ends to report than the depth allows",
                self.me
            );
        }
        if again {
            rq = self.end_what_is_done(rq, now, fx);
            self.count_requeue(&mut rq, now);
            self.requeue(rq, fx);
        } else {
            self.end_request(rq, status, now, fx);
        }
    }

    pub(super) fn count_requeue(&mut self, rq: &mut Request, now: Instant) {
        self.shard().events.requeued.add(1);
        rq.retries += 1;
        rq.state = State::Staged;
        if let Some(tracer) = &self.tracer {
            tracer.step(Step::Requeued, rq, now);
        }
    }

    /// Requeues a request where it came from: at the elevator's head, or on the dispatch list.
    pub(super) fn requeue(&mut self, mut rq: Box<Request>, fx: &mut Effects) {
        if rq.from_elevator && self.queue.is_scheduled() {
            rq.from_elevator = false;
            self.publish(rq);
        } else {
            self.hw
                .as_mut()
                .expect("it was in flight here")
                .add_to_dispatch_list(rq);
        }
        self.queue.run_hctx(HctxId(self.me.0), self.me, fx);
    }

    /// Returns every bio of an ended request to its owner.
    #[inline]
    pub(super) fn end_request(
        &mut self,
        mut rq: Box<Request>,
        status: Status,
        now: Instant,
        fx: &mut Effects,
    ) {
        if let Some(tracer) = &self.tracer {
            tracer.completed(&rq, status, now);
        }
        if !status.is_ok() {
            rq = self.end_what_is_done(rq, now, fx);
        }
        self.queue.count_finished(self.me, rq.bios.into());
        rq.completed_at = now;
        rq.status = if status == Status::Requeue {
            Status::Io
        } else {
            status
        };
        if rq.bios == 1 && rq.owner == self.me {
            self.sw.end_bio(&self.queue, rq, fx);
            return;
        }
        let (inserted_at, issued_at) = (rq.inserted_at, rq.issued_at);
        let (status, mut stamp) = (rq.status, rq.stamp);
        if rq.bios > 1 {
            if self.queue.counts_outside(&rq) {
                self.shard().count_merged(&rq);
            }
            stamp = stamp.of_a_part();
        }
        rq.take_apart(|mut rq| {
            if rq.inserted_at == NOT_INSERTED {
                // Merged in the plug: it was inserted with the others.
                rq.inserted_at = inserted_at;
            }
            rq.completed_at = now;
            rq.issued_at = issued_at;
            rq.stamp = stamp;
            rq.status = status;
            self.complete_on_owner(rq, fx);
        });
    }

    /// Ends, without error, the bios that lie in the completed part of a request, and returns the rest of the request.
    pub(super) fn end_what_is_done(
        &mut self,
        rq: Box<Request>,
        now: Instant,
        fx: &mut Effects,
    ) -> Box<Request> {
        if rq.done == 0 {
            return rq;
        }
        let (inserted_at, issued_at, stamp) = (rq.inserted_at, rq.issued_at, rq.stamp.of_a_part());
        rq.take_done(|mut part| {
            self.queue.count_finished(self.me, 1);
            if part.inserted_at == NOT_INSERTED {
                part.inserted_at = inserted_at;
            }
            (part.issued_at, part.completed_at) = (issued_at, now);
            (part.status, part.stamp) = (Status::Ok, stamp);
            if self.queue.counts_outside(&part) {
                self.shard().count_part(&part);
            }
            self.complete_on_owner(part, fx);
        })
    }

    /// Returns a request of one bio to its owner, directly or by mail.
    #[inline]
    pub(super) fn complete_on_owner(&mut self, rq: Box<Request>, fx: &mut Effects) {
        if rq.owner == self.me {
            self.sw.end_bio(&self.queue, rq, fx);
        } else {
            self.send(rq.owner, Mail::Complete(rq), fx);
        }
    }
}

/// How often a request is requeued before it ends with an I/O error.
pub(super) const REQUEUES_MAX: u8 = 100;
