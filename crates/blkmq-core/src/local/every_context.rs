//! Dispatch without the gate (`Dispatch::EveryContext` and `OwnContext`): each reactor waits for the
//! elevator and dispatches for itself. It exists to be measured against the gate, so it does nothing
//! worse than Linux did.

use std::rc::Rc;

use super::LocalQueue;
use crate::hw_ctx::Outcome;
use crate::ids::{HctxId, ReactorId};
use crate::queue::{Dispatch, Effects};
use crate::time::Instant;

impl LocalQueue {
    /// Says whether each context dispatches for itself.
    pub(super) fn dispatches_for_itself(&self) -> bool {
        self.queue.is_scheduled() && self.queue.dispatch != Dispatch::Single
    }

    /// Inserts published requests into the elevator, then runs the context: its own at once, or the owner's.
    pub(super) fn insert_and_run_own(&mut self, now: Instant, fx: &mut Effects) {
        let queue = Rc::clone(&self.queue);
        let shard = &queue.reactor(self.me).shard;
        shard.events.gate_entered.add(1);
        let mut state = queue.gate.enter_spinning();
        state.fold(&queue.stats, queue.is_draining(), now, self.tracer.as_ref());
        // A reactor that left a mark has not continued: it waits.
        let _ = state.leave_owing();
        match &self.hw {
            Some(hw) if hw.dispatch.is_empty() => self.dispatch_for_itself(now, fx),
            Some(_) => {}
            None => queue.run_hctx(HctxId(queue.hctx_owner(self.me).0), self.me, fx),
        }
    }

    /// Takes requests one by one and issues each to its own driver, outside the elevator. The caller has entered the queue.
    pub(super) fn dispatch_for_itself(&mut self, now: Instant, fx: &mut Effects) {
        let queue = Rc::clone(&self.queue);
        let reactor = queue.reactor(self.me);
        let (mut issued, mut ended) = (false, false);
        while self.hw.as_ref().is_some_and(|hw| hw.dispatch.is_empty()) {
            reactor.shard.events.gate_entered.add(1);
            reactor.shard.events.gate_passes.add(1);
            let mut state = queue.gate.enter_spinning();
            state.fold(&queue.stats, queue.is_draining(), now, self.tracer.as_ref());
            let rq = state.dispatch(queue.depth(), &queue.stats, now);
            self.note_wakeup(&state, true, fx);
            let _ = state.leave_owing();
            let Some(rq) = rq else {
                break;
            };
            if !reactor.is_event_loop && rq.owner != self.me || self.is_flush_of_other_context(&rq) {
                self.send_to_owner(rq, now, fx);
                continue;
            }
            issued = true;
            let hw = self.hw.as_mut().expect("looked at above");
            match hw.issue(rq, u32::MAX, false, now) {
                Outcome::Queued | Outcome::NeedsTag => {}
                Outcome::PushedBack(hold) => self.hold(hold, now),
                Outcome::Ended { rq, status } => {
                    ended = true;
                    self.completed(rq, status, now, fx);
                }
            }
        }
        if issued {
            self.hw.as_mut().expect("issued to it").driver.commit();
        }
        if ended && queue.dispatch == Dispatch::EveryContext {
            self.run_other_contexts(fx);
        }
    }

    /// Queues a run of every hardware context but this reactor's.
    pub(super) fn run_other_contexts(&self, fx: &mut Effects) {
        for hctx in (0..self.queue.hctxs()).map(HctxId) {
            if ReactorId(hctx.0) != self.me {
                self.queue.run_hctx(hctx, self.me, fx);
            }
        }
    }
}
