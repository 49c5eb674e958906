//! The gate around the elevator, and the work of the one dispatcher inside it: it takes all reactors'
//! insertions and completions into the elevator, and dispatches requests while the depth allows. `local`
//! enters the gate, issues dispatched requests, and leaves. On the way in, requests of groups with caps
//! stop at `throttle`; without an elevator no others come here. On the way out, `share` holds requests
//! beyond a disk's share of shared tags, and `target` holds requests for the sake of a latency target.
//!
//! ```text
//!  insert lists ─► throttle ─► elevator ─► share ─► target ─► the dispatcher, or back to the requeue list, which goes first
//! ```

use std::collections::VecDeque;

use blkmq_sync::spsc::Consumer;

use crate::group::GroupTree;
use crate::ids::{DiskId, GroupId};
use crate::qos::share::Shares;
use crate::qos::target::Targets;
use crate::qos::throttle::Throttle;
use crate::request::{Request, State};
use crate::sched::{Elevator, GroupAware, InsertAt, Note};
use crate::stat::{Stats, Watch};
use crate::time::Instant;
use crate::trace::Tracer;

/// Which reactors dispatch from an elevator that is not multi-queue aware.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dispatch {
    /// One dispatcher at a time, for all reactors, to its own hardware context. A reactor that finds another
    /// one dispatching leaves its insertions and completions to that one and continues.
    #[default]
    Single,
    /// An insertion runs its submitter's hardware context, a batch of completions runs all contexts. Each
    /// context waits for the elevator, takes one request at a time and issues it to its own driver, outside
    /// of the elevator. Linux until 5.10 did this where all contexts were run at completions: for SCSI, and
    /// for `bfq` whenever the drive had become empty. It measures what `Single` gains. It costs a run of every
    /// context per batch of completions, and requests are not issued in the order of decision.
    #[cfg(feature = "baselines")]
    EveryContext,
    /// As `EveryContext`, but a batch of completions runs only its own context.
    #[cfg(feature = "baselines")]
    OwnContext,
}

/// A reactor's report about a request that the elevator gave out.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Report {
    /// It has ended.
    Ended(Note, DiskId),
    /// It returns through the insert list; with its group and when it was issued, if `target` has counted it.
    Requeued(DiskId, Option<(GroupId, Instant)>),
}

/// The state that the gate protects: the elevator, the receiving ends of all reactors' lists, and the count
/// against the depth.
pub(crate) struct GateState {
    pub(crate) elevator: Option<Box<dyn Elevator>>,
    /// Whether the elevator divides the drive among groups ([`crate::sched::ElevatorType::knows_groups`]).
    pub(crate) knows_groups: bool,
    pub(crate) inserts: Vec<Consumer<Box<Request>>>,
    pub(crate) reports: Vec<Consumer<Report>>,
    /// Requests that the elevator gave out and whose end has not been reported.
    pub(crate) in_flight: u32,
    /// The depth that the elevator knows; 0 for none.
    pub(crate) depth_told: u32,
    /// Requests among these that a driver, or a missing tag, pushed back: the next dispatcher begins with them.
    pub(crate) requeue_list: VecDeque<Box<Request>>,
    /// Each disk's share of a shared tag set.
    pub(crate) shares: Shares,
    /// Holds back groups without a latency target for groups that have one.
    pub(crate) targets: Targets,
    /// The tenant tree.
    pub(crate) groups: GroupTree,
    /// Which groups wait, and since when.
    pub(crate) watch: Watch,
    /// Removed groups whose number is not free yet, each with the grace period that must pass first (`sw_ctx`), in order.
    pub(crate) leaving: VecDeque<(GroupId, u64)>,
    /// Holds requests back for the caps of their groups.
    pub(crate) throttle: Throttle,
    /// Requests that the caps let pass and that bypass the elevator: flushes, and all requests if there is no
    /// elevator. Empty outside of a pass.
    pub(crate) passed: VecDeque<Box<Request>>,
}

