//! Decides how many requests others may have in flight, so that requests of passed-over members keep within
//! their time.
//!
//! The room is found by feedback: it grows while those requests keep within their time, and shrinks while
//! they do not. The cause of slow requests need not be the drive: ten clients that share two processors are
//! slow although the drive idles for them. So if the others would be served much more without the room, and
//! those members not much less, the room is *lifted*.

use crate::time::{Instant, Nanos};

/// The room of the others, and the observations from which it is found.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// Ended requests of passed-over members, and the sum of their times, each divided by the time allowed,
    /// in 1/1024.
    ends: u64,
    parts: u64,
    /// The latest time at which one of those requests began or ended, or at which one was seen to be out.
    pub(super) seen: Instant,
    /// The latest time at which one began or ended.
    pub(super) moved: Instant,
    /// The largest number that the others had in flight when one of them was held.
    held_at: u32,
    /// How many requests the others may have in flight.
    room: u32,
    /// None of those requests took too long since the first member was passed over: the room doubles.
    is_new: bool,
    /// A passed-over member has requests, so the room applies.
    pub(super) is_binding: bool,
    /// The room does not apply even then, because it costs more than it gains.
    is_lifted: bool,
    /// How fast those requests end with the room, and without it: in the open phases of probes, and while it
    /// is lifted.
    limited: Pace,
    open: Pace,
    /// Time up to which the paces are counted.
    paced_until: Instant,
}

/// How many requests ended in how much time, lately.
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    ends: u64,
    time: Nanos,
}

impl Window {
    /// Says whether the others, with `others` requests in flight, may have one more.
    #[inline]
    pub(super) fn permits(&self, others: u32) -> bool {
        !self.is_binding || self.is_lifted || others < self.room
    }

    /// Notes that a request of the others was held while they had `others` in flight.
    #[inline]
    pub(super) fn note_held_back(&mut self, others: u32) {
        self.held_at = self.held_at.max(others);
    }

    /// Counts the dispatch of a passed-over member's request: room is kept for it.
    #[inline]
    pub(super) fn begin_one(&mut self, now: Instant) {
        (self.seen, self.moved, self.is_binding) = (now, now, true);
    }

    /// Starts with the first passed-over member: the room is what the others use now.
    pub(super) fn begin(&mut self) {
        (self.room, self.is_new) = (self.held_at.max(1), true);
        self.forget_gain();
    }

    /// The room, and whether it is lifted.
    pub(super) fn learnt(&self) -> (u64, u64) {
        (self.room.into(), self.is_lifted.into())
    }

    /// Continues with the values found by another elevator.
    pub(super) fn take_learnt(&mut self, room: u64, lifted: u64) {
        (self.room, self.is_lifted) = (room.clamp(1, ROOM_MAX) as u32, lifted == 1);
    }

    /// Other members are passed over than before: the gain of the room must be measured again.
    pub(super) fn forget_gain(&mut self) {
        (self.is_lifted, self.limited, self.open) = (false, Pace::default(), Pace::default());
    }

    /// Counts the end of a passed-over member's request that took `time`; `time_max` is the time allowed,
    /// zero for no limit. The others have `others` in flight.
    pub(super) fn note_end(&mut self, time: Nanos, time_max: Nanos, others: u32, now: Instant) {
        let pace = if self.is_lifted {
            &mut self.open
        } else {
            &mut self.limited
        };
        pace.add(1, now.since(self.paced_until).min(ROOM_KEPT));
        (self.seen, self.moved, self.paced_until) = (now, now, now);
        self.ends += 1;
        self.parts += (time.0 * 1024)
            .checked_div(time_max.0)
            .unwrap_or(0)
            .min(PARTS_MAX);
        if self.ends >= WINDOW_ENDS {
            self.adapt(others);
        }
    }

    /// Counts an open phase of a probe: `time` long, with `ends` ended requests of passed-over members. All
    /// members together had the rate `all` in it, and `usual` before it, in bytes per second.
    pub(super) fn note_open(&mut self, ends: u64, time: Nanos, all: u64, usual: u64) {
        self.open.add(ends, time);
        let Some(gain) = self.gain().filter(|_| usual > 0) else {
            return;
        };
        let cost = all.saturating_mul(GAIN_NONE) / usual;
        self.is_lifted |= gain <= GAIN_LOW && cost >= gain + gain / COST_PART;
    }

    /// The pace of those members with the room divided by their pace without it, in 1/1024, if both are known.
    fn gain(&self) -> Option<u64> {
        let expected = self.limited.ends_in(self.open.time)?;
        (expected >= PACE_KNOWN).then(|| expected * GAIN_NONE / self.open.ends.max(1))
    }

    /// Gives the others more room if the requests kept within their time, otherwise less.
    fn adapt(&mut self, others: u32) {
        let is_enough = self.parts <= 1024 * self.ends;
        let step = match self.is_new {
            true => self.room,
            false => (self.room / STEP_PART).max(1),
        };
        self.is_new &= is_enough;
        if self.is_lifted {
            // The room is kept for when it applies again.
            self.is_lifted = self.gain().is_none_or(|gain| gain <= GAIN_HIGH);
        } else if !is_enough {
            self.room = self.room.min(self.held_at.max(others));
            self.room = self.room.saturating_sub(step).max(1);
        } else if self.held_at >= self.room {
            // Room that is not used does not grow.
            self.room += step;
        }
        (self.ends, self.parts, self.held_at) = (0, 0, 0);
    }

    /// A probe is over: counts from before it are dropped.
    pub(super) fn begin_again(&mut self, is_binding: bool, now: Instant) {
        (self.ends, self.parts, self.held_at) = (0, 0, 0);
        (self.seen, self.moved, self.paced_until) = (now, now, now);
        self.is_binding = is_binding;
    }
}

impl Pace {
    fn add(&mut self, ends: u64, time: Nanos) {
        if self.ends >= PACE_KEPT || self.time >= PACE_TIME {
            (self.ends, self.time) = (self.ends / 2, Nanos(self.time.0 / 2));
        }
        self.ends += ends;
        self.time += time;
    }

    /// How many requests end in `time` at this pace, if the pace is known.
    fn ends_in(&self, time: Nanos) -> Option<u64> {
        let ends = u128::from(self.ends) * u128::from(time.0) / u128::from(self.time.0.max(1));
        (self.ends >= PACE_KNOWN).then_some(ends as u64)
    }
}

/// A request counts for at most this multiple of its allowed time, in 1/1024.
const PARTS_MAX: u64 = 4 * 1024;
/// More than any drive holds.
const ROOM_MAX: u64 = 1 << 16;
/// The room changes after this many ends, by one part in `STEP_PART`.
const WINDOW_ENDS: u64 = 8;
const STEP_PART: u32 = 8;
/// How long room is kept for passed-over members without requests.
pub(super) const ROOM_KEPT: Nanos = Nanos::from_millis(4);
/// A pace is known from `PACE_KNOWN` ends on, and halves its counts at `PACE_KEPT` ends, or after `PACE_TIME`.
const PACE_KNOWN: u64 = 16;
const PACE_KEPT: u64 = 128;
const PACE_TIME: Nanos = Nanos::from_millis(200);
/// The room is lifted if its gain for those members is low and its cost for all members together is higher by
/// one part in `COST_PART`, until its gain would be high; in 1/1024.
const GAIN_NONE: u64 = 1024;
const GAIN_LOW: u64 = 1792;
const GAIN_HIGH: u64 = 2048;
const COST_PART: u64 = 4;

#[cfg(test)]
mod tests;
