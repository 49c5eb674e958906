//! The path of the engine's own flushes to the driver: they bypass the elevator; flushes of groups with
//! caps go through the gate, where they wait for the caps. `crate::flush` says which are due.

use super::LocalQueue;
use crate::queue::Effects;
use crate::request::State;
use crate::time::Instant;
use crate::trace::Step;

impl LocalQueue {
    /// Issues the flushes that are due, past the elevator; a flush of a group with caps when the caps let it pass.
    pub(super) fn issue_flushes(&mut self, now: Instant, fx: &mut Effects) -> bool {
        if !self.sw.flush.has_due() {
            return false;
        }
        let Some(entered) = self.queue.enter_to_start(self.me, 0) else {
            return false;
        };
        let (mut any, mut published) = (false, false);
        while let Some((mut rq, is_capped)) = self.sw.flush.next_flush() {
            any = true;
            self.queue.count_started(self.me, 1);
            self.shard().events.flushes.add(1);
            rq.inserted_at = now;
            if let Some(tracer) = &self.tracer {
                tracer.step(Step::Queued, &rq, now);
            }
            if is_capped {
                published = true;
                self.publish(rq);
                continue;
            }
            match &mut self.hw {
                Some(hw) => {
                    rq.state = State::Dispatched;
                    hw.dispatch.push_front(rq);
                    self.issue_dispatch_list(now, fx);
                }
                None => self.send_to_owner(rq, now, fx),
            }
        }
        if published {
            self.look_at_published(now, fx);
        }
        self.leave(entered);
        any
    }
}
