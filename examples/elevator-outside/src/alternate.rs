//! An elevator that serves the requests of even and of odd disks in turn, each in the order of their arrival.

use std::collections::VecDeque;

use blkmq_core::request::Request;
use blkmq_core::sched::{Elevator, ElevatorType, InsertAt, Inserted};
use blkmq_core::time::Instant;

/// All that blkmq needs to know of it.
pub static ALTERNATE: ElevatorType = ElevatorType {
    name: "alternate",
    help: "serves even and odd disks in turn",
    knows_groups: false,
    build: Some(|setup| Box::new(Alternate::new(setup.requests_max))),
};

struct Alternate {
    /// Those of even disks and those of odd ones.
    lists: [VecDeque<Box<Request>>; 2],
    /// Whose turn it is.
    turn: usize,
}

impl Alternate {
    fn new(requests_max: usize) -> Self {
        Self {
            lists: std::array::from_fn(|_| VecDeque::with_capacity(requests_max)),
            turn: 0,
        }
    }
}

impl Elevator for Alternate {
    fn name(&self) -> &'static str {
        ALTERNATE.name
    }

    fn insert(&mut self, rq: Box<Request>, at: InsertAt, _now: Instant) -> Inserted {
        let list = &mut self.lists[rq.disk().0 as usize % 2];
        match at {
            InsertAt::Ordered => list.push_back(rq),
            InsertAt::Head => list.push_front(rq),
        }
        Inserted::Queued
    }

    fn dispatch(&mut self, _now: Instant) -> Option<Box<Request>> {
        let next = self.lists[self.turn].pop_front();
        let other = 1 - self.turn;
        let rq = next.or_else(|| self.lists[other].pop_front())?;
        self.turn = 1 - rq.disk().0 as usize % 2;
        Some(rq)
    }

    fn queued(&self) -> usize {
        self.lists.iter().map(VecDeque::len).sum()
    }
}
