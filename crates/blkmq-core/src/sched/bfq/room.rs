//! Decides for which members others are not held: members that could not have their due even if all others
//! were held.
//! `mod` asks at each hold, reports dispatches and ends, and obeys a probe; `wf2q` passes over the members
//! named here, and counts the service of each.
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
//! not bounded by it. Instead *room* bounds the others: they may have so much in flight that the members
//! passed over keep most of what they have alone. A request of such a member may take as long as it does
//! alone, plus a quarter of the time from one request to the next. The room grows by an eighth while that
//! holds, and shrinks by an eighth while it does not; if the room gains nothing for these members, it is
//! lifted (`room/window.rs`).
//!
//! The time of a request next to others, over its time alone, tells less: a member with 32 small writes in
//! flight is slow because of its own writes, and would be protected from others for ever.

mod member;
mod probe;
mod window;

use self::member::{Member, Verdict};
use self::probe::{Mark, Phase, Probe};
use self::window::{ROOM_KEPT, Window};
use super::wf2q::{EntityId, Wf2q};
use crate::group::ROOT;
use crate::sched::overdue::Overdue;
use crate::time::{Instant, Nanos};

/// The measurements of all members, and the probe.
#[derive(Debug)]
pub(super) struct Room {
    members: Vec<Member>,
    probe: Probe,
    /// No member is probed before the first time, and no member that is passed over before the second.
    quiet_until: Instant,
    passed_quiet_until: Instant,
    /// The beginning of the watch, and the rate of all members after the latest probe, per second.
    watched: Mark,
    usual: u64,
    /// The members that are passed over, and those that moved at the pace of the probe's subject when the probe began.
    passed: Vec<EntityId>,
    alike: Vec<EntityId>,
    window: Window,
}

