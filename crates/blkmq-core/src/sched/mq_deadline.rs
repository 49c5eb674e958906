//! The mq-deadline elevator: it orders requests by priority class, deadline, direction and position. The
//! gate's holder calls it (see `sched`); the order inside a class is in `class`, the tunables in
//! `tunables`.
//!
//! After the document and the tunables of Linux's deadline scheduler; `docs/schedulers/mq-deadline.md` lists
//! the differences.
//!
//! ```text
//!  insert --> class RT   --> requeued                         --> dispatch: an aged class's turn,
//!             class BE       reads:  by arrival, by position      else the first class that has something
//!             class IDLE     writes: by arrival, by position
//! ```

mod class;
#[cfg(test)]
mod tests;
mod tunables;

use self::class::{Class, SIDES};
use self::tunables::Tunables;
use super::request_list::RequestMemory;
use crate::limits::Limits;
use crate::request::Request;
use crate::sched::elevator::{Elevator, InsertAt, Inserted, TunableError};
use crate::sched::registry::ElevatorType;
use crate::time::Instant;

/// Deadlines and batches, by direction and priority class.
pub const MQ_DEADLINE: &ElevatorType = &ElevatorType {
    name: "mq-deadline",
    help: "sorts and merges, prefers readers, and keeps a deadline for everybody",
    knows_groups: false,
    build: Some(|setup| Box::new(MqDeadline::new(setup.limits.clone(), setup.requests_max))),
};

/// The mq-deadline elevator.
///
/// It allocates at set-up: about 80 bytes per request, without the request itself.
#[derive(Debug)]
pub struct MqDeadline {
    held: RequestMemory,
    /// By [`crate::bio::Class`], highest first.
    classes: [Class; CLASSES],
    tunables: Tunables,
    /// The latest time seen: clocks of different reactors may differ by some nanoseconds, but arrivals must be
    /// in order.
    now: Instant,
}

impl MqDeadline {
    /// Makes an elevator that holds up to `requests_max` requests and merges within `limits`.
    pub fn new(limits: Limits, requests_max: usize) -> Self {
        let mut held = RequestMemory::new(limits, requests_max, CLASSES * SIDES);
        Self {
            classes: std::array::from_fn(|_| Class::new(&mut held)),
            held,
            tunables: Tunables::default(),
            now: Instant::default(),
        }
    }

    /// The class whose turn it is: one that has aged behind a higher one, else the highest that has requests.
    #[inline]
    fn turn(&self) -> Option<usize> {
        let first = self.classes.iter().position(|class| !class.is_empty())?;
        let aged = |class: &Class| {
            let oldest = class.oldest(&self.held);
            oldest.is_some_and(|at| self.now.since(at) >= self.tunables.prio_aging_expire)
        };
        let lower = first + 1..CLASSES;
        Some(
            lower
                .into_iter()
                .find(|&c| aged(&self.classes[c]))
                .unwrap_or(first),
        )
    }

    fn notice(&mut self, now: Instant) {
        self.now = self.now.max(now);
    }
}

impl Elevator for MqDeadline {
    fn name(&self) -> &'static str {
        MQ_DEADLINE.name
    }

    fn insert(&mut self, rq: Box<Request>, at: InsertAt, now: Instant) -> Inserted {
        self.notice(now);
        let class = &mut self.classes[rq.prio().class as usize];
        match at {
            InsertAt::Ordered => class.insert(&mut self.held, rq, &self.tunables, self.now),
            InsertAt::Head => class.requeue(&mut self.held, rq, self.now),
        }
    }

    fn dispatch(&mut self, now: Instant) -> Option<Box<Request>> {
        self.notice(now);
        let turn = self.turn()?;
        let mut rq = self.classes[turn].dispatch(&mut self.held, &self.tunables, self.now);
        rq.seal();
        Some(rq)
    }

    fn queued(&self) -> usize {
        self.held.count()
    }

    fn tunables(&self) -> Vec<(&'static str, u64)> {
        self.tunables.list()
    }

    fn set_tunable(&mut self, name: &str, value: u64) -> Result<(), TunableError> {
        self.tunables.set(self.name(), name, value)
    }

    fn check_invariants(&self) {
        let mut count = 0;
        let mut chunks = 0;
        for (number, class) in self.classes.iter().enumerate() {
            let (requests, in_use) = class.check(&self.held, number);
            count += requests;
            chunks += in_use;
        }
        self.held.check(count, chunks);
    }
}

const CLASSES: usize = 3;
