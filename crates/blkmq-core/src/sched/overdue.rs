//! How many requests are out for much longer than usual. A limit on requests in flight does not count them: nobody
//! knows when they end, and until then they would hold everybody else.
//! `bfq` asks for the drive, `target` for the groups without a latency target.
//!
//! Time is cut into epochs of a few times the usual time of a request. At the end of one, what was issued before
//! its beginning and has not ended is overdue, so a request becomes overdue after one to two epochs.
//!
//! Late requests come in rows: whoever has sixteen reads of a bad sector sends the next when the first is given up,
//! and the rest waits once more. So an epoch that finds more of them makes the next one shorter, by a factor of four,
//! until a whole one has passed without: a row costs the rest little more than its first request does.

use crate::time::{Instant, Nanos};

/// Counts of the requests in flight, by age.
#[derive(Debug, Default)]
pub(crate) struct Overdue {
    /// The usual time of a request: a moving mean, to which a late request adds little.
    usual_ns: u64,
    /// The time of the slower kinds among them: it rises fast and falls slowly.
    slow_ns: u64,
    /// When the present epoch began, and the requests in flight that were issued since.
    epoch: Instant,
    young: u32,
    /// The overdue ones: in flight since before the beginning of the epoch before this one.
    count: u32,
    before: Instant,
    /// One of them has ended in this epoch, and was learnt from.
    learnt_late: bool,
    punctual_ends: u32,
    /// How many epochs found more of them lately, and until when that counts.
    finds: u32,
    finds_until: Instant,
}

/// Which of one queue's requests in flight are overdue, all of those that it has out.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Late {
    /// The latest epoch in which one was issued or ended, the requests issued since, and the overdue ones.
    epoch: Instant,
    young: u32,
    count: u32,
}

impl Overdue {
    /// Counts a request that goes out of a queue with `in_flight` others.
    #[inline]
    pub(crate) fn issued_of(&self, queue: &mut Late, in_flight: u32) {
        self.bring_up_to_date(queue, in_flight);
        queue.young += 1;
    }

    /// Counts a request issued at `issued_at` that is out no more, of a queue with `in_flight`, this one included; `is_of_all`
    /// says whether [`Overdue::issued`] counted it as well.
    #[inline]
    pub(crate) fn ended_of(&mut self, queue: &mut Late, in_flight: u32, issued_at: Instant, is_of_all: bool) {
        self.bring_up_to_date(queue, in_flight);
        let of_all = u32::from(is_of_all);
        if issued_at >= self.epoch {
            queue.young = queue.young.saturating_sub(1);
            self.young = self.young.saturating_sub(of_all);
        } else if issued_at < self.before {
            queue.count = queue.count.saturating_sub(1);
            self.count = self.count.saturating_sub(of_all);
        }
    }

    /// The overdue requests of a queue with `in_flight`.
    #[inline]
    pub(crate) fn late_of(&self, queue: &mut Late, in_flight: u32) -> u32 {
        self.bring_up_to_date(queue, in_flight);
        queue.count
    }

    #[inline]
    fn bring_up_to_date(&self, queue: &mut Late, in_flight: u32) {
        if queue.epoch != self.epoch {
            self.begin_epoch_of(queue, in_flight);
        }
    }

    #[cold]
    fn begin_epoch_of(&self, queue: &mut Late, in_flight: u32) {
        // What it had issued in the epoch before this one is neither young nor overdue.
        let is_before = queue.epoch == self.before;
        *queue = Late {
            epoch: self.epoch,
            young: 0,
            count: in_flight.saturating_sub(if is_before { queue.young } else { 0 }),
        };
    }

    /// The requests, of `in_flight`, that are not overdue.
    #[inline]
    pub(crate) fn punctual(&self, in_flight: u32) -> u32 {
        in_flight.saturating_sub(self.count)
    }

    /// Says whether a request is overdue.
    #[inline]
    pub(crate) fn finds_any(&self) -> bool {
        self.count != 0
    }

    /// Counts a request that goes out.
    #[inline]
    pub(crate) fn issued(&mut self) {
        self.young += 1;
    }

