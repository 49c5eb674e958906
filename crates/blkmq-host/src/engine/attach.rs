//! I/O on a library user's own thread: it attaches, and from then on submits, issues and reaps by itself.
//! `reactor::core` is its side of the queues; nothing is handed to another thread.
//!
//! An attached thread may stop calling, so the engine never leaves others' work with it. The clock is read
//! once per batch, at the first submission after a [`Attached::poll`]. Bios that end while they are issued
//! (at a drive that completes inline) are returned without another reading, for a bounded number of times in
//! a row.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use blkmq_core::bio::{Bio, Full, Submission};
use blkmq_core::time::{Instant, Nanos};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use crate::disk::{Disk, QueueId};
use crate::error::Error;
use crate::reactor::core::{News, ReactorCore};
use crate::reactor::shared::{Inbox, Order, Shared};
use crate::reactor::wait::Expected;

/// A thread's own access to all disks of an engine. Stays on the thread that attached.
///
/// A drop issues staged bios and blocks until all bios that it submitted have ended, since their buffers are
/// in use.
pub struct Attached {
    /// Always present, except while it is being dropped.
    core: Option<ReactorCore>,
    shared: Arc<Shared>,
    /// Changes of disks and queues that this thread is to make on its side.
    orders: Arc<Inbox>,
    /// Made when the thread's own event loop asks for it.
    event: Option<Event>,
    /// The thread waits in its own event loop, as far as others know.
    is_waiting: bool,
    /// The core's time was read in this batch.
    is_clock_fresh: bool,
    /// Bios submitted and not returned.
    outstanding: u32,
    /// Polls in a row that returned only bios that had ended inline.
    short_polls: u32,
}

/// Why a bio was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// There is no room: submit it again when another one has ended.
    IsFull,
    /// The disk is removed, or about to be.
    IsGone,
}

/// What an event loop waits for: the ring's event, and the event by which others wake the thread. The ring has
/// that one, too, but Linux 6.18 announces only the first of the completions that writes to eventfds cause.
struct Event {
    /// An epoll instance with both.
    all: OwnedFd,
    /// That of the ring.
    _completed: OwnedFd,
}

impl Event {
    fn open(core: &ReactorCore) -> io::Result<Self> {
        let all = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let completed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        core.ring().register_event(completed.as_fd())?;
        let (flags, no_data) = (
            epoll::EventFlags::IN | epoll::EventFlags::ET,
            epoll::EventData::new_u64(0),
        );
        epoll::add(&all, &completed, no_data, flags)?;
        epoll::add(&all, core.wake_event(), no_data, flags)?;
        let _completed = completed;
        Ok(Self { all, _completed })
    }

    /// What came until now does not make it readable any more.
    fn clear(&self) {
        let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; 2];
        // Both events are edges, so none is left. There is nothing to wait for, and no signal to interrupt it.
        let _ = epoll::wait(&self.all, &mut events[..], Some(&Timespec::default()));
    }
}

impl Attached {
    pub(crate) fn new(shared: &Arc<Shared>) -> Result<Self, Error> {
        let reactor_queues = shared.take_queues()?;
        let mut core = ReactorCore::open(shared, reactor_queues).map_err(|(error, reactor_queues)| {
            shared.put_queues(reactor_queues);
            error
        })?;
        for (index, disk) in shared.all_encrypted() {
            core.add_encrypted(index, disk);
        }
        Ok(Self {
            orders: shared.attached_inbox(core.id()),
            core: Some(core),
            shared: Arc::clone(shared),
            event: None,
            is_waiting: false,
            is_clock_fresh: false,
            outstanding: 0,
            short_polls: 0,
        })
    }

    /// Submits a bio. It is staged until [`Self::unplug`], [`Self::poll`] or [`Self::wait`], or until 32 bios
    /// are staged.
    ///
    /// # Errors
    /// Returns the bio if as many bios of this thread wait as the queue has requests per reactor or, when little
    /// room is left, if too many of its group wait. Submit it again when another bio has ended.
    ///
    /// If there is no such queue or mapped disk, the bio ends as [`Status::Invalid`](blkmq_core::bio::Status).
    #[inline]
    pub fn submit(&mut self, queue: QueueId, bio: Bio) -> Result<(), Bio> {
        self.core_at_time().submit(queue, bio)?;
        self.outstanding += 1;
        Ok(())
    }

