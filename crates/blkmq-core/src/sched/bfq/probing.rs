//! Probes: they find the members that could not have their due even if all others were held, for which nobody
//! is held then.
//! `mod` asks at each hold and in between, reports dispatches and ends, and obeys a probe; `wf2q` passes over the
//! members named here, and counts the service of each.
//!
//! The bound of `lead` holds members that are ahead until the slowest member catches up. That is worth its
//! price if the slow member can have its due. If it cannot (few requests in flight, flushes, pauses between
//! them), the drive would idle at that member's pace. A probe measures whether it can:
//!
//! ```text
//!           held for it, and its rest is over       all go by order alone      what was in flight has ended
//!   Resting ─────────────────────────────────► Open ────────────────► Draining ───────────────► Alone ──► Resting
//!      ▲                                        │ it had its due until now
//!      └────────────────────────────────────────┘
//! ```
//! *Open* measures what the drive does for all without a bound: by weight, a part of that is the member's
//! due. *Alone* measures what the member has by itself, with its own depth, flushes and pauses. Its *reach*
//! is alone over due, a mean of some probes. A member with a low reach is *passed over*: the others' lead is
//! not bounded by it. What it finds in the drive is bounded all the same, by the law of the depth. Its load may
//! change, so it is probed again, at ever longer intervals.

mod member;
mod probe;

use self::member::{Member, Verdict};
use self::probe::{Mark, Phase, Probe};
use super::wf2q::{EntityId, Wf2q};
use crate::group::ROOT;
use crate::sched::overdue::Overdue;
use crate::time::{Instant, Nanos};

/// The measurements of all members, and the probe.
#[derive(Debug)]
pub(super) struct Probing {
    members: Vec<Member>,
    probe: Probe,
    /// No member is probed before the first time, and no member that is passed over before the second.
    quiet_until: Instant,
    passed_quiet_until: Instant,
    /// The beginning of the watch, and the rate of all members after the latest probe, per second.
    watched: Mark,
    baseline_rate: u64,
    /// The members that are passed over, and those that moved at the pace of the probe's subject when the probe began.
    passed: Vec<EntityId>,
    same_pace: Vec<EntityId>,
    /// When a request of a passed-over member began last.
    passed_seen: Instant,
}

impl Probing {
    /// Makes the tables for `members` groups and clients.
    pub(super) fn new(members: usize) -> Self {
        let none = EntityId::default();
        Self {
            members: vec![Member::UNKNOWN; members],
            probe: Probe::resting(none),
            quiet_until: Instant(0),
            passed_quiet_until: Instant(0),
            watched: Mark::default(),
            baseline_rate: 0,
            passed: Vec::with_capacity(members.min(PASSED_MAX)),
            same_pace: Vec::with_capacity(members.min(PASSED_MAX)),
            passed_seen: Instant(0),
        }
    }

