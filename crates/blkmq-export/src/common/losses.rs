//! Decides what a flush of one client says of writes that may be lost: each client hears of each loss once, whichever of them
//! flushed first. Who serves a client asks when a flush has ended.

use blkmq_core::bio::Status;
use blkmq_host::disk::Disk;

/// What one client has been told of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Heard(u64);

impl Heard {
    /// A client that begins with a disk: it may be one that has written before, over another connection, so it hears of what nobody
    /// has been told of.
    pub(crate) fn new(disk: &Disk) -> Self {
        Self(disk.losses().told)
    }

    /// Writes may be lost that it has not been told of: another daemon knows.
    pub(crate) fn miss(&mut self, disk: &Disk) {
        self.0 = disk.losses().count.wrapping_sub(1);
    }

    /// Says whether writes may be lost that it has not been told of.
    pub(crate) fn misses_some(self, disk: &Disk) -> bool {
        self.0 != disk.losses().count
    }

    /// Says how a flush ends for this client that has ended like this for whoever shared it.
    pub(crate) fn end_flush(&mut self, disk: &Disk, status: Status) -> Status {
        let count = disk.losses().count;
        if std::mem::replace(&mut self.0, count) == count {
            return status;
        }
        disk.tell_losses();
        status.and(Status::Medium)
    }
}
