//! Decides nothing: how a command is put into the ring, whose memory is for the caller to vouch for.

use io_uring::squeue;

use super::CommandRing;

impl CommandRing {
    /// Adds a command, of which the kernel hears with [`CommandRing::submit`].
    ///
    /// # Safety
    /// What memory the command names is the kernel's until it ends.
    ///
    /// # Panics
    /// If there are more commands than the ring was made for.
    pub(crate) unsafe fn push(&self, entry: squeue::Entry128) {
        let mut ring = self.0.borrow_mut();
        // SAFETY: as the caller says.
        let pushed = unsafe { ring.submission().push(&entry) };
        pushed.expect("there are no more commands than the ring is made for");
    }
}
