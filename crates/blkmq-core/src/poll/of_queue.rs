//! Decides what a queue is asked and told of polling: `queue` as far as `poll` is concerned.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{Bucket, BucketStats, Policy};
use crate::queue::Queue;

/// The attributes `io_poll` and `io_poll_delay`. Hints that may lag: each reactor sees a change in one of its next turns, so all
/// accesses are relaxed.
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
    /// Has the ends of requests looked for, or waited for, from now on. A driver that cannot be polled goes on as it did. Kick
    /// everybody afterwards.
    pub fn set_polled(&self, on: bool) {
        self.polling.is_on.store(on, Ordering::Relaxed);
        self.run_all();
    }

    /// Whether the ends of requests are looked for.
    #[inline]
    pub fn is_polled(&self) -> bool {
        self.polling.is_on.load(Ordering::Relaxed)
    }

    /// Says how requests of a polled driver are slept for, from now on.
    pub fn set_poll_policy(&self, policy: Policy) {
        self.polling.policy.store(policy.to_raw(), Ordering::Relaxed);
    }

    /// How requests of a polled driver are slept for.
    #[inline]
    pub fn poll_policy(&self) -> Policy {
        Policy::from_raw(self.polling.policy.load(Ordering::Relaxed))
    }

    /// Tells what was seen of the times of one bucket's requests, over all hardware contexts.
    pub fn poll_stats(&self, bucket: Bucket) -> BucketStats {
        let mut sum = BucketStats::default();
        self.shards().for_each(|shard| sum.add(&shard.poll.get(bucket)));
        sum
    }
}
