//! What the threads of one engine share: queues, disks, wakeups, and each reactor's inbox of orders.
//! `engine` makes it; `reactor::core`, `control` and `attach` hold it.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, mpsc};
use std::thread::{self, ThreadId};
use std::time::Duration;

use blkmq_core::ids::{ReactorId, ReactorSet};
use blkmq_core::mapper::table::Table;
use blkmq_core::poll::Wait;
use blkmq_core::queue::{Queue, QueueHandle};
use blkmq_core::time::Nanos;

use crate::block_locks::Announcements;
use crate::clock::Clock;
use crate::device::Device;
use crate::disk::{Disk, QueueId};
use crate::engine::encrypted::Encrypted;
use crate::error::Error;
use crate::group_paths::Paths;
use crate::reactor::core::ReactorCore;
use crate::reactor::service::ServiceFactory;
use crate::reactor::wakeup::Wakeup;
use crate::register::Register;
use crate::size_news::SizeNews;
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
    /// One for each handle of an attached thread. What comes while no thread has it stays for the next one.
    attached_inboxes: Box<[Arc<Inbox>]>,
    /// By their ids; none where a queue has been removed.
    queues: RwLock<Vec<Option<Arc<QueueEntry>>>>,
    disks: RwLock<Arc<[Disk]>>,
    /// Held while disks and queues are added or removed: the number of the next disk.
    pub(crate) changes: Mutex<u32>,
    /// The tables of mapped disks.
    pub(crate) mapped: Arc<Table>,
    /// What the reactors write to them.
    pub(crate) encrypted_writes: Arc<Announcements>,
    /// The encrypted disks, by their numbers; none where one has been removed.
    encrypted: Mutex<Vec<Option<Arc<Encrypted>>>>,
    /// The tenants that have or had disks.
    pub(crate) tenants: Register,
    pub(crate) free_queues: Mutex<FreeQueues>,
    pub(crate) attached_max: usize,
    /// Number of services on all reactors, including ordered ones.
    pub(crate) services: AtomicU32,
    /// A shutdown under way must stop waiting.
    pub(crate) is_hurried: AtomicBool,
    /// A trace is being taken.
    pub(crate) is_traced: AtomicBool,
    /// Reports of devices that sizes of disks have changed.
    pub(crate) size_news: Arc<SizeNews>,
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

/// The free handles for attached threads.
#[derive(Default)]
pub(crate) struct FreeQueues {
    free: Vec<ReactorQueues>,
    /// The threads that have the others.
    taken: Vec<(ReactorId, ThreadId)>,
    /// The engine shuts down: no thread can attach any more.
    is_closed: bool,
}

/// Orders of other threads to a reactor. They are rare, so a lock is enough; the flag saves the reactor
/// from taking it.
#[derive(Default)]
pub(crate) struct Inbox {
    has_orders: AtomicBool,
    orders: Mutex<Vec<Order>>,
}

