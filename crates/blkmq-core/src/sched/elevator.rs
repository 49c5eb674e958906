//! Decides what an elevator is: who holds requests back, and in which order they leave for the driver. The
//! gate's holder calls it, so it needs no lock; `none` is the absence of one (requests go straight to
//! `hw_ctx`). The folders beside this file have those there are.

use std::fmt;

use crate::bio::{Direction, Prio};
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
    /// Before everything else of its kind that has not been out: it has been, and came back (requeued).
    Head,
}

/// What became of an inserted request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// It is queued by itself.
    Queued,
    /// It is part of a queued request.
    Merged,
}

/// What the elevator learns of a request that it gave out and that has ended.
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
    /// When its end was seen.
    pub completed_at: Instant,
    /// What the elevator left in `Request::sched_data`.
    pub sched_data: u32,
    /// Its bios.
    pub bios: u32,
    /// Whether somebody waited for it.
    pub is_sync: bool,
    /// Whether latency targets are kept with its help.
    pub is_targeted: bool,
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
            stamp: rq.stamp,
        }
    }
}

/// A scheduler of requests that has one state for the whole queue.
///
/// The caller inserts, dispatches and reports completions, one at a time; time comes in with every call. An
/// elevator neither allocates nor reads a clock after set-up: it holds at most the number of requests it was
/// made for.
pub trait Elevator: Send {
    /// The name under which users choose it.
    fn name(&self) -> &'static str;

    /// Takes a request in.
    fn insert(&mut self, rq: Box<Request>, at: InsertAt, now: Instant) -> Inserted;

    /// Gives out the next request, if there is one that may go now.
    fn dispatch(&mut self, now: Instant) -> Option<Box<Request>>;

    /// Gives out the next request if it is of a light client that is not to wait for others' to end: they have all that they
    /// may have in flight.
    fn dispatch_urgent(&mut self, _now: Instant) -> Option<Box<Request>> {
        None
    }

    /// Learns that a request that was given out has ended.
    fn completed(&mut self, _note: &Note) {}

    /// Names the reactors of which it would like to know until when they have answered: of interest to dispatch.
    fn awaits(&self) -> ReactorSet {
        ReactorSet::default()
    }

    /// Learns that a reactor has told its clients of all that had ended `until` then, and taken in what they had to say.
    fn answered(&mut self, _reactor: ReactorId, _until: Instant, _now: Instant) {}

    /// Hands over for whom it has let the drive idle on purpose since the last call, and for how long.
    fn drain_idled(&mut self, _take: &mut dyn FnMut(GroupId, Nanos)) {}

    /// Says whether it divides the drive among groups by itself, so that what it gives out is to be issued in its order.
    fn knows_groups(&self) -> bool {
        false
    }

    /// What it has learnt of a group, in numbers of its own, for one of its name in another process that goes on with the group.
    fn learnt(&self, _group: GroupId) -> Vec<u64> {
        Vec::new()
    }

    /// Begins with what another one has learnt of a group. Numbers that mean nothing are ignored.
    fn take_learnt(&mut self, _group: GroupId, _learnt: &[u64], _now: Instant) {}

    /// Returns how many requests it holds.
    fn queued(&self) -> usize;

    /// Says whether it holds requests that it keeps back until one that is out has ended. It is asked by tests.
    fn keeps_back(&self) -> bool {
        false
    }

    /// Says when to ask [`Elevator::dispatch`] again although nothing happens, when it holds requests that
    /// may not go yet.
    fn next_wakeup(&self) -> Option<Instant> {
        None
    }

    /// Lists its tunables with their values.
    fn tunables(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Sets one tunable.
    ///
    /// # Errors
    /// If there is none of that name, or the value is out of its range; nothing is changed then.
    fn set_tunable(&mut self, name: &str, _value: u64) -> Result<(), TunableError> {
        Err(TunableError::unknown(self.name(), name))
    }

    /// Learns of a group that is new, or of which anything has changed. Its parent is known already.
    fn group_set(&mut self, _id: GroupId, _node: &Node) {}

    /// Learns that a group is gone: no request of it is inside or will come, and it has no children.
    fn group_gone(&mut self, _id: GroupId) {}

    /// Asserts what must always hold inside. Costly; the simulator calls it after every event.
    fn check_invariants(&self) {}
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
