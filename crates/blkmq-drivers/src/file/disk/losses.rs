//! What is lost of a file: what the kernel could not write, and what is behind the end of a file that somebody has
//! truncated. Requests there fail until the disk is opened again.

use std::sync::atomic::{AtomicBool, Ordering};

use blkmq_core::bio::Status;
use blkmq_host::device::Losses;

use super::FileDisk;

impl FileDisk {
    /// Returns whether bytes before `end` are lost.
    pub(in crate::file) fn has_lost(&self, end: u64) -> bool {
        end > self.lost_from.load(Ordering::Relaxed)
    }

    /// Returns whether any bytes are lost.
    pub(in crate::file) fn is_truncated(&self) -> bool {
        self.lost_from.load(Ordering::Relaxed) < u64::MAX
    }

    /// Records that the kernel may have dropped what it could not write.
    pub(in crate::file) fn note_failed_flush(&self) {
        // Relaxed, as all of these: the flush that has failed tells its client, whatever others see yet.
        if !self.flush_failed.swap(true, Ordering::Relaxed) {
            self.note_loss();
        }
    }

    /// Returns whether flushes fail because one has failed.
    #[cfg(feature = "qcow2")]
    pub(crate) fn has_failed_flush(&self) -> bool {
        self.flush_failed.load(Ordering::Relaxed)
    }

    pub(in crate::file) fn note_loss(&self) {
        self.losses.fetch_add(1, Ordering::Relaxed);
        ANY_LOSS.store(true, Ordering::Relaxed);
    }

    /// How often writes may have been lost.
    pub(crate) fn losses(&self) -> Losses {
        Losses {
            count: self.losses.load(Ordering::Relaxed),
            seen: self.seen.load(Ordering::Relaxed),
        }
    }

    /// Notes that a client was told of all losses.
    pub(in crate::file) fn mark_losses_seen(&self) {
        let count = self.losses.load(Ordering::Relaxed);
        self.seen.fetch_max(count, Ordering::Relaxed);
    }

    /// Counts a request that is refused because of what is lost; that was logged.
    pub(in crate::file) fn refuse_lost(&self) -> Status {
        self.errors.fetch_add(1, Ordering::Relaxed);
        Status::Io
    }
}

/// Returns whether any file of this process has ever lost something. Clients ask for losses in each turn, and few files lose
/// any.
#[inline]
pub(in crate::file) fn has_any_loss() -> bool {
    ANY_LOSS.load(Ordering::Relaxed)
}

/// Relaxed, as the counts of losses: the flush that has failed tells its client.
static ANY_LOSS: AtomicBool = AtomicBool::new(false);
