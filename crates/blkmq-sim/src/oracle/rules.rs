//! What the oracle knows of a history's queues, drives and disks. `world` fills it in from the
//! setup.

use blkmq_core::limits::Limits;

use crate::drive::Span;
use crate::mapped::Layout;

/// What the oracle knows of the queues.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Bytes of a block: the unit of content and of places.
    pub block: u32,
    /// The disks that clients use.
    pub disks: Vec<DiskRules>,
    /// The queues, each with its own drive; they differ only in what is stated here.
    pub wires: Vec<WireRules>,
    /// How many hardware contexts there are.
    pub hctxs: u16,
    /// The depth of each tag set.
    pub depth: u32,
    /// There is one tag set for all hardware contexts.
    pub shared_tags: bool,
    /// There is one reactor, so that ends arrive in the order in which they are reported.
    pub one_reactor: bool,
    /// Groups are made and removed: a bio of a removed group may be moved to its ancestor.
    pub groups_change: bool,
}

/// What the oracle knows of a disk.
#[derive(Clone, Debug)]
pub struct DiskRules {
    /// Its limits.
    pub limits: Limits,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// Where it lies.
    pub layout: Layout,
}

/// What the oracle knows of one queue.
#[derive(Clone, Debug)]
pub struct WireRules {
    /// The drive's limits.
    pub limits: Limits,
    /// Where each of the queue's disks lies.
    pub places: Vec<Span>,
}
