//! The gate's record of each group's time: whether the group has requests queued, waits for its turn, or
//! has none. Only the holder writes, so the states cannot contradict each other; any thread reads the
//! counters.
//!
//! ```text
//!            inserted                       dispatched                    dispatched, nothing left
//!  empty ───────────────► waiting ─────────────────────────► served ─────────────────────────────► empty
//!    └ empty_time           └ group_wait_time                                                  dequeue
//! ```
//! A request costs one increment and one decrement; the clock is read when a state changes. Which group was
//! dispatched before, and how many bios were queued, is stored in the request and counted at its end, by the
//! reactor that ends it (`stat`).

use std::ops::Range;
use std::sync::Arc;

use blkmq_sync::counter::Counter;

use super::stamp::Stamp;
use crate::group::{GroupTree, ROOT};
use crate::ids::GroupId;
use crate::request::Request;
use crate::time::{Instant, Nanos};

/// The times of one group. The gate's holder writes them.
#[derive(Debug, Default)]
pub(super) struct Times {
    pub(super) queued: Counter,
    pub(super) group_wait_ns: Counter,
    pub(super) empty_ns: Counter,
    pub(super) idle_ns: Counter,
    pub(super) turn_ns: Counter,
    pub(super) dequeues: Counter,
}

/// The groups' times and their columns, for readers.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(super) times: Box<[Times]>,
    /// By column of the table of delays, from 1: the group's number plus one. Top-level groups first, then nested ones.
    pub(super) columns: [Counter; OWNERS_MAX],
}

/// The holder's own side of the record.
pub(crate) struct Watch {
    watched: Arc<Watched>,
    states: Box<[State]>,
    /// By group: the column that it is counted in, 0 until that is decided; and its top-level group's column.
    columns: Box<[u8]>,
    tops: Box<[u8]>,
    is_on: bool,
    /// The group whose request was dispatched last, and since when no other group's was.
    turn: Option<GroupId>,
    turn_since: Instant,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    waits: bool,
    /// When the present state began.
    since: Instant,
}

impl Watched {
    pub(super) fn new(groups: usize) -> Self {
        Self {
            times: (0..groups).map(|_| Times::default()).collect(),
            columns: std::array::from_fn(|_| Counter::new()),
        }
    }
}

impl Watch {
    /// Watches the groups of a tree; does nothing unless it `is_on`.
    pub(crate) fn new(watched: Arc<Watched>, groups: &GroupTree, is_on: bool) -> Self {
        let mut watch = Self {
            states: vec![State::default(); watched.times.len()].into(),
            columns: vec![0; watched.times.len()].into(),
            tops: vec![OTHERS; watched.times.len()].into(),
            watched,
            is_on,
            turn: None,
            turn_since: Instant::default(),
        };
        watch.groups_changed(groups);
        watch
    }

    /// Adapts to the tree as it is now. A group keeps the column that it once got. A top-level group that comes when
    /// all are taken is counted with the others.
    pub(crate) fn groups_changed(&mut self, groups: &GroupTree) {
        self.columns.fill(0);
        self.tops.fill(OTHERS);
        for (id, _) in groups.iter() {
            let top = groups.chain(id).take_while(|(id, _)| *id != ROOT).last();
            let top = top.map_or(ROOT, |(id, _)| id);
            self.tops[id.index()] = self.column_of(top, 0..TOPS_MAX).unwrap_or(OTHERS);
            if top == id {
                self.columns[id.index()] = self.tops[id.index()];
            }
        }
    }

    /// A group is gone: its column is not reused, because requests that carry it may still be under way.
    pub(crate) fn group_gone(&mut self, id: GroupId) {
        let owner = u64::from(id.0) + 1;
        if let Some(column) = self.watched.columns.iter().find(|column| column.get() == owner) {
            column.set(GONE);
        }
        self.columns[id.index()] = 0;
        self.states[id.index()] = State::default();
        // Otherwise the next group of this number would inherit the turn.
        self.turn = self.turn.filter(|turn| *turn != id);
    }

    /// Records that a request is inserted.
    #[inline]
    pub(crate) fn inserted(&mut self, group: GroupId, bios: u32, now: Instant) {
        if !self.is_on {
            return;
        }
        let times = &self.watched.times[group.index()];
        if times.queued.get() == 0 {
            let state = &mut self.states[group.index()];
            times.empty_ns.add(now.since(state.since).0);
            *state = State {
                waits: true,
                since: now,
            };
        }
        times.queued.add(bios.into());
    }

    /// Records that the elevator has let the drive idle for a group.
    pub(crate) fn idled(&mut self, group: GroupId, time: Nanos) {
        if self.is_on {
            self.watched.times[group.index()].idle_ns.add(time.0);
        }
    }

    /// Records that a request is dispatched.
    #[inline]
    pub(crate) fn dispatched(&mut self, rq: &mut Request, now: Instant) {
        if !self.is_on {
            return;
        }
        let group = rq.group();
        let (ahead, column) = (self.column(self.turn.unwrap_or(ROOT)), self.column(group));
        let times = &self.watched.times[group.index()];
        let state = &mut self.states[group.index()];
        if state.waits {
            times.group_wait_ns.add(now.since(state.since).0);
            state.waits = false;
        }
        let queued = times.queued.get();
        debug_assert!(
            queued >= rq.bios.into(),
            "group {group}: out goes what never came in"
        );
        rq.stamp = Stamp::new(queued as u32, column, ahead);
        let left = queued - u64::from(rq.bios);
        times.queued.set(left);
        if left == 0 {
            state.since = now;
            times.dequeues.add(1);
        }
        if self.turn != Some(group) {
            if let Some(turn) = self.turn.replace(group) {
                let turn = &self.watched.times[turn.index()];
                turn.turn_ns.add(now.since(self.turn_since).0);
            }
            self.turn_since = now;
        }
    }

    /// The column that a group is counted in.
    #[inline]
    fn column(&mut self, group: GroupId) -> u8 {
        match self.columns[group.index()] {
            0 => self.column_of_nested(group),
            column => column,
        }
    }

    /// Decides it for a nested group at its first dispatch, so that groups without I/O take no column: one of its
    /// own, or its top-level group's if all are taken.
    #[cold]
    fn column_of_nested(&mut self, group: GroupId) -> u8 {
        let own = self.column_of(group, TOPS_MAX..OWNERS_MAX);
        let column = own.unwrap_or(self.tops[group.index()]);
        self.columns[group.index()] = column;
        column
    }

    /// The group's column, or the first of these that is free.
    fn column_of(&mut self, group: GroupId, among: Range<usize>) -> Option<u8> {
        let owner = u64::from(group.0) + 1;
        let columns = &self.watched.columns;
        let found = columns.iter().position(|column| column.get() == owner);
        let column = found.or_else(|| among.into_iter().find(|at| columns[*at].get() == 0))?;
        columns[column].set(owner);
        Some(column as u8 + 1)
    }
}

/// Number of top-level groups with a column of their own in the table of delays: the first ones.
const TOPS_MAX: usize = 16;
/// With the nested groups that have one: the first that did I/O.
pub(super) const OWNERS_MAX: usize = TOPS_MAX + 16;
/// The column of all other groups; 0 stands for no stamp.
pub(super) const OTHERS: u8 = OWNERS_MAX as u8 + 1;
const GONE: u64 = u64::MAX;
