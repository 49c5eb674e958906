//! The throttle: it holds requests of groups with caps until they may go on to the elevator, or to the
//! driver if there is none. It is inside the gate, in front of the elevator, so there is one for the
//! whole queue; `meter` computes the times. Requests of groups without caps and without capped ancestors
//! never come here.
//!
//! ```text
//!  add ─► line (a group's reads, its writes, or its flushes; FIFO) ─► waits at a stop ─► ... ─► all caps of the chain let it pass ─► out
//! ```
//! At a stop, lines wait for one group's caps, in turn. A line waits at one stop at a time, that of the cap in
//! its chain which will let it pass last; a thousand lines below one cap cost one timer.

mod meter;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::bio::Op;
use crate::group::{Caps, Debts, GroupTree};
use crate::ids::GroupId;
use crate::limits::Limits;
use crate::qos::lines::Lines;
use crate::request::Request;
use crate::time::Instant;
use crate::trace::{Step, Tracer};
use meter::Meter;

/// Holds requests back for the caps of groups. Bounded: it holds at most the requests that it was made for.
pub(crate) struct Throttle {
    meters: Box<[Option<Box<Meter>>]>,
    /// Whether the group, or one of its ancestors, has caps.
    is_capped: Box<[bool]>,
    /// For each group: one line for each of [`LINES`].
    lines: Lines<Box<Request>>,
    /// The line that follows a line at its stop.
    next: Box<[u32]>,
    /// Since when a line has had requests.
    since: Box<[Instant]>,
    stops: Box<[Stop]>,
    /// Stops with lines, each once, with a time not later than its caps can let a request pass.
    due: BinaryHeap<Reverse<Due>>,
    is_active: bool,
    /// Number of requests that have passed, so that stops that become due together take turns.
    passed: u64,
    /// What the drive has to write, for the charge.
    limits: Limits,
}

/// Lines that wait for the caps of one group and direction, in turn.
#[derive(Clone, Copy, Debug)]
struct Stop {
    first: u32,
    last: u32,
    /// The number of the request that passed last.
    passed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Due {
    at: Instant,
    /// Among several, the one that has waited longest goes first.
    passed: u64,
    stop: u32,
}

impl Throttle {
    /// Makes everything for up to `requests_max` requests of the groups of a tree, with the caps that it has, on a drive with
    /// these limits.
    pub(crate) fn new(tree: &GroupTree, requests_max: usize, limits: &Limits) -> Self {
        let lines = LINES.len() * tree.capacity();
        let mut throttle = Self {
            meters: (0..tree.capacity()).map(|_| None).collect(),
            is_capped: vec![false; tree.capacity()].into(),
            lines: Lines::new(lines, requests_max),
            next: vec![NONE; lines].into(),
            since: vec![Instant(0); lines].into(),
            stops: vec![Stop::EMPTY; lines].into(),
            due: BinaryHeap::with_capacity(lines),
            is_active: false,
            passed: 0,
            limits: limits.clone(),
        };
        for (id, node) in tree.iter() {
            throttle.set_caps(id, node.caps, Instant(0));
        }
        throttle.retime(tree);
        throttle
    }

    /// Says whether any request may need to come here, or is here.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.is_active
    }

    /// Says whether requests of a group must come here.
    #[inline]
    pub(crate) fn concerns(&self, group: GroupId) -> bool {
        self.is_capped[group.index()]
    }

    /// How many requests it holds.
    pub(crate) fn held_back(&self) -> usize {
        self.lines.count()
    }

