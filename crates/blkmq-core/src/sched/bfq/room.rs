//! Decides for whom others are not held: members that could not have their due if everybody else were held. `mod` asks on each
//! hold, tells what it gives out and what ends, and obeys a probe; `wf2q` passes over the members that are named here, and counts
//! what each is served.
//!
//! The bound of `lead` holds whoever is ahead until the slowest member catches up. That is worth its price if the slow one can have
//! its due. If it cannot (few requests in flight, flushes, pauses between them), the drive would idle at its pace. Whether it can is
//! measured:
//!
//! ```text
//!           held for it, and its rest is over       all go by order alone      what was in flight has ended
//!   Resting ─────────────────────────────────► Open ────────────────► Draining ───────────────► Alone ──► Resting
//!      ▲                                        │ it had its due until now
//!      └────────────────────────────────────────┘
//! ```
//! *Open* tells what the drive does for all without a bound: by weight a part of that is the member's due. *Alone* tells what the
//! member has by itself, with its own depth, flushes and pauses. Its *reach* is one over the other, a mean of some probes. Where that
//! is low the member is *passed over*: the others' lead is not bounded by it. What bounds them then is *room*: so much they may have
//! in flight that those who are passed over keep most of what they have alone. A request of theirs may take as long as it does alone,
//! and a quarter of the time from one to the next more. The room grows by an eighth while that holds, and shrinks by an eighth while
//! it does not.
//!
//! How long a request takes beside others, over the time of one by itself, tells less: who has 32 small writes in flight is slow
//! because of its own, and would be protected from others for ever.

use super::wf2q::{EntityId, Wf2q};
use crate::group::ROOT;
use crate::time::{Instant, Nanos};

/// What is known of all members, and the probe.
#[derive(Debug)]
pub(super) struct Room {
    members: Vec<Member>,
    probe: Probe,
    /// Nobody is probed until then, and nobody who is passed over until then.
    quiet_until: Instant,
    passed_quiet_until: Instant,
    /// Since when, and what all did in a second after the latest probe.
    watched: Mark,
    usual: u64,
    /// Who is passed over, and who moved at the pace of the probe's subject when it began.
    passed: Vec<EntityId>,
    alike: Vec<EntityId>,
    window: Window,
}

/// What is known of one group or client.
#[derive(Clone, Copy, Debug)]
struct Member {
    /// In 1/1024, a mean of so many probes.
    reach: u64,
    probes: u64,
    /// How long a request of it may take, if it is passed over; zero if that is not known, and then as long as it likes.
    time_max: Nanos,
    is_passed: bool,
    /// When it is probed next, and how long it rests after that; zero as long as nobody was held for it.
    probe_at: Instant,
    rest: Nanos,
    /// At the end of its latest probe.
    probed: Mark,
}

/// What somebody was served until some moment, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    served: u64,
    at: Instant,
}

/// A phase of the probe of one member.
#[derive(Clone, Copy, Debug)]
struct Probe {
    phase: Phase,
    subject: EntityId,
    began: Instant,
    phase_began: Instant,
    /// Where this phase began to count, and what was given out since then.
    from: Option<Mark>,
    taken: u32,
    /// When the subject's latest request was given out, or has ended.
    seen_at: Instant,
    /// Of the subject, in the last phase: requests that have ended, and how long the drive had them, in all.
    ends: u64,
    times: Nanos,
    /// What was in flight when nobody else was let in any more, and has not ended.
    before: u32,
    /// What the subject is due, in bytes per second.
    due: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Resting,
    Open,
    Draining,
    Alone,
}

/// How long the requests of those take that are passed over, and what that lets others have in flight.
#[derive(Debug, Default)]
struct Window {
    /// Of so many requests, the sum of times over those that they may take, in 1/1024.
    ends: u64,
    parts: u64,
    /// When one of them began or ended last.
    seen: Instant,
    /// What the others had in flight when one of them was held, at most.
    held_at: u32,
    /// So much the others may have in flight.
    room: u32,
    /// Nobody had too little since somebody was passed over: the room doubles.
    is_new: bool,
    /// Somebody who is passed over is there.
    is_binding: bool,
}

