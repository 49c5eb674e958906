//! A disk's way to a thread of the engine's: callers on any thread put bios into its inbox, and a service on a
//! reactor does them. `disk` has the callers' end.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_core::bio::{self, Status};
use blkmq_host::disk::Use;
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service, Waker};

use crate::bio::Bio;
use crate::io::Promise;
use crate::loans::Loans;
use crate::sys::forks;

/// The callers' end. A drop lets the service end when its bios have.
pub(crate) struct Client {
    inbox: Arc<Inbox>,
    /// How many forks there were when it was made.
    forks: u32,
}

/// The engine's end, on its reactor.
pub(crate) struct ClientService {
    inbox: Arc<Inbox>,
    disk: blkmq_host::Disk,
    /// For which there was no room yet, in order.
    waiting: VecDeque<Sent>,
    loans: Loans<Promise>,
    /// Keeps the disk from being removed while it has I/O under way. None before the start, and when all is over.
    of_disk: Option<Use>,
    /// No more comes.
    is_leaving: bool,
}

#[derive(Default)]
struct Inbox(Mutex<Inside>);

#[derive(Default)]
struct Inside {
    sent: Vec<Sent>,
    /// The service's, once it is there.
    waker: Option<Waker>,
    /// Whoever sends is refused, or nobody does any more.
    is_closed: bool,
}

/// A bio that was sent, and where its end is told.
struct Sent {
    bio: Bio,
    promise: Promise,
}

impl Client {
    /// Makes both ends.
    pub(crate) fn new(disk: &blkmq_host::Disk) -> (Self, ClientService) {
        let inbox = Arc::new(Inbox::default());
        let service = ClientService {
            inbox: Arc::clone(&inbox),
            disk: disk.clone(),
            waiting: VecDeque::new(),
            loans: Loans::new(),
            of_disk: None,
            is_leaving: false,
        };
        let forks = forks();
        (Self { inbox, forks }, service)
    }

    /// Sends a bio, which ends with [`Status::Shutdown`] if the engine takes no more.
    pub(crate) fn send(&self, bio: Bio, promise: Promise) {
        let mut inside = self.inbox.lock();
        if inside.is_closed {
            drop(inside);
            return promise.end(Status::Shutdown, bio.into_buffer());
        }
        inside.sent.push(Sent { bio, promise });
        // One call for all that is sent until the service takes it.
        let waker = (inside.sent.len() == 1).then(|| inside.waker.clone()).flatten();
        drop(inside);
        waker.inspect(Waker::wake);
    }
}

impl Drop for Client {
    /// In a fork nothing: the parent's thread may have had the lock, and nobody returns it there.
    fn drop(&mut self) {
        if self.forks != forks() {
            return;
        }
        let mut inside = self.inbox.lock();
        inside.is_closed = true;
        let waker = inside.waker.clone();
        drop(inside);
        waker.inspect(Waker::wake);
    }
}

impl ClientService {
    /// Takes what was sent, and submits as much as there is room for.
    fn go_on(&mut self, cx: &mut Cx<'_>) {
        let mut inside = self.inbox.lock();
        inside.is_closed |= self.disk.users.are_told_to_leave();
        self.waiting.extend(inside.sent.drain(..));
        self.is_leaving = inside.is_closed;
        drop(inside);
        while let Some(Sent { bio, promise }) = self.waiting.pop_front() {
            let (loan, bio) = bio.lend(&self.disk, self.loans.next());
            match cx.submit(self.disk.queue, bio) {
                Ok(()) => self.loans.add(loan, promise),
                Err(refused) => {
                    let bio = Bio::take_back(loan, refused);
                    return self.waiting.push_front(Sent { bio, promise });
                }
            }
        }
        self.leave_if_over();
    }

    fn leave_if_over(&mut self) {
        if self.is_leaving && self.waiting.is_empty() && self.loans.is_empty() {
            self.of_disk = None;
        }
    }
}

impl Service for ClientService {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.of_disk = self.disk.users.enter(cx.waker());
        if self.of_disk.is_none() {
            // The disk has been removed.
            self.is_leaving = true;
            return self.refuse_all();
        }
        self.inbox.lock().waker = Some(cx.waker());
        self.go_on(cx);
    }

    fn on_ring(&mut self, _cx: &mut Cx<'_>, _completed: &[Completion]) {}

    fn on_end(&mut self, _cx: &mut Cx<'_>, ended: bio::Bio) {
        let (promise, status, buffer) = self.loans.end(ended);
        promise.end(status, buffer);
        self.leave_if_over();
    }

    fn on_wake(&mut self, cx: &mut Cx<'_>) {
        self.go_on(cx);
    }

    fn on_room(&mut self, cx: &mut Cx<'_>) {
        self.go_on(cx);
    }

    /// What was sent before is done.
    fn drain(&mut self, cx: &mut Cx<'_>) {
        self.inbox.lock().is_closed = true;
        self.go_on(cx);
    }

    fn is_finished(&self) -> bool {
        self.is_leaving && self.waiting.is_empty()
    }
}

impl Drop for ClientService {
    /// Also if it was never started: whoever has sent is told.
    fn drop(&mut self) {
        self.refuse_all();
    }
}

impl ClientService {
    /// Ends what was sent and not submitted, and takes no more.
    fn refuse_all(&mut self) {
        let mut inside = self.inbox.lock();
        inside.is_closed = true;
        let sent = std::mem::take(&mut inside.sent);
        drop(inside);
        for Sent { bio, promise } in sent.into_iter().chain(self.waiting.drain(..)) {
            promise.end(Status::Shutdown, bio.into_buffer());
        }
    }
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