    /// Submits a bio that is still to be made: the usual one is written where it stays until it has ended. `new` names the
    /// disk by its number. Like [`Self::submit`] otherwise.
    ///
    /// # Errors
    /// If there is no room, as there, or the disk is removed.
    #[inline]
    pub fn submit_new(&mut self, disk: &Disk, new: &Submission) -> Result<(), Refused> {
        let core = self.core_at_time();
        // Behind the orders that this thread has taken: the one to let the disk go may be among them.
        if disk.users.are_told_to_leave() {
            return Err(Refused::IsGone);
        }
        core.submit_new(disk.queue, new).map_err(|Full| Refused::IsFull)?;
        self.outstanding += 1;
        Ok(())
    }

    /// Issues staged bios.
    #[inline]
    pub fn unplug(&mut self) {
        self.core_at_time().unplug();
    }

    /// Issues staged bios, appends ended bios to `out`, and returns their number. Never blocks.
    #[inline]
    pub fn poll(&mut self, out: &mut Vec<Bio>) -> usize {
        self.look();
        self.send();
        self.take_ended(out)
    }

    /// Like [`Self::poll`], but blocks until a bio has ended or `timeout` is over (none: no limit). With no bio
    /// under way it returns at once.
    pub fn wait(&mut self, out: &mut Vec<Bio>, timeout: Option<Nanos>) -> usize {
        let until = timeout.map(|timeout| self.shared.clock.now() + timeout);
        loop {
            self.look();
            let is_idle = self.outstanding == 0;
            let has_orders = self.orders.has_orders();
            let core = self.core();
            if !core.ended().is_empty() || is_idle || until.is_some_and(|until| core.now() >= until) {
                self.send();
                return self.take_ended(out);
            }
            if !core.has_news() && !has_orders {
                // Submits, too: issuing and waiting are one system call.
                let orders = Orders(&self.orders);
                self.core.as_mut().expect(THERE).wait(Expected::Io, until, orders);
            }
        }
    }

