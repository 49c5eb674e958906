//! Decides what doors and library users know of a disk, and how they find it.
//! `engine` makes the table at set-up; it never changes afterwards.

use std::fmt;
use std::io;
use std::sync::Arc;

use blkmq_core::ids::{DiskId, GroupId};
use blkmq_core::limits::Limits;

use crate::device::{Allocation, Extent, Losses};

/// Names a queue of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueId(pub u16);

impl QueueId {
    /// Returns the number as an index into a table.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A disk, as its users see it.
#[derive(Clone)]
pub struct Disk {
    /// Its name, unique in the engine.
    pub name: String,
    /// What it is, for people. May be empty.
    pub description: String,
    /// The queue it lies on; for a mapped disk, a number behind the queues', which only submissions take.
    pub queue: QueueId,
    /// Its number on that queue, for [`blkmq_core::bio::Bio::disk`].
    pub id: DiskId,
    /// Bytes.
    pub size: u64,
    /// Whether changes are refused.
    pub read_only: bool,
    /// Smallest unit of its addresses and lengths, in bytes.
    pub block_size: u32,
    /// The group that its I/O is accounted to, unless a submitter knows better.
    pub group: GroupId,
    /// What its drive takes in one request; larger bios are split by the engine.
    pub limits: Limits,
    /// What its drive knows about allocation.
    pub allocation: Arc<dyn Allocation>,
    /// The mapped disk that lies on it, or the first of several: who writes to both by himself damages one of them. So doors
    /// that serve all disks leave it out.
    pub used_by: Option<String>,
}

impl Disk {
    /// Appends what is stored where on this disk; see [`Allocation::extents`]. May block.
    ///
    /// # Errors
    /// What the drive says.
    pub fn extents(&self, offset: u64, len: u64, max: usize, out: &mut Vec<Extent>) -> io::Result<()> {
        self.allocation.extents(self.id, offset, len, max, out)
    }

    /// Says how often completed writes may have been lost; see [`Losses`].
    pub fn losses(&self) -> Losses {
        self.allocation.losses(self.id)
    }

    /// Takes note that a user has been told of all losses that there are.
    pub fn tell_losses(&self) {
        self.allocation.tell_losses(self.id);
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk")
            .field("name", &self.name)
            .field("queue", &self.queue)
            .field("id", &self.id)
            .field("size", &self.size)
            .field("read_only", &self.read_only)
            .finish_non_exhaustive()
    }
}
