//! The methods of `queue` for `poll`: a queue's settings and statistics of polling.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{Bucket, BucketStats, Policy};
use crate::queue::Queue;

/// The attributes `io_poll` and `io_poll_delay`. Hints that may lag: each reactor sees a change in one of its
/// next turns, so all accesses are relaxed.
#[derive(Debug)]
pub(crate) struct Polling {
    is_on: AtomicBool,
    /// See [`Policy::from_raw`].
    policy: AtomicU64,
}

impl Polling {
    pub(crate) fn new(is_on: bool, policy: Policy) -> Self {
        Self {
            is_on: AtomicBool::new(is_on),
            policy: AtomicU64::new(policy.to_raw()),
        }
    }
}

impl Queue {
    /// Sets whether ends of requests are polled for, or waited for, from now on. A driver that cannot be
    /// polled is not affected. Kick all reactors afterwards.
    pub fn set_polled(&self, on: bool) {
        self.polling.is_on.store(on, Ordering::Relaxed);
        self.run_all();
    }

    /// Whether ends of requests are polled for.
    #[inline]
    pub fn is_polled(&self) -> bool {
        self.polling.is_on.load(Ordering::Relaxed)
    }

    /// Sets how requests of a polled driver are slept for, from now on.
    pub fn set_poll_policy(&self, policy: Policy) {
        self.polling.policy.store(policy.to_raw(), Ordering::Relaxed);
    }

    /// How requests of a polled driver are slept for.
    #[inline]
    pub fn poll_policy(&self) -> Policy {
        Policy::from_raw(self.polling.policy.load(Ordering::Relaxed))
    }

    /// The completion times of one bucket's requests, over all hardware contexts.
    pub fn poll_stats(&self, bucket: Bucket) -> BucketStats {
        let mut sum = BucketStats::default();
        self.shards().for_each(|shard| sum.add(&shard.poll.get(bucket)));
        sum
    }
}
