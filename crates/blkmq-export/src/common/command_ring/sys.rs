//! The unsafe part of `command_ring`: it puts a command into the ring, for whose memory the caller vouches,
//! and copies the ring's descriptor.

#[cfg(feature = "ublk")]
use std::io;
#[cfg(feature = "ublk")]
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use io_uring::squeue;

use super::CommandRing;

impl CommandRing {
    /// Adds a command, which the kernel gets with [`CommandRing::submit`].
    ///
    /// # Safety
    /// The memory that the command names belongs to the kernel until the command ends.
    ///
    /// # Panics
    /// There are more commands than the ring was made for.
    pub(crate) unsafe fn push(&self, entry: squeue::Entry128) {
        let mut ring = self.ring.borrow_mut();
        // SAFETY: as the caller says.
        let pushed = unsafe { ring.submission().push(&entry) };
        pushed.expect("there are no more commands than the ring is made for");
    }

    /// A descriptor that keeps the ring open.
    ///
    /// # Errors
    /// The process has no descriptor left.
    #[cfg(feature = "ublk")]
    pub(crate) fn keep_open(&self) -> io::Result<OwnedFd> {
        let fd = self.ring.borrow().as_raw_fd();
        // SAFETY: the ring is open as long as this borrow.
        unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()
    }

    /// Adds a command that does nothing and ends.
    #[cfg(test)]
    pub(crate) fn push_nop(&self) {
        let entry = io_uring::opcode::Nop::new().build().into();
        // SAFETY: it names no memory.
        unsafe { self.push(entry) };
    }
}
