//! The wake-up of a sleeping reactor: the first thread that has work for it writes to its event once.
//! `blkmq_sync::wake_flag` announces sleep; `reactor::core` sleeps; threads that publish work call
//! `ring`.
//!
//! If the reactor is awake, a wake-up costs one fence and one load, and at times one write; no system call.
//! A multishot poll in the reactor's ring watches the event, which is never read: each write is one completion.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use blkmq_core::ids::ReactorSet;
use blkmq_sync::{CachePadded, WakeFlag};
use rustix::event::{EventfdFlags, eventfd};

/// Wakes one reactor, from any thread.
#[derive(Debug)]
pub(crate) struct Wakeup {
    flag: CachePadded<WakeFlag>,
    event: OwnedFd,
}

impl Wakeup {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            flag: CachePadded::new(WakeFlag::new()),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Wakes the owner if it sleeps. The caller has published the work before.
    pub(crate) fn ring(&self) {
        if self.flag.notify() {
            // The counter cannot overflow: it takes 2^64 writes. Nothing else can fail on an open event.
            let written = rustix::io::write(&self.event, &1u64.to_ne_bytes());
            assert_eq!(written, Ok(8), "waking a reactor");
        }
    }

    /// The owner's side: announce sleep, check for work, block or not, announce that it is awake.
    pub(crate) fn flag(&self) -> &WakeFlag {
        &self.flag
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    pub(crate) fn event(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

/// Wakes each reactor in `set` once.
pub(crate) fn wake_all(wakeups: &[Wakeup], mut set: ReactorSet) {
    while let Some(reactor) = set.pop() {
        wakeups[reactor.index()].ring();
    }
}