    /// Counts a request that was issued at `issued_at` and is out no more. `time` is what it took, if it ended.
    #[inline]
    pub(crate) fn ended(&mut self, issued_at: Instant, time: Option<Nanos>) {
        if issued_at >= self.epoch {
            self.young = self.young.saturating_sub(1);
        } else if issued_at < self.before {
            self.count = self.count.saturating_sub(1);
        }
        if let Some(time) = time {
            self.learn(issued_at, time);
        }
    }

    /// Learns what a request took that was issued at `issued_at`; says whether it counts. Of overdue ones, which may all hang
    /// for one reason, one in an epoch does, and one for each so many that were not: a slower kind is usual, however fast
    /// the others are.
    #[inline]
    pub(crate) fn learn(&mut self, issued_at: Instant, Nanos(time): Nanos) -> bool {
        if issued_at >= self.before {
            self.punctual_ends = (self.punctual_ends + 1).min(EARNS_LATE);
        } else if std::mem::replace(&mut self.learnt_late, true) {
            if self.punctual_ends < EARNS_LATE {
                return false;
            }
            self.punctual_ends = 0;
        }
        if self.usual_ns == 0 {
            (self.usual_ns, self.slow_ns) = (time, time);
            return true;
        }
        let counted = time.min(self.usual_ns * TIMES_MAX);
        self.usual_ns = (self.usual_ns * (MEAN_OF - 1) + counted) / MEAN_OF;
        if time > self.slow_ns {
            self.slow_ns += (time.min(self.slow_ns * TIMES_MAX) - self.slow_ns) / RISE_PART;
        } else {
            self.slow_ns -= self.slow_ns / FALL_PART;
        }
        true
    }

    /// Begins the next epoch, if the present one is over, with `in_flight` requests out. Says whether more are
    /// overdue now.
    #[inline]
    pub(crate) fn look(&mut self, in_flight: u32, now: Instant) -> bool {
        now >= self.epoch_ends() && self.next_epoch(in_flight, now)
    }

    /// When [`Overdue::look`] may find more overdue requests.
    pub(crate) fn epoch_ends(&self) -> Instant {
        let patience = self.patience();
        let shortened = Nanos(patience.0 >> (2 * self.finds));
        // Not so short that what is only slower than most is late.
        let usual = self.longest_usual().max(Nanos(self.slow_ns + self.slow_ns / 2));
        self.epoch + shortened.max(usual.min(patience))
    }

    /// The usual time of a request.
    #[inline]
    pub(crate) fn usual(&self) -> Nanos {
        Nanos(self.usual_ns)
    }

    /// What a request may take and still be of a usual kind; no limit while nothing is known.
    #[inline]
    pub(crate) fn longest_usual(&self) -> Nanos {
        match self.usual_ns {
            0 => Nanos(u64::MAX),
            usual => Nanos(usual * TIMES_MAX),
        }
    }

    /// How long the rest waits at most for requests that are out: some milliseconds, or, on a slow drive, longer than
    /// the slower kinds of requests take. Requests that time out are no kind: they say nothing of a fast drive.
    #[inline]
    pub(crate) fn patience(&self) -> Nanos {
        let patience = Nanos(self.slow_ns * PATIENCE_TIMES).clamp(PATIENCE_MIN, PATIENCE_MAX);
        let slow_ns = self.slow_ns.min(self.longest_usual().0);
        patience.max(Nanos(slow_ns + slow_ns / 2))
    }

    #[cold]
    fn next_epoch(&mut self, in_flight: u32, now: Instant) -> bool {
        let before = self.count;
        // A request may be issued in the epoch after the one in which it went out; each epoch counts afresh.
        self.count = in_flight.saturating_sub(self.young);
        self.before = self.epoch;
        (self.epoch, self.young, self.learnt_late) = (now, 0, false);
        let finds_more = self.count > before;
        if finds_more {
            self.finds = (self.finds + 1).min(FINDS_MAX);
            self.finds_until = now + self.patience();
        } else if now >= self.finds_until {
            self.finds = 0;
        }
        finds_more
    }
}

