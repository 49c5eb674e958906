//! Decides what is told of a history when it is over: its digest and its counts, or the fault that ended it.

use blkmq_core::time::{Instant, Nanos};

use crate::oracle::Counts;

/// What came of a history.
#[derive(Clone, Copy, Debug)]
pub struct Summary {
    /// Stands for all that happened: equal histories have equal digests.
    pub digest: u64,
    /// How many facts the history has.
    pub facts: u64,
    /// How long it took, in virtual time.
    pub time: Nanos,
    /// What was counted.
    pub counts: Counts,
    /// Control actions.
    pub controls: u64,
    /// Times a reactor found the gate held.
    pub gate_skipped: u64,
    /// Power cuts.
    pub power_cuts: PowerCuts,
    /// Time that CPUs were busy, summed up.
    pub busy: Nanos,
    /// When the first reactor's client had finished, and when the last of the others had.
    pub finished_at: [Instant; 2],
}

/// What the power cuts of a history met and left.
#[derive(Clone, Copy, Debug, Default)]
pub struct PowerCuts {
    /// Power cuts.
    pub count: u32,
    /// Those that met requests at a drive.
    pub in_flight: u32,
    /// Those at which a drive lost blocks that it had in its cache.
    pub lost: u32,
    /// Those that left one part of a bio written and another not.
    pub torn_bios: u32,
    /// Those that left a block of a disk, as clients see it, written in part.
    pub torn_blocks: u32,
}

/// A fault that the oracle found.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What is wrong.
    pub fault: String,
    /// The last facts before it.
    pub tail: String,
}
