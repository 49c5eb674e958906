//! Statistics on the wire, for the daemon that writes and the clients that read them. Times are in
//! nanoseconds, sizes in bytes, counts since the start (of the first daemon, if others have taken over
//! since).

use std::collections::BTreeMap;
use std::sync::Arc;

use blkmq_core::bio::Direction;
use serde::{Deserialize, Serialize};

/// What a daemon has counted.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Statistics {
    /// Since the start of this daemon.
    pub uptime_ns: u64,
    /// The number of changes of its configuration, or of a disk's size: lists are valid while it
    /// stays the same.
    #[serde(default)]
    pub changes: u64,
    /// Whether `queues` has those alone that have changed since the notification before.
    #[serde(default, skip_serializing_if = "is_false")]
    pub is_partial: bool,
    /// All queues, or some.
    pub queues: Vec<Arc<QueueStatistics>>,
    /// All addresses.
    pub exports: Vec<ExportStatistics>,
    /// Payload of NBD connections.
    pub nbd_memory: Memory,
}

/// The counts of a queue.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct QueueStatistics {
    /// Its name.
    pub name: String,
    /// Its elevator.
    pub sched: String,
    /// Requests that have begun and not ended.
    pub in_flight: u64,
    /// How many may be at the drive.
    pub depth: u32,
    /// How many may be there now: fewer while groups compete below `bfq`. 0 from a daemon that does not tell.
    #[serde(default)]
    pub depth_limit: u32,
    /// Groups that did something.
    pub groups: Vec<GroupStatistics>,
    /// Which group waited behind which.
    pub delays: Vec<Delay>,
    /// The number of each kind of event.
    pub events: BTreeMap<String, u64>,
}

/// How long a group waited while another one's requests went ahead.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Delay {
    /// The group that waited.
    pub group: String,
    /// The group that it waited behind.
    pub behind: String,
    /// How long, over all its I/Os.
    pub ns: u64,
}

/// The counts of a group.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct GroupStatistics {
    /// Its path.
    pub path: String,
    /// I/Os in the scheduler now.
    pub queued: u64,
    /// Requests at the drive now; unknown where a reactor has not answered.
    #[serde(default)]
    pub in_flight: Option<u64>,
    /// How long the oldest of them has been there.
    #[serde(default)]
    pub oldest_ns: Option<u64>,
    /// How long the scheduler let the drive idle for it.
    pub idle_ns: u64,
    /// How long it had work, and waited for its turn.
    pub group_wait_ns: u64,
    /// From insertion to issue, of I/Os that waited.
    pub wait: Times,
    /// From issue to end.
    pub device: Times,
    /// Its reads.
    pub read: Counts,
    /// Its writes.
    pub write: Counts,
    /// Its discards.
    pub discard: Counts,
    /// Its flushes.
    pub flush: Counts,
    /// All of these.
    pub total: Counts,
}

/// The counts of I/Os of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct Counts {
    /// I/Os that ended.
    pub ios: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Those that were merged into another one's request.
    pub merged: u64,
    /// Those that failed.
    pub errors: u64,
    /// From issue to end, over all of them.
    pub service_ns: u64,
    /// From insertion to issue, over all of them.
    pub wait_ns: u64,
}

/// How long something took, as a histogram.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Times {
    /// The number of samples.
    pub count: u64,
    /// The bound that half of them do not exceed.
    pub p50_ns: Option<u64>,
    /// For 99 of 100.
    pub p99_ns: Option<u64>,
    /// For 999 of 1000.
    pub p999_ns: Option<u64>,
    /// The bound of each bucket that is not empty, and its number of samples; in order.
    pub buckets: Vec<(u64, u64)>,
}

/// The counts of an address.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct ExportStatistics {
    /// The address.
    pub address: String,
    /// Connections that are open.
    pub open: u32,
    /// Most connections.
    pub max: u32,
    /// Those of them that have selected no disk yet.
    pub negotiating: u32,
    /// Connections refused for lack of room.
    pub refused: u64,
    /// Connections that had selected no disk and were displaced.
    pub displaced: u64,
    /// `served`, `gone` where somebody has unmounted the file or removed the device, or `refused` while the time is in
    /// the way.
    #[serde(default)]
    pub state: String,
    /// Why it is `refused`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct Memory {
    /// In use.
    pub used: u64,
    /// The limit.
    pub max: u64,
}

impl GroupStatistics {
    /// The counts of one direction.
    pub fn of(&mut self, direction: Direction) -> &mut Counts {
        match direction {
            Direction::Read => &mut self.read,
            Direction::Write => &mut self.write,
            Direction::Discard => &mut self.discard,
            Direction::Flush => &mut self.flush,
        }
    }
}

impl Times {
    /// A histogram of buckets in order.
    pub fn new(buckets: Vec<(u64, u64)>) -> Self {
        let count = buckets.iter().map(|(_, count)| count).sum();
        let below = |permille| permille_of(&buckets, count, permille);
        Self {
            count,
            p50_ns: below(500),
            p99_ns: below(990),
            p999_ns: below(999),
            buckets,
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(is: &bool) -> bool {
    !is
}

/// The bound of the bucket with the time that `permille` of 1000 do not exceed; `None` without
/// samples.
fn permille_of(buckets: &[(u64, u64)], count: u64, permille: u64) -> Option<u64> {
    let rank = (count * permille).div_ceil(1000).max(1);
    let mut seen = 0;
    let found = buckets.iter().find(|(_, count)| {
        seen += count;
        seen >= rank
    });
    found.map(|(bound, _)| *bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentile_is_the_bound_of_its_bucket() {
        let times = Times::new(vec![(10, 98), (20, 1), (u64::MAX, 1)]);
        assert_eq!(
            (times.count, times.p50_ns, times.p99_ns, times.p999_ns),
            (100, Some(10), Some(20), Some(u64::MAX))
        );
        assert_eq!(Times::new(Vec::new()), Times::default());
        let text = serde_json::to_string(&times).unwrap();
        assert_eq!(serde_json::from_str::<Times>(&text).unwrap(), times);
    }
}