pub(crate) enum Order {
    /// Make a service.
    Add(ServiceFactory),
    /// Change something of this thread's side of the queues.
    Change(Box<dyn FnOnce(&mut ReactorCore) + Send>),
    /// Call the service in this slot, if there is one.
    Wake(u32),
    /// Let all services finish, and make no more.
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
        // Release: pairs with the Acquire in `has_orders`, so a reactor that sees the flag finds the order.
        self.has_orders.store(true, Ordering::Release);
    }

    /// Says whether an order was posted since the last [`Inbox::take`]. For the owner.
    #[inline]
    pub(crate) fn has_orders(&self) -> bool {
        // Acquire: pairs with the Release in `post`.
        self.has_orders.load(Ordering::Acquire)
    }

    /// Takes the posted orders. For the owner.
    pub(crate) fn take(&self) -> Vec<Order> {
        // Cleared before the list is emptied: an order that comes in between is taken now, and its flag only
        // causes one more look.
        self.has_orders.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.orders.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The parts from which the shared state is made.
pub(crate) struct Parts {
    pub(crate) ring: RingConfig,
    pub(crate) spin_max: Nanos,
    pub(crate) wait: Wait,
    pub(crate) wakeups: Box<[Wakeup]>,
    pub(crate) reactors: usize,
    pub(crate) queues: Vec<Arc<QueueEntry>>,
    pub(crate) disks: Vec<Disk>,
    pub(crate) mapped: Arc<Table>,
    pub(crate) tenants: Register,
}

impl Shared {
    pub(crate) fn new(parts: Parts) -> Self {
        Self {
            clock: Clock::get(),
            ring: parts.ring,
            spin_max: parts.spin_max,
            wait: parts.wait,
            attached_max: parts.wakeups.len() - parts.reactors,
            attached_inboxes: (parts.reactors..parts.wakeups.len())
                .map(|_| Arc::default())
                .collect(),
            wakeups: parts.wakeups,
            inboxes: (0..parts.reactors).map(|_| Inbox::default()).collect(),
            queues: RwLock::new(parts.queues.into_iter().map(Some).collect()),
            changes: Mutex::new(parts.disks.len() as u32),
            disks: RwLock::new(parts.disks.into()),
            mapped: parts.mapped,
            encrypted: Mutex::default(),
            encrypted_writes: Arc::default(),
            tenants: parts.tenants,
            free_queues: Mutex::default(),
            services: AtomicU32::new(0),
            is_hurried: AtomicBool::new(false),
            is_traced: AtomicBool::new(false),
            size_news: Arc::default(),
        }
    }

    /// A queue, if there is one of this number.
    pub(crate) fn entry(&self, queue: QueueId) -> Option<Arc<QueueEntry>> {
        read(&self.queues).get(queue.index())?.clone()
    }

    /// All queues, in the order of their ids.
    pub(crate) fn entries(&self) -> Vec<(QueueId, Arc<QueueEntry>)> {
        let queues = read(&self.queues);
        let numbered = (0..).map(QueueId).zip(&*queues);
        numbered
            .filter_map(|(id, entry)| Some((id, entry.clone()?)))
            .collect()
    }

    /// Puts a queue in its place, or removes it.
    pub(crate) fn set_entry(&self, queue: QueueId, entry: Option<Arc<QueueEntry>>) {
        let mut queues = self.queues.write().unwrap_or_else(PoisonError::into_inner);
        if queues.len() <= queue.index() {
            queues.resize_with(queue.index() + 1, || None);
        }
        queues[queue.index()] = entry;
    }

    /// The first number that no queue has.
    pub(crate) fn free_queue_id(&self) -> QueueId {
        let queues = read(&self.queues);
        let free = queues.iter().position(Option::is_none);
        QueueId(free.unwrap_or(queues.len()) as u16)
    }

    /// All disks, as they are at this moment.
    pub(crate) fn disks(&self) -> Arc<[Disk]> {
        Arc::clone(&read(&self.disks))
    }

    /// Replaces the list of disks.
    pub(crate) fn set_disks(&self, disks: Arc<[Disk]>) {
        *self.disks.write().unwrap_or_else(PoisonError::into_inner) = disks;
    }

    /// An encrypted disk, by its number less the first one's.
    pub(crate) fn encrypted(&self, index: usize) -> Option<Arc<Encrypted>> {
        self.lock_encrypted().get(index)?.clone()
    }

    /// All encrypted disks, with their numbers less the first one's.
    pub(crate) fn all_encrypted(&self) -> Vec<(usize, Arc<Encrypted>)> {
        let all = self.lock_encrypted();
        let numbered = all.iter().cloned().enumerate();
        numbered
            .filter_map(|(index, disk)| Some((index, disk?)))
            .collect()
    }

    /// Puts an encrypted disk in its place, or removes it.
    pub(crate) fn set_encrypted(&self, index: usize, disk: Option<Arc<Encrypted>>) {
        let mut all = self.lock_encrypted();
        if all.len() <= index {
            all.resize(index + 1, None);
        }
        all[index] = disk;
    }

    /// The first place that no encrypted disk has.
    pub(crate) fn free_encrypted(&self) -> usize {
        let all = self.lock_encrypted();
        all.iter().position(Option::is_none).unwrap_or(all.len())
    }

    fn lock_encrypted(&self) -> MutexGuard<'_, Vec<Option<Arc<Encrypted>>>> {
        self.encrypted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a job on each reactor's side of the queues, in a turn of that reactor, and waits for all answers, in
    /// the order of the reactors. For any thread but a reactor's.
    pub(crate) fn on_reactors<T: Send + 'static, F>(&self, job: impl Fn(ReactorId) -> F) -> Vec<T>
    where
        F: FnOnce(&mut ReactorCore) -> T + Send + 'static,
    {
        let receive = |id: u16| {
            let (answer, answered) = mpsc::sync_channel(1);
            let job = job(ReactorId(id));
            let order = Order::Change(Box::new(move |core: &mut ReactorCore| {
                // The asking thread waits for it.
                let _ = answer.send(job(core));
            }));
            self.order(ReactorId(id), order);
            answered
        };
        let answers: Vec<_> = (0..self.inboxes.len() as u16).map(receive).collect();
        // A reactor that has ended does not answer, and needs no change any more.
        let answer = |answer: mpsc::Receiver<T>| answer.recv_timeout(ANSWER_MAX).ok();
        answers.into_iter().filter_map(answer).collect()
    }

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
        let taken = free_queues.free.pop().ok_or(Error::NoQueueHandle {
            max: self.attached_max,
        })?;
        free_queues.taken.push((taken.id, thread::current().id()));
        Ok(taken)
    }

    /// Returns queue handles, or adds new ones.
    pub(crate) fn put_queues(&self, reactor_queues: ReactorQueues) {
        let mut free_queues = self.lock_free_queues();
        free_queues.taken.retain(|(id, _)| *id != reactor_queues.id);
        free_queues.free.push(reactor_queues);
    }

    /// The same for a thread that leaves, unless an order for it has come.
    ///
    /// # Errors
    /// Returns the handles: orders are for a core.
    pub(crate) fn put_queues_without_orders(
        &self,
        reactor_queues: ReactorQueues,
    ) -> Result<(), ReactorQueues> {
        let mut free_queues = self.lock_free_queues();
        // Orders are posted under the lock.
        if self.attached_inbox(reactor_queues.id).has_orders() {
            return Err(reactor_queues);
        }
        free_queues.taken.retain(|(id, _)| *id != reactor_queues.id);
        free_queues.free.push(reactor_queues);
        Ok(())
    }

    /// The orders for the thread that has the handles of this number.
    pub(crate) fn attached_inbox(&self, id: ReactorId) -> Arc<Inbox> {
        Arc::clone(&self.attached_inboxes[id.index() - self.inboxes.len()])
    }

    /// Says whether the calling thread is attached.
    pub(crate) fn is_attached_here(&self) -> bool {
        let here = thread::current().id();
        self.lock_free_queues()
            .taken
            .iter()
            .any(|(_, thread)| *thread == here)
    }

    /// Changes the free handles of attached threads with `free`, and orders each attached thread a job, which it does
    /// when it next comes back to its I/O, before all else. A job's answer comes from the receiver of its thread.
    pub(crate) fn on_attached<T: Send + 'static, F>(
        &self,
        mut free: impl FnMut(&mut ReactorQueues),
        mut job: impl FnMut(ReactorId) -> F,
    ) -> Vec<mpsc::Receiver<T>>
    where
        F: FnOnce(&mut ReactorCore) -> T + Send + 'static,
    {
        let mut free_queues = self.lock_free_queues();
        free_queues.free.iter_mut().for_each(&mut free);
        let mut order = |(id, _): &(ReactorId, ThreadId)| {
            let (answer, answered) = mpsc::sync_channel(1);
            let job = job(*id);
            let order = move |core: &mut ReactorCore| {
                // Whoever asked may wait no longer.
                let _ = answer.send(job(core));
            };
            self.attached_inbox(*id).post(Order::Change(Box::new(order)));
            self.wakeups[id.index()].ring();
            answered
        };
        free_queues.taken.iter().map(&mut order).collect()
    }

    /// The number of attached threads.
    pub(crate) fn attached(&self) -> usize {
        self.attached_max - self.lock_free_queues().free.len()
    }

    /// The number of attached threads. If there is none, none can attach from now on.
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

/// Longer than any turn of a reactor.
const ANSWER_MAX: Duration = Duration::from_secs(30);

fn read<T>(lock: &RwLock<T>) -> std::sync::RwLockReadGuard<'_, T> {
    // No code that can panic runs under the lock.
    lock.read().unwrap_or_else(PoisonError::into_inner)
}
