//! `SO_PEERCRED` as the kernel has it: rustix's type forbids the 0 that stands for a process without a
//! number here.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The number of the peer's process, 0 if it has none here, and its user.
pub(super) fn peer(socket: BorrowedFd<'_>) -> io::Result<(i32, u32)> {
    let mut found = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut bytes = size_of_val(&found) as libc::socklen_t;
    // SAFETY: the option's value is a `ucred`, of which all bit patterns are valid; it and its length
    // live as long as the call, and the kernel writes no more than that length.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut bytes,
        )
    };
    match done {
        0 => Ok((found.pid, found.uid)),
        _ => Err(io::Error::last_os_error()),
    }
}
