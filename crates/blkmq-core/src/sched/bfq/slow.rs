//! Which queues' requests take far longer than those of others of the same kind: their drive is slow, not their
//! neighbours. The depth counts requests so that few of them wait in the drive; these wait for something else, and
//! counted they would fill the depth and leave nothing to the rest.
//!
//! A request's *stretch* is its time in the drive over the least time of its kind; below one, as from a cache, it counts
//! as one. On a drive that does not seek, requests that wait in one queue have much the same stretch, whoever sent them;
//! `leader` is the queue with the lowest one. If the drive becomes slower, the leader's stretch grows with all others.
//!
//! A group has such a mean as well, once something of it was late: its queues may have a request each, and too few end for
//! one of them to be known. A group whose latest requests hung gets little of the reserve of the depth (`parked`).
//!
//! Some requests of slow queues may be out beside the depth, up to a bound: a mistake, or a client that wants to be slow,
//! costs the rest a little. More of them count; what is late among these is overdue.

use crate::time::{Instant, Nanos};

/// The stretch of each queue's requests.
#[derive(Debug)]
pub(super) struct SlowQueues {
    /// By queue, a moving mean, in 1/`ONE`; 0 while unknown.
    stretches: Vec<u32>,
    /// The same by group, whose queues may have a request each; 0 while nothing was slow.
    groups: Vec<u32>,
    leader: usize,
    /// The leader's stretch, the largest number while unknown, and when it was seen last.
    lowest: u32,
    seen_at: Instant,
}

impl SlowQueues {
    pub(super) fn new(queues: usize, groups: usize) -> Self {
        Self {
            stretches: vec![0; queues],
            groups: vec![0; groups],
            leader: 0,
            lowest: u32::MAX,
            seen_at: Instant(0),
        }
    }

    /// Says whether the requests of a queue, or of its group, take far longer than those of the leader.
    #[inline]
    pub(super) fn is_slow(&self, id: usize, group: usize) -> bool {
        self.stretches[id].max(self.groups[group]) > self.lowest.saturating_mul(SLOW_TIMES)
    }

    /// Says whether the latest requests of a group, two or three of them, took far longer.
    #[inline]
    pub(super) fn is_suspect(&self, group: usize) -> bool {
        self.groups[group] > self.lowest.saturating_mul(SUSPECT_TIMES)
    }

    /// Learns from the end of a request of a queue, and of its group, that the drive had for `time`; its kind takes `least`
    /// without a queue.
    #[inline]
    pub(super) fn completed(&mut self, (id, group): (usize, usize), time: Nanos, least: Nanos, now: Instant) {
        let stretch =
            (time.0.saturating_mul(ONE) / least.0.max(1)).clamp(ONE, u64::from(u32::MAX / MEAN_OF)) as u32;
        // Well below the threshold, which moves with the leader.
        let counted_max = if time < LATE_MIN {
            STRETCH_USUAL
        } else {
            STRETCH_MAX
        };
        if time >= LATE_MIN || self.groups[group] != 0 {
            self.learn_of_group(group, stretch.min(self.lowest.saturating_mul(counted_max)));
        }
        let own = &mut self.stretches[id];
        *own = match *own {
            0 => stretch.min(self.lowest.saturating_mul(STRETCH_USUAL)),
            // A pause of the drive is no property of a queue: some in a row are.
            mean => (mean * (MEAN_OF - 1) + stretch.min(self.lowest.saturating_mul(counted_max))) / MEAN_OF,
        };
        if id == self.leader || *own < self.lowest || now.since(self.seen_at) >= LEADS_FOR {
            (self.leader, self.lowest, self.seen_at) = (id, *own, now);
        }
    }

    #[cold]
    fn learn_of_group(&mut self, group: usize, stretch: u32) {
        let own = &mut self.groups[group];
        *own = ((*own).max(ONE as u32) * (MEAN_OF - 1) + stretch) / MEAN_OF;
        if *own < self.lowest.saturating_mul(STRETCH_FORGOTTEN) {
            *own = 0;
        }
    }

    /// Forgets a group, whose number another has now.
    pub(super) fn forget_group(&mut self, group: usize) {
        self.groups[group] = 0;
    }

    /// Forgets a leader who has ended no request for long. Whoever ends none that counts asks for this.
    #[inline]
    pub(super) fn look(&mut self, now: Instant) {
        if now.since(self.seen_at) >= LEADS_FOR {
            self.lowest = u32::MAX;
        }
    }

    /// Forgets a queue, which another client has now.
    pub(super) fn forget(&mut self, id: usize) {
        self.stretches[id] = 0;
        if id == self.leader {
            self.lowest = u32::MAX;
        }
    }
}

