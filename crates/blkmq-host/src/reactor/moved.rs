//! A limit on the data that one group may move in one turn of a reactor, in bytes and in time. Drives
//! that complete inline (memory, the page cache) copy a group's data on the reactor's thread, and all
//! others wait meanwhile. `reactor::core` owns it, `service` asks it.

use blkmq_core::ids::GroupId;
use blkmq_core::time::{Instant, Nanos};

use crate::disk::QueueId;

/// The data that each group has moved in this turn.
#[derive(Debug, Default)]
pub(crate) struct Moved(Vec<Share>);

#[derive(Debug)]
struct Share {
    of: (QueueId, GroupId),
    /// When its first large bio of this turn was submitted.
    since: Instant,
    /// Bytes of its large bios.
    bytes: u64,
}

impl Moved {
    /// A new turn begins.
    #[inline]
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Counts a bio and admits it, unless its group on that queue has used up its share of this turn: the first
    /// bio of a turn is admitted, whatever its size; the queue stages a large one in parts, in several turns.
    pub(crate) fn admit(&mut self, of: (QueueId, GroupId), bytes: u64, now: Instant) -> bool {
        let Some(share) = self.0.iter_mut().find(|share| share.of == of) else {
            self.0.push(Share {
                of,
                since: now,
                bytes,
            });
            return true;
        };
        let is_enough = share.bytes + bytes > BYTES_MAX || now.since(share.since) > TIME_MAX;
        if is_enough {
            return false;
        }
        share.bytes += bytes;
        true
    }
}

/// About a tenth of a millisecond of copying to memory that was touched before.
const BYTES_MAX: u64 = 1 << 20;
/// Copying to memory that is touched for the first time takes ten times as long.
const TIME_MAX: Nanos = Nanos::from_micros(100);

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const NOW: Instant = Instant(0);

    #[test]
    fn group_that_has_had_enough_holds_up_no_other_and_goes_on_in_the_next_turn() {
        let (flood, light) = ((QueueId(0), GroupId(1)), (QueueId(1), GroupId(1)));
        let mut moved = Moved::default();
        let admitted = (0..100).filter(|_| moved.admit(flood, MIB, NOW)).count();
        assert_eq!(admitted, 1);
        assert!(moved.admit(light, MIB, NOW), "another group, of another queue");
        assert!(!moved.admit(flood, MIB, NOW));
        moved.clear();
        assert!(
            moved.admit(flood, 32 * MIB, NOW),
            "the first one, whatever its size"
        );
        assert!(!moved.admit(flood, 32 << 10, NOW));
    }

    #[test]
    fn group_whose_data_moves_slowly_has_as_much_time_as_others() {
        let group = (QueueId(0), GroupId(1));
        let mut moved = Moved::default();
        let at = |us| NOW + Nanos::from_micros(us);
        let admitted = (0..16)
            .filter(|n| moved.admit(group, 32 << 10, at(n * 30)))
            .count();
        assert_eq!(admitted, 4, "at 0, 30, 60 and 90 µs");
    }
}
