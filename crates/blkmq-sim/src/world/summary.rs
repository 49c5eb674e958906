//! The report of a history when it is over: its digest and its counts, or the fault that ended it.

use blkmq_core::time::{Instant, Nanos};

use crate::oracle::Counts;

/// The result of a history.
#[derive(Clone, Copy, Debug)]
pub struct Summary {
    /// The digest of all facts: equal histories have equal digests.
    pub digest: u64,
    /// Number of facts in the history.
    pub facts: u64,
    /// How long it took, in virtual time.
    pub time: Nanos,
    /// The oracle's counters.
    pub counts: Counts,
    /// Control actions.
    pub controls: u64,
    /// Times a reactor found the gate held.
    pub gate_skipped: u64,
    /// Power cuts.
    pub power_cuts: PowerCuts,
    /// Busy time, summed over all CPUs.
    pub busy: Nanos,
    /// When the first reactor's client had finished, and when the last of the others had.
    pub finished_at: [Instant; 2],
}

/// What the power cuts of a history found and left.
#[derive(Clone, Copy, Debug, Default)]
pub struct PowerCuts {
    /// Power cuts.
    pub count: u32,
    /// Those at which requests were at a drive.
    pub in_flight: u32,
    /// Those at which a drive lost blocks that it had in its cache.
    pub lost: u32,
    /// Those that left one part of a bio written and another not.
    pub torn_bios: u32,
    /// Those that left a block of a disk, as clients see it, partly written.
    pub torn_blocks: u32,
}

/// A fault that the oracle found.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The fault.
    pub fault: String,
    /// The last facts before it.
    pub tail: String,
}
