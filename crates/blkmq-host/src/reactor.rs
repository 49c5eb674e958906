//! A reactor: one thread that does its work in a fixed order (events, queues, completed bios, services,
//! kicks, wait). `reactor::core` sleeps and runs the queues; `engine` starts the threads.
//!
//! ```text
//!   orders, services that come and go, ring, shared memory, timers
//!      -> queues run -> (room offered -> ended bios to services, unplug), several times -> end_of_batch
//!      -> unplug, kicks
//!      -> wait, unless there is news -> the same again
//! ```

pub(crate) mod core;
pub(crate) mod encrypt;
mod moved;
pub(crate) mod queues;
pub mod service;
pub(crate) mod shared;
pub mod sleep;
mod sys;
pub(crate) mod time_slice;
pub mod wait;
pub(crate) mod wakeup;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blkmq_core::bio::Bio;
use blkmq_core::ids::{GroupId, ReactorId};
use blkmq_core::time::Instant;

use self::core::ReactorCore;
use self::service::{Cx, Service, ServiceFactory, ServiceState};
use self::wait::Expected;
use crate::disk::QueueId;
use crate::reactor::core::News;
use crate::reactor::shared::{Inbox, Order, Shared};
use crate::uring::ring::Completion;

/// The loop of one thread and the services that live on it.
pub(crate) struct Reactor {
    core: ReactorCore,
    shared: Arc<Shared>,
    id: ReactorId,
    slots: Vec<Option<Slot>>,
    free_slots: Vec<u32>,
    /// Services to be made.
    arriving: VecDeque<ServiceFactory>,
    /// Services that have finished, to be dropped.
    leaving: VecDeque<Slot>,
    /// The slot of each client of the ring.
    slot_of_client: Vec<u32>,
    timers: BinaryHeap<Reverse<(Instant, u32)>>,
    /// Slots called in this turn.
    touched: Vec<u32>,
    /// Slots that must get a call of `on_room`, by the queue and group that they need room for.
    refused: BTreeMap<(QueueId, GroupId), VecDeque<u32>>,
    /// Empty lines and a list; kept for their memory.
    spare_lines: Vec<VecDeque<u32>>,
    offers: Vec<(QueueId, GroupId)>,
    /// Number of services that expect an event soon.
    busy: u32,
    /// Services whose shared memory is polled.
    busy_polled: Vec<BusyPolled>,
    is_draining: bool,
    is_stopped: bool,
    /// Kept for their memory.
    ended: Vec<Bio>,
    completed: Vec<Completion>,
    ready: Vec<u16>,
}

struct Slot {
    service: Box<dyn Service>,
    state: ServiceState,
}

impl Reactor {
    pub(crate) fn new(core: ReactorCore) -> Self {
        Self {
            shared: Arc::clone(core.shared()),
            id: core.id(),
            core,
            slots: Vec::new(),
            free_slots: Vec::new(),
            arriving: VecDeque::new(),
            leaving: VecDeque::new(),
            slot_of_client: Vec::new(),
            timers: BinaryHeap::with_capacity(64),
            touched: Vec::with_capacity(64),
            refused: BTreeMap::new(),
            spare_lines: Vec::with_capacity(16),
            offers: Vec::new(),
            busy: 0,
            busy_polled: Vec::new(),
            is_draining: false,
            is_stopped: false,
            ended: Vec::with_capacity(ENDED_AT_ONCE),
            completed: Vec::with_capacity(ENDED_AT_ONCE),
            ready: Vec::with_capacity(64),
        }
    }

    /// Turns until ordered to stop.
    pub(crate) fn run(mut self) {
        while !self.is_stopped {
            self.turn();
            if self.has_news() {
                self.core.ring().submit();
            } else {
                self.wait();
            }
        }
    }

    fn turn(&mut self) {
        self.core.read_clock();
        self.take_orders();
        self.make_and_drop_services();
        self.take_ring();
        self.poll_services();
        self.take_timers();
        self.core.run_queues();
        for _ in 0..ROUNDS_MAX {
            // Whatever had no room has some where bios have ended, also those that end while they are issued: no event
            // may follow. Before they are delivered, since their submitters send others.
            self.core.ended();
            self.offer_room();
            self.deliver();
            self.core.unplug();
            if self.core.ended().is_empty() {
                break;
            }
        }
        self.end_batch();
        self.core.unplug();
        self.core.answered();
    }

