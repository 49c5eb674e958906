//! Latency targets: a bound on the requests in flight of groups without a target, so that groups with a
//! target meet it. It is inside the gate, behind the elevator: requests of other groups that the elevator
//! dispatches beyond the bound are held here, in its order.
//!
//! A group with a target *answers* for it, and so do the groups below it that have none of their own. If more
//! than one of ten of their requests in a window were late, the others' bound is cut by a quarter, down to
//! one; if fewer than one of twenty, it grows by an eighth, until it is gone. An elevator that knows groups
//! (`bfq`) keeps the order itself: at the bound it is called only for clients that need not wait for others.
//!
//! The idea is that of Linux's io.latency controller: groups with slack are held back for groups that miss
//! their target. Here the amount is not configured: the bound follows from the misses.

use std::collections::VecDeque;

use crate::group::GroupTree;
use crate::ids::GroupId;
use crate::request::Request;
use crate::sched::overdue::Overdue;
use crate::time::{Instant, Nanos};

/// The bound on groups without a target, and the requests that it holds back.
pub(crate) struct Targets {
    /// By group: the target that it answers for.
    target_of: Box<[Option<Nanos>]>,
    /// By group: requests that passed here while there were targets, and have not ended.
    in_flight_of: Box<[u32]>,
    is_active: bool,
    /// Requests in flight of groups without a target.
    others: u32,
    /// Those among them that are out for much longer than usual: they do not count against the bound.
    overdue: Overdue,
    /// The bound on `others`; none for no bound.
    bound: Option<u32>,
    window: Window,
    held: VecDeque<Box<Request>>,
}

/// The counts since the last change of the bound.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    since: Instant,
    /// Requests with a target that have ended, and how many of them were late.
    ended: u32,
    late: u32,
    /// The most bounded requests in flight.
    peak: u32,
}

impl Targets {
    /// Makes the tables for the groups of a tree and `requests_max` requests.
    pub(crate) fn new(tree: &GroupTree, requests_max: usize) -> Self {
        let mut targets = Self {
            target_of: vec![None; tree.capacity()].into(),
            in_flight_of: vec![0; tree.capacity()].into(),
            is_active: false,
            others: 0,
            overdue: Overdue::default(),
            bound: None,
            window: Window::default(),
            held: VecDeque::with_capacity(requests_max),
        };
        targets.learn(tree);
        targets
    }

    /// Handles a change of targets, caps or the tree.
    ///
    /// A group with caps, its own or an ancestor's, answers for no target: its requests may be late because of
    /// the caps.
    pub(crate) fn learn(&mut self, tree: &GroupTree) {
        for (index, target) in self.target_of.iter_mut().enumerate() {
            let chain = || tree.chain(GroupId(index as u32));
            let is_capped = chain().any(|(_, node)| !node.caps.is_none());
            *target = chain()
                .find_map(|(_, node)| node.latency_target)
                .filter(|_| !is_capped);
        }
        self.is_active = self.target_of.iter().any(Option::is_some);
        if !self.is_active {
            self.bound = None;
        }
        let others = self.target_of.iter().zip(&self.in_flight_of);
        self.others = others
            .filter(|(target, _)| target.is_none())
            .map(|(_, count)| count)
            .sum();
    }

    /// Says whether groups without a target have as many requests in flight as they may.
    #[inline]
    pub(crate) fn is_reached(&self) -> bool {
        self.bound
            .is_some_and(|bound| self.overdue.punctual(self.others) >= bound)
    }

    /// Takes a request on its way to the driver: returns it if it may go now, otherwise holds it.
    #[inline]
    pub(crate) fn admit(&mut self, mut rq: Box<Request>) -> Option<Box<Request>> {
        rq.is_targeted = self.is_active;
        if !self.is_active {
            return Some(rq);
        }
        self.admit_counted(rq)
    }

    fn admit_counted(&mut self, rq: Box<Request>) -> Option<Box<Request>> {
        let has_target = self.target_of[rq.group().index()].is_some();
        if !has_target && self.is_reached() {
            self.held.push_back(rq);
            return None;
        }
        self.goes(&rq, has_target);
        Some(rq)
    }