impl Room {
    /// Makes the tables for `members` groups and clients.
    pub(super) fn new(members: usize) -> Self {
        let none = EntityId::default();
        Self {
            members: vec![Member::UNKNOWN; members],
            probe: Probe::resting(none),
            quiet_until: Instant(0),
            passed_quiet_until: Instant(0),
            watched: Mark::default(),
            usual: 0,
            passed: Vec::with_capacity(members.min(PASSED_MAX)),
            alike: Vec::with_capacity(members.min(PASSED_MAX)),
            window: Window::default(),
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

    /// Says whether the members that are not passed over may have one more request in flight.
    #[inline]
    pub(super) fn permits(&self, others: u32) -> bool {
        self.window.permits(others) || self.probe.phase != Phase::Resting
    }

    /// Notes that all waiting requests are held, for `holder` or for lack of room, with the others' number in
    /// flight. Says whether a probe begins, so that no member is held any more.
    pub(super) fn note_held_back(
        &mut self,
        wf2q: &mut Wf2q,
        holder: Option<EntityId>,
        others: u32,
        now: Instant,
    ) -> bool {
        self.window.note_held_back(others);
        if self.probe.phase != Phase::Resting || now < self.quiet_until {
            return false;
        }
        let is_slow = self.is_slow(wf2q, now);
        let members = &mut self.members;
        let mut is_due = |id: &EntityId| {
            let is_urgent = is_slow && holder == Some(*id);
            members[id.index()].is_due(wf2q.served(*id), is_urgent, now)
        };
        let is_quiet = now < self.passed_quiet_until;
        let passed = self.passed.iter().copied();
        let passed = passed.filter(|id| !is_quiet && needs_room(wf2q, *id));
        let subject = holder.into_iter().chain(passed).find(&mut is_due);
        let Some(subject) = subject else {
            self.quiet_until = now + LOOK;
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
        self.alike.clear();
        let alike = wf2q.alike(subject).filter(|id| *id != subject);
        self.alike.extend(alike.take(PASSED_MAX));
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
        if self.usual == 0 {
            self.usual = rate;
        }
        rate < self.usual / 2
    }

    /// Counts a dispatched request of a leaf, passed over or not.
    #[inline]
    pub(super) fn taken(&mut self, wf2q: &Wf2q, leaf: EntityId, is_passed: bool, now: Instant) {
        if self.probe.phase != Phase::Resting {
            if self.probe.phase == Phase::Open || self.is_of_subject(wf2q, leaf) {
                self.probe.taken += 1;
                self.probe.seen_at = now;
            }
        } else if is_passed && self.time_max_of(wf2q, leaf).is_some() {
            if now.since(self.window.seen) >= LONG_AWAY {
                self.doubt();
            }
            self.window.begin_one(now);
        }
    }

    /// Handles a long absence of the members passed over: their load may have changed, so one probe decides.
    #[cold]
    fn doubt(&mut self) {
        for id in &self.passed {
            self.members[id.index()].doubt();
        }
        self.window.forget_gain();
    }

    /// Counts the end of a request of a leaf; the drive had the request for `time`, until now.
    #[inline]
    pub(super) fn ended(&mut self, wf2q: &Wf2q, leaf: EntityId, time: Nanos, others: u32, now: Instant) {
        match self.probe.phase {
            Phase::Resting if self.window.is_binding => {
                if let Some(time_max) = self.time_max_of(wf2q, leaf) {
                    self.window.note_end(time, time_max, others, now);
                }
            }
            Phase::Resting => {}
            Phase::Open => {
                let counts = self.probe.from.is_some() && self.time_max_of(wf2q, leaf).is_some();
                self.probe.ends += u64::from(counts);
            }
            Phase::Draining | Phase::Alone => {
                let probe = &mut self.probe;
                if now.since(probe.phase_began) <= time {
                    probe.before = probe.before.saturating_sub(1);
                }
                if self.is_of_subject(wf2q, leaf) {
                    self.probe.ends += 1;
                    self.probe.times += time;
                    self.probe.seen_at = now;
                }
            }
        }
    }

    /// Says whether a leaf is the probe's subject, or below it.
    fn is_of_subject(&self, wf2q: &Wf2q, leaf: EntityId) -> bool {
        wf2q.with_groups(leaf).any(|id| id == self.probe.subject)
    }

    /// How long a request of a leaf may take if room is kept for the leaf, or for a group that contains it.
    fn time_max_of(&self, wf2q: &Wf2q, leaf: EntityId) -> Option<Nanos> {
        let passed = wf2q
            .with_groups(leaf)
            .find(|id| self.members[id.index()].is_passed)?;
        (!wf2q.is_modest(passed)).then(|| self.members[passed.index()].time_max)
    }

    /// The latest time at which the phase ends, or at which no member is passed over any more.
    #[inline]
    pub(super) fn next_wakeup(&self, wf2q: &Wf2q, overdue: &Overdue) -> Option<Instant> {
        match self.probe.phase {
            Phase::Resting => self.window.is_binding.then(|| self.window.seen + ROOM_KEPT),
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

    /// Checks, and says, whether the phase is over, with `in_flight` requests in flight. Room is not kept for
    /// members of which nothing began or ended for as long as `overdue` says.
    #[inline]
    pub(super) fn look(&mut self, wf2q: &mut Wf2q, in_flight: u32, overdue: &Overdue, now: Instant) -> bool {
        if self.probe.phase != Phase::Resting {
            return self.look_at_probe(wf2q, in_flight, overdue, now);
        }
        if self.window.is_binding && now >= self.window.seen + ROOM_KEPT {
            self.window.seen = now;
            let is_busy = self.passed.iter().any(|id| needs_room(wf2q, *id));
            let stalled_after = overdue.patience().max(self.longest_allowed());
            self.window.is_binding = is_busy && now < self.window.moved + stalled_after;
        }
        false
    }

    /// Twice the longest time that a request of a passed-over member may take.
    fn longest_allowed(&self) -> Nanos {
        let times = self.passed.iter().map(|id| self.members[id.index()].time_max);
        Nanos(2 * times.max().unwrap_or_default().0)
    }

    /// The measurements of a member, and of the room of the others, for an elevator that continues with them;
    /// none before its first probe.
    pub(super) fn learnt(&self, id: EntityId, now: Instant) -> Option<[u64; LEARNT]> {
        let member = &self.members[id.index()];
        let [reach, probes, time_max, rest, probe_in] = member.learnt(now)?;
        let (passed, (room, lifted)) = (member.is_passed.into(), self.window.learnt());
        Some([reach, probes, time_max, rest, probe_in, passed, room, lifted])
    }

    /// Takes over another elevator's measurements of a member.
    pub(super) fn take_learnt(&mut self, wf2q: &mut Wf2q, id: EntityId, learnt: [u64; LEARNT], now: Instant) {
        let [reach, probes, time_max, rest, probe_in, passed, room, lifted] = learnt;
        let member = &mut self.members[id.index()];
        if member.learnt(now).is_some() || passed == 1 && reach > REACH_HIGH {
            return;
        }
        member.take_learnt([reach, probes, time_max, rest, probe_in], wf2q.served(id), now);
        if passed == 1 && self.passed.len() < PASSED_MAX {
            member.is_passed = true;
            wf2q.pass_over(id, member.counts(wf2q.waits(id)));
            self.passed.push(id);
            self.window.take_learnt(room, lifted);
            self.window.begin_again(true, now);
        }
    }

    /// Forgets the measurements of a member.
    pub(super) fn forget(&mut self, wf2q: &mut Wf2q, id: EntityId) {
        self.alike.retain(|alike| *alike != id);
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
        self.window = Window::default();
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
        let is_drained = phase == Phase::Draining && self.probe.before == 0;
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
        if let Some(from) = self.probe.from {
            let ends = self.probe.ends;
            self.window.note_open(ends, now.since(from.at), all, self.usual);
        }
        let (own, weights) = wf2q.part(subject);
        let due = (u128::from(all) * u128::from(own) / u128::from(weights)) as u64;
        self.probe.due = due.max(1);
        let member = &self.members[subject.index()];
        let until_now = Mark {
            served: wf2q.served(subject),
            at: self.probe.began,
        };
        let had = self.probe.of_due(until_now.since(member.probed));
        if !member.is_passed && had >= REACH_HIGH {
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
        let time_max = self.probe.time_max(now);
        let member = &mut self.members[subject.index()];
        let (verdict, is_another) = member.learn(reach, time_max);
        match verdict {
            Verdict::CountAgain => self.count_again(wf2q, subject),
            Verdict::PassOver => self.pass_over_alike(wf2q, subject),
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
    fn pass_over_alike(&mut self, wf2q: &mut Wf2q, subject: EntityId) {
        if self.passed.is_empty() {
            self.window.begin();
        }
        let known = self.members[subject.index()];
        for id in std::iter::once(subject).chain(self.alike.drain(..)) {
            let member = &mut self.members[id.index()];
            if member.is_passed || self.passed.len() == PASSED_MAX {
                continue;
            }
            (member.is_passed, member.reach, member.time_max) = (true, known.reach, known.time_max);
            self.passed.push(id);
            self.window.forget_gain();
            wf2q.pass_over(id, member.counts(wf2q.waits(id)));
        }
    }

    fn count_again(&mut self, wf2q: &mut Wf2q, id: EntityId) {
        self.members[id.index()].is_passed = false;
        self.passed.retain(|passed| *passed != id);
        self.window.forget_gain();
        wf2q.count_again(id);
    }

    /// Ends a probe, with a result or without.
    fn rest(&mut self, wf2q: &mut Wf2q, now: Instant) {
        let subject = self.probe.subject;
        let member = &mut self.members[subject.index()];
        member.rest_from(wf2q.served(subject), now);
        (self.watched.at, self.usual) = (now, 0);
        self.watched.served = wf2q.served(wf2q.group(ROOT.index()));
        // A pause of all members is not part of a probe.
        let lasted = now.since(self.probe.began).min(STALE);
        self.quiet_until = now + Nanos(lasted.0 * QUIET_TIMES);
        self.passed_quiet_until = now + Nanos(lasted.0 * PASSED_QUIET_TIMES);
        self.probe = Probe::resting(subject);
        wf2q.set_only(None);
        self.window.begin_again(!self.passed.is_empty(), now);
    }
}

/// Says whether room is kept for a passed-over member: it has requests, and does not pause by nature.
fn needs_room(wf2q: &Wf2q, id: EntityId) -> bool {
    wf2q.is_busy(id) && !wf2q.is_modest(id)
}

/// Says whether a rate is so far below a member's due that others are not held for the member.
pub(super) fn is_low(rate: u64, due: u64) -> bool {
    u128::from(rate) * 1024 < u128::from(due) * u128::from(REACH_LOW)
}

/// How many numbers describe a member.
pub(super) const LEARNT: usize = 8;
/// A member is passed over if its reach is below the first, in 1/1024, and no longer if it is above the
/// second: exact shares cost up to a third of the drive.
const REACH_LOW: u64 = 635;
const REACH_HIGH: u64 = 717;
/// A request of a member that is passed over may take longer by one part in so many of the time from one to
/// the next: the member keeps four fifths of what it has alone.
const LONGER_PART: u64 = 4;
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
