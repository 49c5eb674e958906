//! The faults of a modelled drive: each has a name and a probability, drawn once when the command
//! arrives. Faults are what a real drive may do, and the engine must handle; a [`Mutation`] is what no
//! drive may do, and the oracle must detect.

use std::ops::Range;

use blkmq_core::bio::Status;
use blkmq_core::time::Nanos;

use crate::rng::{Ppm, Rng};

/// The faults of a drive.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// The answer `Resource`: no event announces the end of the shortage.
    pub resource: Ppm,
    /// The answer `DeviceResource`, if a request is in flight whose end will free the resource.
    pub device_resource: Ppm,
    /// The request ends with `Requeue`.
    pub requeue: Ppm,
    /// The end never comes; the time limit must detect it.
    pub lost: Ppm,
    /// The command takes `slow_factor` times as long, possibly longer than the time limit.
    pub slow: Ppm,
    /// How much longer a slow command takes.
    pub slow_factor: u32,
    /// The command takes `hangs_for` longer, and its unit as long, unless another one hangs.
    pub hangs: Ppm,
    /// How much longer a command that hangs takes.
    pub hangs_for: Nanos,
    /// The end is reported a second time, later.
    pub twice: Ppm,
    /// The connection to the drive fails.
    pub transport: Ppm,
    /// Asked about a command that timed out, the drive answers once that it still needs the command.
    pub wait: Ppm,
    /// The end of a command that timed out is reported later, although the drive has given the
    /// command up.
    pub late: Ppm,
    /// Blocks that cannot be read or written.
    pub bad_blocks: Range<u32>,
}

/// What a drive must never do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// Forgets a command, and never gives it up.
    DropsCompletion,
    /// Reports a flush as done without writing anything.
    FlushPersistsNothing,
    /// Ignores FUA.
    IgnoresFua,
    /// Reports another command, still under way, as done (as a cookie without a generation would).
    EndsAnother,
    /// Returns the content that the block had before its last write.
    ReadsOldData,
    /// Reports a write as done that was not executed.
    DropsWrite,
    /// Exchanges the content of two blocks of one write.
    SwapsBlocks,
    /// Moves data for a command that it has given up.
    WritesAfterTimeout,
    /// Reports a failed read as successful, without moving data.
    HidesErrors,
}

impl Mutation {
    /// All mutations.
    pub const ALL: [Self; 9] = [
        Self::DropsCompletion,
        Self::FlushPersistsNothing,
        Self::IgnoresFua,
        Self::EndsAnother,
        Self::ReadsOldData,
        Self::DropsWrite,
        Self::SwapsBlocks,
        Self::WritesAfterTimeout,
        Self::HidesErrors,
    ];
}

/// How one command is executed.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    /// How it ends.
    pub(super) status: Status,
    /// Its end is never reported.
    pub(super) lost: bool,
    /// Its time is multiplied by this.
    pub(super) slowness: u32,
    /// This is added to its time.
    pub(super) hangs_for: Nanos,
    /// Its end is reported twice.
    pub(super) twice: bool,
    /// Its data moves when a unit starts it, not when the unit is done.
    pub(super) early: bool,
    /// The drive does not give it up when first asked.
    pub(super) wait: bool,
    /// Its end is reported although the drive has given it up.
    pub(super) late: bool,
}

impl Faults {
    /// Draws the plan of a command that touches `blocks`.
    pub(super) fn plan(&self, blocks: &Range<u32>, rng: &mut Rng) -> Plan {
        let slow = rng.chance(self.slow);
        let mut plan = Plan {
            status: Status::Ok,
            lost: rng.chance(self.lost),
            slowness: if slow { self.slow_factor.max(1) } else { 1 },
            hangs_for: Nanos::ZERO,
            twice: rng.chance(self.twice),
            early: rng.chance(Ppm::percent(50)),
            wait: rng.chance(self.wait),
            late: rng.chance(self.late),
        };
        if rng.chance(self.requeue) {
            plan.status = Status::Requeue;
        }
        if rng.chance(self.transport) {
            plan.status = Status::Transport;
        }
        if blocks.start < self.bad_blocks.end && self.bad_blocks.start < blocks.end {
            plan.status = Status::Medium;
        }
        // Without this fault nothing is drawn for it, so that the seeds of other scenarios keep their histories.
        if self.hangs > Ppm::NEVER && rng.chance(self.hangs) {
            plan.hangs_for = self.hangs_for;
        }
        plan
    }
}
