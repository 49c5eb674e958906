//! Decides whether others are to be held for a member that has all it asks for in flight: as long as that makes it faster. `mod`
//! asks on each hold, tells of each end while anybody is held, and keeps what is in flight within the limit of a probe.
//!
//! A request's *slowdown* is the drive's time for it over the *base*, the time that the drive takes for one of its kind by
//! itself. Where requests of the slow member take hardly longer than the base, the drive is not busy: the member has what it
//! could have alone, or nearly, and to hold others back would only waste the drive. So while its slowdown is at most
//! ENOUGH, there is *room* beyond the bound of `lead`, an eighth more after each few of its ends; and an eighth less while it is
//! above. What is in flight settles where the slow member has about 1 / ENOUGH of what it has alone, or where shares are
//! exact, whichever comes first.
//!
//! ```text
//!             held, and the base is old             nothing in flight          enough ends, or too long
//!   Resting ─────────────────────────► Draining ───────────────────► Measuring ────────────────────────► Resting
//! ```
//! *The base* is found by probes: every few seconds what is in flight ends, then some requests go one at a time, in the order
//! of the shares as ever. That takes some thousandths of the time, and no estimate from a busy drive could replace it. The idea
//! is that of BBR's probes for the round trip (Cardwell and others, 2016).

use super::wf2q::EntityId;
use crate::bio::Direction;
use crate::time::{Instant, Nanos};

/// The base of each kind of request, and the slowdown of the slow member.
#[derive(Debug)]
pub(super) struct Slowdown {
    /// By direction and size; zero while unknown. Those that move no data are one kind.
    base: [[Nanos; SIZES]; 3],
    /// Until when ends are looked at: a while beyond the last hold.
    watched_until: Instant,
    /// For whom others were held last, and how many were in flight then.
    holder: Option<EntityId>,
    held_at: u32,
    /// The sum over so many of its ends, in 1/256.
    sum: u64,
    ends: u64,
    /// So many may be in flight where the bound would hold them.
    room: u32,
    probe: Probe,
    /// When the base is looked at again, and how long the rest after that is.
    probe_at: Instant,
    rest: Nanos,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Probe {
    Resting,
    Draining { until: Instant },
    Measuring { since: Instant, ends: u32 },
}

impl Slowdown {
    pub(super) fn new() -> Self {
        Self {
            base: [[Nanos::ZERO; SIZES]; 3],
            watched_until: Instant(0),
            holder: None,
            held_at: 0,
            sum: 0,
            ends: 0,
            room: 0,
            probe: Probe::Resting,
            probe_at: Instant(0),
            rest: REST_FIRST,
        }
    }

    /// Says how many requests may be in flight, if a probe bounds them.
    #[inline]
    pub(super) fn limit(&self) -> Option<u32> {
        (self.probe != Probe::Resting).then_some(1)
    }

    /// All that waits is held for a member, which has something in flight if it is busy, with so many in flight in all. Says
    /// whether one more may go all the same.
    pub(super) fn held(&mut self, holder: EntityId, is_busy: bool, in_flight: u32, now: Instant) -> bool {
        if self.watched_until < now {
            self.room = 0;
        }
        self.watched_until = now + WATCH;
        self.holder = Some(holder);
        self.held_at = in_flight;
        if self.probe == Probe::Resting && now >= self.probe_at && is_busy && in_flight > 0 {
            self.probe = Probe::Draining {
                until: now + DRAIN_MAX,
            };
            return false;
        }
        self.limit().is_none() && in_flight < self.room
    }

    /// Says whether ends are to be told.
    #[inline]
    pub(super) fn is_watching(&self, now: Instant) -> bool {
        now <= self.watched_until || self.probe != Probe::Resting
    }

