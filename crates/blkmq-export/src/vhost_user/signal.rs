//! Decides how a front end is notified: the kernel's asynchronous I/O, whose completions never
//! block, adds to its eventfd. A `write` could block: the front end has the same open file, may
//! make it blocking and its count full, and the reactor would wait for a reader that never comes.
//! `queue` and `device` use it.

mod sys;

use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use rustix::fs::{MemfdFlags, memfd_create};

use self::sys::Context;

/// Opens what a signal needs. The front door calls it when it has an address, so that no reactor
/// has to.
pub(super) fn start() {
    EMPTY.get_or_init(open);
}

/// Adds 1 to the count of an eventfd, unless it is full; a front end with a full count was notified
/// often enough. Takes a microsecond, and never blocks where the system has asynchronous I/O
/// (`CONFIG_AIO`, `io_submit` allowed).
pub(super) fn signal(event: &OwnedFd) {
    let is_done = CONTEXT.with(|context| match (context, EMPTY.get_or_init(open)) {
        (Some(context), Some(empty)) => context.read_nothing(empty, event),
        _ => false,
    });
    if !is_done {
        let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
    }
}

fn open() -> Option<OwnedFd> {
    memfd_create("blkmq-signal", MemfdFlags::CLOEXEC).ok()
}

thread_local! {
    /// One for each thread that signals; `None` if the system refuses.
    static CONTEXT: Option<Context> = Context::new();
}

/// A file of which nothing is read: the read ends at once, and the kernel adds to the eventfd.
static EMPTY: OnceLock<Option<OwnedFd>> = OnceLock::new();
