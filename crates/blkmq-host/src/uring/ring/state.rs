//! The state of one thread's ring: entries on their way to the kernel, and completions on their way to
//! their clients.

use std::collections::VecDeque;

use blkmq_core::time::Nanos;
use io_uring::{IoUring, squeue};

use super::{CLIENT_SHIFT, ClientState, Completion, USER_MAX, sys};

pub(super) struct RingState {
    pub(super) uring: IoUring,
    /// Entries pushed while the submission queue was full and the kernel took none.
    pub(super) backlog: VecDeque<squeue::Entry>,
    pub(super) clients: Vec<ClientState>,
    /// Numbers of clients that are closed and drained.
    pub(super) unused: Vec<u16>,
    /// Ports with completions that [`super::RingHandle::take_ready`] has not reported.
    pub(super) ready: Vec<u16>,
    pub(super) free_files: Vec<u32>,
    /// How often the kernel was entered.
    pub(super) enters: u64,
}

/// The completions found in the completion queue.
#[derive(Default)]
pub(super) struct Reaped {
    pub(super) completions: usize,
    /// Entries that will not complete again.
    pub(super) entries: u32,
}

#[derive(Clone, Copy)]
pub(super) enum Wait {
    No,
    Until { timeout: Option<Nanos>, is_for_io: bool },
}

impl RingState {
    /// Puts an entry on the submission queue; submits first if that is full.
    pub(super) fn queue(&mut self, entry: squeue::Entry) {
        if self.backlog.is_empty() && sys::push(&mut self.uring.submission(), &entry) {
            return;
        }
        self.backlog.push_back(entry);
        self.enter(Wait::No);
    }

    pub(super) fn has_unsubmitted(&mut self) -> bool {
        !self.backlog.is_empty() || !self.uring.submission().is_empty()
    }

    pub(super) fn queue_backlog(&mut self) {
        let mut submission = self.uring.submission();
        while let Some(entry) = self.backlog.front() {
            if !sys::push(&mut submission, entry) {
                return;
            }
            self.backlog.pop_front();
        }
    }

    /// Says whether completions are announced but not posted, or overflowed into the kernel's memory, or are never
    /// announced.
    pub(super) fn must_enter(&mut self, in_flight: u32) -> bool {
        if self.uring.params().is_setup_iopoll() {
            return in_flight > 0;
        }
        let submission = self.uring.submission();
        submission.taskrun() || submission.cq_overflow()
    }

    pub(super) fn distribute(&mut self) -> Reaped {
        let mut reaped = Reaped::default();
        for entry in self.uring.completion() {
            reaped.completions += 1;
            let id = (entry.user_data() >> CLIENT_SHIFT) as usize;
            let client = &mut self.clients[id];
            let completion = Completion {
                user: entry.user_data() & USER_MAX,
                result: entry.result(),
                flags: entry.flags(),
            };
            if !completion.has_more() {
                client.in_flight -= 1;
                reaped.entries += 1;
            }
            if !client.is_open {
                if client.is_unused() {
                    self.unused.push(id as u16);
                }
                continue;
            }
            client.completed.push(completion);
            if !client.is_ready {
                client.is_ready = true;
                self.ready.push(id as u16);
            }
        }
        reaped
    }

    /// Enters the kernel: submits, runs the deferred work, and waits as `wait` says. It returns at a timeout, at a
    /// signal, and if the kernel takes no entry before completions are reaped: the caller loops.
    pub(super) fn enter(&mut self, mut wait: Wait) {
        self.queue_backlog();
        if !self.backlog.is_empty() {
            wait = Wait::No;
        }
        self.enters += 1;
        let entered = match wait {
            Wait::No => self.uring.submitter().submit(),
            Wait::Until { timeout, is_for_io } => sys::submit_and_wait(&mut self.uring, timeout, is_for_io),
        };
        if let Err(error) = entered {
            let errno = error.raw_os_error().unwrap_or(0);
            let is_passing = [libc::ETIME, libc::EINTR, libc::EBUSY, libc::EAGAIN].contains(&errno);
            assert!(is_passing, "io_uring_enter: {error}");
        }
        self.queue_backlog();
    }
}