    /// Says whether the probe is open: no member is held.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.probe.phase == Phase::Open
    }

    /// Says whether only the probe's subject is served, beside members that ask for less than their due: nobody is
    /// held for these at any time.
    #[inline]
    pub(super) fn is_alone(&self) -> bool {
        matches!(self.probe.phase, Phase::Draining | Phase::Alone)
    }

    /// Says whether any member is passed over.
    #[inline]
    pub(super) fn has_passed(&self) -> bool {
        !self.passed.is_empty()
    }

    /// Begins a probe if one is due, of `holder`, for which all waiting requests are held, or of a member that is
    /// passed over. Says whether it did, so that no member is held any more.
    #[cold]
    pub(super) fn begin_if_due(&mut self, wf2q: &Wf2q, holder: Option<EntityId>, now: Instant) -> bool {
        if self.probe.phase != Phase::Resting || now < self.quiet_until {
            return false;
        }
        // A look between holds leaves the watch to the member held for.
        let is_slow = holder.is_some() && self.is_slow(wf2q, now);
        let members = &mut self.members;
        let mut is_due = |id: &EntityId| {
            let is_urgent = is_slow && holder == Some(*id);
            members[id.index()].is_due(wf2q.served(*id), is_urgent, now)
        };
        let is_quiet = now < self.passed_quiet_until;
        let passed = self.passed.iter().copied();
        // Where nobody is held, one that has all its requests in flight could not have more.
        let could_have_more = |id: EntityId| holder.is_some() || wf2q.waits(id);
        let passed = passed.filter(|id| !is_quiet && may_be_probed(wf2q, *id) && could_have_more(*id));
        let subject = holder.into_iter().chain(passed).find(&mut is_due);
        let Some(subject) = subject else {
            match holder {
                Some(_) => self.quiet_until = now + LOOK,
                None => self.passed_quiet_until = self.passed_quiet_until.max(now + LOOK),
            }
            return false;
        };
        self.probe = Probe {
            phase: Phase::Open,
            subject,
            began: now,
            phase_began: now,
            seen_at: now,
            ..self.probe
        };
        self.probe.begin(Phase::Open, None, now);
        self.same_pace.clear();
        let others = wf2q.same_pace(subject).filter(|id| *id != subject);
        self.same_pace.extend(others.take(PASSED_MAX));
        true
    }

    /// Says whether all members together do less than half of what they did after the latest probe: the member
    /// for which they are held may have changed its load.
    fn is_slow(&mut self, wf2q: &Wf2q, now: Instant) -> bool {
        if now.since(self.watched.at) < WATCH {
            return false;
        }
        let so_far = Mark {
            served: wf2q.served(wf2q.group(ROOT.index())),
            at: now,
        };
        let rate = so_far.since(std::mem::replace(&mut self.watched, so_far));
        if self.baseline_rate == 0 {
            self.baseline_rate = rate;
        }
        rate < self.baseline_rate / 2
    }

    /// Counts a dispatched request of a leaf.
    #[inline]
    pub(super) fn taken(&mut self, wf2q: &Wf2q, leaf: EntityId, now: Instant) {
        if self.probe.phase != Phase::Resting {
            if self.probe.phase == Phase::Open || self.is_of_subject(wf2q, leaf) {
                self.probe.taken += 1;
                self.probe.seen_at = now;
            }
        } else if self.has_passed() && wf2q.is_passed_over(leaf) {
            if now.since(self.passed_seen) >= LONG_AWAY {
                self.doubt();
            }
            self.passed_seen = now;
        }
    }

    /// Handles a long absence of the members passed over: their load may have changed, so one probe decides.
    #[cold]
    fn doubt(&mut self) {
        for id in &self.passed {
            self.members[id.index()].doubt();
        }
    }

    /// Counts the end of a request of a leaf; the drive had the request for `time`, until now, if the depth counted it.
    #[inline]
    pub(super) fn ended(&mut self, wf2q: &Wf2q, leaf: EntityId, time: Option<Nanos>, now: Instant) {
        if !self.is_alone() {
            return;
        }
        if time.is_some_and(|time| now.since(self.probe.phase_began) <= time) {
            self.probe.before = self.probe.before.saturating_sub(1);
        }
        if self.is_of_subject(wf2q, leaf) {
            self.probe.seen_at = now;
        }
    }

    /// Says whether a leaf is the probe's subject, or below it.
    fn is_of_subject(&self, wf2q: &Wf2q, leaf: EntityId) -> bool {
        wf2q.with_groups(leaf).any(|id| id == self.probe.subject)
    }

    /// The latest time at which the phase ends.
    #[inline]
    pub(super) fn next_wakeup(&self, wf2q: &Wf2q, overdue: &Overdue) -> Option<Instant> {
        match self.probe.phase {
            Phase::Resting => None,
            Phase::Open => Some(self.probe.until()),
            _ => Some(self.probe.until().min(self.gone_at(wf2q, overdue))),
        }
    }

    /// When the subject counts as gone, if it gets no request until then, or as stalled, if none of its requests
    /// ends.
    fn gone_at(&self, wf2q: &Wf2q, overdue: &Overdue) -> Instant {
        let patience = match wf2q.is_busy(self.probe.subject) {
            true => overdue.patience().max(GONE),
            false => GONE,
        };
        self.probe.seen_at + patience
    }

    /// Checks, with `in_flight` requests in flight, whether a phase is over or a probe of a passed-over member begins;
    /// says whether one did.
    #[inline]
    pub(super) fn look(&mut self, wf2q: &mut Wf2q, in_flight: u32, overdue: &Overdue, now: Instant) -> bool {
        if self.probe.phase != Phase::Resting {
            return self.look_at_probe(wf2q, in_flight, overdue, now);
        }
        self.has_passed() && now >= self.passed_quiet_until && self.begin_if_due(wf2q, None, now)
    }

    /// The measurements of a member, for an elevator that continues with them; none before its first probe.
    pub(super) fn learnt(&self, id: EntityId, now: Instant) -> Option<[u64; LEARNT]> {
        let member = &self.members[id.index()];
        let [reach, probes, rest, probe_in] = member.learnt(now)?;
        let passed = member.is_passed.into();
        Some([reach, probes, 0, rest, probe_in, passed, NO_ROOM, 0])
    }

    /// Takes over another elevator's measurements of a member.
    pub(super) fn take_learnt(&mut self, wf2q: &mut Wf2q, id: EntityId, learnt: [u64; LEARNT], now: Instant) {
        let [reach, probes, _, rest, probe_in, passed, ..] = learnt;
        let member = &mut self.members[id.index()];
        if member.learnt(now).is_some() || passed == 1 && reach > REACH_HIGH {
            return;
        }
        member.take_learnt([reach, probes, rest, probe_in], wf2q.served(id), now);
        if passed == 1 && self.passed.len() < PASSED_MAX {
            member.is_passed = true;
            wf2q.pass_over(id, member.counts(wf2q.waits(id)));
            self.passed.push(id);
        }
    }

    /// Forgets the measurements of a member.
    pub(super) fn forget(&mut self, wf2q: &mut Wf2q, id: EntityId) {
        self.same_pace.retain(|other| *other != id);
        if std::mem::replace(&mut self.members[id.index()], Member::UNKNOWN).is_passed {
            self.passed.retain(|passed| *passed != id);
            wf2q.count_again(id);
        }
        if self.probe.subject == id {
            self.abandon(wf2q);
        }
    }

    /// Ends a probe without a result, because groups change.
    pub(super) fn abandon(&mut self, wf2q: &mut Wf2q) {
        if self.probe.phase != Phase::Resting {
            self.probe = Probe::resting(self.probe.subject);
            wf2q.set_only(None);
            wf2q.set_open(false);
        }
    }

    /// No member is held for another any more, so none is passed over.
    pub(super) fn clear(&mut self, wf2q: &mut Wf2q) {
        self.abandon(wf2q);
        for id in self.passed.drain(..) {
            self.members[id.index()] = Member::UNKNOWN;
            wf2q.count_again(id);
        }
    }

    #[cold]
    fn look_at_probe(&mut self, wf2q: &mut Wf2q, in_flight: u32, overdue: &Overdue, now: Instant) -> bool {
        let Probe {
            phase,
            subject,
            phase_began,
            taken,
            ..
        } = self.probe;
        let has_left = phase != Phase::Open && now >= self.gone_at(wf2q, overdue);
        let is_known = phase == Phase::Alone && taken >= TAKEN_KNOWN;
        if has_left && !is_known || now.since(phase_began) >= STALE {
            self.rest(wf2q, now);
            return true;
        }
        let counts = match phase {
            Phase::Open => wf2q.parent(subject),
            _ => subject,
        };
        let so_far = Mark {
            served: wf2q.served(counts),
            at: now,
        };
        let is_drained = phase == Phase::Draining && overdue.punctual(self.probe.before) == 0;
        if now < self.probe.until() && !is_drained && !has_left {
            return false;
        }
        let rate = self.probe.from.map(|from| so_far.since(from));
        match (phase, rate) {
            (Phase::Open, Some(all)) => self.end_open(wf2q, all, in_flight, now),
            (Phase::Alone, Some(alone)) => self.end_alone(wf2q, alone, now),
            (Phase::Draining, _) => self.probe.begin(Phase::Alone, Some(so_far), now),
            _ => self.probe.begin(phase, Some(so_far), now),
        }
        true
    }

    /// Ends the open phase, with the drive's rate for all. If the subject had its due of that, the probe ends.
    fn end_open(&mut self, wf2q: &mut Wf2q, all: u64, in_flight: u32, now: Instant) {
        let subject = self.probe.subject;
        let (own, weights) = wf2q.part(subject);
        let due = (u128::from(all) * u128::from(own) / u128::from(weights)) as u64;
        self.probe.due = due.max(1);
        let member = &self.members[subject.index()];
        let until_now = Mark {
            served: wf2q.served(subject),
            at: self.probe.began,
        };
        let had = self.probe.of_due(until_now.since(member.probed));
        // One for which nobody is held has its due only if it has all of it.
        let is_due = if member.is_passed { REACH_WHOLE } else { REACH_HIGH };
        if had >= is_due {
            self.rest(wf2q, now);
            return;
        }
        self.probe.begin(Phase::Draining, None, now);
        self.probe.before = in_flight;
        self.probe.seen_at = now;
        wf2q.set_only(Some(subject));
    }

    /// Ends the alone phase, with the subject's rate.
    fn end_alone(&mut self, wf2q: &mut Wf2q, alone: u64, now: Instant) {
        let subject = self.probe.subject;
        let reach = self.probe.of_due(alone);
        let member = &mut self.members[subject.index()];
        let (verdict, is_another) = member.learn(reach);
        match verdict {
            Verdict::CountAgain => self.count_again(wf2q, subject),
            Verdict::PassOver => self.pass_over_same_pace(wf2q, subject),
            Verdict::Unchanged if member.is_passed => {
                wf2q.pass_over(subject, member.counts(wf2q.waits(subject)));
            }
            Verdict::Unchanged => {}
        }
        self.rest(wf2q, now);
        if is_another {
            self.passed_quiet_until = self.quiet_until;
        } else if verdict == Verdict::PassOver {
            self.quiet_until = now + QUIET_NEW;
        }
    }

    /// Passes over the subject and the members that move at its pace: they get the same reach by weight, until
    /// they are probed themselves.
    fn pass_over_same_pace(&mut self, wf2q: &mut Wf2q, subject: EntityId) {
        let known = self.members[subject.index()];
        for id in std::iter::once(subject).chain(self.same_pace.drain(..)) {
            let member = &mut self.members[id.index()];
            if member.is_passed || self.passed.len() == PASSED_MAX {
                continue;
            }
            (member.is_passed, member.reach) = (true, known.reach);
            self.passed.push(id);
            wf2q.pass_over(id, member.counts(wf2q.waits(id)));
        }
    }

    fn count_again(&mut self, wf2q: &mut Wf2q, id: EntityId) {
        self.members[id.index()].is_passed = false;
        self.passed.retain(|passed| *passed != id);
        wf2q.count_again(id);
    }

    /// Ends a probe, with a result or without.
    fn rest(&mut self, wf2q: &mut Wf2q, now: Instant) {
        let subject = self.probe.subject;
        let member = &mut self.members[subject.index()];
        member.rest_from(wf2q.served(subject), now);
        (self.watched.at, self.baseline_rate) = (now, 0);
        self.watched.served = wf2q.served(wf2q.group(ROOT.index()));
        // A pause of all members is not part of a probe.
        let lasted = now.since(self.probe.began).min(STALE);
        self.quiet_until = now + Nanos(lasted.0 * QUIET_TIMES);
        self.passed_quiet_until = now + Nanos(lasted.0 * PASSED_QUIET_TIMES);
        self.probe = Probe::resting(subject);
        wf2q.set_only(None);
    }
}