    /// Takes the first held request, if it may go now.
    #[inline]
    pub(crate) fn next_held_back(&mut self) -> Option<Box<Request>> {
        if self.held.is_empty() || self.is_reached() {
            return None;
        }
        let rq = self.held.pop_front()?;
        self.goes(&rq, self.target_of[rq.group().index()].is_some());
        Some(rq)
    }

    /// Counts the return of a request that passed while there were targets and was issued at `issued_at`: it has
    /// ended, after `latency`, or is requeued.
    pub(crate) fn ended(&mut self, group: GroupId, issued_at: Instant, latency: Option<Nanos>, now: Instant) {
        self.in_flight_of[group.index()] -= 1;
        let Some(target) = self.target_of[group.index()] else {
            self.others -= 1;
            let time = latency.map(|_| now.since(issued_at));
            self.overdue.ended(issued_at, time);
            return;
        };
        if let Some(latency) = latency {
            self.window.ended += 1;
            self.window.late += u32::from(latency > target);
            self.end_window(now);
        }
    }

    /// When to look again although nothing ends: while the bound holds others, what is out may become overdue.
    pub(crate) fn next_wakeup(&self) -> Option<Instant> {
        self.is_reached().then(|| self.overdue.epoch_ends())
    }

    /// Checks whether groups with targets have become silent, and which requests are overdue; call it now and then.
    #[inline]
    pub(crate) fn look(&mut self, now: Instant) {
        if self.bound.is_some() {
            self.overdue.look(self.others, now);
        }
        if self.bound.is_some() && now.since(self.window.since) >= SILENCE {
            self.bound = None;
            self.window = Window {
                since: now,
                ..Window::default()
            };
        }
    }

    /// Says whether nothing is held.
    pub(crate) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Says whether requests are held back, or may be.
    pub(crate) fn keeps_back(&self) -> bool {
        self.bound.is_some()
    }

    /// Asserts that the counts agree.
    pub(crate) fn check_invariants(&self) {
        let of_others = self.target_of.iter().zip(&self.in_flight_of);
        let others: u32 = of_others
            .filter(|(target, _)| target.is_none())
            .map(|(_, count)| count)
            .sum();
        assert_eq!(others, self.others, "in flight of groups without a target");
    }

    #[inline]
    fn goes(&mut self, rq: &Request, has_target: bool) {
        self.in_flight_of[rq.group().index()] += 1;
        if !has_target {
            self.others += 1;
            self.overdue.issued();
        }
        self.window.peak = self.window.peak.max(self.others);
    }

    fn end_window(&mut self, now: Instant) {
        let Window {
            since,
            ended,
            late,
            peak,
        } = self.window;
        if ended < ENDED_MIN && now.since(since) < WINDOW_MAX {
            return;
        }
        self.window = Window {
            since: now,
            peak: self.others,
            ..Window::default()
        };
        if late * LATE_PART > ended {
            let from = self.bound.unwrap_or(peak).min(peak.max(1));
            self.bound = Some((from * 3 / 4).max(1));
        } else if let Some(bound) = self.bound.filter(|_| late * LATE_PART * 2 <= ended) {
            // A bound beyond the demand is no bound.
            let grown = bound + (bound / 8).max(1);
            self.bound = (grown <= peak.saturating_mul(2)).then_some(grown);
        }
    }
}

