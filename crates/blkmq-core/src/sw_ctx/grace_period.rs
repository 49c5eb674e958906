//! Grace periods: a proof that nothing in a software context carries the number of a removed group any more, without
//! counting the bios of groups. A grace period moves waiting bios to the group's ancestor, then waits until every
//! request outside the pool has returned to it once. A request that returns is marked with the grace
//! period's number; the request path pays for one comparison.

use std::sync::atomic::Ordering;

use super::SwCtx;
use crate::bio::Bio;
use crate::queue::Queue;
use crate::request::Request;

impl SwCtx {
    /// Begins the next grace period if one is wanted and none is under way.
    #[inline]
    pub(crate) fn advance_grace_period(&mut self, queue: &Queue) {
        if self.grace_period != queue.wanted_grace_period() && self.before_grace_period == 0 {
            self.begin_grace_period(queue);
        }
    }

    #[inline(never)]
    fn begin_grace_period(&mut self, queue: &Queue) {
        self.grace_period = queue.wanted_grace_period();
        let forward = |bio: &mut Bio| {
            bio.group = queue.group_states.effective_group(bio.group).unwrap_or(bio.group);
        };
        self.waiting.for_each_mut(forward);
        self.splits.for_each_bio(forward);
        self.flush.for_each_bio(forward);
        self.mark_pooled();
        self.finish_grace_period_if_done(queue);
    }

    /// Marks the requests in the pool, and counts the others.
    pub(super) fn mark_pooled(&mut self) {
        let grace_period = self.grace_period as u32;
        self.pool.iter_mut().for_each(|rq| rq.grace_period = grace_period);
        self.before_grace_period = self.requests - self.pool.len() + self.flush.mark_idle(grace_period);
    }

    /// Counts the return of a request that the grace period waits for.
    #[cold]
    pub(super) fn pass_grace_period(&mut self, queue: &Queue, rq: &mut Request) {
        rq.grace_period = self.grace_period as u32;
        self.before_grace_period -= 1;
        self.finish_grace_period_if_done(queue);
    }

    fn finish_grace_period_if_done(&self, queue: &Queue) {
        if self.before_grace_period == 0 {
            // Release: pairs with the Acquire in `Queue::grace_period_done`.
            queue
                .reactor(self.me)
                .grace_period_done
                .store(self.grace_period, Ordering::Release);
        }
    }
}