    /// Says whether the next turn is due at once.
    fn has_news(&mut self) -> bool {
        self.is_stopped
            || !self.core.ended().is_empty()
            || !self.arriving.is_empty()
            || !self.leaving.is_empty()
            || self.shared.inboxes[self.id.index()].has_orders()
            || self.core.has_news()
            || self
                .busy_polled
                .iter()
                .any(|busy_polled| has_work(&self.slots, busy_polled.index))
    }

    fn wait(&mut self) {
        let expected = if self.core.expects_io() {
            Expected::Io
        } else if self.busy > 0 {
            Expected::Message
        } else {
            Expected::Nothing
        };
        let alarm = self.next_timer();
        let news = NewsOfServices {
            inbox: &self.shared.inboxes[self.id.index()],
            slots: &mut self.slots,
            busy_polled: &mut self.busy_polled,
        };
        self.core.wait(expected, alarm, news);
    }

    fn take_orders(&mut self) {
        let inbox = &self.shared.inboxes[self.id.index()];
        if !inbox.has_orders() {
            return;
        }
        for order in inbox.take() {
            match order {
                Order::Add(factory) => self.arriving.push_back(factory),
                Order::Wake(index) if (index as usize) < self.slots.len() => {
                    self.call(index, |service, cx| service.on_wake(cx));
                }
                Order::Wake(_) => {}
                Order::Change(job) => job(&mut self.core),
                Order::Drain => self.drain(),
                Order::Stop => self.is_stopped = true,
            }
        }
    }

    /// Makes and drops a few services: each one maps, unmaps and closes resources while the other services wait.
    fn make_and_drop_services(&mut self) {
        for _ in 0..SERVICES_PER_TURN {
            if let Some(factory) = self.arriving.pop_front() {
                self.add(factory);
            }
            if let Some(slot) = self.leaving.pop_front() {
                drop(slot);
                // Release: pairs with the Acquire of the thread that waits for the last service to go.
                self.shared.services.fetch_sub(1, Ordering::Release);
            }
        }
    }

    fn add(&mut self, factory: ServiceFactory) {
        if self.is_draining {
            self.shared.services.fetch_sub(1, Ordering::Release);
            return;
        }
        let index = self.free_slots.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        let ring_client = self.core.ring().open_client();
        let id = usize::from(ring_client.id());
        if self.slot_of_client.len() <= id {
            self.slot_of_client.resize(id + 1, u32::MAX);
        }
        self.slot_of_client[id] = index;
        let state = ServiceState::new(index, ring_client);
        self.slots[index as usize] = Some(Slot {
            service: factory(),
            state,
        });
        self.call(index, |service, cx| service.start(cx));
    }

    fn drain(&mut self) {
        // Services that were ordered before have work, too, that is finished.
        while let Some(factory) = self.arriving.pop_front() {
            self.add(factory);
        }
        self.is_draining = true;
        for index in 0..self.slots.len() as u32 {
            self.call(index, |service, cx| service.drain(cx));
        }
    }

    fn take_ring(&mut self) {
        self.ready.clear();
        self.ready.extend_from_slice(self.core.reap_ring());
        for at in 0..self.ready.len() {
            let ring_client = usize::from(self.ready[at]);
            // A driver's client has no slot: the driver takes its completions when its queue runs.
            let Some(&index) = self
                .slot_of_client
                .get(ring_client)
                .filter(|&&index| index != u32::MAX)
            else {
                continue;
            };
            let mut completed = std::mem::take(&mut self.completed);
            completed.clear();
            self.call(index, |service, cx| {
                cx.ring_client().take(&mut completed);
                if !completed.is_empty() {
                    service.on_ring(cx, &completed);
                }
            });
            self.completed = completed;
        }
    }