/// More than one late request in this many is too many.
const LATE_PART: u32 = 10;
/// A window ends after this many requests with a target, or after this time.
const ENDED_MIN: u32 = 32;
const WINDOW_MAX: Nanos = Nanos::from_millis(100);
/// If no request with a target has ended for this long, there is no bound.
const SILENCE: Nanos = Nanos::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bio::Bio;
    use crate::group::{ROOT, WEIGHT_DEFAULT};
    use crate::ids::ReactorId;

    const TARGET: Nanos = Nanos::from_micros(200);

    /// The root, a group with a target, one below it, and one without.
    fn tree() -> GroupTree {
        let mut tree = GroupTree::new(4);
        let answers = tree.create(ROOT, WEIGHT_DEFAULT).unwrap();
        tree.create(answers, WEIGHT_DEFAULT).unwrap();
        tree.create(ROOT, WEIGHT_DEFAULT).unwrap();
        tree.set_latency_target(answers, Some(TARGET)).unwrap();
        tree
    }

    fn rq(group: u32) -> Box<Request> {
        let bio = Bio {
            group: GroupId(group),
            len: 4096,
            ..Bio::default()
        };
        Request::for_test(ReactorId(0), bio, 0)
    }

    /// A window of requests with a target that take so long, each in its own millisecond.
    fn window(targets: &mut Targets, from_ms: u64, latency: Nanos) {
        for n in 0..u64::from(ENDED_MIN) {
            assert!(targets.admit(rq(2)).is_some(), "who has a target always goes");
            let now = Instant(0) + Nanos::from_millis(from_ms + n);
            targets.ended(GroupId(2), now - latency, Some(latency), now);
            targets.check_invariants();
        }
    }

    #[test]
    fn others_are_held_while_a_target_is_missed_and_let_go_when_it_is_met() {
        let mut targets = Targets::new(&tree(), 64);
        for _ in 0..16 {
            assert!(targets.admit(rq(3)).is_some());
        }
        window(&mut targets, 0, TARGET + TARGET);
        assert_eq!(targets.bound, Some(12), "three quarters of what was in flight");
        assert!(targets.admit(rq(3)).is_none());
        for _ in 0..4 {
            targets.ended(GroupId(3), Instant(0), Some(Nanos(1)), Instant(0));
            assert!(targets.next_held_back().is_none(), "12 are in flight still");
        }
        targets.ended(GroupId(3), Instant(0), Some(Nanos(1)), Instant(0));
        assert!(targets.next_held_back().is_some());
        for round in 1..20 {
            window(&mut targets, 100 * round, TARGET);
        }
        assert_eq!(targets.bound, None, "a target that is met bounds nobody");
    }

    #[test]
    fn one_request_of_others_goes_whatever_is_missed_and_all_when_nobody_asks_any_more() {
        let mut targets = Targets::new(&tree(), 64);
        for round in 0..50 {
            window(&mut targets, 100 * round, TARGET + TARGET);
        }
        assert_eq!(targets.bound, Some(1));
        assert!(targets.admit(rq(3)).is_some());
        assert!(targets.admit(rq(3)).is_none());
        targets.look(Instant(0) + Nanos::from_secs(60));
        assert!(targets.next_held_back().is_some());
    }

    #[test]
    fn group_with_a_target_goes_when_the_others_have_their_bound() {
        let mut targets = Targets::new(&tree(), 64);
        (0..8).for_each(|_| assert!(targets.admit(rq(3)).is_some()));
        window(&mut targets, 0, TARGET + TARGET);
        assert_eq!((targets.bound, targets.is_reached()), (Some(6), true));
        assert!(targets.admit(rq(2)).is_some() && targets.admit(rq(3)).is_none());
    }

    #[test]
    fn group_with_caps_answers_for_nothing_and_a_target_taken_off_lifts_the_bound() {
        let mut tree = tree();
        let mut targets = Targets::new(&tree, 64);
        (0..8).for_each(|_| assert!(targets.admit(rq(3)).is_some()));
        window(&mut targets, 0, TARGET + TARGET);
        assert!(targets.bound.is_some());
        tree.set_latency_target(GroupId(1), None).unwrap();
        targets.learn(&tree);
        assert_eq!((targets.bound, targets.others), (None, 8));
        let caps = crate::group::Caps::default().with(crate::group::CapKind::Iops, 100);
        tree.set_latency_target(GroupId(1), Some(TARGET)).unwrap();
        tree.set_caps(GroupId(1), caps).unwrap();
        targets.learn(&tree);
        assert!(!targets.is_active && targets.target_of.iter().all(Option::is_none));
    }

    #[test]
    fn slow_request_of_others_holds_them_for_milliseconds() {
        let mut targets = Targets::new(&tree(), 64);
        assert!(targets.admit(rq(3)).is_some());
        for round in 0..50 {
            window(&mut targets, 100 * round, TARGET + TARGET);
        }
        assert!(targets.is_reached() && targets.admit(rq(3)).is_none());
        let held_at = Instant(0) + Nanos::from_secs(5);
        targets.look(held_at);
        let wakes_at = targets.next_wakeup().expect("others are held");
        assert!(wakes_at.since(held_at) <= Nanos::from_millis(5));
        targets.look(wakes_at);
        assert!(targets.next_held_back().is_some(), "the slow one does not count");
    }
}