impl GateState {
    /// Takes in what all reactors have published, and the requests that the caps let pass by `now`: all of them,
    /// if the queue `drains`.
    pub(crate) fn fold(&mut self, stats: &Stats, drains: bool, now: Instant, tracer: Option<&Tracer>) {
        self.shares.look(now);
        self.targets.look(now);
        self.fold_reports(stats);
        self.count_idle();
        if self.throttle.is_active() {
            return self.fold_through_caps(stats, drains, now, tracer);
        }
        for list in &mut self.inserts {
            list.drain_announced(
                |rq| rq.fetch(),
                |rq| match &mut self.elevator {
                    Some(elevator) if !rq.is_flush => insert(
                        elevator.as_mut(),
                        &mut self.shares,
                        &mut self.watch,
                        rq,
                        stats,
                        now,
                    ),
                    _ => self.passed.push_back(rq),
                },
            );
        }
    }

    #[inline(never)]
    fn fold_through_caps(&mut self, stats: &Stats, drains: bool, now: Instant, tracer: Option<&Tracer>) {
        let Self {
            elevator,
            inserts,
            groups,
            throttle,
            passed,
            shares,
            watch,
            ..
        } = self;
        let mut go_on = |rq: Box<Request>| match elevator {
            Some(elevator) if !rq.is_flush => insert(elevator.as_mut(), shares, watch, rq, stats, now),
            _ => passed.push_back(rq),
        };
        for list in inserts {
            list.drain_announced(
                |rq| rq.fetch(),
                |rq| {
                    // A request that comes back from the driver has passed its caps.
                    if rq.retries == 0 && throttle.concerns(rq.group()) {
                        throttle.add(rq, groups, now, tracer, &mut go_on);
                    } else {
                        go_on(rq);
                    }
                },
            );
        }
        if drains {
            throttle.release_all(groups, now, &mut go_on);
        } else {
            throttle.release(groups, now, &mut go_on);
        }
    }

    /// The elevator, if it knows groups.
    pub(crate) fn group_aware(&mut self) -> Option<&mut dyn GroupAware> {
        self.elevator.as_mut()?.group_aware()
    }

    /// Counts the time for which the elevator let the drive idle.
    pub(crate) fn count_idle(&mut self) {
        if let Some(elevator) = self.elevator.as_mut().and_then(|elevator| elevator.group_aware()) {
            elevator.drain_idled(&mut |group, time| self.watch.idled(group, time));
        }
    }

    /// Takes in the ends that all reactors have published.
    pub(crate) fn fold_reports(&mut self, stats: &Stats) {
        let Some(elevator) = &mut self.elevator else {
            return;
        };
        for list in &mut self.reports {
            list.drain(|report| {
                self.in_flight -= 1;
                match report {
                    Report::Ended(note, disk) => {
                        self.shares.ended(disk);
                        update_targets(&mut self.targets, &note, self.knows_groups);
                        count_end(stats, &note);
                        elevator.completed(&note);
                    }
                    Report::Requeued(disk, group) => {
                        self.shares.ended(disk);
                        if let Some((group, issued_at)) = group {
                            self.targets.ended(group, issued_at, None, issued_at);
                        }
                    }
                }
            });
        }
    }

    /// Dispatches the next request: one that was pushed back, else the elevator's choice, unless `depth` are in
    /// flight; or the next one that needs no elevator.
    pub(crate) fn dispatch(&mut self, depth: u32, stats: &Stats, now: Instant) -> Option<Box<Request>> {
        if let Some(rq) = self.requeue_list.pop_front() {
            return Some(rq);
        }
        if let Some(mut rq) = self.passed.pop_front() {
            rq.state = State::Dispatched;
            return Some(rq);
        }
        let elevator = self.elevator.as_mut()?;
        if self.in_flight >= depth {
            return None;
        }
        if depth != self.depth_told {
            elevator.set_depth(depth);
            self.depth_told = depth;
        }
        let for_urgent = self.knows_groups && self.targets.is_reached();
        let mut next = self.targets.next_held_back();
        while next.is_none() {
            let shared = match self.shares.next_held_back(depth) {
                Some(rq) => Some(rq),
                None => {
                    let mut rq = match for_urgent {
                        false => elevator.dispatch(now)?,
                        true => elevator.group_aware()?.dispatch_urgent(now)?,
                    };
                    debug_assert_eq!(
                        rq.state,
                        State::Inserted,
                        "the elevator gave out what it was not given"
                    );
                    rq.state = State::Dispatched;
                    rq.from_elevator = true;
                    self.shares.admit(rq, depth)
                }
            };
            next = shared.and_then(|rq| self.targets.admit(rq));
        }
        self.in_flight += 1;
        next.map(|mut rq| {
            self.watch.dispatched(&mut rq, stats.time_of_update(now));
            rq
        })
    }

