//! Decides what the threads of one engine share: queues, disks, wakeups, and each reactor's inbox of orders.
//! `engine` makes it; `reactor::core`, `control` and `attach` hold it.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_core::ids::{ReactorId, ReactorSet};
use blkmq_core::mapper::table::Table;
use blkmq_core::poll::Wait;
use blkmq_core::queue::{Queue, QueueHandle};
use blkmq_core::time::Nanos;

use crate::clock::Clock;
use crate::device::Device;
use crate::disk::Disk;
use crate::error::Error;
use crate::group_paths::Paths;
use crate::reactor::service::ServiceFactory;
use crate::reactor::wakeup::Wakeup;
use crate::uring::ring::RingConfig;

pub(crate) struct Shared {
    pub(crate) clock: Clock,
    pub(crate) ring: RingConfig,
    pub(crate) spin_max: Nanos,
    pub(crate) wait: Wait,
    /// One for each reactor, then one for each handle of an attached thread.
    pub(crate) wakeups: Box<[Wakeup]>,
    /// One for each reactor.
    pub(crate) inboxes: Box<[Inbox]>,
    pub(crate) queues: Box<[QueueEntry]>,
    pub(crate) disks: Box<[Disk]>,
    /// What lies where on mapped disks.
    pub(crate) mapped: Arc<Table>,
    pub(crate) free_queues: Mutex<FreeQueues>,
    pub(crate) attached_max: usize,
    /// Services that live, or are ordered to, on all reactors.
    pub(crate) services: AtomicU32,
    /// A shutdown that is under way is to give up waiting.
    pub(crate) is_hurried: AtomicBool,
}

pub(crate) struct QueueEntry {
    pub(crate) queue: Arc<Queue>,
    pub(crate) device: Arc<dyn Device>,
    /// Held while groups are changed.
    pub(crate) paths: Mutex<Paths>,
}

/// One thread's handles at all queues.
pub(crate) struct ReactorQueues {
    pub(crate) id: ReactorId,
    pub(crate) handles: Vec<QueueHandle>,
}

/// The handles of attached threads that nobody has taken.
#[derive(Default)]
pub(crate) struct FreeQueues {
    free: Vec<ReactorQueues>,
    /// The engine shuts down: nobody attaches any more.
    is_closed: bool,
}

/// What a reactor is told to do by other threads. Seldom, so a lock will do; the flag spares the reactor
/// taking it.
#[derive(Default)]
pub(crate) struct Inbox {
    has_orders: AtomicBool,
    orders: Mutex<Vec<Order>>,
}

pub(crate) enum Order {
    /// Make a service.
    Add(ServiceFactory),
    /// Call the service in this slot, if there is one.
    Wake(u32),
    /// Have all services finish, make no more.
    Drain,
    /// Leave the loop.
    Stop,
}

impl Inbox {
    fn post(&self, order: Order) {
        self.orders
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(order);
        // Release: pairs with the Acquire in `has_orders`, so who sees the flag finds the order.
        self.has_orders.store(true, Ordering::Release);
    }

    /// Says whether somebody has posted since the last [`Inbox::take`]. For the owner.
    #[inline]
    pub(crate) fn has_orders(&self) -> bool {
        // Acquire: pairs with the Release in `post`.
        self.has_orders.load(Ordering::Acquire)
    }

    /// Takes what was posted. For the owner.
    pub(crate) fn take(&self) -> Vec<Order> {
        // Cleared before the list is emptied: an order that comes in between is taken now and its flag seen
        // once more.
        self.has_orders.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.orders.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Shared {
    /// Takes queue handles for an attached thread.
    ///
    /// # Errors
    /// If all are taken, or the engine shuts down.
    pub(crate) fn take_queues(&self) -> Result<ReactorQueues, Error> {
        let mut free_queues = self.lock_free_queues();
        if free_queues.is_closed {
            return Err(Error::Shutdown(
                "the engine has ended: nobody can attach".to_owned(),
            ));
        }
        free_queues.free.pop().ok_or(Error::NoQueueHandle {
            max: self.attached_max,
        })
    }

    /// Gives queue handles back, or adds new ones.
    pub(crate) fn put_queues(&self, reactor_queues: ReactorQueues) {
        self.lock_free_queues().free.push(reactor_queues);
    }

    /// How many threads are attached. If none is, none can attach from now on.
    pub(crate) fn close_free_queues(&self) -> usize {
        let mut free_queues = self.lock_free_queues();
        let taken = self.attached_max - free_queues.free.len();
        free_queues.is_closed |= taken == 0;
        taken
    }

    fn lock_free_queues(&self) -> MutexGuard<'_, FreeQueues> {
        self.free_queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a reactor an order and wakes it.
    pub(crate) fn order(&self, reactor: ReactorId, order: Order) {
        if matches!(order, Order::Add(_)) {
            // Relaxed: a count for `shutdown`, which orders a drain through the inbox first.
            self.services.fetch_add(1, Ordering::Relaxed);
        }
        self.inboxes[reactor.index()].post(order);
        self.wakeups[reactor.index()].ring();
    }

    pub(crate) fn kick(&self, set: ReactorSet) {
        crate::reactor::wakeup::wake_all(&self.wakeups, set);
    }
}