    /// A request of a member has ended after the drive had it for `time`; so many are in flight still. `above` are the member and
    /// the groups that it is in.
    pub(super) fn ended(
        &mut self,
        mut above: impl Iterator<Item = EntityId>,
        (direction, bytes): (Direction, u64),
        time: Nanos,
        in_flight: u32,
        now: Instant,
    ) {
        let base = match direction {
            Direction::Read => &mut self.base[0][size(bytes)],
            Direction::Write => &mut self.base[1][size(bytes)],
            Direction::Discard | Direction::Flush => &mut self.base[2][0],
        };
        match self.probe {
            Probe::Measuring { since, ends } => {
                learn(base, time);
                let ends = ends + 1;
                let is_enough = ends >= ENDS_MAX || ends >= ENDS_MIN && now.since(since) >= MEASURE_MIN;
                self.probe = if is_enough {
                    Probe::Resting
                } else {
                    Probe::Measuring { since, ends }
                };
                if is_enough {
                    self.rest_from(now);
                }
            }
            Probe::Draining { .. } if in_flight == 0 => {
                self.probe = Probe::Measuring { since: now, ends: 0 };
            }
            Probe::Draining { .. } => {}
            Probe::Resting if *base > Nanos::ZERO && above.any(|id| self.holder == Some(id)) => {
                let slowdown = (time.0 * 256 / base.0).min(SLOWDOWN_MAX);
                self.note(slowdown);
            }
            Probe::Resting => {}
        }
    }

    /// Ends a probe that takes too long: something in flight does not end.
    pub(super) fn look(&mut self, now: Instant) {
        if self.next_wakeup().is_some_and(|until| now >= until) {
            self.probe = Probe::Resting;
            self.rest_from(now);
        }
    }

    /// Says when a probe ends at the latest.
    #[inline]
    pub(super) fn next_wakeup(&self) -> Option<Instant> {
        match self.probe {
            Probe::Resting => None,
            Probe::Draining { until } => Some(until),
            Probe::Measuring { since, .. } => Some(since + MEASURE_MAX),
        }
    }

    fn note(&mut self, slowdown: u64) {
        self.sum += slowdown;
        self.ends += 1;
        if self.ends < STEP_ENDS {
            return;
        }
        let has_enough = self.sum <= ENOUGH * self.ends;
        (self.sum, self.ends) = (0, 0);
        let step = (self.room / STEP_PART).max(1);
        self.room = match has_enough {
            // Room that nobody uses does not grow.
            true => (self.room.max(self.held_at) + step).min(self.held_at.saturating_mul(2) + step),
            false => self.room.saturating_sub(step),
        };
    }

    fn rest_from(&mut self, now: Instant) {
        self.probe_at = now + self.rest;
        self.rest = Nanos(self.rest.0 * 2).min(REST_MAX);
    }
}

/// Takes a time that the drive took for a request by itself into the base, which is a low one of such times: it falls by a
/// fourth of the difference and rises by 1/32 of itself. A drive that pauses or is slow for a moment does not pass for one that is
/// always so; one that has become slower is known within some probes, and until then shares are exact at its cost.
fn learn(base: &mut Nanos, time: Nanos) {
    *base = match base.0 {
        0 => time,
        known if time.0 < known => Nanos(known - (known - time.0) / 4),
        known => Nanos((known + known / 32).min(time.0)),
    };
    *base = (*base).max(Nanos(1));
}

/// The class of a size: powers of two from 4 KiB on.
#[inline]
fn size(bytes: u64) -> usize {
    ((bytes >> 12).max(1).ilog2() as usize).min(SIZES - 1)
}

/// Up to this slowdown, in 1/256, a member has enough: as a rule two thirds and more of what it has alone, since its client has a
/// part in each round, too. The base is a low time, so a request that finds the drive idle has 1.1.
const ENOUGH: u64 = 307;
/// A single request counts for no more: a pause of the drive is not its load.
const SLOWDOWN_MAX: u64 = 4 * 256;
/// After so many ends of the slow member the room changes, by one part in so many.
const STEP_ENDS: u64 = 8;
const STEP_PART: u32 = 8;
/// Classes of size: 4 KiB to 1 MiB and more.
const SIZES: usize = 9;
/// Ends of a probe: so many, or fewer that took so long.
const ENDS_MAX: u32 = 16;
const ENDS_MIN: u32 = 4;
const MEASURE_MIN: Nanos = Nanos::from_millis(1);
/// So long a probe waits for what is in flight, and goes on after that, at most.
const DRAIN_MAX: Nanos = Nanos::from_millis(20);
const MEASURE_MAX: Nanos = Nanos::from_millis(100);
/// From one probe to the next: at first, and at most.
const REST_FIRST: Nanos = Nanos::from_millis(100);
const REST_MAX: Nanos = Nanos::from_secs(4);
/// So long after a hold ends are still looked at.
const WATCH: Nanos = Nanos::from_millis(100);
