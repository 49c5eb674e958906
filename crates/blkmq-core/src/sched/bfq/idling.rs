//! Decides how long others are held for a group or client that has nothing, neither waiting nor in flight: as long as it may
//! come back at once. `mod` tells it who comes and goes, the gate when each reactor has answered.
//!
//! ```text
//!   busy ──► dry ──────────────────► gone: the others are held for it no longer
//!    ▲        │   thinks for longer than it is waited for; or its time is over
//!    └────────┘   its reactor has not answered yet: up to LATE_MAX, on credit
//! ```
//! Who sends one request after the other is dry between two of them. What it thinks in between is known from its past; who thinks
//! for longer than `slice_idle`, or PATIENCE, is not waited for. A reactor that has lost its processor for some milliseconds has
//! ends that it has told nobody of: its clients cannot ask. They are waited for until it answers, at most LATE_MAX, and in all
//! for one in CREDIT_PART of the time.
//!
//! Waiting costs nothing while the others are within the bound of `lead`, which is about as long as most waits.

use super::wf2q::EntityId;
use crate::ids::{GroupId, REACTORS_MAX, ReactorId, ReactorSet};
use crate::time::{Instant, Nanos};

/// What is known of all groups and clients.
#[derive(Debug)]
pub(super) struct Idling {
    members: Vec<Member>,
    /// Until when each reactor has answered, and when that was told.
    answered: Vec<(Instant, Instant)>,
    /// Reactors that are to be asked, once each, and when one was named last.
    awaited: ReactorSet,
    asked_at: Instant,
    /// For whom others are held now, since when, and when to look again.
    held: Option<IdleWait>,
    credit: Nanos,
    credit_at: Instant,
}

/// One group or client.
#[derive(Clone, Copy, Debug)]
struct Member {
    dry_since: Instant,
    /// When its latest end was seen by its reactor, which may be a while before it was told of here.
    ended_at: Instant,
    /// From its last end to its next request: a moving mean, of so many.
    think: Nanos,
    thinks: u32,
    /// For how long it may be away and keep what is due to it, and until when that was earned.
    moments: Nanos,
    moments_at: Instant,
    /// Of its latest end.
    reactor: ReactorId,
}

#[derive(Clone, Copy, Debug)]
struct IdleWait {
    group: GroupId,
    since: Instant,
    /// When to look again; none if nobody is waited for who has nothing.
    until: Option<Instant>,
    /// It is waited for because its reactor is late.
    is_late: bool,
}

impl Idling {
    /// Makes what is needed for so many groups and clients.
    pub(super) fn new(members: usize) -> Self {
        let member = Member {
            dry_since: Instant(0),
            ended_at: Instant(0),
            think: Nanos::ZERO,
            thinks: 0,
            moments: Nanos::ZERO,
            moments_at: Instant(0),
            reactor: ReactorId(0),
        };
        Self {
            members: vec![member; members],
            answered: vec![(Instant(0), Instant(0)); REACTORS_MAX],
            awaited: ReactorSet::default(),
            asked_at: Instant(0),
            held: None,
            credit: CREDIT_MAX,
            credit_at: Instant(0),
        }
    }

    /// It has a request again, or for the first time; others were held for it no longer than `patience`. Says whether it was away for a
    /// moment only, as a client is that has lost its processor: the others went on, but not at its expense.
    #[inline]
    pub(super) fn came(&mut self, id: EntityId, patience: Nanos, now: Instant) -> bool {
        let member = &mut self.members[id.index()];
        let pause = now.since(member.dry_since);
        let missed = Nanos(pause.0.saturating_sub(member.wait(patience).0));
        let is_moment = member.thinks > 0 && member.spend(missed, now);
        if member.thinks == 0 {
            // It is there from now on; until now nobody was waited for.
            member.moments_at = now;
        } else {
            member.think = Nanos((member.think.0 * 7 + pause.min(THINK_MAX).0) / 8);
        }
        member.thinks = member.thinks.saturating_add(1);
        is_moment
    }

    /// Its last request has ended; its reactor has seen that at `ended_at`.
    #[inline]
    pub(super) fn left(&mut self, id: EntityId, reactor: ReactorId, ended_at: Instant, now: Instant) {
        let member = &mut self.members[id.index()];
        member.dry_since = now;
        member.ended_at = ended_at;
        member.reactor = reactor;
    }

    /// Nothing is known of it any more.
    pub(super) fn forget(&mut self, id: EntityId) {
        let member = &mut self.members[id.index()];
        (member.think, member.thinks) = (Nanos::ZERO, 0);
        member.moments = Nanos::ZERO;
    }

    /// Those for whom others are held are about to be looked at anew.
    pub(super) fn look_again(&mut self) {
        if let Some(held) = &mut self.held {
            held.until = None;
        }
    }

