//! Counts the completions of a batch: neighbouring ones of one group and kind with equal times are added
//! up first, so that together they cost a shard's counters as much as one. `sw_ctx` counts the requests
//! that return to it.

use super::Shard;
use super::stamp::Stamp;
use crate::bio::{Flags, Op};
use crate::ids::GroupId;
use crate::request::Request;
use crate::time::{Instant, Nanos};

/// What two ends must have in common to count in the same counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Like {
    inserted_at: Instant,
    issued_at: Instant,
    completed_at: Instant,
    /// Which group waited behind which: without the length of the queue.
    stamp: Stamp,
    group: GroupId,
    op: Op,
    flags: Flags,
    is_ok: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    count: u64,
    bytes: u64,
    queued: u64,
    samples: u64,
}

impl Like {
    #[inline(always)]
    fn of(rq: &Request) -> Self {
        Self {
            inserted_at: rq.inserted_at,
            issued_at: rq.issued_at,
            completed_at: rq.completed_at,
            stamp: rq.stamp.of_a_part(),
            group: rq.bio.group,
            op: rq.bio.op,
            flags: rq.bio.flags,
            is_ok: rq.status.is_ok(),
        }
    }
}

impl Sums {
    #[inline(always)]
    fn add(&mut self, rq: &Request) {
        self.count += 1;
        self.bytes += rq.bio.len;
        self.queued += rq.stamp.queued();
        self.samples += u64::from(rq.stamp.queued() > 0);
    }
}

impl Shard {
    /// Counts the end of a single bio's request, or of one bio of several. Called by the shard's owner only.
    #[inline]
    pub(crate) fn count_end(&self, rq: &Request) {
        let mut sums = Sums::default();
        sums.add(rq);
        self.count_alike(&Like::of(rq), sums);
    }

    /// Counts the ends of requests of a single bio. Called by the shard's owner only.
    #[inline]
    pub(crate) fn count_ends(&self, list: &[Box<Request>]) {
        for run in list.chunk_by(|one, next| Like::of(one) == Like::of(next)) {
            let mut sums = Sums::default();
            run.iter().for_each(|rq| sums.add(rq));
            self.count_alike(&Like::of(&run[0]), sums);
        }
    }

    #[inline(always)]
    fn count_alike(&self, like: &Like, sums: Sums) {
        let group = &self.groups[like.group.index()];
        let counters = &group.kinds[super::kind_of(like.op, like.flags)];
        let device = like.completed_at.since(like.issued_at);
        let wait = like.issued_at.since(like.inserted_at);
        counters.ios.add(sums.count);
        counters.bytes.add(sums.bytes);
        counters.service_ns.add(device.0 * sums.count);
        group.device.record_many(device, sums.count);
        if like.stamp.is_set() {
            group.queue.queued_sum.add(sums.queued);
            group.queue.samples.add(sums.samples);
        } else {
            // The requests bypassed all elevators: nothing has counted their insertion.
            counters.inserted.add(sums.count);
        }
        if wait != Nanos::ZERO {
            let waits = Nanos(wait.0 * sums.count);
            counters.wait_ns.add(waits.0);
            group.wait.record_many(wait, sums.count);
            self.count_delay(like.stamp, waits);
        }
        if !like.is_ok {
            counters.errors.add(sums.count);
        }
    }
}
