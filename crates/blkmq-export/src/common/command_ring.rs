//! Decides how commands of a character device are put into io_uring (URING_CMD): those of FUSE and
//! ublk need entries of 128 bytes, so they have a ring of their own, which a reactor's ring polls.

mod sys;

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use io_uring::{IoUring, cqueue, squeue};

/// A ring of commands. Closing it ends the loan of memory to the kernel by commands that have not
/// ended.
pub(crate) struct CommandRing(RefCell<IoUring<squeue::Entry128>>);

/// A command that has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    /// As given with the command.
    pub(crate) user: u64,
    /// As the device has it; a negative errno on error.
    pub(crate) result: i32,
}

/// How a reactor learns that commands have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watch {
    /// It looks in its next turn.
    Again,
    /// Its ring polls the descriptor.
    Poll,
    /// Not at all: some have ended, and none are taken now. A poll would complete at once.
    Not,
}

impl CommandRing {
    /// A ring for `entries` commands at a time.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn new(entries: u32) -> io::Result<Self> {
        let mut builder = IoUring::builder();
        let ring = builder.setup_clamp().setup_submit_all().build(entries)?;
        Ok(Self(RefCell::new(ring)))
    }

    /// The descriptor to poll for commands that have ended.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.borrow().as_raw_fd()
    }

    /// Submits the pushed commands to the kernel.
    ///
    /// # Errors
    /// The system's error. The commands are submitted with the next call.
    pub(crate) fn submit(&self) -> io::Result<()> {
        let mut ring = self.0.borrow_mut();
        let is_empty = ring.submission().is_empty();
        match is_empty {
            true => Ok(()),
            false => ring.submit().map(drop),
        }
    }

    /// Submits the pushed commands to the kernel, and blocks until one has ended.
    ///
    /// # Errors
    /// The system's error: the commands may be under way.
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

    /// How a reactor is to learn of the next command that has ended. `is_full`: some are still to be
    /// submitted; `takes`: those that have ended are taken now.
    pub(crate) fn watch(&self, is_full: bool, takes: bool) -> Watch {
        let has_ended = !self.0.borrow_mut().completion().is_empty();
        match has_ended {
            _ if is_full || has_ended && takes => Watch::Again,
            true => Watch::Not,
            false => Watch::Poll,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_not_polled_while_commands_that_have_ended_are_not_taken() {
        let ring = CommandRing::new(2).unwrap();
        assert_eq!(ring.watch(false, true), Watch::Poll);
        assert_eq!(ring.watch(false, false), Watch::Poll);
        ring.push_nop();
        ring.submit().unwrap();
        assert_eq!(ring.watch(false, true), Watch::Again);
        assert_eq!(ring.watch(false, false), Watch::Not);
        ring.take(&mut Vec::new());
        assert_eq!(ring.watch(false, false), Watch::Poll);
        assert_eq!(ring.watch(true, false), Watch::Again);
    }
}
