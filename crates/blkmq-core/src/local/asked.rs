//! What a reactor asks of its part of a queue between two turns: is there work, when is the next, how to wait for it.

use std::sync::Arc;

use super::LocalQueue;
use crate::hw_ctx::HwCtx;
use crate::poll::{Verdict, Wait, Waited, WakeLatency};
use crate::queue::Queue;
use crate::time::Instant;

impl LocalQueue {
    /// The time at which [`LocalQueue::run`] must be called even if no event comes; a time in the past means at once.
    pub fn next_wakeup(&self) -> Option<Instant> {
        let run = &self.queue.reactor(self.me).run;
        if self.has_mail() {
            return Some(Instant(0));
        }
        let hw = self.hw.as_ref()?;
        [run.deadline().map(Instant), hw.next_event(), self.sched_timer]
            .into_iter()
            .flatten()
            .min()
    }

    /// Says whether there is work that needs no event. Check it again after announcing sleep.
    #[inline]
    pub fn has_mail(&self) -> bool {
        let run = &self.queue.reactor(self.me).run;
        !self.mailbox.is_empty()
            || (self.is_unfinished && !self.sw.is_idle())
            || (self.hw.is_some() && run.is_wanted() && !run.is_stopped())
            // Work held back by a freeze that has ended since: the kick may have come before sleep was announced.
            || (self.sw.has_work_to_start() && !self.queue.is_frozen())
    }

    /// Says whether nothing is in flight or waiting here and no timer is set: [`LocalQueue::run`] has nothing
    /// to do until a bio is submitted or the reactor is kicked.
    pub fn is_quiet(&self) -> bool {
        let hw_is_quiet =
            |hw: &HwCtx| hw.in_flight == 0 && !hw.needs_idle_poll && hw.dispatch_list_is_empty();
        self.sw.is_at_rest() && self.hw.as_ref().is_none_or(hw_is_quiet) && self.next_wakeup().is_none()
    }

    /// Says whether requests are in flight whose completions only [`LocalQueue::run`] finds, since the driver
    /// announces none.
    #[inline]
    pub fn must_poll(&self) -> bool {
        self.hw
            .as_ref()
            .is_some_and(|hw| hw.in_flight > 0 && hw.is_polled())
    }

    /// Decides how the reactor waits for the requests in flight at its hardware context. `host` has its
    /// measured wake-up latency.
    pub fn verdict(&mut self, wait: Wait, host: &mut WakeLatency, now: Instant) -> Verdict {
        let policy = self.queue.poll_policy();
        let hw = self.hw.as_mut();
        hw.map_or(Verdict::Block, |hw| hw.verdict(wait, policy, host, now))
    }

    /// Notes how the reactor spent the time until now. Call it before [`LocalQueue::run`].
    pub fn waited(&mut self, how: Waited, until: Instant) {
        if let Some(hw) = &mut self.hw {
            hw.waited(how, until);
        }
    }

    /// Says whether every bio of this reactor's submitters has started as a whole: a drain of the queue ends them all.
    pub fn has_started_all(&self) -> bool {
        self.sw.has_started_all()
    }

    /// How many bios of this reactor's submitters have not ended.
    #[inline]
    pub fn outstanding(&self) -> u32 {
        self.sw.outstanding
    }

    /// How many requests this reactor's driver has.
    #[inline]
    pub fn hctx_in_flight(&self) -> u32 {
        self.hw.as_ref().map_or(0, |hw| hw.in_flight)
    }

    /// Says whether a completion may come at any moment: bios or requests of this reactor are in flight, and
    /// the drive has not been silent for a while. Call it at each wait.
    #[inline]
    pub fn expects_end(&mut self, now: Instant) -> bool {
        let is_still = self.hw.as_mut().is_some_and(|hw| hw.is_still(now));
        !is_still && (self.outstanding() > 0 || self.hctx_in_flight() > 0)
    }

    /// How often this reactor entered the gate.
    pub fn gate_entered(&self) -> u64 {
        self.shard().events.gate_entered.get()
    }

    /// The queue, which all its reactors share.
    pub fn queue(&self) -> &Arc<Queue> {
        &self.queue
    }
}