/// Says whether a passed-over member may be probed: it has requests, and does not pause by nature.
fn may_be_probed(wf2q: &Wf2q, id: EntityId) -> bool {
    wf2q.is_busy(id) && !wf2q.is_modest(id)
}

/// Says whether a rate is so far below a member's due that others are not held for the member.
pub(super) fn is_low(rate: u64, due: u64) -> bool {
    u128::from(rate) * 1024 < u128::from(due) * u128::from(REACH_LOW)
}

/// How many numbers describe a member. The third and the last two are for daemons before, which limited how much the
/// others had in flight: as much as they like.
pub(super) const LEARNT: usize = 8;
const NO_ROOM: u64 = 1 << 16;
/// A member is passed over if its reach is below the first, in 1/1024, and no longer if it is above the
/// second: exact shares cost up to a third of the drive.
const REACH_LOW: u64 = 635;
const REACH_HIGH: u64 = 717;
const REACH_WHOLE: u64 = 1024;
/// A passed-over member with a backlog counts by its reach and one part in so many of it.
const SPARE_PART: u64 = 4;
/// At most this many members are passed over.
const PASSED_MAX: usize = 256;
/// If the subject leaves in the last phase, this many requests are enough for a result.
const TAKEN_KNOWN: u32 = 3;
/// A phase that is checked this late has no result: there was a pause.
const STALE: Nanos = Nanos::from_millis(200);
/// A subject without requests for this long counts as gone: the others do not wait for it.
const GONE: Nanos = Nanos::from_micros(2900);
/// No probe follows for so many times the length of a probe; the second factor is for members that are
/// passed over, of which there may be many.
const QUIET_TIMES: u64 = 8;
const PASSED_QUIET_TIMES: u64 = 64;
/// The same after a member was passed over: the next one for which others are held may be of its kind.
const QUIET_NEW: Nanos = Nanos::from_millis(40);
/// Time between two checks whether all members together have become slow.
const WATCH: Nanos = Nanos::from_millis(100);
/// After an absence this long, the measurements of members that are passed over no longer count.
const LONG_AWAY: Nanos = Nanos::from_millis(200);
/// Time between two checks whether a member's rest is over.
const LOOK: Nanos = Nanos::from_millis(10);
