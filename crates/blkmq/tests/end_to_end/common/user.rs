//! Another user of this host: a thread of the test becomes it, so that all of the test's own clients are its.

use std::thread;

use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_gid, set_thread_groups, set_thread_uid};

/// Says whether a test may become other users, with a message if not.
pub(crate) fn can_switch() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        blkmq_testkit::skip("other users are needed, so root");
    }
    is_root
}

/// Runs this as a user, in the group of the same number alone. The user needs no name.
pub(crate) fn as_user<T: Send>(user: u32, run: impl FnOnce() -> T + Send) -> T {
    as_member(user, &[], run)
}

/// The same, as a member of these groups as well.
pub(crate) fn as_member<T: Send>(user: u32, groups: &[u32], run: impl FnOnce() -> T + Send) -> T {
    let switched = move || {
        // Of this thread alone: it has the system's calls themselves, not the C library's.
        let groups: Vec<Gid> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
        set_thread_groups(&groups).expect("root may");
        set_thread_gid(Gid::from_raw(user)).expect("root may");
        set_thread_uid(Uid::from_raw(user)).expect("root may");
        run()
    };
    let done = thread::scope(|scope| scope.spawn(switched).join());
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
