//! The thread that unmaps memory of front ends, a little at a time. Unmapping 4 GiB of a used guest takes a
//! quarter of a second, or a second if the front end is gone and the pages go too; reactors serve others
//! meanwhile. The thread works in steps, because all mappings of a process share one lock, which reactors
//! need for regions of their own. [`super::sys::Mapping`] hands over unused addresses.

use std::os::fd::OwnedFd;
use std::sync::mpsc::Receiver;
use std::thread;

use super::sys::Unused;
use crate::common::worker::{self, Worker};

/// Starts the thread, if it does not exist. The front door calls it when it has an address, so that
/// no reactor has to.
pub(super) fn start() {
    THREAD.get();
}

/// Queues memory for unmapping. Unmaps it at once if too much waits, or there can be no thread now.
pub(super) fn unmap(unused: Unused) {
    match THREAD.get() {
        // What is refused is dropped here, and so unmapped.
        Some(thread) => drop(thread.try_send(unused)),
        None => drop(unused),
    }
}

/// Queues a file for closing, as [`unmap`] does: the last close frees its pages.
pub(super) fn close(file: OwnedFd) {
    unmap(Unused::file(file));
}

fn serve(unused: &Receiver<Unused>) {
    // If the system refuses, the thread shares processors as usual.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICENESS);
    for mut unused in unused {
        while unused.unmap_some() {
            // Niceness is not enough: a running thread keeps the processor for a slice of some
            // milliseconds, even if another one wakes.
            thread::yield_now();
        }
    }
}

/// One thread for the process.
static THREAD: Worker<Unused> = Worker::new(|| worker::spawn("unmap", WAITING_MAX, serve));
/// Mappings that wait. A front end has 510 at most.
const WAITING_MAX: usize = 16_384;
/// Niceness of the thread, above that of the threads that serve.
const NICENESS: i32 = 10;
