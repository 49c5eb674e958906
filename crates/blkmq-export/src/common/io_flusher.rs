//! Decides that a thread is marked as one that the writing back of memory waits for, where doors serve disks that this host writes to.

mod sys;

pub(crate) use self::sys::become_io_flusher;
