//! How much others may have in flight so that the requests of members that are passed over take no longer than they may.
//!
//! The room is found by what it does: it grows while those requests take no longer than they may, and shrinks while they do. What
//! makes them slow need not be the drive: ten clients that share two processors are slow beside a drive that idles for them. So
//! where the others would have far more without the room, and those members not much less, it is *lifted*.

use crate::time::{Instant, Nanos};

/// The room of the others, and what it is found from.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// Requests of members that are passed over which have ended, and the sum of their times over those that they may take, in
    /// 1/1024.
    ends: u64,
    parts: u64,
    /// When one of those requests began or ended, at the latest.
    pub(super) seen: Instant,
    /// The most that the others had in flight when one of them was held.
    held_at: u32,
    /// So many requests the others may have in flight.
    room: u32,
    /// None of those requests took too long since the first member was passed over: the room doubles.
    is_new: bool,
    /// A member that is passed over has requests, so the room counts.
    pub(super) is_binding: bool,
    /// It does not count all the same: it costs more than it gains.
    is_lifted: bool,
    /// How fast those requests end with the room, and without it: in the open phases of probes, and while it is lifted.
    limited: Pace,
    open: Pace,
    /// Up to when that is counted.
    paced_until: Instant,
}

/// So many requests in so long, of the latest ones.
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    ends: u64,
    time: Nanos,
}

impl Window {
    /// Says whether the others may have one more in flight than these.
    #[inline]
    pub(super) fn permits(&self, others: u32) -> bool {
        !self.is_binding || self.is_lifted || others < self.room
    }

    /// One of the others was held while they had so many in flight.
    #[inline]
    pub(super) fn note_held_back(&mut self, others: u32) {
        self.held_at = self.held_at.max(others);
    }

    /// The first member is passed over: the room is what the others use now.
    pub(super) fn begin(&mut self) {
        (self.room, self.is_new) = (self.held_at.max(1), true);
        self.forget_gain();
    }

    /// How many the others may have in flight, and whether that does not count.
    pub(super) fn learnt(&self) -> (u64, u64) {
        (self.room.into(), self.is_lifted.into())
    }

    /// Goes on with what was found elsewhere.
    pub(super) fn take_learnt(&mut self, room: u64, lifted: u64) {
        (self.room, self.is_lifted) = (room.clamp(1, ROOM_MAX) as u32, lifted == 1);
    }

    /// Other members are passed over than before: what the room gains is found out again.
    pub(super) fn forget_gain(&mut self) {
        (self.is_lifted, self.limited, self.open) = (false, Pace::default(), Pace::default());
    }

    /// A request of a member that is passed over has ended, after this time; it may take `time_max`, or as long as it likes if that
    /// is zero. The others have so many in flight.
    pub(super) fn note_end(&mut self, time: Nanos, time_max: Nanos, others: u32, now: Instant) {
        let pace = if self.is_lifted {
            &mut self.open
        } else {
            &mut self.limited
        };
        pace.add(1, now.since(self.paced_until).min(ROOM_KEPT));
        (self.seen, self.paced_until) = (now, now);
        self.ends += 1;
        self.parts += (time.0 * 1024)
            .checked_div(time_max.0)
            .unwrap_or(0)
            .min(PARTS_MAX);
        if self.ends >= WINDOW_ENDS {
            self.adapt(others);
        }
    }

    /// In an open phase of a probe, as long as this, so many requests of members that are passed over have ended. All together had
    /// this rate in it, and `usual` before it, in bytes per second.
    pub(super) fn note_open(&mut self, ends: u64, time: Nanos, all: u64, usual: u64) {
        self.open.add(ends, time);
        let Some(gain) = self.gain().filter(|_| usual > 0) else {
            return;
        };
        let cost = all.saturating_mul(GAIN_NONE) / usual;
        self.is_lifted |= gain <= GAIN_LOW && cost >= gain + gain / COST_PART;
    }

    /// What those members have with the room over what they have without, in 1/1024, if that is known.
    fn gain(&self) -> Option<u64> {
        let expected = self.limited.ends_in(self.open.time)?;
        (expected >= PACE_KNOWN).then(|| expected * GAIN_NONE / self.open.ends.max(1))
    }

    /// Gives the others more room if the requests took no longer than they may, else less.
    fn adapt(&mut self, others: u32) {
        let is_enough = self.parts <= 1024 * self.ends;
        let step = match self.is_new {
            true => self.room,
            false => (self.room / STEP_PART).max(1),
        };
        self.is_new &= is_enough;
        if self.is_lifted {
            // It is kept for when it counts again.
            self.is_lifted = self.gain().is_none_or(|gain| gain <= GAIN_HIGH);
        } else if !is_enough {
            self.room = self.room.min(self.held_at.max(others));
            self.room = self.room.saturating_sub(step).max(1);
        } else if self.held_at >= self.room {
            // Room that nobody uses does not grow.
            self.room += step;
        }
        (self.ends, self.parts, self.held_at) = (0, 0, 0);
    }

    /// A probe is over: what was counted before it says nothing.
    pub(super) fn begin_again(&mut self, is_binding: bool, now: Instant) {
        (self.ends, self.parts, self.held_at) = (0, 0, 0);
        (self.seen, self.paced_until, self.is_binding) = (now, now, is_binding);
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

    /// How many end in so long a time at this pace, once it is known.
    fn ends_in(&self, time: Nanos) -> Option<u64> {
        let ends = u128::from(self.ends) * u128::from(time.0) / u128::from(self.time.0.max(1));
        (self.ends >= PACE_KNOWN).then_some(ends as u64)
    }
}

/// A request counts for no more than so many times what it may take, in 1/1024.
const PARTS_MAX: u64 = 4 * 1024;
/// More than any drive holds.
const ROOM_MAX: u64 = 1 << 16;
/// The room changes after so many ends, by one part in so many.
const WINDOW_ENDS: u64 = 8;
const STEP_PART: u32 = 8;
/// So long room is kept for members that are passed over and have nothing.
pub(super) const ROOM_KEPT: Nanos = Nanos::from_millis(4);
/// A pace is known from so many ends, and forgets half of what it knows at so many, or after so long.
const PACE_KNOWN: u64 = 16;
const PACE_KEPT: u64 = 128;
const PACE_TIME: Nanos = Nanos::from_millis(200);
/// The room is lifted if it gains those members little and costs all together more, by one part in so many, until it would gain them
/// much; in 1/1024.
const GAIN_NONE: u64 = 1024;
const GAIN_LOW: u64 = 1792;
const GAIN_HIGH: u64 = 2048;
const COST_PART: u64 = 4;

#[cfg(test)]
mod tests;
