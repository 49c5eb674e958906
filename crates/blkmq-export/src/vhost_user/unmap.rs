//! Decides who gives memory of front ends back: a thread of its own, little by little. To unmap 4 GiB of a guest
//! that was used takes a quarter of a second, and a whole one if the front end is gone and the pages with it; a
//! reactor serves others meanwhile. The thread goes in steps, because all mappings of a process have one lock, which
//! reactors need for regions of their own. [`super::sys::Mapping`] hands over what it had when nobody uses it any more.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use super::sys::Unused;

/// Starts the thread, if it is not there. The front door does so when it has an address, so that no reactor has to.
pub(super) fn start() {
    THREAD.get_or_init(spawn);
}

/// Has memory be unmapped soon. If more waits than the thread may have before it, or there can be no thread, at once.
pub(super) fn unmap(unused: Unused) {
    match THREAD.get_or_init(spawn) {
        // What is refused is dropped here, and so unmapped.
        Some(thread) => drop(thread.try_send(unused)),
        None => drop(unused),
    }
}

/// Has a file be closed soon, as [`unmap`] does: who closes one last frees its pages.
pub(super) fn close(file: OwnedFd) {
    unmap(Unused::file(file));
}

fn spawn() -> Option<SyncSender<Unused>> {
    let (sender, receiver) = sync_channel(WAITING_MAX);
    let thread = thread::Builder::new().name("unmap".to_owned());
    thread.spawn(move || serve(&receiver)).ok().map(|_| sender)
}

fn serve(receiver: &Receiver<Unused>) {
    // If the system refuses, it shares processors as usual.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICENESS);
    for mut unused in receiver {
        while unused.unmap_some() {
            // Niceness is not enough: who runs keeps the processor for a slice of some milliseconds, whoever wakes.
            thread::yield_now();
        }
    }
}

/// One for the process, as the addresses are.
static THREAD: OnceLock<Option<SyncSender<Unused>>> = OnceLock::new();
/// Mappings that wait. A front end has 33 at most.
const WAITING_MAX: usize = 4096;
/// How far the thread stands behind those that serve.
const NICENESS: i32 = 10;
