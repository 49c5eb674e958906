//! Idling: others are held for a group or client that has no request waiting or in flight, as long as it may
//! return at once.
//! `mod` reports which members come and go, the gate reports when each reactor has answered.
//!
//! ```text
//!   busy ──► dry ──────────────────► gone: the others are held for it no longer
//!    ▲        │   thinks for longer than it is waited for; or its time is over
//!    └────────┘   its reactor has not answered yet: up to LATE_MAX, on credit
//! ```
//! A client that sends one request after the other is dry between two requests. Its think time between them
//! is known from its past; a client that thinks for longer than `slice_idle`, or than a request takes, is not
//! waited for. A reactor that lost its CPU for some milliseconds has ends that it has not delivered, so its clients
//! cannot respond. Its clients are waited for until it answers, at most LATE_MAX, and in total for one in
//! CREDIT_PART of the time.
//!
//! Waiting costs nothing while the others are within the bound of `lead`, which is about as long as most waits.

use super::wf2q::EntityId;
use crate::ids::{GroupId, REACTORS_MAX, ReactorId, ReactorSet};
use crate::time::{Instant, Nanos};

/// The estimates for all groups and clients.
#[derive(Debug)]
pub(super) struct Idling {
    members: Vec<Member>,
    /// By reactor: until when it has answered, and when that was reported.
    answered: Vec<(Instant, Instant)>,
    /// Reactors to query, once each, and when one was named last.
    awaited: ReactorSet,
    asked_at: Instant,
    /// The member for which others are held now, since when, and when to check again.
    held: Option<IdleWait>,
    credit: Nanos,
    credit_at: Instant,
    /// When it may count as stalled.
    stalls_at: Option<Instant>,
    /// The latest end of any request, and for how long the drive has ended some.
    last_end: Instant,
    alive: Nanos,
}

/// One group or client.
#[derive(Clone, Copy, Debug)]
struct Member {
    dry_since: Instant,
    /// When its reactor reaped its latest completion; the report may come here later.
    ended_at: Instant,
    /// Think time, from its last end to its next request: a moving mean, of `thinks` values.
    think: Nanos,
    thinks: u32,
    /// Its service from one such pause to the next: a moving mean, in bytes; and its service at the latest one.
    burst: u64,
    served: u64,
    /// While others are held for it although it has requests: since when it got nothing more.
    watch: Option<Watch>,
    /// For how long it may be absent and keep its due, and until when that was earned.
    moments: Nanos,
    moments_at: Instant,
    /// The reactor of its latest end.
    reactor: ReactorId,
}

/// How a member comes back from a pause.
#[derive(Clone, Copy, Debug)]
pub(super) struct Return {
    /// It was absent only for a moment, as a client that lost its CPU: the others continued, but not at its
    /// expense.
    pub(super) is_moment: bool,
    /// How many bytes a second it would ask for if its I/O took no time: its bursts over its pauses.
    pub(super) asks: u64,
    /// Up to which service this is a burst like those before.
    pub(super) modest_until: u64,
}

impl Return {
    /// Nothing is known of its pauses.
    pub(super) const OF_NEWCOMER: Self = Self {
        is_moment: false,
        asks: u64::MAX,
        modest_until: 0,
    };
}

/// Since when a member got nothing more: its service, the time, and for how long the drive had ended requests.
#[derive(Clone, Copy, Debug)]
struct Watch {
    served: u64,
    since: Instant,
    alive: Nanos,
}

#[derive(Clone, Copy, Debug)]
struct IdleWait {
    group: GroupId,
    since: Instant,
    /// When to check again; none if no member without requests is waited for.
    until: Option<Instant>,
    /// It is waited for because its reactor is late.
    is_late: bool,
}

impl Idling {
    /// Makes the tables for `members` groups and clients.
    pub(super) fn new(members: usize) -> Self {
        let member = Member {
            dry_since: Instant(0),
            ended_at: Instant(0),
            think: Nanos::ZERO,
            thinks: 0,
            burst: 0,
            served: 0,
            watch: None,
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
            stalls_at: None,
            last_end: Instant(0),
            alive: Nanos::ZERO,
        }
    }