const ONE: u64 = 1024;
/// The mean is one of about so many requests, each counted up to so many times the leader's stretch.
const MEAN_OF: u32 = 8;
const STRETCH_MAX: u32 = 2 * SLOW_TIMES;
const STRETCH_USUAL: u32 = SLOW_TIMES / 2;
/// A group whose mean is below so many times the leader's stretch is like any other.
const STRETCH_FORGOTTEN: u32 = 2;
/// Two that are counted as `STRETCH_MAX` make a group suspect, or three where the leader's stretch is 2.
const SUSPECT_TIMES: u32 = 8;
/// A queue is slow if its requests take more than so many times as long as the leader's.
const SLOW_TIMES: u32 = 16;
/// Whatever others take, less than this makes nobody slow: a drive's own work takes so long beside what its cache has.
const LATE_MIN: Nanos = Nanos::from_millis(1);
/// Without an end for this long, the leader is another.
const LEADS_FOR: Nanos = Nanos::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: Nanos = Nanos::from_micros(100);

    fn ends(slow: &mut SlowQueues, id: usize, count: u32, us: u64, at_ms: u64) {
        let now = Instant(0) + Nanos::from_millis(at_ms);
        (0..count).for_each(|_| slow.completed((id, id), Nanos::from_micros(us), LEAST, now));
    }

    #[test]
    fn queue_is_slow_if_several_requests_in_a_row_take_far_longer_than_anothers() {
        let mut slow = SlowQueues::new(2, 2);
        ends(&mut slow, 0, 9, 100, 0);
        ends(&mut slow, 1, 9, 300, 0);
        ends(&mut slow, 1, 4, 1_000_000, 1);
        assert!(!slow.is_slow(1, 1), "four late ones are chance");
        ends(&mut slow, 1, 9, 1_000_000, 1);
        assert!(slow.is_slow(1, 1) && !slow.is_slow(0, 0));
        ends(&mut slow, 1, 20, 300, 2);
        assert!(!slow.is_slow(1, 1));
    }

    #[test]
    fn nobody_is_slow_on_a_drive_that_is_slow_for_all() {
        let mut slow = SlowQueues::new(2, 2);
        for us in [100, 5_000, 500_000] {
            for _ in 0..16 {
                ends(&mut slow, 0, 1, us, 0);
                ends(&mut slow, 1, 1, 2 * us, 0);
                assert!(!slow.is_slow(0, 0));
            }
            assert!(!slow.is_slow(1, 1), "{us}");
        }
    }

    #[test]
    fn reader_of_a_cache_makes_nobody_slow() {
        let mut slow = SlowQueues::new(2, 2);
        ends(&mut slow, 1, 9, 1, 0);
        ends(&mut slow, 0, 20, 999, 0);
        assert!(!slow.is_slow(0, 0) && !slow.is_slow(1, 1));
        let least = Nanos::from_micros(10);
        let mut far_longer = |us| {
            (0..40).for_each(|_| slow.completed((1, 1), least, least, Instant(0)));
            (0..40).for_each(|_| slow.completed((0, 0), Nanos::from_micros(us), least, Instant(0)));
            slow.is_slow(0, 0)
        };
        assert!(!far_longer(999), "a drive's own work");
        assert!(far_longer(1_000));
        assert!(!far_longer(500), "it is slow no more");
    }

    #[test]
    fn first_request_of_a_client_may_be_late() {
        let mut slow = SlowQueues::new(2, 2);
        ends(&mut slow, 0, 9, 100, 0);
        ends(&mut slow, 1, 1, 1_000_000, 0);
        assert!(!slow.is_slow(1, 1));
    }

    #[test]
    fn nobody_is_slow_once_the_leader_is_gone_for_long() {
        let mut slow = SlowQueues::new(2, 2);
        ends(&mut slow, 0, 1, 100, 0);
        ends(&mut slow, 1, 20, 100_000, 0);
        slow.look(Instant(0) + Nanos::from_millis(999));
        assert!(slow.is_slow(1, 1));
        slow.look(Instant(0) + Nanos::from_millis(1_000));
        assert!(!slow.is_slow(1, 1), "it sends only what says nothing of it");
        ends(&mut slow, 0, 1, 100, 1_001);
        assert!(slow.is_slow(1, 1));
    }

    #[test]
    fn leader_that_left_is_replaced() {
        let mut slow = SlowQueues::new(2, 2);
        ends(&mut slow, 0, 1, 100, 0);
        ends(&mut slow, 1, 20, 100_000, 0);
        assert!(slow.is_slow(1, 1));
        ends(&mut slow, 1, 20, 100_000, 1_000);
        assert!(!slow.is_slow(1, 1));
        slow.forget(1);
        assert!(!slow.is_slow(1, 1));
    }
}