    /// A descriptor that becomes readable when [`Self::poll`] has work, for an event loop of this thread's own: see
    /// [`Self::prepare_to_wait`]. It may miss the ends of I/O of drivers that watch an eventfd (Ceph, and NBD
    /// while it connects again).
    ///
    /// # Errors
    /// The kernel's error.
    pub fn event(&mut self) -> io::Result<BorrowedFd<'_>> {
        if self.event.is_none() {
            self.event = Some(Event::open(self.core())?);
        }
        Ok(self.event.as_ref().expect("just made").all.as_fd())
    }

    /// Issues staged bios, clears the event, and returns for how long the thread may wait for it before the next
    /// call of [`Self::poll`]: not at all (zero), or at most some time (an alarm of the engine's); none for no limit.
    pub fn prepare_to_wait(&mut self) -> Option<Nanos> {
        self.core_at_time().unplug();
        self.core().wipe();
        if let Some(event) = &self.event {
            event.clear();
        }
        self.is_waiting = true;
        self.is_clock_fresh = false;
        let wait = self.core().prepare_to_wait();
        if self.orders.has_orders() {
            Some(Nanos::ZERO)
        } else {
            wait
        }
    }

    /// Bios of this thread that have not been returned.
    #[inline]
    pub fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// How often this thread has entered the kernel to submit, reap or wait, for reports.
    pub fn system_calls(&self) -> u64 {
        self.core.as_ref().map_or(0, |core| core.ring().enters())
    }

    /// The engine's time.
    pub fn now(&self) -> Instant {
        self.shared.clock.now()
    }

    /// All disks.
    pub fn disks(&self) -> Arc<[Disk]> {
        self.shared.disks()
    }

    /// Finds a disk by its name.
    pub fn disk(&self, name: &str) -> Option<Disk> {
        self.disks().iter().find(|disk| disk.name == name).cloned()
    }

    /// Issues staged bios and looks for ended ones. If bios ended inline, all other sources are checked only once
    /// in a while.
    #[inline]
    fn look(&mut self) {
        let core = self.core_at_time();
        core.unplug();
        if core.ended().is_empty() || self.short_polls == SHORT_POLLS_MAX {
            self.look_everywhere();
        } else {
            self.short_polls += 1;
        }
        self.is_clock_fresh = false;
    }

    /// Checks ring, mailboxes, completions, run work and timers.
    fn look_everywhere(&mut self) {
        self.short_polls = 0;
        let core = self.core();
        core.read_clock();
        core.reap_ring();
        core.run_queues();
    }

    /// Submits to the kernel the entries that drivers have pushed.
    #[inline]
    fn send(&mut self) {
        let core = self.core();
        if core.uses_ring() {
            core.ring().submit();
        }
    }

    #[inline]
    fn take_ended(&mut self, out: &mut Vec<Bio>) -> usize {
        let ended = self.core().ended();
        let count = ended.len();
        if out.is_empty() {
            // The two lists are swapped: no bio is copied.
            std::mem::swap(out, ended);
        } else {
            out.append(ended);
        }
        self.outstanding -= count as u32;
        // The thread goes its own ways now, or waits by other means.
        self.core().wipe();
        count
    }

    /// The core, with the time of this batch.
    #[inline]
    fn core_at_time(&mut self) -> &mut ReactorCore {
        if self.orders.has_orders() {
            self.take_orders();
        }
        let core = self.core.as_mut().expect(THERE);
        if !self.is_clock_fresh {
            self.is_clock_fresh = true;
            if std::mem::take(&mut self.is_waiting) {
                core.end_wait();
            }
            core.read_clock();
        }
        core
    }

    #[inline]
    fn core(&mut self) -> &mut ReactorCore {
        self.core.as_mut().expect(THERE)
    }

    /// Does what other threads have ordered.
    #[cold]
    fn take_orders(&mut self) {
        let core = self.core.as_mut().expect(THERE);
        for order in self.orders.take() {
            if let Order::Change(change) = order {
                change(core);
            }
        }
    }
}

/// The orders of an attached thread, as news for its wait.
struct Orders<'a>(&'a Inbox);

impl News for Orders<'_> {
    fn is_there(&self) -> bool {
        self.0.has_orders()
    }

    fn before_sleep(&mut self) -> bool {
        self.0.has_orders()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let mut out = Vec::new();
        while self.outstanding() > 0 {
            self.wait(&mut out, Some(DROP_REPORT));
            if out.is_empty() {
                tracing::warn!(
                    outstanding = self.outstanding(),
                    "an attached thread leaves and waits for its I/O to end"
                );
            }
            out.clear();
        }
        // The next thread with these queues is awake.
        self.core_at_time();
        let Some(mut core) = self.core.take() else {
            return;
        };
        loop {
            match core.close() {
                Ok(reactor_queues) => match self.shared.put_queues_without_orders(reactor_queues) {
                    Ok(()) => return,
                    Err(reactor_queues) => match ReactorCore::open(&self.shared, reactor_queues) {
                        Ok(open) => core = open,
                        // The next thread that attaches takes the orders.
                        Err((_, reactor_queues)) => return self.shared.put_queues(reactor_queues),
                    },
                },
                // Others may have left mail here: a run passes it on.
                Err(open) => core = *open,
            }
            for order in self.orders.take() {
                if let Order::Change(change) = order {
                    change(&mut core);
                }
            }
            core.read_clock();
            core.ring().submit();
            core.reap_ring();
            core.run_queues();
        }
    }
}

const THERE: &str = "there until dropped";
/// Between two full polls, at most this many polls return only bios that ended inline.
const SHORT_POLLS_MAX: u32 = 32;
/// A drop that waits longer for its I/O logs this.
const DROP_REPORT: Nanos = Nanos::from_secs(5);
