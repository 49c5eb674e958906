//! How a thread waits: it polls, sleeps until a predicted completion, or blocks in its ring. `wait` and the queues
//! decide which.

use std::os::fd::BorrowedFd;

use blkmq_core::local::LocalQueue;
use blkmq_core::poll::{Verdict, Wait, Waited};
use blkmq_core::time::{Instant, Nanos};

use super::{HEARTBEAT_PASSED, News, ReactorCore};
use crate::reactor::wait::Expected;
use crate::uring::ring::HEARTBEAT;

impl ReactorCore {
    /// Waits until an event or `alarm`, whichever is first, in the way that the policy decides.
    /// `others` knows events outside of the core.
    pub(crate) fn wait(&mut self, expected: Expected, alarm: Option<Instant>, mut others: impl News) {
        let alarm = self.earliest_alarm(alarm);
        let start = self.clock.now();
        if alarm.is_some_and(|at| at <= start) {
            // An alarm may be due in each turn: what was pushed goes on meanwhile.
            return self.ring.submit();
        }
        let verdict = self.verdict(expected, start);
        let spin = match verdict {
            Verdict::SleepUntil(wake) if alarm.is_none_or(|at| wake <= at) => {
                return self.doze(wake, &mut others);
            }
            Verdict::SleepUntil(_) => Nanos::ZERO,
            // Only a run of the queues finds completions: the next turn does this.
            Verdict::Spin if self.is_polled() => return self.ring.submit(),
            Verdict::Spin => self.policy.spin_for_drive(),
            Verdict::Block => self.policy.spin_for(expected, start, alarm),
        };
        if spin > Nanos::ZERO {
            self.ring.submit();
            if self.has_news() || others.is_there() {
                // The submission itself completed entries: this says nothing about how long waits take.
                return;
            }
            let end = alarm.map_or(start + spin, |at| at.min(start + spin));
            let found = self.look(end, &others);
            let is_alarm = alarm == Some(end);
            if expected != Expected::Nothing && (found || !is_alarm) {
                self.policy.looked(found);
            }
            if found || is_alarm || verdict == Verdict::Spin {
                self.waited(Waited::Looking, self.clock.now());
                return;
            }
        }
        self.block(alarm, &mut others);
    }

    /// Decides how to wait for all requests in flight.
    fn verdict(&mut self, expected: Expected, now: Instant) -> Verdict {
        if expected != Expected::Nothing && self.mode == Wait::Poll {
            return Verdict::Spin;
        }
        let Self {
            queues, host, mode, ..
        } = self;
        let mut verdict = Verdict::Block;
        queues.for_each(|queue| verdict = verdict.and(queue.verdict(*mode, host, now)));
        verdict
    }

    /// Sleeps until `wake`, unless it is woken before.
    fn doze(&mut self, wake: Instant, others: &mut impl News) {
        let left = wake.since(self.clock.now());
        self.sleep(Some(left), others);
        self.awoke(Some(wake), true);
    }

    /// Measures a sleep that should have ended at `until`: before a predicted completion (`ahead`), or at a known
    /// one, since a drive that knows when a request ends in effect wakes the thread.
    fn awoke(&mut self, until: Option<Instant>, ahead: bool) {
        let now = self.clock.now();
        let late = until.filter(|until| now >= *until).map(|until| now.since(until));
        late.into_iter().for_each(|late| self.host.observe(late));
        let how = match late {
            Some(_) if ahead => Waited::Asleep,
            late => Waited::Woken(late.unwrap_or(self.host.typical())),
        };
        self.waited(how, now);
    }

    /// Tells the queues how the time until now was spent.
    fn waited(&mut self, how: Waited, now: Instant) {
        self.queues.for_each(|queue| queue.waited(how, now));
    }

    /// Says whether requests are in flight whose completion only a run of the queues finds.
    fn is_polled(&self) -> bool {
        self.queues.iter().any(LocalQueue::must_poll)
    }

    /// Says whether there is work before waiting, not counting bios that have ended.
    pub(crate) fn has_news(&self) -> bool {
        self.runs_again || self.ring.has_completed() || self.has_mail()
    }

    fn earliest_alarm(&self, alarm: Option<Instant>) -> Option<Instant> {
        let queues = self.queues.iter().filter_map(LocalQueue::next_wakeup);
        queues.chain(alarm).chain(self.encrypter.alarm()).min()
    }

    /// Polls for news until `end`. Says whether there is any.
    fn look(&self, end: Instant, others: &impl News) -> bool {
        loop {
            for _ in 0..LOOKS_PER_CLOCK_READ {
                if self.has_news() || others.is_there() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if self.clock.now() >= end {
                return false;
            }
        }
    }

    /// Blocks until an event or `alarm`.
    fn block(&mut self, alarm: Option<Instant>, others: &mut impl News) {
        let mut timeout = alarm.map(|at| at.since(self.clock.now()));
        if timeout.is_some_and(|timeout| timeout >= HEARTBEAT) && self.is_for_io() {
            // For example a request's time limit. A timer for each wait would cost as much as the wait's I/O.
            self.beat();
            timeout = None;
        }
        self.sleep(timeout, others);
        self.awoke(alarm.filter(|_| timeout.is_some()), false);
    }

    /// Submits pushed entries and sleeps, in one system call, for at most `timeout`.
    fn sleep(&mut self, timeout: Option<Nanos>, others: &mut impl News) {
        self.encrypter.wipe();
        self.is_told |= self.wakeup().prepare_to_sleep();
        if !self.runs_again && !self.has_mail() && !others.before_sleep() {
            if self.is_for_io() {
                self.ring.wait(timeout);
            } else {
                self.ring.sleep(timeout);
            }
        }
        self.is_told |= self.wakeup().cancel_sleep();
    }

    /// Submits pushed entries and announces that this thread is about to wait for its ring by other means. Returns
    /// for how long it may at most: not at all (zero) if there is work; none for no limit.
    pub(crate) fn prepare_to_wait(&mut self) -> Option<Nanos> {
        self.ring.submit();
        self.is_told |= self.wakeup().prepare_to_sleep();
        if self.has_news() || !self.ended().is_empty() || self.is_polled() {
            return Some(Nanos::ZERO);
        }
        self.earliest_alarm(None).map(|at| at.since(self.clock.now()))
    }

    /// The event by which other threads wake this one.
    pub(crate) fn wake_event(&self) -> BorrowedFd<'_> {
        self.shared.wakeups[self.id.index()].as_fd()
    }

    /// Announces that the wait of [`Self::prepare_to_wait`] is over.
    pub(crate) fn end_wait(&mut self) {
        self.is_told |= self.wakeup().cancel_sleep();
    }

    fn is_for_io(&self) -> bool {
        self.queues.iter().any(|queue| queue.hctx_in_flight() > 0)
    }

    /// Makes sure that the ring completes an entry within about a [`HEARTBEAT`], so that a distant alarm is checked again.
    fn beat(&mut self) {
        if !self.has_heartbeat {
            self.has_heartbeat = true;
            self.wake.push_heartbeat(HEARTBEAT_PASSED);
        }
    }
}

const LOOKS_PER_CLOCK_READ: u32 = 8;
