//! Decides nothing: the two system calls of this door that no crate wraps.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Has a descriptor of `/dev/fuse` that was just opened be another way to the filesystem of `from`.
///
/// # Errors
/// What the system says.
pub(super) fn clone_device(new: BorrowedFd<'_>, from: BorrowedFd<'_>) -> io::Result<()> {
    let from = from.as_raw_fd() as u32;
    // SAFETY: the request reads the 4 bytes of `from`, which is alive until the call returns, and both descriptors are open.
    let done = unsafe { libc::ioctl(new.as_raw_fd(), DEVICE_CLONE, &raw const from) };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Marks the calling thread as one that the writing back of memory waits for: what the kernel allocates for it waits for no I/O.
///
/// # Errors
/// What the system says: it needs the capability `CAP_SYS_RESOURCE`.
pub(super) fn become_io_flusher() -> io::Result<()> {
    // SAFETY: the request takes numbers alone, and changes a flag of this thread.
    let done = unsafe { libc::prctl(SET_IO_FLUSHER, 1, 0, 0, 0) };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// `_IOR(229, 0, uint32_t)`.
const DEVICE_CLONE: libc::Ioctl = 0x8004_e500_u32 as libc::Ioctl;
/// `PR_SET_IO_FLUSHER`.
const SET_IO_FLUSHER: libc::c_int = 57;