    /// Says whether it holds nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.lines.count() == 0
    }

    /// Changes a group's caps. Call [`Throttle::retime`] afterwards.
    pub(crate) fn set_caps(&mut self, group: GroupId, caps: Caps, now: Instant) {
        let meter = &mut self.meters[group.index()];
        if caps.is_none() {
            *meter = None;
        } else {
            meter.get_or_insert_default().set(caps, now);
        }
    }

    /// A group's debts to its own caps.
    pub(crate) fn debts(&self, group: GroupId, now: Instant) -> Debts {
        let meter = self.meters[group.index()].as_ref();
        meter.map_or_else(Debts::default, |meter| meter.debts(now))
    }

    /// Adds to a group's debts to its own caps. Call [`Throttle::retime`] afterwards.
    pub(crate) fn owe(&mut self, group: GroupId, debts: &Debts, now: Instant) {
        if let Some(meter) = &mut self.meters[group.index()] {
            meter.owe(debts, now);
        }
    }

    /// Handles a change of caps or of the tree: the next [`Throttle::release`] checks all waiting requests again.
    pub(crate) fn retime(&mut self, tree: &GroupTree) {
        for (index, is_capped) in self.is_capped.iter_mut().enumerate() {
            let mut chain = tree.chain(GroupId(index as u32));
            *is_capped = chain.any(|(id, _)| self.meters[id.index()].is_some());
        }
        let mut waiting = Vec::new();
        while let Some(Reverse(due)) = self.due.pop() {
            waiting.extend(std::iter::from_fn(|| self.leave_stop(due.stop)));
        }
        // Requests that wait without caps go with the next release; the next change then finds none.
        self.is_active = !waiting.is_empty() || self.is_capped.contains(&true);
        for line in waiting {
            self.wait_at(line, line, Instant(0));
        }
    }

    /// Takes a request of a group with caps; passes it on at once if no cap holds it.
    pub(crate) fn add(
        &mut self,
        rq: Box<Request>,
        tree: &GroupTree,
        now: Instant,
        tracer: Option<&Tracer>,
        out: &mut impl FnMut(Box<Request>),
    ) {
        let line = line_of(&rq);
        let is_first = self.lines.is_empty(line);
        if let Some(tracer) = tracer.filter(|_| !is_first) {
            tracer.step(Step::HeldBack, &rq, now);
        }
        let inserted_at = rq.inserted_at;
        self.lines.push(line, rq);
        if !is_first {
            return;
        }
        self.since[line as usize] = inserted_at;
        self.place(line, tree, now, out);
        if let (Some(tracer), Some(rq)) = (tracer, self.lines.first(line)) {
            tracer.step(Step::HeldBack, rq, now);
        }
    }

    /// Passes on the first request of a line that was empty, or makes the line wait.
    fn place(&mut self, line: u32, tree: &GroupTree, now: Instant, out: &mut impl FnMut(Box<Request>)) {
        if let Some((stop, at)) = self.obstacle(line, tree, now) {
            self.wait_at(line, stop, at);
        } else if let Some(stop) = self.busy_stop(line, tree) {
            // It would go before the lines that wait.
            self.wait_at(line, stop, now);
        } else {
            self.pass(line, None, tree, now, out);
        }
    }

    /// Passes on the requests that the caps allow by `now`.
    pub(crate) fn release(&mut self, tree: &GroupTree, now: Instant, out: &mut impl FnMut(Box<Request>)) {
        while let Some(Reverse(due)) = self.due.peek().filter(|due| due.0.at <= now).copied() {
            self.due.pop();
            self.serve(due.stop, tree, now, out);
        }
    }

    /// Passes on all requests, regardless of the caps; they are charged, so the averages hold afterwards.
    pub(crate) fn release_all(&mut self, tree: &GroupTree, now: Instant, out: &mut impl FnMut(Box<Request>)) {
        while let Some(Reverse(due)) = self.due.pop() {
            while let Some(line) = self.leave_stop(due.stop) {
                while !self.lines.is_empty(line) {
                    self.pass(line, None, tree, now, out);
                }
            }
        }
    }

    /// The time at which [`Throttle::release`] must be called next.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.due.peek().map(|due| due.0.at)
    }

    /// Asserts that every request is in a line, and every line with requests waits at one stop that is due.
    pub(crate) fn check_invariants(&self) {
        let mut waits = vec![false; self.next.len()];
        let mut is_due = vec![false; self.stops.len()];
        for Reverse(due) in &self.due {
            assert!(
                !std::mem::replace(&mut is_due[due.stop as usize], true),
                "stop {} is due twice",
                due.stop
            );
        }
        for (number, stop) in self.stops.iter().enumerate() {
            assert_eq!(
                is_due[number],
                stop.first != NONE,
                "stop {number}: due, and has lines"
            );
            for line in links(stop.first, |at| self.next[at]) {
                assert!(
                    !std::mem::replace(&mut waits[line], true),
                    "line {line} waits twice"
                );
            }
        }
        for (line, waits) in waits.into_iter().enumerate() {
            assert_eq!(
                waits,
                !self.lines.is_empty(line as u32),
                "line {line}: waits, and has requests"
            );
        }
        self.lines.check_invariants();
    }

    /// Lets the lines at a stop pass in turn, while its caps allow.
    fn serve(&mut self, stop: u32, tree: &GroupTree, now: Instant, out: &mut impl FnMut(Box<Request>)) {
        while self.stops[stop as usize].first != NONE {
            let ready = self.ready_at(stop);
            if ready > now {
                self.arm(stop, ready);
                return;
            }
            let line = self.leave_stop(stop).expect("looked at above");
            if let Some((other, at)) = self.obstacle(line, tree, now) {
                self.wait_at(line, other, at);
                continue;
            }
            self.passed += 1;
            self.stops[stop as usize].passed = self.passed;
            self.pass(line, Some(stop), tree, now, out);
            if !self.lines.is_empty(line) {
                self.join_stop(line, stop);
            }
        }
    }

    /// Passes on the first request of a line, which has waited at `stop`, and charges the whole chain for it.
    fn pass(
        &mut self,
        line: u32,
        stop: Option<u32>,
        tree: &GroupTree,
        now: Instant,
        out: &mut impl FnMut(Box<Request>),
    ) {
        let rq = self.lines.pop(line).expect("lines at stops have requests");
        for (id, _) in tree.chain(rq.group()) {
            if let Some(meter) = &mut self.meters[id.index()] {
                meter.charge(
                    &rq,
                    &self.limits,
                    self.since[line as usize],
                    stop.is_none_or(|stop| group_of(stop) == id),
                    now,
                );
            }
        }
        out(rq);
    }

    /// The stop in a line's chain whose caps will let it pass last, and when; none if all let it pass.
    fn obstacle(&self, line: u32, tree: &GroupTree, now: Instant) -> Option<(u32, Instant)> {
        let stops = self.stops_of(line, tree);
        let (stop, at) = stops
            .map(|stop| (stop, self.ready_at(stop)))
            .max_by_key(|(_, at)| *at)?;
        (at > now).then_some((stop, at))
    }

    /// A stop in a line's chain at which lines wait.
    fn busy_stop(&self, line: u32, tree: &GroupTree) -> Option<u32> {
        self.stops_of(line, tree)
            .find(|&stop| self.stops[stop as usize].first != NONE)
    }

    /// The stops of the capped groups in a line's chain.
    fn stops_of(&self, line: u32, tree: &GroupTree) -> impl Iterator<Item = u32> {
        let chain = tree.chain(group_of(line));
        let capped = chain.filter(|(id, _)| self.meters[id.index()].is_some());
        capped.map(move |(id, _)| number(id, op_of(line)))
    }

    /// When the caps of a stop let a request pass.
    fn ready_at(&self, stop: u32) -> Instant {
        let meter = self.meters[group_of(stop).index()].as_ref();
        meter.map_or(Instant(0), |meter| meter.ready_at(op_of(stop)))
    }

    fn wait_at(&mut self, line: u32, stop: u32, at: Instant) {
        if self.stops[stop as usize].first == NONE {
            self.arm(stop, at);
        }
        self.join_stop(line, stop);
    }

    fn arm(&mut self, stop: u32, at: Instant) {
        let passed = self.stops[stop as usize].passed;
        self.due.push(Reverse(Due { at, passed, stop }));
    }

    fn join_stop(&mut self, line: u32, stop: u32) {
        self.next[line as usize] = NONE;
        let stop = &mut self.stops[stop as usize];
        match std::mem::replace(&mut stop.last, line) {
            NONE => stop.first = line,
            last => self.next[last as usize] = line,
        }
    }

    fn leave_stop(&mut self, stop: u32) -> Option<u32> {
        let stop = &mut self.stops[stop as usize];
        let line = stop.first;
        if line == NONE {
            return None;
        }
        stop.first = self.next[line as usize];
        if stop.first == NONE {
            stop.last = NONE;
        }
        Some(line)
    }
}

