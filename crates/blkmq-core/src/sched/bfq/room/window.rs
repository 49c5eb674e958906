//! How much others may have in flight so that the requests of members that are passed over take no longer than they may.

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
}

impl Window {
    /// Says whether the others may have one more in flight than these.
    #[inline]
    pub(super) fn permits(&self, others: u32) -> bool {
        !self.is_binding || others < self.room
    }

    /// One of the others was held while they had so many in flight.
    #[inline]
    pub(super) fn held(&mut self, others: u32) {
        self.held_at = self.held_at.max(others);
    }

    /// The first member is passed over: the room is what the others use now.
    pub(super) fn open(&mut self) {
        (self.room, self.is_new) = (self.held_at.max(1), true);
    }

    /// A request of a member that is passed over has ended, after this time; it may take `time_max`, or as long as it likes if that
    /// is zero. The others have so many in flight.
    pub(super) fn note_end(&mut self, time: Nanos, time_max: Nanos, others: u32, now: Instant) {
        self.seen = now;
        self.ends += 1;
        self.parts += (time.0 * 1024)
            .checked_div(time_max.0)
            .unwrap_or(0)
            .min(PARTS_MAX);
        if self.ends >= WINDOW_ENDS {
            self.adapt(others);
        }
    }

    /// Gives the others more room if the requests took no longer than they may, else less.
    fn adapt(&mut self, others: u32) {
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

    /// A probe is over: what was counted before it says nothing.
    pub(super) fn begin_again(&mut self, is_binding: bool, now: Instant) {
        (self.ends, self.parts, self.held_at) = (0, 0, 0);
        (self.seen, self.is_binding) = (now, is_binding);
    }
}

/// A request counts for no more than so many times what it may take, in 1/1024.
const PARTS_MAX: u64 = 4 * 1024;
/// The room changes after so many ends, by one part in so many.
const WINDOW_ENDS: u64 = 8;
const STEP_PART: u32 = 8;