    /// Calls the polled services that have work. A service that had none for many turns is switched to
    /// notifications, so that the cost of a turn does not grow with the number of idle services.
    fn poll_services(&mut self) {
        let mut at = 0;
        while let Some(busy_polled) = self.busy_polled.get_mut(at) {
            let index = busy_polled.index;
            let has_work = has_work(&self.slots, index);
            busy_polled.idle_turns = if has_work { 0 } else { busy_polled.idle_turns + 1 };
            if has_work
                || (busy_polled.idle_turns > IDLE_TURNS_MAX && enable_notifications(&mut self.slots, index))
            {
                self.call(index, |service, cx| service.on_work(cx));
            } else if busy_polled.idle_turns > IDLE_TURNS_MAX {
                self.busy_polled.swap_remove(at);
                continue;
            }
            at += 1;
        }
    }

    fn take_timers(&mut self) {
        let now = self.core.now();
        while let Some(&Reverse((at, index))) = self.timers.peek() {
            if at > now {
                return;
            }
            self.timers.pop();
            let Some(slot) = &mut self.slots[index as usize] else {
                continue;
            };
            if slot.state.timer_entered == Some(at) {
                slot.state.timer_entered = None;
            }
            if slot.state.timer.is_some_and(|due| due <= now) {
                slot.state.timer = None;
                self.call(index, |service, cx| service.on_timer(cx));
            } else {
                self.enter_timer(index);
            }
        }
    }

    /// The time of the next timer. Removes entries that are no longer wanted: a wait without a timer needs none
    /// in the kernel.
    fn next_timer(&mut self) -> Option<Instant> {
        while let Some(&Reverse((at, index))) = self.timers.peek() {
            let state = self.slots[index as usize].as_mut().map(|slot| &mut slot.state);
            let wish = state.as_ref().and_then(|state| state.timer);
            if wish.is_some_and(|due| due <= at) {
                return Some(at);
            }
            self.timers.pop();
            if let Some(state) = state
                && state.timer_entered == Some(at)
            {
                state.timer_entered = None;
            }
            self.enter_timer(index);
        }
        None
    }

    /// Puts a service's timer on the heap, unless an entry of the service there is early enough.
    fn enter_timer(&mut self, index: u32) {
        let Some(slot) = &mut self.slots[index as usize] else {
            return;
        };
        let state = &mut slot.state;
        if let Some(due) = state.timer
            && state.timer_entered.is_none_or(|entered| due < entered)
        {
            state.timer_entered = Some(due);
            self.timers.push(Reverse((due, index)));
        }
    }

    /// Offers room to services whose bios were refused: for each group of a queue to one service after the
    /// other, until one is refused again. So the cost of a turn does not grow with the number of services of a
    /// group that has no room.
    fn offer_room(&mut self) {
        if self.refused.is_empty() {
            return;
        }
        let mut offers = std::mem::take(&mut self.offers);
        offers.extend(self.refused.keys());
        for of in offers.drain(..) {
            // A service that is refused again stands behind the others in the line.
            let waiting = self.refused.get(&of).map_or(0, VecDeque::len);
            for _ in 0..waiting {
                if !self.offer_room_to_next(of) {
                    break;
                }
            }
            if self.refused.get(&of).is_some_and(VecDeque::is_empty) {
                self.spare_lines.extend(self.refused.remove(&of));
            }
        }
        self.offers = offers;
    }

    /// Offers room to the next one in a line. Says whether there may be more for others.
    fn offer_room_to_next(&mut self, of: (QueueId, GroupId)) -> bool {
        let Some(index) = self.refused.get_mut(&of).and_then(VecDeque::pop_front) else {
            return false;
        };
        // If it is refused again, the call puts it back in the line.
        self.call(index, |service, cx| {
            cx.state.awaits_room = None;
            if cx.state.refused.take().is_some() {
                service.on_room(cx);
            }
        });
        let slot = self.slots[index as usize].as_ref();
        slot.is_none_or(|slot| slot.state.awaits_room != Some(of))
    }

    fn deliver(&mut self) {
        let mut ended = std::mem::take(&mut self.ended);
        std::mem::swap(&mut ended, self.core.ended());
        for bio in ended.drain(..) {
            self.call(bio.client, |service, cx| {
                cx.state.outstanding -= 1;
                service.on_end(cx, bio);
            });
        }
        self.ended = ended;
    }

    fn end_batch(&mut self) {
        let mut touched = std::mem::take(&mut self.touched);
        for &index in &touched {
            self.call(index, |service, cx| service.end_of_batch(cx));
        }
        for &index in &touched {
            self.note_wants(index);
        }
        touched.clear();
        self.touched = touched;
    }

