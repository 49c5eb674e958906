//! Decides how one hardware context of a null drive answers a request: at once, at the next reap, by timer, or not at all.
//! `hw_ctx` of the core calls it; `service` says how long a request takes.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use blkmq_core::bio::{Op, Status};
use blkmq_core::driver::{Done, Driver, Issued, TimedOut};
use blkmq_core::ids::{Cookie, HctxId};
use blkmq_core::request::Request;
use blkmq_core::time::Instant;

use super::config::Completion;
use super::drive::NullDrive;
use super::service::Latency;
use crate::driver::chance::Chance;
use crate::driver::{Rate, sys};

/// One hardware context of a null drive. Its data moves while a request is issued, so it never holds on to buffers.
pub(super) struct NullHctx {
    /// Nothing is configured that would have to be looked at: every request is done at once.
    plain: bool,
    completion: Completion,
    drive: Arc<NullDrive>,
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

/// A request under way, ordered by its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Timed {
    at: Instant,
    sequence: u64,
    cookie_raw: u64,
    failed: Failure,
}

/// How a request under way ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Failure {
    None,
    Medium,
    Requeue,
}

impl NullHctx {
    pub(super) fn new(drive: Arc<NullDrive>, hctx: HctxId) -> Self {
        let config = &drive.config;
        let depth = config.depth as usize;
        let completion = config.effective_completion();
        let never_fails = [config.timeout_rate, config.requeue_rate, config.resource_rate]
            .iter()
            .all(|rate| rate.is_never());
        let capacity_of = |used: bool| if used { depth } else { 0 };
        Self {
            plain: completion == Completion::Inline && never_fails && config.bad.is_empty() && !config.zero,
            completion,
            latency: Latency::new(config),
            chance: Chance::new(config.seed, u64::from(hctx.0)),
            deferred: Vec::with_capacity(capacity_of(completion == Completion::Deferred)),
            timed: BinaryHeap::with_capacity(capacity_of(completion == Completion::Timer)),
            swallowed: Vec::with_capacity(capacity_of(!config.timeout_rate.is_never())),
            issued: 0,
            drive,
        }
    }

    fn issue_with_options(&mut self, rq: &Request, cookie: Cookie, now: Instant) -> Issued {
        if let Some(refusal) = self.refusal() {
            return refusal;
        }
        let config = &self.drive.config;
        if self.chance.hits(config.timeout_rate) {
            self.swallowed.push(cookie);
            return Issued::Queued;
        }
        let failed = self.failure(rq);
        if failed == Failure::None {
            self.move_data(rq);
        }
        self.end(rq, cookie, failed, now)
    }

    /// Says why the request is not taken, if it is not.
    fn refusal(&mut self) -> Option<Issued> {
        let in_flight = self.deferred.len() + self.timed.len() + self.swallowed.len();
        if in_flight >= self.drive.config.depth as usize {
            return Some(Issued::DeviceResource);
        }
        let rate: Rate = self.drive.config.resource_rate;
        if !self.chance.hits(rate) {
            return None;
        }
        // Somebody who will end must be in flight, or nobody would announce the resource.
        let announced = self.deferred.len() + self.timed.len() > 0;
        Some(if announced && self.chance.bits() & 1 == 1 {
            Issued::DeviceResource
        } else {
            Issued::Resource
        })
    }

    fn failure(&mut self, rq: &Request) -> Failure {
        let config = &self.drive.config;
        let end = rq.offset() + rq.len();
        let is_bad = |bad: &std::ops::Range<u64>| rq.offset() < bad.end && bad.start < end;
        if !rq.is_empty() && config.bad.iter().any(is_bad) {
            Failure::Medium
        } else if self.chance.hits(config.requeue_rate) {
            Failure::Requeue
        } else {
            Failure::None
        }
    }

    fn move_data(&self, rq: &Request) {
        if rq.op() == Op::Read && self.drive.config.zero {
            sys::for_each_sink(rq, |mut sink| sink.put_zeroes(sink.left()));
        }
    }

    fn end(&mut self, rq: &Request, cookie: Cookie, failed: Failure, now: Instant) -> Issued {
        let status = failed.status();
        match self.completion {
            Completion::Inline => return Issued::Done(status),
            Completion::Deferred => self.deferred.push(Done { cookie, status }),
            Completion::Timer => {
                let service = self.latency.draw(&mut self.chance);
                let bytes = if rq.op().has_data() { rq.len() } else { 0 };
                self.issued += 1;
                self.timed.push(Reverse(Timed {
                    at: self.drive.capacity.book(now, service, bytes),
                    sequence: self.issued,
                    cookie_raw: cookie.raw(),
                    failed,
                }));
            }
        }
        Issued::Queued
    }
}

impl Driver for NullHctx {
    #[inline]
    fn issue(&mut self, rq: &Request, cookie: Cookie, _last: bool, now: Instant) -> Issued {
        if self.plain {
            return Issued::Done(Status::Ok);
        }
        self.issue_with_options(rq, cookie, now)
    }

    fn reap(&mut self, now: Instant, done: &mut Vec<Done>) {
        done.append(&mut self.deferred);
        while let Some(Reverse(first)) = self.timed.peek() {
            if first.at > now {
                break;
            }
            done.push(Done {
                cookie: Cookie::from_raw(first.cookie_raw),
                status: first.failed.status(),
            });
            self.timed.pop();
        }
    }

    fn next_event(&self) -> Option<Instant> {
        if !self.deferred.is_empty() {
            return Some(Instant(0));
        }
        self.timed.peek().map(|Reverse(first)| first.at)
    }

    /// Forgets the request: no buffer of it is in use since it was issued.
    fn timed_out(&mut self, cookie: Cookie) -> TimedOut {
        self.swallowed.retain(|held| *held != cookie);
        self.deferred.retain(|held| held.cookie != cookie);
        self.timed.retain(|Reverse(held)| held.cookie_raw != cookie.raw());
        TimedOut::Ended
    }
}

impl Failure {
    fn status(self) -> Status {
        match self {
            Self::None => Status::Ok,
            Self::Medium => Status::Medium,
            Self::Requeue => Status::Requeue,
        }
    }
}

#[cfg(test)]
mod tests;
