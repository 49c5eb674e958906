//! `SO_PEERCRED` as the kernel has it: rustix's type forbids the 0 that stands for a process without a
//! number here.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The number of the peer's process, 0 if it has none here, and its user.
pub(super) fn peer(socket: BorrowedFd<'_>) -> io::Result<(i32, u32)> {
    let found = credentials(socket)?;
    Ok((found.pid, found.uid))
}

/// The peer's own group, and its others.
pub(super) fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups = vec![0u32; GROUPS_MAX];
    let mut bytes = size_of_val(groups.as_slice()) as libc::socklen_t;
    // SAFETY: the option's value is a list of numbers; it and its length live as long as the call, and the kernel
    // writes no more than that length.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &raw mut bytes,
        )
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    groups.truncate(bytes as usize / size_of::<u32>());
    groups.push(credentials(socket)?.gid);
    Ok(groups)
}

fn credentials(socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
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
        0 => Ok(found),
        _ => Err(io::Error::last_os_error()),
    }
}

/// As many groups as a process may have (`NGROUPS_MAX`).
const GROUPS_MAX: usize = 65_536;