    /// Takes back a request that could not be issued now. It is the next one for any dispatcher.
    pub(crate) fn push_back(&mut self, rq: Box<Request>) {
        debug_assert_eq!(
            rq.state,
            State::Dispatched,
            "only what was dispatched is pushed back"
        );
        self.requeue_list.push_front(rq);
    }

    /// Reports the end of a request that was issued by the holder and ended at once.
    pub(crate) fn ended(&mut self, note: &Note, disk: DiskId, stats: &Stats) {
        count_end(stats, note);
        self.in_flight -= 1;
        self.shares.ended(disk);
        if let Some(elevator) = &mut self.elevator {
            update_targets(&mut self.targets, note, self.knows_groups);
            elevator.completed(note);
        }
    }

    /// Requeues a request that the driver asks to have issued again.
    pub(crate) fn requeue(&mut self, rq: Box<Request>, stats: &Stats, now: Instant) {
        self.in_flight -= 1;
        self.shares.ended(rq.disk());
        if rq.is_targeted {
            self.targets.ended(rq.group(), rq.issued_at, None, now);
        }
        if let Some(elevator) = &mut self.elevator {
            insert(
                elevator.as_mut(),
                &mut self.shares,
                &mut self.watch,
                rq,
                stats,
                now,
            );
        }
    }

    /// Says when to call the elevator, or the caps, again. While `depth` requests are in flight, or one waits that
    /// was pushed back, the elevator's time is left out: something else comes first.
    pub(crate) fn next_wakeup(&self, depth: u32) -> Option<Instant> {
        let is_full = || {
            self.in_flight >= depth
                || !self.requeue_list.is_empty()
                || self.knows_groups && self.targets.is_reached()
        };
        let elevator = self.elevator.as_deref().filter(|_| !is_full());
        let elevator = elevator.and_then(|elevator| elevator.next_wakeup());
        let waits = || !self.targets.is_empty() || self.elevator.as_ref().is_some_and(|e| e.queued() > 0);
        let targets = self
            .targets
            .next_wakeup()
            .filter(|_| self.in_flight < depth && waits());
        [elevator, targets, self.throttle.next_due()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Says whether no request is inside, on a drained queue.
    pub(crate) fn is_empty(&self) -> bool {
        self.in_flight == 0
            && self.requeue_list.is_empty()
            && self.shares.is_empty()
            && self.targets.is_empty()
            && self.throttle.is_empty()
            && self.passed.is_empty()
            && self
                .elevator
                .as_ref()
                .is_none_or(|elevator| elevator.queued() == 0)
            && self.inserts.iter().all(Consumer::is_empty)
    }

    /// Says whether all that was published has been taken in.
    pub(crate) fn is_all_taken_in(&self) -> bool {
        self.inserts.iter().all(Consumer::is_empty) && self.reports.iter().all(Consumer::is_empty)
    }
}

fn insert(
    elevator: &mut dyn Elevator,
    shares: &mut Shares,
    watch: &mut Watch,
    mut rq: Box<Request>,
    stats: &Stats,
    now: Instant,
) {
    shares.inserted(&rq, now);
    debug_assert_eq!(rq.state, State::Staged, "insert of a request that is not staged");
    let at = if rq.retries > 0 {
        InsertAt::Head
    } else {
        InsertAt::Ordered
    };
    if stats.mode.is_under_gate() && rq.retries == 0 {
        stats.under_gate.count_insert(&rq);
    }
    watch.inserted(rq.group(), rq.bios, stats.time_of_update(now));
    rq.state = State::Inserted;
    elevator.insert(rq, at, now);
}

/// If the elevator shares by weight, the weight decides a request's wait in it, and holding others back
/// does not shorten that wait: only the time at the drive counts.
#[inline]
fn update_targets(targets: &mut Targets, note: &Note, knows_groups: bool) {
    if note.is_targeted {
        let latency = match knows_groups {
            true => note.completed_at.since(note.issued_at),
            false => note.latency(),
        };
        targets.ended(note.group, note.issued_at, Some(latency), note.completed_at);
    }
}

#[inline]
fn count_end(stats: &Stats, note: &Note) {
    if stats.mode.is_timed() {
        let completed_at = stats.time_of_update(note.completed_at);
        stats.under_gate.count_note(&Note {
            completed_at,
            ..*note
        });
    } else if stats.mode.is_under_gate() {
        stats.under_gate.count_note(note);
    }
}
