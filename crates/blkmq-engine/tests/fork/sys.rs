//! A fork of the test's process, with a bound on its time.

/// Runs `child` in a fork and says whether it returned true, within ten seconds.
pub(crate) fn is_true_in_fork(child: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child has this thread alone. It uses memory, which the C library makes usable after a fork, and
    // the code under test; it leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "no fork: {}", std::io::Error::last_os_error());
    if pid == 0 {
        // SAFETY: it takes a number. The signal ends a child that hangs.
        unsafe { libc::alarm(10) };
        let is_true = child();
        // SAFETY: it takes a number, and does not return.
        unsafe { libc::_exit(i32::from(!is_true)) }
    }
    let mut status = -1;
    // SAFETY: the child is this process's, and nobody else waits for it; `status` outlives the call.
    let ended = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    ended == pid && status == 0
}
