//! Decides who vouches for the memory that an entry of the ring names: whoever pushes it.
//! The parent module does the rest of the ring without `unsafe`.

use io_uring::squeue;

use super::Port;

impl Port {
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

/// Puts an entry on the submission queue. Says false if that is full.
pub(super) fn push(queue: &mut squeue::SubmissionQueue<'_>, entry: &squeue::Entry) -> bool {
    // SAFETY: entries come from `Port::push`, whose caller vouches for their memory, or from the safe
    // functions of the parent module, whose entries point to none.
    unsafe { queue.push(entry) }.is_ok()
}
