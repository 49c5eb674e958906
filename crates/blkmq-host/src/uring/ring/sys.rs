//! The unsafe calls of the ring: the caller that pushes an entry vouches for the memory that it names,
//! and the kernel is entered to wait. The parent module does the rest of the ring without `unsafe`.

use std::io;

use blkmq_core::time::Nanos;
use io_uring::{EnterFlags, IoUring, squeue, types};

use super::RingClient;

impl RingClient {
    /// Queues an entry; the kernel sees it with the ring's next submission. `user` comes back in the
    /// completion.
    ///
    /// If the submission queue is full, it is submitted first. The call never fails.
    ///
    /// # Safety
    /// Every piece of memory that `entry` points to must stay valid, for what the operation does with it,
    /// until its last completion has been taken (or the ring and all its clones are gone and the kernel has
    /// let go of it).
    ///
    /// # Panics
    /// If `user` is larger than [`super::USER_MAX`].
    pub unsafe fn push(&self, entry: squeue::Entry, user: u64) {
        self.ring.push(self.id, entry, user);
    }
}

/// Puts an entry on the submission queue. False if the queue is full.
pub(super) fn push(queue: &mut squeue::SubmissionQueue<'_>, entry: &squeue::Entry) -> bool {
    // SAFETY: entries come from `RingClient::push`, whose caller vouches for their memory, or from the safe
    // functions of the parent module, whose entries point to none.
    unsafe { queue.push(entry) }.is_ok()
}

/// Submits all entries and waits for a completion, or until `timeout` is over.
pub(super) fn submit_and_wait(
    uring: &mut IoUring,
    timeout: Option<Nanos>,
    is_for_io: bool,
) -> io::Result<usize> {
    let count = uring.submission().len() as u32;
    let mut flags = EnterFlags::GETEVENTS | EnterFlags::EXT_ARG;
    if !is_for_io && uring.params().is_feature_no_iowait() {
        flags |= EnterFlags::NO_IOWAIT;
    }
    let time = types::Timespec::new();
    let time = timeout.map(|Nanos(ns)| time.sec(ns / 1_000_000_000).nsec((ns % 1_000_000_000) as u32));
    let mut args = types::SubmitArgs::new();
    if let Some(time) = &time {
        args = args.timespec(time);
    }
    // SAFETY: the flags say that the argument is the extended one, which it is; it and the time it names live until the
    // call returns. The entries submitted are vouched for as in `push`.
    unsafe { uring.submitter().enter(count, 1, flags.bits(), Some(&args)) }
}
