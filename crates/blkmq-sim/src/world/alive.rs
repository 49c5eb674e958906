//! The checks that a history still makes progress: no wake-up was lost, nothing waits longer than it may,
//! and at the end everything is at rest.

use blkmq_core::group::ROOT;
use blkmq_core::ids::{GroupId, ReactorId};
use blkmq_core::queue::Queue;
use blkmq_core::stat::GroupStats;
use blkmq_core::time::{Instant, Nanos};

use super::World;
use crate::control::CONTROLLED;
use crate::drive::model::Model;
use crate::drive::{Drive, Spec};
use crate::oracle::Oracle;
use crate::reactor::Phase;
use crate::rng::Ppm;

/// A wait for the scheduler alone: nothing was issued since, although depth, tags and requests are free for a bio.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hold {
    token: u64,
    since: Instant,
    /// How many requests the drives had taken then.
    issued: u64,
}

impl World {
    /// After an event: all reactors may sleep only if each that has a reason to run will be woken.
    pub(super) fn check_alive(&self) {
        let now = self.stage.now.get();
        let (ended, under_way) = {
            let oracle = self.stage.oracle.borrow();
            (oracle.counts.ended, oracle.under_way())
        };
        let (last, since) = self.last_end.get();
        if ended != last || under_way == 0 {
            self.last_end.set((ended, now));
        } else if now.since(since) > self.patience() {
            self.fail_stuck(&format!("nothing has ended for {}", now.since(since)));
        }
        let waits = self.control.borrow().waits_since();
        if let Some(since) = waits
            && now.since(since) > self.patience()
        {
            self.fail_stuck("the queue does not become still");
        }
        if under_way > 0 && !self.control.borrow().is_holding() {
            self.check_wake_ups(now);
        } else {
            self.hold.set(None);
        }
    }

    /// Before the time becomes `at`: no request waits beyond the bound of any hold while the drive has room and its
    /// group has not all the requests out that may hang. In that time something else must be issued at least; whether a group has its due is asserted by the model of
    /// fair shares, which knows the weights.
    pub(super) fn check_hold(&self, at: Instant) {
        let Some(hold) = self.hold.get() else { return };
        if hold.issued != self.stage.oracle.borrow().counts.requests {
            self.hold.set(None);
        } else if at.since(hold.since) > self.hold_max() {
            self.fail_stuck(&format!(
                "nothing is issued for {} although depth is free for bio {}",
                at.since(hold.since),
                hold.token
            ));
        }
    }

    /// The longest hold in the table of `docs/architecture.md` that ends without an end, and the lateness of timers.
    fn hold_max(&self) -> Nanos {
        let seeks = |(_, drive): (_, &Spec)| matches!(drive.model, Model::Rotating { .. });
        match self.setup.drives().any(seeks) {
            true => Self::HOLD_MAX_OF_SEEKS,
            false => Self::HOLD_MAX,
        }
    }

    /// If bios are under way and no reactor runs, every request that could be issued must have
    /// been. If the drive is also at rest, only a timer can continue the work, and it must be near.
    fn check_wake_ups(&self, now: Instant) {
        if self.kicks.get() > 0 {
            return;
        }
        let mut next: Option<Instant> = None;
        let mut away = Vec::new();
        for reactor in &self.reactors {
            let reactor = reactor.borrow();
            match reactor.phase {
                Phase::Asleep => next = [next, reactor.timer].into_iter().flatten().min(),
                Phase::Away => away.push(reactor.id),
                _ => return,
            }
        }
        let is_soon = next.is_some_and(|at| at <= now + Self::RERUN);
        if self.queues.iter().any(|queue| queue.held_for_caps() != Ok(0)) {
            // Caps hold back what could be issued, so there must be a timer. It may be that of a
            // reactor that is away.
            self.hold.set(None);
            if !is_soon && next.is_none() && !self.stage.any_drive(Drive::is_busy) && away.is_empty() {
                self.fail_stuck("requests wait for caps, and nobody has a timer");
            }
            return;
        }
        self.check_work_conserving(&away, is_soon);
        if is_soon {
            return;
        }
        // The bios of a reactor that is away wait for it, and may occupy the depth that others
        // need.
        let hangs = self.stage.paths.as_ref().is_some_and(|paths| paths.hangs());
        let acts = self.stage.any_drive(|drive| drive.is_busy() || drive.lost() > 0);
        let excused = acts || !away.is_empty() || hangs;
        let drives = self.stage.drives.iter();
        let uncommitted: usize = drives.map(|drive| drive.borrow().uncommitted()).sum();
        if !excused {
            self.fail_stuck(&format!(
                "a wake-up was lost: all sleep, the drive is at rest ({uncommitted} requests were issued and never \
                 committed), next timer {next:?}"
            ));
        }
    }

    /// If depth is free and all reactors sleep, no request may wait that could be issued. A drive
    /// that refuses requests is exempt: it decides itself when it must be asked again. So is an
    /// elevator that knows what it waits for.
    ///
    /// With a timer that is due soon, this only begins or ends a [`Hold`].
    fn check_work_conserving(&self, away: &[ReactorId], is_soon: bool) {
        let refuses = |(_, drive): (_, &Spec)| {
            let faults = &drive.faults;
            let is_full = drive.slots < self.setup.depth;
            faults.resource > Ppm::NEVER || faults.device_resource > Ppm::NEVER || is_full
        };
        if self.stage.paths.is_some() || self.setup.drives().any(refuses) {
            return;
        }
        // Beyond that requests are short, and a group waits for its share of them.
        let plenty = self.setup.requests_per_reactor.div_ceil(2);
        let held_back = self.stage.oracle.borrow().held_back(plenty, away);
        let within_due =
            held_back.and_then(|_| self.stage.oracle.borrow().held_back_within_due(plenty, away));
        let hold = within_due.map(|token| Hold {
            token,
            since: self.stage.now.get(),
            issued: self.stage.oracle.borrow().counts.requests,
        });
        // What waits may change during a hold, but not since when nothing is issued.
        self.hold.set(hold.map(|hold| self.hold.get().unwrap_or(hold)));
        let keeps_back = || is_soon || self.queues.iter().any(|queue| queue.keeps_back());
        if let Some(token) = held_back.filter(|_| !keeps_back()) {
            self.fail_stuck(&format!(
                "all sleep with depth free, but bio {token} has not been issued"
            ));
        }
    }

