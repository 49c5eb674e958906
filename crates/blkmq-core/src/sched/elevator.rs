//! The interface of an elevator, which holds requests and chooses the order in which they go to the
//! driver. The gate's holder calls it, so it needs no lock; with `none` there is no elevator and requests
//! go directly to `hw_ctx`. The folders beside this file have the elevators.

use std::fmt;

use crate::bio::{Direction, Prio, Status};
use crate::group::Node;
use crate::ids::{GroupId, ReactorId, ReactorSet};
use crate::request::Request;
use crate::stat::stamp::Stamp;
use crate::time::{Instant, Nanos};

/// Where a request enters the elevator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InsertAt {
    /// By the elevator's own order; it may be merged with a queued one.
    Ordered,
    /// Before all requests of its kind that were never dispatched: it was requeued.
    Head,
}

/// The result of an insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// It is queued by itself.
    Queued,
    /// It is part of a queued request.
    Merged,
}

/// Reports to the elevator the end of a request that it gave out.
#[derive(Clone, Copy, Debug)]
pub struct Note {
    /// The request's group.
    pub group: GroupId,
    /// Its priority.
    pub prio: Prio,
    /// Its direction.
    pub direction: Direction,
    /// Its bytes.
    pub bytes: u64,
    /// When it was inserted.
    pub inserted_at: Instant,
    /// When the driver took it.
    pub issued_at: Instant,
    /// When its completion was reaped.
    pub completed_at: Instant,
    /// The elevator's value in `Request::sched_data`.
    pub sched_data: u32,
    /// Its bios.
    pub bios: u32,
    /// Whether its submitter waits for it.
    pub is_sync: bool,
    /// Whether its latency counts for a latency target.
    pub is_targeted: bool,
    /// Whether it was given up at its time limit: when the drive would have ended it is not known.
    pub is_timed_out: bool,
    /// For the statistics, if they are kept under the gate.
    pub stamp: Stamp,
}

impl Note {
    /// From insertion to the end.
    #[inline]
    pub fn latency(&self) -> Nanos {
        self.completed_at.since(self.inserted_at)
    }

    /// Describes a request whose end was seen at `now`.
    pub fn of(rq: &Request, now: Instant) -> Self {
        Self {
            group: rq.group(),
            prio: rq.prio(),
            direction: rq.op().direction(),
            bytes: rq.len(),
            inserted_at: rq.inserted_at,
            issued_at: rq.issued_at,
            completed_at: now,
            sched_data: rq.sched_data,
            bios: rq.bios,
            is_sync: rq.is_sync(),
            is_targeted: rq.is_targeted,
            is_timed_out: false,
            stamp: rq.stamp,
        }
    }

    /// Says how the request ended.
    #[inline]
    pub(crate) fn with(self, status: Status) -> Self {
        Self {
            is_timed_out: status == Status::Timeout,
            ..self
        }
    }
}

/// A scheduler of requests that has one state for the whole queue.
///
/// The caller inserts, dispatches and reports completions, one at a time, and passes the time to every
/// call. An elevator neither allocates nor reads a clock after set-up: it holds at most the number of
/// requests that it was made for.
pub trait Elevator: Send {
    /// The name under which it is listed ([`super::ElevatorType`]).
    fn name(&self) -> &'static str;

    /// Inserts a request.
    fn insert(&mut self, rq: Box<Request>, at: InsertAt, now: Instant) -> Inserted;

    /// Dispatches the next request, if one may go now.
    fn dispatch(&mut self, now: Instant) -> Option<Box<Request>>;

    /// Reports the queue's depth, before the first dispatch and when it has changed.
    fn set_depth(&mut self, _depth: u32) {}

    /// Reports that a dispatched request has ended.
    fn completed(&mut self, _note: &Note) {}

    /// Returns how many requests it holds.
    fn queued(&self) -> usize;

    /// Says whether it holds requests back until one in flight has ended. For tests.
    fn keeps_back(&self) -> bool {
        false
    }

    /// The time at which to call [`Elevator::dispatch`] again even if no event comes, while it holds requests
    /// that may not go yet.
    fn next_wakeup(&self) -> Option<Instant> {
        None
    }

    /// How many requests it lets the drive hold now, if it bounds them.
    fn depth_limit(&self) -> Option<u32> {
        None
    }

    /// Lists its tunables with their values.
    fn tunables(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Sets one tunable.
    ///
    /// # Errors
    /// If it has no tunable of that name, or the value is out of range; nothing changes then.
    fn set_tunable(&mut self, name: &str, _value: u64) -> Result<(), TunableError> {
        Err(TunableError::unknown(self.name(), name))
    }

    /// Its other side, if it knows groups. It always has one or never, as [`super::ElevatorType::knows_groups`] says.
    fn group_aware(&mut self) -> Option<&mut dyn GroupAware> {
        None
    }

    /// Asserts its invariants. Costly; the simulator calls it after some events.
    fn check_invariants(&self) {}
}

/// An elevator that knows groups: it shares the drive among them by their weights.
pub trait GroupAware {
    /// Dispatches the next request if it is of a light client that need not wait for others' requests to end.
    /// Called while these others have as many in flight as a latency target allows.
    fn dispatch_urgent(&mut self, now: Instant) -> Option<Box<Request>>;

    /// Names the reactors whose answer times dispatch depends on.
    fn awaits(&mut self) -> ReactorSet;

    /// Reports that a reactor has delivered all ends up to `until` to its clients and taken in their responses.
    fn answered(&mut self, reactor: ReactorId, until: Instant, now: Instant);

    /// Passes to `take` the groups for which it let the drive idle on purpose since the last call, and for how long.
    fn drain_idled(&mut self, take: &mut dyn FnMut(GroupId, Nanos));

    /// What it has measured of a group, as numbers of its own format, for an elevator of the same name in
    /// another process that continues with the group.
    fn learnt(&mut self, group: GroupId) -> Vec<u64>;

    /// Takes over another elevator's measurements of a group. Invalid numbers are ignored.
    fn take_learnt(&mut self, group: GroupId, learnt: &[u64], now: Instant);

    /// Reports a new or changed group. Its parent is known already.
    fn group_set(&mut self, id: GroupId, node: &Node);

    /// Reports a removed group: no request of it is inside or will come, and it has no children.
    fn group_gone(&mut self, id: GroupId);
}

/// A tunable that could not be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunableError(String);

impl TunableError {
    /// The elevator has no such tunable.
    pub fn unknown(elevator: &str, name: &str) -> Self {
        Self(format!("{elevator} has no tunable {name}"))
    }

    /// The value is out of range.
    pub fn range(name: &str, value: u64, min: u64, max: u64) -> Self {
        Self(format!("{name} {value} rejected: must be from {min} to {max}"))
    }
}

impl fmt::Display for TunableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TunableError {}