    /// Says whether others are not to be held for it any longer; else they are, and somebody looks again later. It is waited
    /// for no longer than `patience`, if its reactor has answered.
    pub(super) fn is_gone(&mut self, id: EntityId, group: GroupId, patience: Nanos, now: Instant) -> bool {
        let member = self.members[id.index()];
        let mut until = member.dry_since + member.wait(patience);
        let mut is_late = false;
        if now >= until {
            match self.is_late(member, now) {
                None => {
                    // It is asked before the next look.
                    until = now;
                    self.awaited.insert(member.reactor);
                    self.asked_at = now;
                }
                Some(false) => return true,
                Some(true) => {
                    if now >= member.dry_since + LATE_MAX || !self.has_credit(now) {
                        return true;
                    }
                    until = now + LATE_LOOK;
                    is_late = true;
                    self.awaited.insert(member.reactor);
                    self.asked_at = now;
                }
            }
        }
        let held = self.held.get_or_insert(IdleWait {
            group,
            since: now,
            until: None,
            is_late,
        });
        held.is_late |= is_late;
        held.until = Some(held.until.map_or(until, |other| other.min(until)));
        false
    }

    /// Nobody is held for somebody who has nothing. Returns for whom that was so until now, and for how long.
    #[inline]
    pub(super) fn end_hold(&mut self, now: Instant) -> Option<(GroupId, Nanos)> {
        let held = self.held.take()?;
        let time = now.since(held.since);
        if held.is_late {
            self.credit = Nanos(self.credit.0.saturating_sub(time.0));
        }
        Some((held.group, time))
    }

    /// Whose answers are of interest now.
    #[inline]
    pub(super) fn awaited(&self) -> ReactorSet {
        self.awaited
    }

    /// Learns at `now` that a reactor has answered all that had ended until then.
    pub(super) fn answered(&mut self, reactor: ReactorId, until: Instant, now: Instant) {
        self.answered[reactor.index()] = (until, now);
        self.awaited.remove(reactor);
    }

    /// Says when to look again whether somebody is still waited for.
    pub(super) fn next_wakeup(&self) -> Option<Instant> {
        self.held.and_then(|held| held.until)
    }

    /// Says whether others are held for somebody who has nothing.
    #[inline]
    pub(super) fn holds(&self) -> bool {
        self.held.is_some()
    }

    /// Whether a member's reactor has not answered its last end yet; unknown if it has not been asked.
    fn is_late(&self, member: Member, now: Instant) -> Option<bool> {
        let (until, told_at) = self.answered[member.reactor.index()];
        if told_at == now {
            return Some(until < member.ended_at);
        }
        // Nobody tells of it although it was asked: it cannot be late.
        let was_asked = self.awaited.contains(member.reactor) && self.asked_at < now;
        was_asked.then_some(false)
    }

    fn has_credit(&mut self, now: Instant) -> bool {
        let earned = now.since(self.credit_at).0 / CREDIT_PART;
        if earned > 0 {
            self.credit = Nanos(self.credit.0.saturating_add(earned)).min(CREDIT_MAX);
            self.credit_at = now;
        }
        self.held.is_some_and(|held| held.is_late) || self.credit >= LATE_MAX
    }
}

impl Member {
    /// How long others are held for it if it has nothing.
    #[inline]
    fn wait(&self, patience: Nanos) -> Nanos {
        // Who was never seen to come back is not waited for.
        if self.thinks < THINKS_KNOWN || self.think > patience {
            return Nanos::ZERO;
        }
        Nanos((self.think.0 * 4).max(WAIT_MIN.0)).min(patience)
    }

    /// Takes off what it missed, if it was there for long enough before.
    #[inline]
    fn spend(&mut self, missed: Nanos, now: Instant) -> bool {
        let was_there = now.since(self.moments_at).0.saturating_sub(missed.0);
        self.moments_at = now;
        self.moments = Nanos(self.moments.0 + was_there / MOMENT_PART).min(MOMENT_MAX);
        let is_moment = missed <= self.moments;
        if is_moment {
            self.moments = Nanos(self.moments.0 - missed.0);
        }
        is_moment
    }
}

/// The first request ends no pause; the second does.
const THINKS_KNOWN: u32 = 2;
/// A single long pause says no more than this of how long somebody thinks.
const THINK_MAX: Nanos = Nanos::from_millis(8);
/// Who comes back at once is waited for at least so long: a sleeper needs that to wake up.
const WAIT_MIN: Nanos = Nanos::from_micros(200);
/// Who is away for one part in so many of the time that it is there, and so long at once, keeps what is due to it.
const MOMENT_PART: u64 = 8;
const MOMENT_MAX: Nanos = Nanos::from_millis(20);
/// So long somebody is waited for whose reactor is late.
const LATE_MAX: Nanos = Nanos::from_millis(10);
/// And it is asked again so often.
const LATE_LOOK: Nanos = Nanos::from_micros(500);
/// Waiting for late reactors takes one in so many of all time at most, and so much at once.
const CREDIT_PART: u64 = 32;
const CREDIT_MAX: Nanos = Nanos::from_millis(30);