    /// At the end nothing may be left anywhere.
    pub(super) fn check_rest(&self) {
        let mut oracle = self.stage.oracle.borrow_mut();
        let in_flight = oracle.in_flight();
        if in_flight > 0 {
            oracle.fail(format!(
                "all bios have ended, but {in_flight} requests are at the drive"
            ));
        }
        for reactor in &self.reactors {
            let reactor = reactor.borrow();
            reactor.check_invariants();
            if reactor.outstanding() > 0 {
                oracle.fail(format!(
                    "reactor {} counts {} bios under way at the end",
                    reactor.id,
                    reactor.outstanding()
                ));
            }
        }
        if let Some(fault) = self.stage.paths.as_ref().and_then(|paths| paths.fault_at_rest()) {
            oracle.fail(fault);
        }
        self.check_statistics(&mut oracle);
        for queue in &self.queues {
            let started = queue.outstanding();
            if started > 0 {
                oracle.fail(format!(
                    "the queue counts {started} requests under way at the end"
                ));
            }
            if let Err(fault) = check_sums(queue) {
                oracle.fail(format!("statistics at rest: {fault}"));
            }
        }
    }

    /// The sum of the service of all groups, removed ones included, must be the whole service.
    fn check_statistics(&self, oracle: &mut Oracle) {
        let setup = &self.setup;
        if setup.control.groups == 0 || setup.power_cuts > 0 {
            return;
        }
        let ios = |stats: GroupStats| stats.total().ios;
        let of = |id| {
            let (own, gone) = (
                self.queues[CONTROLLED].group_stats(id),
                self.queues[CONTROLLED].group_stats_of_the_gone(id),
            );
            ios(own) + ios(gone)
        };
        // This also includes what was reported since the gate was last entered, where counting
        // happens inside it.
        let whole = self.queues[CONTROLLED].group_stats_recursive(GroupId(0));
        let counted: u64 = (0..super::boot::GROUPS).map(|id| of(GroupId(id))).sum();
        let done = oracle.counts.requests + oracle.counts.merged - oracle.counts.requeues;
        if whole.map(ios) != Ok(counted) {
            oracle.fail(format!(
                "the root with all below it has not the {counted} bios of all groups"
            ));
        }
        if counted != done {
            oracle.fail(format!(
                "the groups' statistics add up to {counted} parts of bios, {done} have ended"
            ));
        }
    }

    pub(super) fn fail_stuck(&self, what: &str) {
        let mut oracle = self.stage.oracle.borrow_mut();
        let under_way = oracle.under_way();
        let some = oracle.some_under_way();
        let in_flight = oracle.in_flight();
        let phases: Vec<Phase> = self.reactors.iter().map(|r| r.borrow().phase).collect();
        oracle.fail(format!(
            "{what}; {under_way} bios under way ({some:?}), {in_flight} requests at the drive, reactors {phases:?}"
        ));
    }

    fn patience(&self) -> Nanos {
        self.setup.patience
    }

    /// How far away a timer may be when only time can continue the work: the delay after the answer
    /// `Resource`, in whole microseconds.
    const RERUN: Nanos = Nanos::from_micros(3_002);
    /// A probe drains for 50 ms at most; a reactor is preempted for 3 ms, and a timer is late by some µs.
    const HOLD_MAX: Nanos = Nanos::from_millis(54);
    /// On a drive that seeks, a queue keeps its turn for `timeout_sync`, and a usual request takes long.
    const HOLD_MAX_OF_SEEKS: Nanos = Nanos::from_millis(500);
}

/// At rest every sum must be right, whichever shard counted.
fn check_sums(queue: &Queue) -> Result<(), String> {
    let all = queue
        .group_stats_recursive(ROOT)
        .map_err(|_| "somebody is inside the gate")?;
    let mut own = GroupStats::default();
    for group in (0..super::boot::GROUPS).map(GroupId) {
        own.add(&queue.group_stats(group));
        own.add(&queue.group_stats_of_the_gone(group));
    }
    let total = all.total();
    let events = queue.event_stats();
    let (first, second) = (all.synchronous(), all.asynchronous());
    let waited: u64 = queue.delays().pairs.iter().map(|(_, _, waited)| waited.0).sum();
    let sums = [
        ("recursive and the groups' own bios", total.ios, own.total().ios),
        (
            "recursive and the groups' own waits",
            total.wait_ns,
            own.total().wait_ns,
        ),
        ("synchronous and asynchronous", first.ios + second.ios, total.ios),
        ("queued", all.queued, 0),
        ("inserted and ended", total.inserted, total.ios),
        (
            "dispatched with requeues and issued",
            total.ios - total.merged + events.requeued,
            events.issued,
        ),
        ("device times counted", all.device.count(), total.ios),
    ];
    for (what, one, other) in sums {
        if one != other {
            return Err(format!("{what}: {one} and {other}"));
        }
    }
    if waited > total.wait_ns {
        return Err(format!(
            "{waited} ns behind others, of {} ns in all",
            total.wait_ns
        ));
    }
    Ok(())
}
