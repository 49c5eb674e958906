//! One virtqueue as it is served on its reactor: chains are taken when the reactor finds some in the shared
//! memory, or when the driver notifies, which the reactor asks for before it sleeps. Chains become bios, and
//! are returned when these have ended; the driver is called once for each batch. `connection` starts and
//! stops a virtqueue through its [`Control`].

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_core::bio::Bio;
use blkmq_host::disk::Disk;
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service, Waker};

use super::chain::Chain;
use super::fault;
use super::memory::{GuestMemory, Loans};
use super::request::{Begun, Slot};
use super::ring::Broken;
use super::signal::signal;
use super::virtqueue::Virtqueue;

/// Messages between a connection and a virtqueue that is served.
pub(super) struct Control {
    /// `wanted` has something that the virtqueue has not read.
    has_changed: AtomicBool,
    wanted: Mutex<Wanted>,
    /// The waker of the connection.
    waker: Waker,
}

struct Wanted {
    memory: Arc<GuestMemory>,
    call: Option<Arc<OwnedFd>>,
    stops: bool,
    /// The waker of the virtqueue, once it runs.
    waker: Option<Waker>,
    ended: Option<Ended>,
}

/// How a virtqueue ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended {
    /// Where the next one continues; `None` if this one never ran.
    pub(super) base: Option<u32>,
    pub(super) broken: Option<Broken>,
}

impl Control {
    pub(super) fn new(memory: &Arc<GuestMemory>, call: Option<&Arc<OwnedFd>>, waker: Waker) -> Self {
        Self {
            has_changed: AtomicBool::new(true),
            wanted: Mutex::new(Wanted {
                memory: Arc::clone(memory),
                call: call.map(Arc::clone),
                stops: false,
                waker: None,
                ended: None,
            }),
            waker,
        }
    }

    pub(super) fn set_memory(&self, memory: &Arc<GuestMemory>) {
        self.change(|wanted| wanted.memory = Arc::clone(memory));
    }

    pub(super) fn set_call(&self, call: Option<&Arc<OwnedFd>>) {
        self.change(|wanted| wanted.call = call.map(Arc::clone));
    }

    /// Makes it finish what it has taken, and end.
    pub(super) fn stop(&self) {
        self.change(|wanted| wanted.stops = true);
    }

    /// How it ended, once it has.
    pub(super) fn ended(&self) -> Option<Ended> {
        self.lock().ended
    }

