//! The one system call for `io_flusher` that no crate wraps.

use std::io;

/// Marks the calling thread as one that write-back of memory waits for: the kernel's allocations
/// for it wait for no I/O.
///
/// # Errors
/// The system's error: the mark needs the capability `CAP_SYS_RESOURCE`.
pub(super) fn mark() -> io::Result<()> {
    // SAFETY: the request takes numbers alone, and changes a flag of this thread.
    let done = unsafe { libc::prctl(SET_IO_FLUSHER, 1, 0, 0, 0) };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// `PR_SET_IO_FLUSHER`.
const SET_IO_FLUSHER: libc::c_int = 57;
