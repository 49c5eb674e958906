//! One hardware context of a null drive: it completes a request at once, at the next reap, by timer, or
//! not at all. `hw_ctx` of the core calls it; `service` decides how long a request takes.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::ops::Range;
use std::sync::Arc;

use blkmq_core::bio::Status;
use blkmq_core::driver::{Done, HctxDriver, Issued, TimedOut};
use blkmq_core::ids::{Cookie, HctxId};
use blkmq_core::request::Request;
use blkmq_core::time::Instant;

use super::config::Completion;
use super::device::Shared;
use super::service::Latency;
use crate::chance::Chance;

/// One hardware context of a null drive. Its data moves while a request is issued, so it never holds on to buffers.
pub(super) struct NullHctx {
    /// No setting needs a check: every request completes at once.
    plain: bool,
    /// The same, but every request completes at the next reap.
    defers_plainly: bool,
    completion: Completion,
    /// May complete without notification (see [`super::config::NullConfig::poll_queues`]), and
    /// does.
    can_be_polled: bool,
    polled: bool,
    device: Arc<Shared>,
    latency: Latency,
    chance: Chance,
    /// To be reported at the next reap (completion deferred).
    deferred: Vec<Done>,
    /// To be reported when their time has come, and in the order of issue among equals (completion by timer).
    timed: BinaryHeap<Reverse<Timed>>,
    /// Never to be reported; the time limit ends them.
    swallowed: Vec<Cookie>,
    issued: u64,
}

/// A request under way, ordered by its end and then by its issue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Timed {
    at: Instant,
    sequence: u64,
    done: Done,
}

impl NullHctx {
    pub(super) fn new(device: Arc<Shared>, hctx: HctxId) -> Self {
        let config = &device.config;
        let depth = config.depth as usize;
        let completion = config.effective_completion();
        let never_fails = [config.timeout_rate, config.requeue_rate, config.resource_rate]
            .iter()
            .all(|rate| rate.is_never());
        let capacity_of = |used: bool| if used { depth } else { 0 };
        let is_plain = never_fails && config.bad.is_empty() && !config.memory && !config.zero;
        Self {
            plain: is_plain && completion == Completion::Inline,
            defers_plainly: is_plain && completion == Completion::Deferred,
            completion,
            can_be_polled: hctx.0 < config.poll_queues,
            polled: false,
            latency: Latency::new(config),
            chance: Chance::new(config.seed, u64::from(hctx.0)),
            deferred: Vec::with_capacity(capacity_of(completion == Completion::Deferred)),
            timed: BinaryHeap::with_capacity(capacity_of(completion == Completion::Timer)),
            swallowed: Vec::with_capacity(capacity_of(!config.timeout_rate.is_never())),
            issued: 0,
            device,
        }
    }

    fn issue_with_options(&mut self, rq: &Request, cookie: Cookie, now: Instant) -> Issued {
        if let Some(refusal) = self.refusal() {
            return refusal;
        }
        let config = &self.device.config;
        if self.chance.hits(config.timeout_rate) {
            self.swallowed.push(cookie);
            return Issued::Queued;
        }
        let failed = self.failure(rq);
        let status = failed.unwrap_or_else(|| self.move_data(rq));
        self.end(rq, cookie, status, now)
    }

    /// Returns why the request is not taken, if it is not.
    fn refusal(&mut self) -> Option<Issued> {
        let in_flight = self.deferred.len() + self.timed.len() + self.swallowed.len();
        if in_flight >= self.device.config.depth as usize {
            return Some(Issued::DeviceResource);
        }
        if !self.chance.hits(self.device.config.resource_rate) {
            return None;
        }
        // A request that will end must be in flight, or nobody would announce the resource.
        let announced = self.deferred.len() + self.timed.len() > 0;
        Some(if announced && self.chance.bits() & 1 == 1 {
            Issued::DeviceResource
        } else {
            Issued::Resource
        })
    }

    /// Returns the error with which the request ends instead of being executed, if any.
    fn failure(&mut self, rq: &Request) -> Option<Status> {
        let config = &self.device.config;
        let end = rq.offset() + rq.len();
        let is_bad = |bad: &Range<u64>| rq.offset() < bad.end && bad.start < end;
        if !rq.is_empty() && config.bad.iter().any(is_bad) {
            return Some(Status::Medium);
        }
        let requeues = self.chance.hits(config.requeue_rate);
        requeues.then_some(Status::Requeue)
    }

    fn move_data(&self, rq: &Request) -> Status {
        let disk = self.device.disks.get(rq.disk().index());
        disk.map_or(Status::Invalid, |disk| disk.run(rq))
    }

    fn end(&mut self, rq: &Request, cookie: Cookie, status: Status, now: Instant) -> Issued {
        match self.completion {
            Completion::Inline => return Issued::Done(status),
            Completion::Deferred => self.deferred.push(Done { cookie, status }),
            Completion::Timer => {
                let service = self.latency.draw(&mut self.chance);
                let bytes = if rq.op().has_data() { rq.len() } else { 0 };
                self.issued += 1;
                self.timed.push(Reverse(Timed {
                    at: self.device.capacity.book(now, service, bytes),
                    sequence: self.issued,
                    done: Done { cookie, status },
                }));
            }
        }
        Issued::Queued
    }
}

impl HctxDriver for NullHctx {
    #[inline]
    fn issue(&mut self, rq: &Request, cookie: Cookie, _last: bool, now: Instant) -> Issued {
        if self.plain {
            return Issued::Done(Status::Ok);
        }
        if self.defers_plainly && self.deferred.len() < self.device.config.depth as usize {
            let status = Status::Ok;
            self.deferred.push(Done { cookie, status });
            return Issued::Queued;
        }
        self.issue_with_options(rq, cookie, now)
    }

    fn reap(&mut self, now: Instant, done: &mut Vec<Done>) {
        done.append(&mut self.deferred);
        while let Some(Reverse(first)) = self.timed.peek() {
            if first.at > now {
                break;
            }
            done.push(first.done);
            self.timed.pop();
        }
    }

    fn next_event(&self) -> Option<Instant> {
        if self.polled {
            return None;
        }
        if !self.deferred.is_empty() {
            return Some(Instant(0));
        }
        self.timed.peek().map(|Reverse(first)| first.at)
    }

    fn set_polled(&mut self, on: bool) -> bool {
        self.polled = on && self.can_be_polled;
        self.polled
    }

    /// Drops the request: its buffers were not used after it was issued.
    fn timed_out(&mut self, cookie: Cookie) -> TimedOut {
        self.swallowed.retain(|held| *held != cookie);
        self.deferred.retain(|held| held.cookie != cookie);
        self.timed.retain(|Reverse(held)| held.done.cookie != cookie);
        TimedOut::Ended
    }
}

impl Ord for Timed {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.sequence).cmp(&(other.at, other.sequence))
    }
}

impl PartialOrd for Timed {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests;