    /// Calls a service, if it still exists, and notes that it needs `end_of_batch`.
    #[inline]
    fn call(&mut self, index: u32, with: impl FnOnce(&mut dyn Service, &mut Cx<'_>)) {
        let Some(slot) = &mut self.slots[index as usize] else {
            return;
        };
        let mut cx = Cx {
            core: &mut self.core,
            state: &mut slot.state,
        };
        with(&mut *slot.service, &mut cx);
        if slot.state.awaits_room.is_none()
            && let Some(of) = slot.state.refused
        {
            slot.state.awaits_room = Some(of);
            let spare = || self.spare_lines.pop().unwrap_or_default();
            self.refused.entry(of).or_insert_with(spare).push_back(index);
        }
        if !slot.state.is_touched {
            slot.state.is_touched = true;
            self.touched.push(index);
        }
    }

    /// Notes the state of a service after a batch: its timer, whether it is busy, whether it has finished.
    fn note_wants(&mut self, index: u32) {
        self.enter_timer(index);
        let Some(slot) = &mut self.slots[index as usize] else {
            return;
        };
        let Slot { service, state } = slot;
        state.is_touched = false;
        let is_over = service.is_finished() && state.outstanding == 0 && state.ring_client.in_flight() == 0;
        let is_busy = !is_over && service.busy();
        self.busy = self.busy + u32::from(is_busy) - u32::from(state.is_busy);
        state.is_busy = is_busy;
        if !is_over && !state.is_busy_polled && service.wants_busy_poll() {
            state.is_busy_polled = true;
            self.busy_polled.push(BusyPolled { index, idle_turns: 0 });
        }
        if is_over {
            let awaited = state.awaits_room;
            self.slot_of_client[usize::from(state.ring_client.id())] = u32::MAX;
            self.leaving.extend(self.slots[index as usize].take());
            if let Some(line) = awaited.and_then(|of| self.refused.get_mut(&of)) {
                line.retain(|&refused| refused != index);
            }
            self.busy_polled.retain(|busy_polled| busy_polled.index != index);
            self.free_slots.push(index);
        }
    }
}

/// A service whose peer sends no notifications: the reactor polls its memory.
struct BusyPolled {
    index: u32,
    /// Turns without work since the last one with work.
    idle_turns: u32,
}

fn has_work(slots: &[Option<Slot>], index: u32) -> bool {
    slots[index as usize]
        .as_ref()
        .is_some_and(|slot| slot.service.has_work())
}

/// Switches a service's peer to notifications. Says whether there is work already: then polling continues.
fn enable_notifications(slots: &mut [Option<Slot>], index: u32) -> bool {
    let Some(slot) = &mut slots[index as usize] else {
        return false;
    };
    slot.state.is_busy_polled = slot.service.enable_notifications();
    slot.state.is_busy_polled
}

/// The events that a reactor waits for in addition to those of its core.
struct NewsOfServices<'a> {
    inbox: &'a Inbox,
    slots: &'a mut [Option<Slot>],
    busy_polled: &'a mut Vec<BusyPolled>,
}

impl News for NewsOfServices<'_> {
    fn is_there(&self) -> bool {
        let Self {
            inbox,
            slots,
            busy_polled,
        } = self;
        inbox.has_orders()
            || busy_polled
                .iter()
                .any(|busy_polled| has_work(slots, busy_polled.index))
    }

    fn before_sleep(&mut self) -> bool {
        let Self {
            inbox,
            slots,
            busy_polled,
        } = self;
        busy_polled.retain(|busy_polled| enable_notifications(slots, busy_polled.index));
        !busy_polled.is_empty() || inbox.has_orders()
    }
}

/// Turns without work after which a service is no longer polled.
const IDLE_TURNS_MAX: u32 = 64;
/// Most rounds of delivering and issuing in one turn, if drivers complete inline; then the ring and the
/// timers are due.
const ROUNDS_MAX: usize = 4;
/// Most services that are made, and most that are dropped, in one turn: 10 to 20 µs each.
const SERVICES_PER_TURN: usize = 2;
/// Room for bios that end in one turn, before a list must grow.
const ENDED_AT_ONCE: usize = 1024;
