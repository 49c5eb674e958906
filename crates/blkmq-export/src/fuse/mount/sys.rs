//! Looks at a file from a process of its own: at a mount whose daemon does not answer, whoever looks may
//! hang so that not even its end ends it.

use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;

use rustix::process::Pid;

/// Starts a process that looks at a file and then ends: with 0, or with the number of the system's error.
///
/// # Errors
/// The system's error; there is no such process then.
pub(super) fn start_looking(path: &CStr) -> io::Result<Pid> {
    // SAFETY: the child makes only calls that are allowed after a fork of a process with threads.
    let child = unsafe { libc::fork() };
    if child != 0 {
        return Pid::from_raw(child.max(0)).ok_or_else(io::Error::last_os_error);
    }
    let mut found = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: as above. The path was there before the fork, and `found` has room for the answer. The
    // descriptors are this child's copies, which it must not keep open.
    unsafe {
        libc::close_range(0, libc::c_uint::MAX, 0);
        let looked = libc::lstat(path.as_ptr(), found.as_mut_ptr());
        libc::_exit(if looked == 0 { 0 } else { *libc::__errno_location() })
    }
}