impl Room {
    /// Makes what is needed for so many groups and clients.
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

    /// Says whether all go by order alone.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.probe.phase == Phase::Open
    }

    /// Says whether one member goes alone.
    #[inline]
    pub(super) fn is_alone(&self) -> bool {
        matches!(self.probe.phase, Phase::Draining | Phase::Alone)
    }

    /// Says whether anybody is passed over.
    #[inline]
    pub(super) fn has_passed(&self) -> bool {
        !self.passed.is_empty()
    }

    /// Says whether those who are not passed over may have one more in flight.
    #[inline]
    pub(super) fn permits(&self, others: u32) -> bool {
        !self.window.is_binding || others < self.window.room || self.probe.phase != Phase::Resting
    }

    /// All that waits is held: for `holder`, or for want of room; the others have so many in flight. Says whether a probe begins,
    /// so that nobody is held any more.
    pub(super) fn held(&mut self, wf2q: &Wf2q, holder: Option<EntityId>, others: u32, now: Instant) -> bool {
        self.window.held_at = self.window.held_at.max(others);
        if self.probe.phase != Phase::Resting || now < self.quiet_until {
            return false;
        }
        let is_slow = self.is_slow(wf2q, now);
        let members = &mut self.members;
        let mut is_due = |id: &EntityId| {
            let member = &mut members[id.index()];
            if member.rest == Nanos::ZERO {
                member.rest = REST_FIRST;
                member.rest_from(wf2q.served(*id), now);
            }
            if is_slow && holder == Some(*id) {
                member.rest = REST_FIRST;
                return true;
            }
            now >= member.probe_at
        };
        let is_quiet = now < self.passed_quiet_until;
        let passed = self.passed.iter().copied();
        let passed = passed.filter(|id| !is_quiet && wf2q.is_busy(*id));
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

    /// Says whether all together do less than half of what they did after the latest probe: for whom they are held may have become
    /// another.
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

    /// A request was given out, of somebody who is passed over or not.
    #[inline]
    pub(super) fn taken(&mut self, is_passed: bool, now: Instant) {
        if self.probe.phase != Phase::Resting {
            self.probe.taken += 1;
            self.probe.seen_at = now;
        } else if is_passed {
            if now.since(self.window.seen) >= LONG_AWAY {
                self.doubt();
            }
            (self.window.seen, self.window.is_binding) = (now, true);
        }
    }

    /// Those who are passed over were away for long, and may have become others: one probe decides.
    #[cold]
    fn doubt(&mut self) {
        for id in &self.passed {
            let member = &mut self.members[id.index()];
            (member.probes, member.rest, member.probe_at) = (0, REST_FIRST, Instant(0));
        }
    }

    /// A request of a leaf has ended that the drive has had for `time`, up to now.
    #[inline]
    pub(super) fn ended(&mut self, wf2q: &Wf2q, leaf: EntityId, time: Nanos, others: u32, now: Instant) {
        let probe = &mut self.probe;
        match probe.phase {
            Phase::Resting if self.window.is_binding => self.note_end(wf2q, leaf, time, others, now),
            Phase::Draining | Phase::Alone => {
                if now.since(probe.phase_began) <= time {
                    probe.before = probe.before.saturating_sub(1);
                }
                if wf2q.with_groups(leaf).any(|id| id == probe.subject) {
                    probe.ends += 1;
                    probe.times += time;
                    probe.seen_at = now;
                }
            }
            _ => {}
        }
    }

    /// Notes how long a request of one who is passed over has taken.
    fn note_end(&mut self, wf2q: &Wf2q, leaf: EntityId, time: Nanos, others: u32, now: Instant) {
        let members = &self.members;
        let Some(id) = wf2q.with_groups(leaf).find(|id| members[id.index()].is_passed) else {
            return;
        };
        let window = &mut self.window;
        window.seen = now;
        window.ends += 1;
        let time_max = self.members[id.index()].time_max.0;
        window.parts += (time.0 * 1024).checked_div(time_max).unwrap_or(0).min(PARTS_MAX);
        if window.ends >= WINDOW_ENDS {
            window.close(others);
        }
    }

    /// Says when a phase is over, or nobody is passed over any more, at the latest.
    #[inline]
    pub(super) fn next_wakeup(&self, wf2q: &Wf2q) -> Option<Instant> {
        match self.probe.phase {
            Phase::Resting => self.window.is_binding.then(|| self.window.seen + ROOM_KEPT),
            Phase::Open => Some(self.probe.until()),
            _ => Some(self.probe.until().min(self.gone_at(wf2q))),
        }
    }

    /// When the subject has left, if it goes on having nothing.
    fn gone_at(&self, wf2q: &Wf2q) -> Instant {
        match wf2q.is_busy(self.probe.subject) {
            true => Instant(u64::MAX),
            false => self.probe.seen_at + GONE,
        }
    }

    /// Looks whether a phase is over, with so many in flight; says whether it is.
    #[inline]
    pub(super) fn look(&mut self, wf2q: &mut Wf2q, in_flight: u32, now: Instant) -> bool {
        if self.probe.phase != Phase::Resting {
            return self.look_at_probe(wf2q, in_flight, now);
        }
        if self.window.is_binding && now >= self.window.seen + ROOM_KEPT {
            self.window.seen = now;
            self.window.is_binding = self.passed.iter().any(|id| wf2q.is_busy(*id));
        }
        false
    }

    /// Nothing is known of it any more.
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

    /// Ends a probe without a result: groups change.
    pub(super) fn abandon(&mut self, wf2q: &mut Wf2q) {
        if self.probe.phase != Phase::Resting {
            self.probe = Probe::resting(self.probe.subject);
            wf2q.set_only(None);
            wf2q.set_open(false);
        }
    }

    /// Nobody is held for anybody any more, so nobody is passed over.
    pub(super) fn clear(&mut self, wf2q: &mut Wf2q) {
        self.abandon(wf2q);
        for id in self.passed.drain(..) {
            self.members[id.index()] = Member::UNKNOWN;
            wf2q.count_again(id);
        }
        self.window = Window::default();
    }

    #[cold]
    fn look_at_probe(&mut self, wf2q: &mut Wf2q, in_flight: u32, now: Instant) -> bool {
        let Probe {
            phase,
            subject,
            phase_began,
            taken,
            ..
        } = self.probe;
        let has_left = phase != Phase::Open && now >= self.gone_at(wf2q);
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

    /// It is known what the drive does for all. If the subject had its due of that until now there is nothing to find out.
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
        if !member.is_passed && had >= REACH_HIGH {
            self.rest(wf2q, now);
            return;
        }
        self.probe.begin(Phase::Draining, None, now);
        self.probe.before = in_flight;
        self.probe.seen_at = now;
        wf2q.set_only(Some(subject));
    }

    /// The subject has this alone.
    fn end_alone(&mut self, wf2q: &mut Wf2q, alone: u64, now: Instant) {
        let subject = self.probe.subject;
        let reach = self.probe.of_due(alone);
        let member = &mut self.members[subject.index()];
        // Who is passed over and could have its due has become another: that is to be known soon.
        let is_another = member.is_passed && reach > REACH_HIGH;
        let kept = if is_another { 2 } else { PROBES_KEPT };
        member.probes = (member.probes + 1).min(kept);
        member.reach = (member.reach * (member.probes - 1) + reach) / member.probes;
        if let Some(time_max) = self.probe.time_max(now) {
            member.time_max = match member.time_max {
                Nanos::ZERO => time_max,
                mean => Nanos((mean.0 * 3 + time_max.0) / 4),
            };
        }
        if is_another || !member.is_passed && reach < REACH_LOW {
            // To be seen twice, or clearly.
            member.rest = REST_FIRST;
        }
        if member.is_passed && member.reach > REACH_HIGH {
            self.count_again(wf2q, subject);
        } else if member.is_passed {
            wf2q.pass_over(subject, member.counts(wf2q.waits(subject)));
        } else if !member.is_passed
            && (member.reach < REACH_LOW && member.probes > 1 || reach < REACH_LOW / 2)
        {
            self.pass_over_alike(wf2q, subject);
        }
        self.rest(wf2q, now);
        if is_another {
            self.passed_quiet_until = self.quiet_until;
        }
    }

    /// The subject is passed over, and so is who moves at its pace: as much by weight, until it is probed itself.
    fn pass_over_alike(&mut self, wf2q: &mut Wf2q, subject: EntityId) {
        if self.passed.is_empty() {
            (self.window.room, self.window.is_new) = (self.window.held_at.max(1), true);
        }
        let known = self.members[subject.index()];
        for id in std::iter::once(subject).chain(self.alike.drain(..)) {
            let member = &mut self.members[id.index()];
            if member.is_passed || self.passed.len() == PASSED_MAX {
                continue;
            }
            (member.is_passed, member.reach, member.time_max) = (true, known.reach, known.time_max);
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
        (self.watched.at, self.usual) = (now, 0);
        self.watched.served = wf2q.served(wf2q.group(ROOT.index()));
        // A pause of everybody is no part of a probe.
        let lasted = now.since(self.probe.began).min(STALE);
        self.quiet_until = now + Nanos(lasted.0 * QUIET_TIMES);
        self.passed_quiet_until = now + Nanos(lasted.0 * PASSED_QUIET_TIMES);
        self.probe = Probe::resting(subject);
        wf2q.set_only(None);
        (self.window.ends, self.window.parts, self.window.held_at) = (0, 0, 0);
        self.window.seen = now;
        self.window.is_binding = !self.passed.is_empty();
    }
}

impl Window {
    /// Gives the others more room if requests of those who are passed over take no longer than they may, else less.
    fn close(&mut self, others: u32) {
        let is_enough = self.parts <= 1024 * self.ends;
        let step = match self.is_new {
            true => self.room,
            false => (self.room / STEP_PART).max(1),
        };
        self.is_new &= is_enough;
        if !is_enough {
            self.room = self.room.min(self.held_at.max(others));
            self.room = self.room.saturating_sub(step).max(1);
        } else if self.held_at >= self.room {
            // Room that nobody uses does not grow.
            self.room += step;
        }
        (self.ends, self.parts, self.held_at) = (0, 0, 0);
    }
}

impl Member {
    const UNKNOWN: Self = Self {
        reach: 0,
        probes: 0,
        time_max: Nanos::ZERO,
        is_passed: false,
        probe_at: Instant(0),
        rest: Nanos::ZERO,
        probed: Mark {
            served: 0,
            at: Instant(0),
        },
    };

    /// How much of its weight counts while it is passed over, in 1/1024. One that has a backlog, also alone, would have the drive to
    /// itself by its weight: it has what it has alone by a part of it, also where all together do a fifth less.
    fn counts(&self, has_backlog: bool) -> u32 {
        match has_backlog {
            true => (self.reach + self.reach / LONGER_PART) as u32,
            false => 1024,
        }
    }

    fn rest_from(&mut self, served: u64, now: Instant) {
        self.probe_at = now + self.rest;
        self.rest = Nanos(self.rest.0 * REST_GROWS).min(REST_MAX);
        self.probed = Mark { served, at: now };
    }
}

impl Mark {
    /// What was served since then, in bytes per second.
    fn since(self, from: Self) -> u64 {
        let elapsed = u128::from(self.at.since(from.at).0.max(1));
        (u128::from(self.served.saturating_sub(from.served)) * 1_000_000_000 / elapsed) as u64
    }
}

impl Probe {
    fn resting(subject: EntityId) -> Self {
        Self {
            phase: Phase::Resting,
            subject,
            began: Instant(0),
            phase_began: Instant(0),
            from: None,
            taken: 0,
            seen_at: Instant(0),
            ends: 0,
            times: Nanos::ZERO,
            before: 0,
            due: 1,
        }
    }

    fn begin(&mut self, phase: Phase, from: Option<Mark>, now: Instant) {
        (self.phase, self.phase_began, self.from, self.taken) = (phase, now, from, 0);
        (self.ends, self.times) = (0, Nanos::ZERO);
    }

    /// So much over the subject's due, in 1/1024.
    fn of_due(&self, rate: u64) -> u64 {
        (u128::from(rate) * 1024 / u128::from(self.due)).min(REACH_MAX) as u64
    }

    /// How long a request of the subject may take if others have room: as long as now that it is alone, and a part of the time from one
    /// to the next, which is the same if it has no pauses.
    fn time_max(&self, now: Instant) -> Option<Nanos> {
        let lasts = now.since(self.from?.at).0;
        let time = self.times.0.checked_div(self.ends)?;
        let cycle = (lasts / self.ends).max(time);
        Some(Nanos(time + cycle / LONGER_PART))
    }

    /// Until when this phase lasts, or is to begin to count.
    fn until(&self) -> Instant {
        match (self.phase, self.from) {
            (Phase::Draining, _) => self.phase_began + DRAIN_MAX,
            (_, None) => self.phase_began + SKIP,
            (_, Some(from)) if self.taken >= TAKEN_MANY => from.at + PHASE_SHORT,
            (_, Some(from)) if self.taken >= TAKEN_FEW => from.at + PHASE_LONG,
            (_, Some(from)) => from.at + PHASE_MAX,
        }
    }
}

/// A member is passed over if its reach is below the first, in 1/1024, and no more if it is above the second: exact shares cost up to
/// a third of the drive.
const REACH_LOW: u64 = 635;
const REACH_HIGH: u64 = 717;
const REACH_MAX: u128 = 4 * 1024;
/// It is a mean of so many probes.
const PROBES_KEPT: u64 = 4;
/// A request of those who are passed over may take longer by one part in so many of the time from one to the next: they have four
/// fifths of what they have alone. A single one counts for no more than so many times what it may take, in 1/1024.
const LONGER_PART: u64 = 4;
const PARTS_MAX: u64 = 4 * 1024;
/// At most so many are passed over.
const PASSED_MAX: usize = 256;
/// A phase counts after this time, that is, when the drive has been filled.
const SKIP: Nanos = Nanos::from_millis(1);
/// A phase ends when so many requests were given out in so long a time.
const TAKEN_MANY: u32 = 64;
const PHASE_SHORT: Nanos = Nanos::from_millis(5);
const TAKEN_FEW: u32 = 8;
/// Of a subject that has left in the last phase: with so many it is known all the same.
const TAKEN_KNOWN: u32 = 3;
const PHASE_LONG: Nanos = Nanos::from_millis(12);
const PHASE_MAX: Nanos = Nanos::from_millis(24);
/// So long it waits for what others have in flight.
const DRAIN_MAX: Nanos = Nanos::from_millis(50);
/// A phase that is looked at so late says nothing: there was a pause.
const STALE: Nanos = Nanos::from_millis(200);
/// A subject that has nothing for so long has left: the others do not wait for it.
const GONE: Nanos = Nanos::from_micros(2900);
/// From one probe of a member to the next: at first, and at most; it grows by so many times each.
const REST_FIRST: Nanos = Nanos::from_millis(100);
const REST_MAX: Nanos = Nanos::from_secs(8);
const REST_GROWS: u64 = 4;
/// After a probe there is none for so many times as long, and none of those who are passed over, of which there may be many.
const QUIET_TIMES: u64 = 8;
const PASSED_QUIET_TIMES: u64 = 64;
/// All together are looked at in pieces of so long.
const WATCH: Nanos = Nanos::from_millis(100);
/// After so long nothing that was known of those who are passed over counts.
const LONG_AWAY: Nanos = Nanos::from_millis(200);
/// How often it is looked whether anybody's rest is over.
const LOOK: Nanos = Nanos::from_millis(10);
/// The room changes after so many ends of those who are passed over, by one part in so many.
const WINDOW_ENDS: u64 = 8;
const STEP_PART: u32 = 8;
/// So long room is kept for those who are passed over if they have nothing.
const ROOM_KEPT: Nanos = Nanos::from_millis(4);
