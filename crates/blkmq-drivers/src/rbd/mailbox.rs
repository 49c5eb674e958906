//! The mailbox for completions from librbd's threads to the reactor that issued the requests: a ring of
//! fixed size, with one event for all that complete before the reactor checks.
//!
//! No completion is lost: librbd's thread pushes, then sets the flag ([`Mailbox::put`]); the
//! reactor clears the flag, then checks. A thread that finds the flag set has pushed before a check
//! that is still to come.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use blkmq_sync::mpsc::{self, Receiver, Sender};
use rustix::event::{EventfdFlags, eventfd};

use super::sys::Slot;

/// The slots of one hardware context's requests while they are under way, and the queue of their
/// completions.
pub(super) struct Mailbox {
    slots: Box<[Slot]>,
    sender: Sender<End>,
    event: OwnedFd,
    /// The event has been written, and the reactor has not checked since.
    is_told: AtomicBool,
    /// The reactor polls.
    is_polled: AtomicBool,
}

/// The end of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct End {
    /// The number of its slot.
    pub(super) slot: u32,
    /// What librbd returned: bytes, or a negative errno.
    pub(super) result: i64,
}

impl Mailbox {
    /// Makes one for `count` slots, and the handle from which completions are taken.
    pub(super) fn new(count: u32) -> io::Result<(Arc<Self>, Receiver<End>)> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (sender, receiver) = mpsc::channel(count as usize);
        let mailbox = Arc::new_cyclic(|of| Self {
            slots: (0..count).map(|number| Slot::new(number, of.clone())).collect(),
            sender,
            event,
            is_told: AtomicBool::new(false),
            is_polled: AtomicBool::new(false),
        });
        Ok((mailbox, receiver))
    }

    /// Becomes readable when there are completions that the reactor has not seen.
    pub(super) fn fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    pub(super) fn slot(&self, number: usize) -> &Slot {
        &self.slots[number]
    }

    /// Adds a completion, and notifies the reactor if nobody has yet. For any thread.
    pub(super) fn put(&self, end: End) {
        let pushed = self.sender.push(end);
        debug_assert!(pushed.is_ok(), "a slot has one end at a time");
        // SeqCst: pairs with the fence in `set_polled`. Either this thread sees that nobody polls any
        // more, or the check after the switch sees what was pushed.
        fence(Ordering::SeqCst);
        if self.is_polled.load(Ordering::Relaxed) {
            return;
        }
        // Release: pairs with the Acquire in `listen`: the thread that clears the flag sees what
        // was pushed.
        if !self.is_told.swap(true, Ordering::AcqRel) {
            // Fails only when the counter is full, and then it is readable anyway.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Clears the flag: the next completion notifies again. The reactor must check afterwards.
    pub(super) fn listen(&self) {
        // Empty already, if it is read once more often than written.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        // A read-modify-write: it sees the latest flag, and so everything that was pushed before
        // that (Acquire).
        self.is_told.swap(false, Ordering::AcqRel);
    }

    /// Sets whether the reactor polls, so that no notification is needed. The reactor must check
    /// once afterwards.
    pub(super) fn set_polled(&self, on: bool) {
        self.is_polled.store(on, Ordering::Relaxed);
        // SeqCst: pairs with the fence in `put`.
        fence(Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_readable(mailbox: &Mailbox) -> bool {
        let mut watched = [rustix::event::PollFd::from_borrowed_fd(
            std::os::fd::AsFd::as_fd(&mailbox.event),
            rustix::event::PollFlags::IN,
        )];
        rustix::event::poll(
            &mut watched,
            Some(&rustix::event::Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            }),
        )
        .unwrap()
            > 0
    }

    #[test]
    fn one_event_tells_of_a_batch_and_another_of_what_comes_after_a_look() {
        let (mailbox, mut ends) = Mailbox::new(4).unwrap();
        let end = |slot| End { slot, result: 0 };
        mailbox.put(end(0));
        mailbox.put(end(1));
        assert!(is_readable(&mailbox));
        let mut count = [0; 8];
        rustix::io::read(&mailbox.event, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1, "writes of the event");
        mailbox.listen();
        assert_eq!(
            (ends.pop(), ends.pop(), ends.pop()),
            (Some(end(0)), Some(end(1)), None)
        );
        mailbox.put(end(2));
        assert!(is_readable(&mailbox), "it listens again");
    }

    #[test]
    fn reactor_that_polls_is_not_told() {
        let (mailbox, mut ends) = Mailbox::new(1).unwrap();
        mailbox.set_polled(true);
        mailbox.put(End { slot: 0, result: -5 });
        assert!(!is_readable(&mailbox));
        assert_eq!(ends.pop().map(|end| end.result), Some(-5));
    }

    #[test]
    fn no_end_is_lost_between_threads() {
        let (mailbox, mut ends) = Mailbox::new(64).unwrap();
        let other = Arc::clone(&mailbox);
        let (credit, credits) = std::sync::mpsc::sync_channel::<()>(64);
        let thread = std::thread::spawn(move || {
            for number in 0..ROUNDS {
                credits.recv().unwrap();
                other.put(End {
                    slot: number,
                    result: 0,
                });
            }
        });
        (0..64).for_each(|_| credit.send(()).unwrap());
        let mut next = 0;
        while next < ROUNDS {
            let timeout = rustix::event::Timespec {
                tv_sec: 10,
                tv_nsec: 0,
            };
            let mut watched = [rustix::event::PollFd::from_borrowed_fd(
                std::os::fd::AsFd::as_fd(&mailbox.event),
                rustix::event::PollFlags::IN,
            )];
            let ready = rustix::event::poll(&mut watched, Some(&timeout)).unwrap();
            assert_eq!(ready, 1, "nothing was told after {next} ends");
            mailbox.listen();
            ends.drain(|end| {
                assert_eq!(end.slot, next);
                next += 1;
                let _ = credit.try_send(());
            });
        }
        thread.join().unwrap();
    }

    const ROUNDS: u32 = 5_000;
}
