//! Decides how commands of a character device stand in io_uring (URING_CMD): the ones of FUSE and ublk want entries of 128 bytes, so their
//! ring is one of its own, which a reactor's ring polls.

mod sys;

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use io_uring::{IoUring, cqueue, squeue};

/// A ring of commands. Closing it takes from the kernel what commands that have not ended have lent it.
pub(crate) struct CommandRing(RefCell<IoUring<squeue::Entry128>>);

/// A command that has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    /// As given with the command.
    pub(crate) user: u64,
    /// As the device has it; a negative errno on error.
    pub(crate) result: i32,
}

impl CommandRing {
    /// A ring for so many commands at a time.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn new(entries: u32) -> io::Result<Self> {
        let mut builder = IoUring::builder();
        let ring = builder.setup_clamp().setup_submit_all().build(entries)?;
        Ok(Self(RefCell::new(ring)))
    }

    /// What can be polled for commands that have ended.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.borrow().as_raw_fd()
    }

    /// Tells the kernel of the commands that were pushed.
    ///
    /// # Errors
    /// What the system says. They are told with the next call.
    pub(crate) fn submit(&self) -> io::Result<()> {
        let mut ring = self.0.borrow_mut();
        let is_empty = ring.submission().is_empty();
        match is_empty {
            true => Ok(()),
            false => ring.submit().map(drop),
        }
    }

    /// Tells the kernel of the commands that were pushed, and blocks until one has ended.
    ///
    /// # Errors
    /// What the system says: the commands may be under way.
    #[cfg(feature = "ublk")]
    pub(crate) fn submit_and_wait(&self) -> io::Result<()> {
        self.0.borrow_mut().submitter().submit_and_wait(1).map(drop)
    }

    /// Takes the commands that have ended.
    pub(crate) fn take(&self, into: &mut Vec<Ended>) {
        let mut ring = self.0.borrow_mut();
        let ended = |entry: cqueue::Entry| Ended {
            user: entry.user_data(),
            result: entry.result(),
        };
        into.extend(ring.completion().map(ended));
    }

    /// Says whether [`CommandRing::take`] would find some.
    pub(crate) fn has_ended(&self) -> bool {
        !self.0.borrow_mut().completion().is_empty()
    }
}
