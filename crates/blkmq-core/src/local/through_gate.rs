//! One reactor's turn inside the gate: it takes in what all reactors have published, dispatches for all
//! of them to its own hardware context, and looks again for reactors that came meanwhile.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use super::LocalQueue;
use super::complete::REQUEUES_MAX;
use crate::bio::Status;
use crate::gate::GateState;
use crate::hw_ctx::Outcome;
use crate::ids::HctxId;
use crate::queue::Effects;
use crate::request::{Request, State};
use crate::sched::Note;
use crate::time::Instant;

impl LocalQueue {
    /// Enters the gate, if it is free, and dispatches for all reactors until nothing is left or the depth is
    /// reached. If the gate is held, its holder looks again after this call (invariant 2), so this call does
    /// not wait.
    ///
    /// The caller has entered the queue: nothing is issued on a quiesced queue.
    pub(super) fn dispatch_through_gate(&mut self, now: Instant, fx: &mut Effects) {
        let queue = Rc::clone(&self.queue);
        let events = &queue.reactor(self.me).shard.events;
        let Some(mut state) = queue.gate.try_enter() else {
            events.gate_skipped.add(1);
            return;
        };
        events.gate_entered.add(1);
        let mut passes = 1;
        let mut blocked = false;
        loop {
            blocked = self.pass(&mut state, blocked, now, fx);
            if passes == PASSES_MAX {
                // Enough done for others: this reactor continues in its next turn. If it has no event loop, a
                // reactor that has one continues.
                if state.leave_owing() {
                    let next = match self.queue.reactor(self.me).is_event_loop {
                        true => self.me,
                        false => self.queue.event_loop().unwrap_or(self.me),
                    };
                    let owner = self.queue.hctx_owner(next);
                    self.queue.run_hctx(HctxId(owner.0), self.me, fx);
                }
                break;
            }
            match state.leave() {
                Ok(()) => break,
                Err(again) => state = again,
            }
            passes += 1;
        }
        events.gate_passes.add(passes);
        self.end_what_ended_inside(now, fx);
    }

    /// One pass inside the gate: takes in all reactors' lists, then dispatches and issues while the depth
    /// allows, up to the first request that cannot be issued here. Says whether there was such a request;
    /// `blocked` is the result of an earlier pass.
    fn pass(&mut self, state: &mut GateState, mut blocked: bool, now: Instant, fx: &mut Effects) -> bool {
        let depth = self.queue.depth();
        let is_event_loop = self.queue.reactor(self.me).is_event_loop;
        state.fold(
            &self.queue.stats,
            self.queue.is_draining(),
            now,
            self.tracer.as_ref(),
        );
        self.report_answers(state, now);
        let mut issued = false;
        while !blocked && self.hw.as_ref().is_some_and(|hw| hw.dispatch.is_empty()) {
            let Some(rq) = state.dispatch(depth, &self.queue.stats, now) else {
                break;
            };
            if !is_event_loop && rq.owner != self.me || self.is_flush_of_other_context(&rq) {
                self.send_to_owner(rq, now, fx);
            } else {
                issued = true;
                blocked = self.issue_inside(rq, state, now, fx);
            }
        }
        // Requests that bypass the elevator (flushes, and all requests without an elevator) go to their owner,
        // whose context may have tags.
        while let Some(mut rq) = state.passed.pop_front() {
            rq.state = State::Dispatched;
            self.send_to_owner(rq, now, fx);
        }
        if issued {
            // Before the next dispatcher issues: the device gets requests in the elevator's order.
            self.hw
                .as_mut()
                .expect("a dispatcher has a context")
                .driver
                .commit();
        }
        let can_issue = !blocked && self.hw.as_ref().is_some_and(|hw| hw.dispatch.is_empty());
        self.note_wakeup(state, can_issue, fx);
        blocked
    }

    /// Says whether a request is a flush that another context must issue: the context that the submitter
    /// uses is the one that reports what may be lost.
    pub(super) fn is_flush_of_other_context(&self, rq: &Request) -> bool {
        rq.is_flush
            && self.queue.reactor(rq.owner).is_event_loop
            && self.queue.hctx_owner(rq.owner) != self.me
    }

