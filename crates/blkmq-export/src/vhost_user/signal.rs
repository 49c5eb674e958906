//! The notification of a front end: the kernel's asynchronous I/O, whose completions never block, adds to its
//! eventfd. A `write` could block: the front end has the same open file, may make it blocking and its count
//! full, and the reactor would wait for a reader that never comes. `queue` and `device` use it.

mod sys;

use std::cell::OnceCell;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use rustix::fs::{MemfdFlags, memfd_create};

use self::sys::Context;

/// Opens what a signal needs. The front door calls it when it has an address, so that no reactor
/// has to.
pub(super) fn start() {
    empty();
}

/// Adds 1 to the count of an eventfd, unless it is full; a front end with a full count was notified
/// often enough. Takes a microsecond, and never blocks where the system has asynchronous I/O
/// (`CONFIG_AIO`, `io_submit` allowed).
pub(super) fn signal(event: &OwnedFd) {
    let is_done = CONTEXT.with(|context| match (made(context), empty()) {
        (Some(context), Some(empty)) => context.read_nothing(empty, event),
        _ => false,
    });
    if !is_done {
        let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
    }
}

/// `None` if there is no descriptor left: the next call tries again.
fn empty() -> Option<&'static OwnedFd> {
    if EMPTY.get().is_none()
        && let Ok(file) = memfd_create("blkmq-signal", MemfdFlags::CLOEXEC)
    {
        let _ = EMPTY.set(file);
    }
    EMPTY.get()
}

/// `None` if the system refuses, as while all processes together have too many: the next call tries again.
fn made(context: &OnceCell<Context>) -> Option<&Context> {
    if context.get().is_none()
        && let Some(new) = Context::new()
    {
        let _ = context.set(new);
    }
    context.get()
}

thread_local! {
    /// One for each thread that signals.
    static CONTEXT: OnceCell<Context> = const { OnceCell::new() };
}

/// A file of which nothing is read: the read ends at once, and the kernel adds to the eventfd.
static EMPTY: OnceLock<OwnedFd> = OnceLock::new();