impl Stop {
    const EMPTY: Self = Self {
        first: NONE,
        last: NONE,
        passed: 0,
    };
}

fn line_of(rq: &Request) -> u32 {
    number(rq.group(), rq.op())
}

/// The number of a group's line, or stop, for an operation.
fn number(group: GroupId, op: Op) -> u32 {
    let at = match op {
        Op::Read => 0,
        Op::Write | Op::Discard | Op::WriteZeroes => 1,
        Op::Flush => 2,
    };
    group.0 * LINES.len() as u32 + at
}

fn group_of(number: u32) -> GroupId {
    GroupId(number / LINES.len() as u32)
}

/// The operation that stands for those of a line.
fn op_of(number: u32) -> Op {
    LINES[number as usize % LINES.len()]
}

/// Follows links from `first`.
fn links(first: u32, next: impl Fn(usize) -> u32) -> impl Iterator<Item = usize> {
    let some = |at: u32| (at != NONE).then_some(at as usize);
    std::iter::successors(some(first), move |&at| some(next(at)))
}

/// A group's lines, each by an operation. Flushes have their own: they have no bytes, so they do not wait
/// behind writes for a cap on bytes.
const LINES: [Op; 3] = [Op::Read, Op::Write, Op::Flush];
const NONE: u32 = u32::MAX;

#[cfg(test)]
mod tests;
