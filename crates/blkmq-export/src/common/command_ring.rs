//! The ring for commands of a character device (io_uring, URING_CMD): those of FUSE and ublk need entries of
//! 128 bytes, so they have a ring of their own. A reactor's ring polls it, or its eventfd.

mod sys;
mod watch;

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use io_uring::{IoUring, cqueue, squeue};

pub(crate) use self::watch::{FREE_USER, Watch};

/// A ring of commands. Closing it ends the loan of memory to the kernel by commands that have not
/// ended.
pub(crate) struct CommandRing {
    ring: RefCell<IoUring<squeue::Entry128>>,
    /// Signalled when commands have ended, and polled in place of the ring.
    eventfd: Option<OwnedFd>,
}

/// A command that has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    /// As given with the command.
    pub(crate) user: u64,
    /// As the device has it; a negative errno on error.
    pub(crate) result: i32,
}

impl CommandRing {
    /// A ring for `entries` commands at a time.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn new(entries: u32) -> io::Result<Self> {
        let mut builder = IoUring::builder();
        let ring = builder.setup_clamp().setup_submit_all().build(entries)?;
        Ok(Self {
            ring: RefCell::new(ring),
            eventfd: None,
        })
    }

    /// The same, for one thread, which calls [`Self::enable`] first. The kernel ends commands only when
    /// that thread enters it for this ring, and an eventfd tells of them: up to two system calls more.
    ///
    /// # Errors
    /// The system's error.
    #[cfg(feature = "ublk")]
    pub(crate) fn for_one_thread(entries: u32) -> io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        let mut builder = IoUring::builder();
        builder
            .setup_clamp()
            .setup_submit_all()
            .setup_r_disabled()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag();
        let ring = builder.build(entries)?;
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        ring.submitter().register_eventfd(eventfd.as_raw_fd())?;
        Ok(Self {
            ring: RefCell::new(ring),
            eventfd: Some(eventfd),
        })
    }

    /// Makes this thread the one that uses the ring.
    ///
    /// # Errors
    /// The system's error.
    #[cfg(feature = "ublk")]
    pub(crate) fn enable(&self) -> io::Result<()> {
        self.ring.borrow().submitter().register_enable_rings()
    }

    /// Submits the pushed commands to the kernel, and has it end those that wait for that. Returns
    /// whether all are submitted; the kernel may have no memory. The others are with the next call.
    pub(crate) fn submit(&self) -> bool {
        let mut ring = self.ring.borrow_mut();
        let submission = ring.submission();
        let has_work = !submission.is_empty() || submission.taskrun();
        drop(submission);
        if has_work {
            // It may submit some and succeed, too.
            let _ = ring.submit();
        }
        ring.submission().is_empty()
    }

    /// Submits the pushed commands to the kernel, and blocks until one has ended.
    ///
    /// # Errors
    /// The system's error: the commands may be under way.
    #[cfg(feature = "ublk")]
    pub(crate) fn submit_and_wait(&self) -> io::Result<()> {
        self.ring.borrow_mut().submitter().submit_and_wait(1).map(drop)
    }

    /// Takes the commands that have ended.
    pub(crate) fn take(&self, into: &mut Vec<Ended>) {
        let mut ring = self.ring.borrow_mut();
        end_waiting(&mut ring);
        if let Some(eventfd) = &self.eventfd {
            // Resets it. EAGAIN: it was not signalled.
            let _ = rustix::io::read(eventfd, &mut [0; 8]);
            // Those whose signal that was; later ones signal it again.
            end_waiting(&mut ring);
        }
        let ended = |entry: cqueue::Entry| Ended {
            user: entry.user_data(),
            result: entry.result(),
        };
        into.extend(ring.completion().map(ended));
    }

    /// Says whether commands have ended that are not taken yet.
    fn has_ended(&self) -> bool {
        !self.ring.borrow_mut().completion().is_empty()
    }

    /// The descriptor to poll once all that have ended are taken.
    fn fd(&self) -> RawFd {
        let of_ring = || self.ring.borrow().as_raw_fd();
        self.eventfd.as_ref().map_or_else(of_ring, AsRawFd::as_raw_fd)
    }
}

/// Has the kernel end the commands that wait for this thread.
fn end_waiting(ring: &mut IoUring<squeue::Entry128>) {
    for _ in 0..ENTERS_MAX {
        if !ring.submission().taskrun() {
            return;
        }
        // An error passes: pushed commands are submitted later.
        let _ = ring.submit();
    }
}

/// How often the kernel is entered at most. It ends 20 at a time, and says that some wait for longer
/// than they do if another thread is late to say so.
const ENTERS_MAX: usize = 8;
