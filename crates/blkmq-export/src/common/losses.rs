//! Writes that may be lost, as clients' flushes report them: each client is told of each loss once, whichever
//! client flushed first. The code that serves a client asks when a flush has ended.

use blkmq_core::bio::Status;
use blkmq_host::disk::Disk;

/// The losses that one client has been told of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Heard(Option<u64>);

impl Heard {
    /// A client that begins with a disk. It may have written before, over another connection, so it
    /// will be told of losses that nobody has been told of.
    pub(crate) fn new(disk: &Disk) -> Self {
        Self(Some(disk.losses().told))
    }

    /// A client of another daemon, which reported that writes may be lost without the client's
    /// knowledge.
    pub(crate) fn nothing() -> Self {
        Self(None)
    }

    /// Returns whether writes may be lost of which the client has not been told.
    pub(crate) fn misses_some(self, disk: &Disk) -> bool {
        self.0 != Some(disk.losses().count)
    }

    /// Returns the status of a flush for this client, from the status of the flush that it shared.
    pub(crate) fn end_flush(&mut self, disk: &Disk, status: Status) -> Status {
        let count = Some(disk.losses().count);
        if std::mem::replace(&mut self.0, count) == count {
            return status;
        }
        disk.tell_losses();
        status.and(Status::Medium)
    }
}
