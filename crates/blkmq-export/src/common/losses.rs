//! The cursor of a client among the losses of its disk, writes that may be lost: each client sees each loss once, at
//! a flush, whichever client flushed first. The code that serves a client asks when a flush has ended.

use blkmq_core::bio::Status;
use blkmq_host::disk::Disk;

/// One client's place among the losses of its disk, as `errseq_t` of Linux has it for an open file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LossCursor(Option<u64>);

impl LossCursor {
    /// That of a client that begins with a disk: at the first loss that nobody has seen, since the client may have
    /// written before, over another connection.
    pub(crate) fn sample(disk: &Disk) -> Self {
        Self(Some(disk.losses().seen))
    }

    /// That of a client of another daemon, which reported that writes may be lost and the client has not seen it.
    pub(crate) fn unsampled() -> Self {
        Self(None)
    }

    /// Returns whether there are losses that the client has not seen.
    pub(crate) fn check(self, disk: &Disk) -> bool {
        self.0 != Some(disk.losses().count)
    }

    /// Returns the status of a flush for this client, from the status of the flush that it shared, and advances:
    /// each client sees a loss once.
    pub(crate) fn check_and_advance(&mut self, disk: &Disk, status: Status) -> Status {
        let count = Some(disk.losses().count);
        if std::mem::replace(&mut self.0, count) == count {
            return status;
        }
        disk.mark_losses_seen();
        status.and(Status::Medium)
    }
}