    /// Passes to the elevator the answer times of the reactors that it awaits.
    fn report_answers(&self, state: &mut GateState, now: Instant) {
        let elevator = state.elevator.as_mut();
        let Some(elevator) = elevator.and_then(|elevator| elevator.group_aware()) else {
            return;
        };
        let mut awaited = elevator.awaits();
        while let Some(reactor) = awaited.pop() {
            let until = self.queue.reactor(reactor).answered.load(Ordering::Relaxed);
            elevator.answered(reactor, Instant(until), now);
        }
    }

    /// Issues a dispatched request. Says whether nothing more can be issued here for now.
    fn issue_inside(
        &mut self,
        rq: Box<Request>,
        state: &mut GateState,
        now: Instant,
        fx: &mut Effects,
    ) -> bool {
        let hw = self.hw.as_mut().expect("a dispatcher has a context");
        // Requests of the elevator are counted against the depth already.
        let depth = if rq.from_elevator || rq.is_flush {
            u32::MAX
        } else {
            self.queue.depth()
        };
        match hw.issue(rq, depth, false, now) {
            Outcome::Queued | Outcome::NeedsTag => {}
            Outcome::PushedBack(hold) => {
                let rq = hw.dispatch.pop_front().expect("just pushed back");
                if rq.from_elevator {
                    // It goes back to the gate as the next request: another context may be able to issue it sooner.
                    state.push_back(rq);
                } else {
                    self.send_to_owner(rq, now, fx);
                }
                self.hold(hold, now);
                return true;
            }
            Outcome::Ended { rq, status } if !rq.from_elevator => {
                self.ended_inside.push((rq, status));
            }
            Outcome::Ended {
                mut rq,
                status: Status::Requeue,
            } if rq.retries < REQUEUES_MAX => {
                rq = self.end_what_is_done(rq, now, fx);
                self.count_requeue(&mut rq, now);
                state.requeue(rq, &self.queue.stats, now);
            }
            Outcome::Ended { rq, status } => {
                state.ended(&Note::of(&rq, now).with(status), rq.disk(), &self.queue.stats);
                self.ended_inside.push((rq, status));
            }
        }
        false
    }

    /// Sets the timer for the next call of the elevator; while nothing can be issued here, the elevator is
    /// not asked. A reactor without an event loop leaves the timer, and requests that were pushed back, to
    /// one that has an event loop.
    pub(super) fn note_wakeup(&mut self, state: &GateState, can_issue: bool, fx: &mut Effects) {
        let depth = if can_issue { self.queue.depth() } else { 0 };
        self.sched_timer = state.next_wakeup(depth);
        let elevator = state.elevator.as_deref();
        self.queue
            .note_elevator_limit(elevator.and_then(|elevator| elevator.depth_limit()));
        let has_more = self.sched_timer.is_some() || !state.requeue_list.is_empty();
        if !has_more || self.queue.reactor(self.me).is_event_loop {
            return;
        }
        if let Some(other) = self.queue.event_loop() {
            self.sched_timer = None;
            self.queue
                .run_hctx(HctxId(self.queue.hctx_owner(other).0), self.me, fx);
        }
    }

    fn end_what_ended_inside(&mut self, now: Instant, fx: &mut Effects) {
        let mut ended = std::mem::take(&mut self.ended_inside);
        let mut own_done = std::mem::take(&mut self.own_done);
        let counts_each = self.queue.stats.mode.is_under_gate();
        for (mut rq, status) in ended.drain(..) {
            // The end of requests that the elevator gave out was reported to it already.
            let is_plain = rq.from_elevator && status.is_ok() && rq.bios == 1 && !rq.is_flush;
            if is_plain && rq.owner == self.me && !counts_each {
                rq.completed_at = now;
                own_done.push(rq);
            } else if rq.from_elevator {
                self.end_request(rq, status, now, fx);
            } else {
                self.completed(rq, status, now, fx);
            }
        }
        self.ended_inside = ended;
        self.end_bios(own_done, fx);
    }
}

/// How many passes the gate's holder makes before it returns to its own event loop.
const PASSES_MAX: u64 = 4;
