//! The option by which a socket accepts or refuses descriptors.

use std::os::fd::{AsRawFd, BorrowedFd};

/// Sets `SO_PASSRIGHTS`. A system that does not know it lets descriptors through.
pub(super) fn pass_rights(socket: BorrowedFd<'_>, may_pass: bool) {
    let value = libc::c_int::from(may_pass);
    // SAFETY: the option's value is an integer that lives as long as the call.
    let _ = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            PASS_RIGHTS,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
}

/// `SO_PASSRIGHTS` of `asm-generic/socket.h`.
const PASS_RIGHTS: libc::c_int = 83;
