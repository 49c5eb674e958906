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
    // SAFETY: the descriptors are this child's copies, and nothing here uses them.
    unsafe { libc::close_range(0, libc::c_uint::MAX, 0) };
    let mut found = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the path ends with a zero, and `found` has room for the answer.
    let looked = unsafe { libc::lstat(path.as_ptr(), found.as_mut_ptr()) };
    let errno = io::Error::last_os_error().raw_os_error().unwrap_or(0);
    // SAFETY: ends the child without what an end of the whole process would do.
    unsafe { libc::_exit(if looked == 0 { 0 } else { errno }) }
}
