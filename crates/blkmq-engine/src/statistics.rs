//! What a group did, over all queues of an engine: the sums of the core's counters that users can rely on.

use blkmq_core::bio::Direction;
use blkmq_core::stat::{DirectionStats, GroupStats};

/// The I/O of one group since the engine started. All numbers only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// Reads.
    pub read: Count,
    /// Writes and zeroing.
    pub write: Count,
    /// Discards.
    pub discard: Count,
    /// Flushes.
    pub flush: Count,
}

/// The I/O of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Count {
    /// I/Os that ended, with any status.
    pub ios: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Those of them that failed.
    pub errors: u64,
    /// How long they waited for the drive, in nanoseconds, all together.
    pub wait_ns: u64,
    /// How long the drive had them, in nanoseconds, all together.
    pub service_ns: u64,
}

impl From<&GroupStats> for Statistics {
    fn from(stats: &GroupStats) -> Self {
        let count = |direction| Count::from(stats.of(direction));
        Self {
            read: count(Direction::Read),
            write: count(Direction::Write),
            discard: count(Direction::Discard),
            flush: count(Direction::Flush),
        }
    }
}

impl From<DirectionStats> for Count {
    fn from(stats: DirectionStats) -> Self {
        Self {
            ios: stats.ios,
            bytes: stats.bytes,
            errors: stats.errors,
            wait_ns: stats.wait_ns,
            service_ns: stats.service_ns,
        }
    }
}