    /// Handles a member that has a request again, or for the first time, with its service so far; others were
    /// held for it no longer than `patience`.
    #[inline]
    pub(super) fn came(&mut self, id: EntityId, served: u64, patience: Nanos, now: Instant) -> Return {
        let member = &mut self.members[id.index()];
        let pause = now.since(member.dry_since);
        let missed = Nanos(pause.0.saturating_sub(member.wait(patience).0));
        let is_moment = member.thinks > 0 && member.spend(missed, now);
        if member.thinks == 0 {
            // It is present from now on; until now no member was waited for.
            member.moments_at = now;
        } else {
            member.think = Nanos((member.think.0 * 7 + pause.min(THINK_MAX).0) / 8);
            let burst = served - member.served;
            member.burst = if member.thinks == 1 {
                burst
            } else {
                (member.burst * 7 + burst) / 8
            };
        }
        member.served = served;
        member.thinks = member.thinks.saturating_add(1);
        let asks = match member.thinks {
            ..=THINKS_KNOWN => u64::MAX,
            _ => member.burst.min(BURST_MAX) * 1_000_000_000 / member.think.0.max(1),
        };
        Return {
            is_moment,
            asks,
            modest_until: served + BURSTS_MODEST * member.burst,
        }
    }

    /// Handles the end of its last request, which its reactor reaped at `ended_at`.
    #[inline]
    pub(super) fn left(&mut self, id: EntityId, reactor: ReactorId, ended_at: Instant, now: Instant) {
        let member = &mut self.members[id.index()];
        member.dry_since = now;
        member.ended_at = ended_at;
        member.reactor = reactor;
    }

    /// Forgets the estimates of a member.
    pub(super) fn forget(&mut self, id: EntityId) {
        let member = &mut self.members[id.index()];
        (member.think, member.thinks) = (Nanos::ZERO, 0);
        (member.burst, member.watch) = (0, None);
        member.moments = Nanos::ZERO;
    }

    /// Begins a new check of the members for which others are held.
    pub(super) fn look_again(&mut self) {
        self.stalls_at = None;
        if let Some(held) = &mut self.held {
            held.until = None;
        }
    }

