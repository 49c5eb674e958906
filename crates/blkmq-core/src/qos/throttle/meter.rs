//! The meter of one cap: when it allows the next request, and the debt after it. It is virtual scheduling
//! in whole nanoseconds with the remainder kept, so that no rounding adds up.
//!
//! Each cap keeps the time at which all requests that it let pass are paid for. A request may pass when that
//! time has come, or is no further away than the burst is worth; the request then moves the time on by its own
//! cost. A request larger than the burst passes too: it makes a debt, and the next one waits longer.
//! (The generic cell rate algorithm in its virtual scheduling form: ITU-T I.371, annex A. Ours charges after passing, so
//! that the size of a request does not matter for whether it may, and keeps the fraction.)

use crate::bio::Op;
use crate::group::{Cap, CapKind, Caps, Debts};
use crate::limits::Limits;
use crate::request::Request;
use crate::time::{Instant, Nanos};

/// The state of one group's caps.
#[derive(Debug, Default)]
pub(super) struct Meter {
    buckets: [Option<Bucket>; CapKind::COUNT],
}

#[derive(Debug)]
struct Bucket {
    cap: Cap,
    /// The burst, as a time.
    ahead: Nanos,
    /// When all passed requests are paid for, and a fraction of a nanosecond, in units of 1 / rate.
    paid_at: Instant,
    fraction: u64,
    /// The cost of the latest request.
    latest: Nanos,
}

impl Meter {
    /// Changes the caps. The debt of an old cap passes to the new one of its kind.
    pub(super) fn set(&mut self, caps: Caps, now: Instant) {
        for kind in CapKind::ALL {
            let bucket = &mut self.buckets[kind as usize];
            let owed = bucket.as_ref().map_or(0, |bucket| bucket.owed(now));
            *bucket = caps.get(kind).map(|cap| Bucket::new(cap, owed, now));
        }
    }

    /// The debts, by cap: bytes or I/Os that passed and are not paid for.
    pub(super) fn debts(&self, now: Instant) -> Debts {
        let owed = |bucket: &Option<Bucket>| bucket.as_ref().map_or(0, |bucket| bucket.owed(now));
        self.buckets.each_ref().map(owed)
    }

    /// Adds debts that must be paid for before a request passes. Debts of caps that do not exist are ignored.
    pub(super) fn owe(&mut self, debts: &Debts, now: Instant) {
        for (bucket, more) in self.buckets.iter_mut().zip(debts) {
            if let Some(bucket) = bucket {
                let owed = bucket.owed(now).saturating_add(*more);
                *bucket = Bucket::new(bucket.cap, owed, now);
            }
        }
    }

    /// The time from which on an operation may pass.
    pub(super) fn ready_at(&self, op: Op) -> Instant {
        let counted = self.counted(op);
        counted
            .map(|(_, bucket)| bucket.paid_at - bucket.ahead)
            .max()
            .unwrap_or_default()
    }

    /// Charges a request that passes now. Its line has had requests since `since`; `is_stop` says that the line
    /// waited last for these caps.
    pub(super) fn charge(
        &mut self,
        rq: &Request,
        limits: &Limits,
        since: Instant,
        is_stop: bool,
        now: Instant,
    ) {
        for (kind, bucket) in CapKind::ALL.into_iter().zip(&mut self.buckets) {
            if let Some(bucket) = bucket
                && kind.counts(rq.op())
            {
                let amount = match kind {
                    CapKind::Bps => rq.moved_bytes(limits),
                    kind if kind.is_bytes() => rq.charged_bytes(limits),
                    _ => rq.bio_count().into(),
                };
                bucket.charge(amount, since, is_stop, now);
            }
        }
    }

    fn counted(&self, op: Op) -> impl Iterator<Item = (CapKind, &Bucket)> {
        let pairs = CapKind::ALL.into_iter().zip(&self.buckets);
        pairs.filter_map(move |(kind, bucket)| Some((kind, bucket.as_ref().filter(|_| kind.counts(op))?)))
    }
}

impl Bucket {
    fn new(cap: Cap, owed: u64, now: Instant) -> Self {
        let time = |amount: u64| {
            let nanos = u128::from(amount) * SECOND / u128::from(cap.rate);
            Nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
        };
        Self {
            cap,
            ahead: time(cap.burst),
            paid_at: now + time(owed),
            fraction: 0,
            latest: Nanos::ZERO,
        }
    }

    /// The debt: the amount that passed and is not paid for.
    fn owed(&self, now: Instant) -> u64 {
        let debt = u128::from(self.paid_at.since(now).0) * u128::from(self.cap.rate);
        (debt / SECOND) as u64
    }

    fn charge(&mut self, amount: u64, since: Instant, is_stop: bool, now: Instant) {
        let rate = u128::from(self.cap.rate);
        let cost = u128::from(amount) * SECOND;
        let time = Nanos((cost / rate) as u64);
        // A delay by a late timer is made up for, within a limit: otherwise each lateness would be lost. A wait for
        // other caps (one more timer, and a turn) is made up for too: otherwise a cap below another cap, whose lines
        // take turns, would be smaller by each wait for a turn. For the turn, one request's worth is enough: lines
        // with turns further apart are limited by the turns.
        let made_up = match is_stop {
            true => CATCH_UP,
            false => CATCH_UP + CATCH_UP + time.max(self.latest),
        };
        let since = since.max(now - made_up);
        if since > self.paid_at {
            self.paid_at = since;
            self.fraction = 0;
        }
        let cost = cost + u128::from(self.fraction);
        self.paid_at = self.paid_at + Nanos((cost / rate) as u64);
        self.fraction = (cost % rate) as u64;
        self.latest = time;
    }
}

/// The largest lateness of a timer that does not reduce the cap: 2 % of 10 ms, the shortest time over which
/// caps are exact.
const CATCH_UP: Nanos = Nanos::from_micros(200);
const SECOND: u128 = 1_000_000_000;
