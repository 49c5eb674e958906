//! Decides what the one dispatcher inside the gate sees and does: it folds everybody's insertions and completions into
//! the elevator, and takes requests out while the depth allows. `local` enters, issues what comes out, and leaves.

use blkmq_sync::spsc::Consumer;

use crate::group::GroupTree;
use crate::ids::GroupId;
use crate::request::{Request, State};
use crate::sched::{Elevator, InsertAt, Inserted, Note};
use crate::stat::Shard;
use crate::time::Instant;

/// What reactors tell the gate of requests that the elevator gave out.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Report {
    /// It has ended.
    Ended(Note),
    /// It comes back through the insert list.
    Requeued,
}

/// What the gate protects: the elevator, the reading ends of everybody's lists, and the count against the depth.
pub(crate) struct Sched {
    pub(crate) elevator: Option<Box<dyn Elevator>>,
    pub(crate) inserts: Vec<Consumer<Box<Request>>>,
    pub(crate) reports: Vec<Consumer<Report>>,
    /// Requests that the elevator gave out and that have not been reported.
    pub(crate) in_flight: u32,
    /// The tenant tree.
    pub(crate) groups: GroupTree,
}

impl Sched {
    /// Takes in what all reactors have published. `shard` counts merges.
    pub(crate) fn fold(&mut self, shard: &Shard, now: Instant) {
        let Self {
            elevator: Some(elevator),
            inserts,
            reports,
            in_flight,
            ..
        } = self
        else {
            return;
        };
        for list in reports {
            list.drain(|report| {
                *in_flight -= 1;
                if let Report::Ended(note) = report {
                    elevator.completed(&note);
                }
            });
        }
        for list in inserts {
            list.drain(|rq| insert(elevator.as_mut(), rq, shard, now));
        }
    }

    /// Takes the next request out of the elevator, unless `depth` are in flight.
    pub(crate) fn dispatch(&mut self, depth: u32, now: Instant) -> Option<Box<Request>> {
        if self.in_flight >= depth {
            return None;
        }
        let mut rq = self.elevator.as_mut()?.dispatch(now)?;
        debug_assert_eq!(
            rq.state,
            State::Inserted,
            "the elevator gave out what it was not given"
        );
        rq.state = State::Dispatched;
        rq.from_elevator = true;
        self.in_flight += 1;
        Some(rq)
    }

    /// Reports the end of a request that was issued by the holder and ended at once.
    pub(crate) fn ended(&mut self, note: &Note) {
        self.in_flight -= 1;
        if let Some(elevator) = &mut self.elevator {
            elevator.completed(note);
        }
    }

    /// Puts a request back that the driver wants again.
    pub(crate) fn put_back(&mut self, rq: Box<Request>, shard: &Shard, now: Instant) {
        self.in_flight -= 1;
        if let Some(elevator) = &mut self.elevator {
            insert(elevator.as_mut(), rq, shard, now);
        }
    }

    /// Says when the elevator wants to be asked again.
    pub(crate) fn next_wakeup(&self) -> Option<Instant> {
        self.elevator.as_ref()?.next_wakeup()
    }

    /// Says whether nothing is inside, on a drained queue.
    pub(crate) fn is_empty(&self) -> bool {
        self.in_flight == 0
            && self
                .elevator
                .as_ref()
                .is_none_or(|elevator| elevator.queued() == 0)
            && self.inserts.iter().all(Consumer::is_empty)
    }

    /// Says whether everything that was published is in.
    pub(crate) fn is_all_taken_in(&self) -> bool {
        self.inserts.iter().all(Consumer::is_empty) && self.reports.iter().all(Consumer::is_empty)
    }
}

fn insert(elevator: &mut dyn Elevator, mut rq: Box<Request>, shard: &Shard, now: Instant) {
    debug_assert_eq!(rq.state, State::Staged, "insert of a request that is not staged");
    let (group, direction, bios): (GroupId, _, _) = (rq.group(), rq.op().direction(), rq.bios);
    let at = if rq.retries > 0 {
        InsertAt::Head
    } else {
        InsertAt::Ordered
    };
    rq.state = State::Inserted;
    if elevator.insert(rq, at, now) == Inserted::Merged {
        shard.count_merge(group, direction, bios);
    }
}