/// The mean is one of about so many requests, each counted up to so many times the mean; so are the slower kinds, where
/// they make the rest wait for long.
const MEAN_OF: u64 = 32;
const TIMES_MAX: u64 = 8;
/// A slower request moves the time of the slower kinds by this part of the difference, a faster one by this part of
/// it: a kind with a twentieth of the requests still makes the rest wait for longer than it takes. A row of sixteen late
/// ones, once, does not.
const RISE_PART: u64 = 32;
/// So many punctual ends let one more overdue one count.
const EARNS_LATE: u32 = 16;
const FALL_PART: u64 = 256;
/// A request is late after so many times the time of the slower kinds, within these bounds; on a drive that takes
/// longer than that, after one and a half times.
const PATIENCE_TIMES: u64 = 4;
const PATIENCE_MIN: Nanos = Nanos::from_millis(1);
const PATIENCE_MAX: Nanos = Nanos::from_millis(20);
/// An epoch is shortened at most so often, and to no less than what a request of a usual kind, or of the slower kinds,
/// may take.
const FINDS_MAX: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overdue_requests_are_not_counted_until_they_end() {
        let mut out = Overdue::default();
        let at = |us: u64| Instant(0) + Nanos::from_micros(us);
        (0..4).for_each(|_| out.issued());
        assert!(
            !out.look(4, at(1_000)),
            "an epoch is over, and nothing is older than it"
        );
        // Three end, and three others come and go; the fourth stays.
        (0..3).for_each(|_| out.ended(at(0), Some(Nanos::from_micros(100))));
        (0..3).for_each(|_| out.issued());
        assert!(out.look(4, at(2_000)));
        assert_eq!(out.punctual(4), 3);
        (0..3).for_each(|_| out.ended(at(1_500), Some(Nanos::from_micros(100))));
        assert_eq!(out.punctual(1), 0);
        out.ended(at(0), Some(Nanos::from_secs(3)));
        assert_eq!(out.punctual(5), 5);
        assert!(
            out.patience() <= Nanos::from_millis(2),
            "one late request is not usual"
        );
    }

    #[test]
    fn slower_kind_beside_many_fast_requests_becomes_usual() {
        let mut out = Overdue::default();
        let at = |us: u64| Instant(0) + Nanos::from_micros(us);
        let fast = |out: &mut Overdue, now: u64| out.ended(at(now - 80), Some(Nanos::from_micros(80)));
        (100..1_000).for_each(|us| fast(&mut out, us));
        assert_eq!(out.patience(), Nanos::from_millis(1));
        // 19 reads of 80 us for each write of 3 ms, five of these in a millisecond.
        for now in (5_000..200_000).step_by(10) {
            out.look(64, at(now));
            fast(&mut out, now);
            if now % 200 == 0 {
                out.ended(at(now - 3_000), Some(Nanos::from_millis(3)));
            }
        }
        assert!(out.patience() > Nanos::from_millis(3), "{}", out.patience());
    }

    #[test]
    fn row_of_requests_that_hang_teaches_little() {
        let mut out = Overdue::default();
        let at = |us: u64| Instant(0) + Nanos::from_micros(us);
        (100..1_000).for_each(|us| out.ended(at(us - 80), Some(Nanos::from_micros(80))));
        for now in [10_000, 20_000] {
            out.look(57, at(now));
        }
        (0..57).for_each(|_| out.ended(at(0), Some(Nanos::from_secs(1))));
        assert!(out.patience() <= Nanos::from_millis(2), "{}", out.patience());
    }

    #[test]
    fn overdue_is_nothing_on_a_drive_whose_requests_take_long() {
        let mut out = Overdue::default();
        let mut now = Instant(0);
        for _ in 0..200 {
            let issued = now;
            out.issued();
            now = now + Nanos::from_millis(4);
            out.look(1, now);
            out.ended(issued, Some(Nanos::from_millis(4)));
        }
        out.issued();
        out.look(1, now + Nanos::from_millis(5));
        assert_eq!(out.punctual(1), 1);
    }
}
