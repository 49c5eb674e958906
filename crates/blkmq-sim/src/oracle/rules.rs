//! The oracle's knowledge of a history's queues, drives and disks; it decides nothing. `world` fills it in
//! from the setup.

use blkmq_core::limits::Limits;

use crate::drive::Span;
use crate::mapped::Layout;

/// The oracle's knowledge of the queues.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Bytes of a block: the unit of content and of places.
    pub block: u32,
    /// The disks that clients use.
    pub disks: Vec<DiskRules>,
    /// The queues, each before a drive of its own; they differ in nothing else.
    pub wires: Vec<WireRules>,
    /// How many hardware contexts there are.
    pub hctxs: u16,
    /// The depth of each tag set.
    pub depth: u32,
    /// There is one tag set for all hardware contexts.
    pub shared_tags: bool,
    /// There is one reactor, so that ends arrive in the order in which they are reported.
    pub one_reactor: bool,
    /// Groups come and go: a bio of a removed one may be given to its ancestor.
    pub groups_change: bool,
}

/// The oracle's knowledge of a disk.
#[derive(Clone, Debug)]
pub struct DiskRules {
    /// Its limits.
    pub limits: Limits,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// Where it lies.
    pub layout: Layout,
}

/// The oracle's knowledge of one queue.
#[derive(Clone, Debug)]
pub struct WireRules {
    /// The drive's limits.
    pub limits: Limits,
    /// Where each of the queue's disks lies.
    pub places: Vec<Span>,
}
