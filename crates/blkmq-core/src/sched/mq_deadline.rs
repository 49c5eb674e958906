//! Decides the order of requests by deadlines, direction and priority class (a plain FIFO until its tunables arrive).
//! Called by the gate's holder; see `sched` for the contract.

use std::collections::VecDeque;

use super::{Elevator, InsertAt, Inserted};
use crate::limits::Limits;
use crate::request::Request;
use crate::time::Instant;

/// The mq-deadline elevator.
#[derive(Debug)]
pub struct MqDeadline {
    fifo: VecDeque<Box<Request>>,
}

impl MqDeadline {
    /// Makes an elevator that holds up to `requests_max` requests.
    pub fn new(_limits: Limits, requests_max: usize) -> Self {
        Self {
            fifo: VecDeque::with_capacity(requests_max),
        }
    }
}

impl Elevator for MqDeadline {
    fn name(&self) -> &'static str {
        "mq-deadline"
    }

    fn insert(&mut self, rq: Box<Request>, at: InsertAt, _now: Instant) -> Inserted {
        match at {
            InsertAt::Ordered => self.fifo.push_back(rq),
            InsertAt::Head => self.fifo.push_front(rq),
        }
        Inserted::Queued
    }

    fn dispatch(&mut self, _now: Instant) -> Option<Box<Request>> {
        self.fifo.pop_front()
    }

    fn queued(&self) -> usize {
        self.fifo.len()
    }
}