    /// Says whether others are no longer held for it; otherwise they are held, and a later check is due. It is
    /// waited for no longer than `patience`, if its reactor has answered.
    pub(super) fn is_gone(&mut self, id: EntityId, group: GroupId, patience: Nanos, now: Instant) -> bool {
        let member = self.members[id.index()];
        let mut until = member.dry_since + member.wait(patience);
        let mut is_late = false;
        if now >= until {
            match self.is_late(member, now) {
                None => {
                    // The reactor is queried before the next check.
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

    /// Says whether others are no longer held for a member that has requests: since they were held first it got
    /// nothing more, for `patience`. A request of it is out for longer than others could be the cause of. Only time
    /// in which the drive ends other requests counts, unless nothing else is out (`is_alone_out`): in a pause of
    /// the whole drive nobody is slower than the others. But they are held for no longer than PAUSE_MAX.
    pub(super) fn is_stalled(
        &mut self,
        (id, served): (EntityId, u64),
        is_alone_out: impl FnOnce() -> bool,
        patience: Nanos,
        now: Instant,
    ) -> bool {
        let known = self.members[id.index()]
            .watch
            .filter(|watch| watch.served == served);
        let watch = known.unwrap_or(Watch {
            served,
            since: now,
            alive: self.alive,
        });
        self.members[id.index()].watch = Some(watch);
        let (since, alive) = (watch.since, Nanos(self.alive.0 - watch.alive.0));
        let (soon, at_last) = (since + patience, since + patience.max(PAUSE_MAX));
        let is_stalled = now >= at_last || now >= soon && (alive >= patience || is_alone_out());
        if !is_stalled {
            let until = if now < soon { soon } else { at_last };
            self.stalls_at = Some(self.stalls_at.map_or(until, |other| other.min(until)));
        }
        is_stalled
    }

    /// Notes that a request of any member has ended; `patience` is that of [`Idling::is_stalled`].
    #[inline]
    pub(super) fn ended(&mut self, patience: Nanos, now: Instant) {
        self.alive += now.since(self.last_end).min(Nanos(patience.0 / ALIVE_PART));
        self.last_end = now;
    }

    /// Ends holding others for a member without requests. Returns that member, and for how long others were held.
    #[inline]
    pub(super) fn end_hold(&mut self, now: Instant) -> Option<(GroupId, Nanos)> {
        self.stalls_at = None;
        let held = self.held.take()?;
        let time = now.since(held.since);
        if held.is_late {
            self.credit = Nanos(self.credit.0.saturating_sub(time.0));
        }
        Some((held.group, time))
    }

    /// The reactors whose answers matter now.
    #[inline]
    pub(super) fn awaited(&self) -> ReactorSet {
        self.awaited
    }

    /// Notes at `now` that a reactor has answered all that had ended by `until`.
    pub(super) fn answered(&mut self, reactor: ReactorId, until: Instant, now: Instant) {
        self.answered[reactor.index()] = (until, now);
        self.awaited.remove(reactor);
    }

    /// The time at which to check again whether a member is still waited for.
    pub(super) fn next_wakeup(&self) -> Option<Instant> {
        let until = self.held.and_then(|held| held.until);
        [until, self.stalls_at].into_iter().flatten().min()
    }

    /// Says whether others are held for a member without requests.
    #[inline]
    pub(super) fn holds(&self) -> bool {
        self.held.is_some() || self.stalls_at.is_some()
    }

    /// Whether a member's reactor has not answered its last end yet; unknown if the reactor was not queried.
    fn is_late(&self, member: Member, now: Instant) -> Option<bool> {
        let (until, told_at) = self.answered[member.reactor.index()];
        if told_at == now {
            return Some(until < member.ended_at);
        }
        // No answer is reported although the reactor was queried: it cannot be late.
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
    /// How long others are held for a member without requests.
    #[inline]
    fn wait(&self, patience: Nanos) -> Nanos {
        // A member that never returned is not waited for.
        if self.thinks < THINKS_KNOWN || self.think > patience {
            return Nanos::ZERO;
        }
        Nanos((self.think.0 * 4).max(WAIT_MIN.0)).min(patience)
    }

    /// Deducts an absence, if the member was present for long enough before.
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
/// A burst this many times longer than those before is no burst.
const BURSTS_MODEST: u64 = 4;
/// A burst counts as at most this many bytes.
const BURST_MAX: u64 = 1 << 33;
/// A single long pause counts as at most this think time.
const THINK_MAX: Nanos = Nanos::from_millis(8);
/// A member that returns at once is waited for at least this long: a sleeping client needs it to wake up.
const WAIT_MIN: Nanos = Nanos::from_micros(200);
/// A member keeps its due if it is absent for at most one part in so many of the time that it is present,
/// and at most so long at once.
const MOMENT_PART: u64 = 8;
const MOMENT_MAX: Nanos = Nanos::from_millis(20);
/// A member with a late reactor is waited for at most this long.
const LATE_MAX: Nanos = Nanos::from_millis(10);
/// A pause of the whole drive that lasts no longer makes no member stalled.
const PAUSE_MAX: Nanos = Nanos::from_millis(20);
/// Between two ends, at most this part of the patience counts as time in which the drive ends requests.
const ALIVE_PART: u64 = 4;
/// Time between two queries of a late reactor.
const LATE_LOOK: Nanos = Nanos::from_micros(500);
/// Waiting for late reactors takes at most one in so many of all time, and at most so much at once.
const CREDIT_PART: u64 = 32;
const CREDIT_MAX: Nanos = Nanos::from_millis(30);