    fn change(&self, change: impl FnOnce(&mut Wanted)) {
        let mut wanted = self.lock();
        change(&mut wanted);
        let waker = wanted.waker.clone();
        // Release: pairs with the Acquire in `take_change`. A driver that is told of new memory
        // makes chains in it afterwards, so a reactor that sees such a chain sees this.
        self.has_changed.store(true, Ordering::Release);
        drop(wanted);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    #[inline]
    fn take_change(&self) -> bool {
        // Acquire: pairs with the Release in `change`. Relaxed would do for the swap, since the lock follows.
        self.has_changed.load(Ordering::Acquire) && self.has_changed.swap(false, Ordering::Acquire)
    }

    fn end(&self, ended: Ended) {
        self.lock().ended.get_or_insert(ended);
        self.waker.wake();
    }

    fn lock(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is needed to serve a virtqueue. If that never happens, its connection is told.
pub(super) struct Start {
    pub(super) ring: Virtqueue,
    pub(super) disk: Disk,
    pub(super) memory: Arc<GuestMemory>,
    /// Writes are to be durable when they end.
    pub(super) is_through: bool,
    pub(super) kick: Arc<OwnedFd>,
    pub(super) control: Report,
}

/// Reports the end to the connection, at the latest when it is dropped.
pub(super) struct Report(pub(super) Arc<Control>);

impl Drop for Report {
    fn drop(&mut self) {
        self.0.end(Ended {
            base: None,
            broken: None,
        });
    }
}

/// A virtqueue that is being served.
pub(super) struct Queue {
    ring: Virtqueue,
    disk: Disk,
    is_through: bool,
    kick: Arc<OwnedFd>,
    call: Option<Arc<OwnedFd>>,
    control: Report,
    loans: Loans,
    /// A memory table that replaces the present one as soon as nothing of that is lent.
    memory: Option<Arc<GuestMemory>>,
    chain: Chain,
    slots: Vec<Slot>,
    /// A head that was taken and waits for the new table; and whether it is done again, so that a
    /// stop waits for it.
    held: Option<u16>,
    is_held_again: bool,
    /// Bios for which the queue had no room.
    refused: VecDeque<Bio>,
    broken: Option<Broken>,
    /// The count of memory losses, of all front ends, that it has checked.
    losses: Option<usize>,
    is_lost: bool,
    is_stopping: bool,
    has_ended: bool,
    is_polling: bool,
    comes_again: bool,
}

impl Queue {
    pub(super) fn new(start: Start) -> Self {
        let size = usize::from(start.ring.size());
        Self {
            ring: start.ring,
            disk: start.disk,
            is_through: start.is_through,
            kick: start.kick,
            call: None,
            control: start.control,
            loans: Loans::new(start.memory),
            memory: None,
            chain: Chain::default(),
            slots: std::iter::repeat_with(Slot::default).take(size).collect(),
            held: None,
            is_held_again: false,
            refused: VecDeque::with_capacity(size),
            broken: None,
            losses: None,
            is_lost: false,
            is_stopping: false,
            has_ended: false,
            is_polling: false,
            comes_again: false,
        }
    }

    /// Takes chains, a few at a time.
    fn take(&mut self, cx: &mut Cx<'_>) {
        if !self.is_stopping {
            self.ring.refuse_kicks();
        }
        for _ in 0..CHAINS_MAX {
            if (self.is_stopping && !self.has_more_again()) || !self.refused.is_empty() {
                return;
            }
            let taken = match self.take_head() {
                Ok(Some(head)) => self.begin(cx, head),
                Ok(None) => return,
                Err(broken) => Err(broken),
            };
            if let Err(broken) = taken {
                self.break_off(broken);
            }
        }
        if !self.wants_busy_poll() {
            self.come_again(cx);
        }
    }

    /// The next head that fits the present memory table. A change is read after the index that led
    /// to the head.
    fn take_head(&mut self) -> Result<Option<u16>, Broken> {
        let is_again = self.has_more_again();
        let head = match self.held.take() {
            Some(head) => Some(head),
            None => self.ring.next_head()?,
        };
        if self.control.0.take_change() {
            self.adopt();
        }
        if (self.memory.is_some() && !self.change_memory()) || (self.is_stopping && !is_again) {
            (self.held, self.is_held_again) = (head, is_again);
            return Ok(None);
        }
        self.is_held_again = false;
        Ok(head)
    }

    /// Returns whether the next head is of a chain that is done again: it was in flight before, so
    /// it counts as taken at a stop.
    fn has_more_again(&self) -> bool {
        let is_next = self.held.is_none() && self.ring.to_repeat() > 0;
        self.broken.is_none() && (is_next || self.is_held_again)
    }

    fn begin(&mut self, cx: &mut Cx<'_>, head: u16) -> Result<(), Broken> {
        let slot = &mut self.slots[usize::from(head)];
        if slot.is_taken {
            return Err(Broken("a chain that is in flight already"));
        }
        self.loans.begin();
        let followed = self.ring.follow(&mut self.chain, &self.loans, head);
        let begun = followed.and_then(|()| slot.begin(&mut self.chain, &self.disk, self.is_through));
        match begun {
            Ok(Begun::Bio(mut bio)) => {
                slot.is_taken = true;
                bio.cookie = head.into();
                if let Err(bio) = cx.submit(self.disk.queue, bio) {
                    self.refused.push_back(bio);
                }
            }
            Ok(Begun::Ended(status, written)) => {
                let written = slot.end(status, written);
                self.give_back(head, written);
            }
            Err(broken) => {
                self.loans.end();
                return Err(broken);
            }
        }
        Ok(())
    }

    fn give_back(&mut self, head: u16, written: u32) {
        self.ring.give_back(head, written);
        self.loans.end();
    }

    /// Adopts what the connection wants.
    #[cold]
    fn adopt(&mut self) {
        let wanted = self.control.0.lock();
        self.call.clone_from(&wanted.call);
        self.is_stopping |= wanted.stops;
        if !self.loans.is_of(&wanted.memory) {
            self.memory = Some(Arc::clone(&wanted.memory));
        }
    }

    /// Adopts the new memory table. Returns whether it is the present one now: not while something
    /// of the former is lent.
    #[cold]
    fn change_memory(&mut self) -> bool {
        if !self.loans.is_empty() {
            return false;
        }
        if let Some(memory) = self.memory.take() {
            self.loans = Loans::new(memory);
        }
        true
    }

    /// Breaks the device if its memory was taken away: what was read since then may be zeroes.
    fn look_for_losses(&mut self) {
        let losses = fault::losses();
        if self.losses == Some(losses) {
            return;
        }
        self.losses = Some(losses);
        if self.ring.is_lost() || self.loans.memory().is_lost() {
            self.is_lost = true;
            self.break_off(Broken("memory that was taken away"));
        }
    }

    #[cold]
    fn break_off(&mut self, broken: Broken) {
        self.broken.get_or_insert(broken);
        self.is_stopping = true;
    }

    /// Returns whether new chains are taken at once; otherwise another event calls the virtqueue.
    fn takes_more(&self) -> bool {
        !self.is_stopping && !self.comes_again && self.held.is_none() && self.refused.is_empty()
    }

    fn come_again(&mut self, cx: &Cx<'_>) {
        if !std::mem::replace(&mut self.comes_again, true) {
            cx.ring_client().push_nop(AGAIN);
        }
    }

    fn poll(&mut self, cx: &Cx<'_>) {
        if !self.is_stopping && !std::mem::replace(&mut self.is_polling, true) {
            // Each write to the event completes the poll once more; so its count is never read.
            cx.ring_client()
                .push_poll(self.kick.as_raw_fd(), libc::POLLIN, true, KICK);
        }
    }

    /// Ends when nothing is under way any more.
    fn end(&mut self, cx: &Cx<'_>) {
        if self.has_ended || !self.loans.is_empty() || self.has_more_again() {
            return;
        }
        self.has_ended = true;
        if self.is_polling {
            cx.ring_client().push_cancel(KICK, CANCEL);
        }
        self.control.0.end(Ended {
            base: Some(self.ring.base(self.held)),
            broken: self.broken,
        });
    }
}

impl Service for Queue {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.control.0.lock().waker = Some(cx.waker());
        self.control.0.take_change();
        self.adopt();
        self.change_memory();
        self.poll(cx);
        self.take(cx);
    }

    fn on_ring(&mut self, cx: &mut Cx<'_>, completed: &[Completion]) {
        for completion in completed {
            match completion.user {
                KICK => {
                    self.is_polling = completion.has_more();
                    if completion.result < 0 && !self.is_stopping {
                        self.break_off(Broken("an event that cannot be waited for"));
                    }
                }
                AGAIN => self.comes_again = false,
                _ => {}
            }
        }
        self.poll(cx);
        self.take(cx);
    }

    fn on_end(&mut self, cx: &mut Cx<'_>, bio: Bio) {
        let head = bio.cookie as u16;
        let status = bio.status;
        // Its list of pieces is free again.
        drop(bio);
        let written = self.slots[usize::from(head)].end_with(status);
        self.give_back(head, written);
        if self.memory.is_some() && self.loans.is_empty() {
            self.take(cx);
        }
    }

    fn on_wake(&mut self, cx: &mut Cx<'_>) {
        if self.control.0.take_change() {
            self.adopt();
        }
        self.take(cx);
    }

    fn on_room(&mut self, cx: &mut Cx<'_>) {
        while let Some(bio) = self.refused.pop_front() {
            if let Err(bio) = cx.submit(self.disk.queue, bio) {
                self.refused.push_front(bio);
                return;
            }
        }
        self.take(cx);
    }

    fn end_of_batch(&mut self, cx: &mut Cx<'_>) {
        self.look_for_losses();
        if !self.is_lost
            && self.ring.publish()
            && let Some(call) = &self.call
        {
            signal(call);
        }
        if self.is_stopping {
            self.end(cx);
        }
    }

    fn wants_busy_poll(&self) -> bool {
        !self.is_stopping && !self.ring.wants_kicks()
    }

    fn has_work(&self) -> bool {
        self.takes_more() && self.ring.has_available()
    }

    fn on_work(&mut self, cx: &mut Cx<'_>) {
        self.take(cx);
    }

    fn enable_notifications(&mut self) -> bool {
        self.takes_more() && self.ring.ask_for_kicks()
    }

    fn busy(&self) -> bool {
        !self.is_stopping
    }

    /// It ends with this batch at the earliest, when the returned chains have been published.
    fn drain(&mut self, cx: &mut Cx<'_>) {
        self.is_stopping = true;
        // Chains that are done again are taken until now.
        self.take(cx);
    }

    fn is_finished(&self) -> bool {
        self.has_ended
    }
}

const KICK: u64 = 0;
const CANCEL: u64 = 1;
const AGAIN: u64 = 2;
/// Chains that one turn takes before others have their turns, and before the driver sees those that
/// have ended: so the driver continues with some while others are in flight. With a whole ring in
/// one turn, driver and device would wait alternately.
const CHAINS_MAX: usize = 16;
