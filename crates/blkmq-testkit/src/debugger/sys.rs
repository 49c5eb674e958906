//! The calls of `ptrace(2)` that stop a thread, which have no safe form elsewhere.

use std::io;
use std::ptr::null_mut;

use libc::c_void;
use rustix::process::Pid;

/// Becomes the debugger of a thread, which goes on.
pub(super) fn seize(thread: Pid) -> io::Result<()> {
    call(libc::PTRACE_SEIZE, thread)
}

/// Has the thread stop.
pub(super) fn interrupt(thread: Pid) -> io::Result<()> {
    call(libc::PTRACE_INTERRUPT, thread)
}

/// Leaves a thread that has stopped, which goes on.
pub(super) fn detach(thread: Pid) -> io::Result<()> {
    call(libc::PTRACE_DETACH, thread)
}

fn call(request: libc::c_uint, thread: Pid) -> io::Result<()> {
    let none: *mut c_void = null_mut();
    // SAFETY: these three requests take no address and no data, so that the kernel reads and writes no memory of
    // this process.
    let done = unsafe { libc::ptrace(request, thread.as_raw_nonzero().get(), none, none) };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
