//! One device, shared by the queues that serve it, one on each participating reactor. `control_thread`, which has a
//! thread of its own, does what blocks.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_core::bio::Status;
use blkmq_host::disk::Disk;
use blkmq_host::service::Waker;

use super::control::Named;
use super::control_thread::Order;
use super::protocol::DeviceInfo;
use super::saved::SavedDevice;
use super::sys::Descriptors;
use crate::common::Common;
use crate::common::log::{About, Log};
use crate::common::losses::LossCursor;

/// One device.
pub(super) struct Device {
    pub(super) disk: Disk,
    pub(super) common: Arc<Common>,
    pub(super) log: Arc<Log>,
    pub(super) named: Named,
    /// For people.
    pub(super) name: String,
    /// Its name for the hand-over; `None` if it does not outlive its daemon.
    pub(super) address: Option<String>,
    /// The control device, which represents this device in a hand-over: the descriptor of the
    /// device itself would keep others out.
    pub(super) control: Arc<OwnedFd>,
    /// The losses that flushes have reported.
    loss_cursor: Mutex<LossCursor>,
    /// What queues serve, until they take it.
    attached: Mutex<Vec<Option<Attached>>>,
    orders: SyncSender<Order>,
    /// The wakers of its queues.
    wakers: Mutex<Vec<Waker>>,
    /// This daemon is to stop and to remove it: during a takeover, only the daemon that serves it
    /// does.
    is_ours: AtomicBool,
    /// The state that another daemon needs has been saved.
    is_saved: AtomicBool,
    is_ending: AtomicBool,
    end: Mutex<Option<End>>,
    /// The kernel is being told a new size.
    pub(super) is_growing: AtomicBool,
}

/// How requests come to one queue.
pub(super) struct Attached {
    pub(super) device: Arc<OwnedFd>,
    pub(super) descriptors: Descriptors,
}

/// Why a device is not served any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// The daemon ends.
    Shutdown,
    /// The disk or the address was removed, or somebody has removed the device.
    Removed,
}

/// How a device has ended for its queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It is stopped: the kernel returns all memory.
    Stopped,
    /// It is left as it is: requests that were not begun are sent again to the next daemon.
    Left,
}

impl Device {
    /// What lines about the device are about.
    pub(super) fn about(&self) -> About<'_> {
        About {
            disk: Some(&self.disk.name),
            ..About::default()
        }
    }

    pub(super) fn new(
        disk: Disk,
        info: &DeviceInfo,
        (address, control): (Option<String>, OwnedFd),
        (common, log): (&Arc<Common>, &Arc<Log>),
        orders: SyncSender<Order>,
    ) -> Self {
        let named = Named::of(info);
        Self {
            loss_cursor: Mutex::new(LossCursor::sample(&disk)),
            name: format!("{} at {}", disk.name, named.path()),
            disk,
            common: Arc::clone(common),
            log: Arc::clone(log),
            named,
            address,
            control: Arc::new(control),
            attached: Mutex::default(),
            orders,
            wakers: Mutex::default(),
            is_ours: AtomicBool::new(false),
            is_saved: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            end: Mutex::new(None),
            is_growing: AtomicBool::new(false),
        }
    }

    /// Requests come there from here on.
    pub(super) fn attach(&self, device: OwnedFd, descriptors: Vec<Descriptors>) {
        let device = Arc::new(device);
        let attached = descriptors.into_iter().map(|descriptors| {
            Some(Attached {
                device: Arc::clone(&device),
                descriptors,
            })
        });
        *lock(&self.attached) = attached.collect();
        self.wake();
    }

    /// How requests come to a queue, if that is known and was not taken.
    pub(super) fn take_attached(&self, queue: u16) -> Option<Attached> {
        lock(&self.attached).get_mut(usize::from(queue))?.take()
    }

    /// Adds a queue, which is woken at changes with `waker`.
    pub(super) fn join(&self, waker: Waker) {
        lock(&self.wakers).push(waker);
    }

    fn wake(&self) {
        let wakers = lock(&self.wakers).clone();
        wakers.iter().for_each(Waker::wake);
    }

    /// The status of a flush through this device, from the status of the flush that it shared.
    pub(super) fn end_flush(&self, status: Status) -> Status {
        lock(&self.loss_cursor).check_and_advance(&self.disk, status)
    }

    /// What another daemon needs to continue the device, given the size that the kernel knows.
    pub(super) fn save(&self, reported_size: u64) -> SavedDevice {
        SavedDevice {
            disk: self.disk.name.clone(),
            number: self.named.number,
            size: reported_size,
            block_size: self.disk.block_size,
            read_only: self.disk.read_only,
            has_losses: lock(&self.loss_cursor).check(&self.disk),
        }
    }

    /// Records that writes may be lost without the users' knowledge: another daemon reported it.
    pub(super) fn note_losses(&self) {
        *lock(&self.loss_cursor) = LossCursor::unsampled();
    }

    pub(super) fn is_ours(&self) -> bool {
        // Acquire: pairs with the Release in `set_ours`.
        self.is_ours.load(Ordering::Acquire)
    }

    pub(super) fn set_ours(&self, is_ours: bool) {
        // Release: the stopper has seen all that was done before it became ours.
        self.is_ours.store(is_ours, Ordering::Release);
    }

    /// Sets whether another daemon may have it from here on, if this one ends. Set before anybody
    /// is told.
    pub(super) fn set_saved(&self, is_saved: bool) {
        self.is_saved.store(is_saved, Ordering::Release);
    }

    /// Releases the device: another daemon serves it, or will.
    pub(super) fn let_go(&self) {
        if self.is_saved.load(Ordering::Acquire) {
            self.set_ours(false);
        }
        self.ask_end(Reason::Removed);
    }

    /// Orders something from the thread. Returns whether the thread will do it.
    pub(super) fn order(&self, order: Order) -> bool {
        self.orders.try_send(order).is_ok()
    }

    /// Makes the thread end the device. Only the first call has an effect.
    pub(super) fn ask_end(&self, reason: Reason) {
        let is_first = !self.is_ending.swap(true, Ordering::Relaxed);
        if is_first && !self.order(Order::End { reason, done: None }) {
            self.end(End::Left);
        }
    }

    /// The same, for a thread that waits for it. Returns whether it was the first call.
    pub(super) fn ask_end_and_tell(&self, reason: Reason, done: SyncSender<()>) -> bool {
        let done = Some(done);
        !self.is_ending.swap(true, Ordering::Relaxed) && self.order(Order::End { reason, done })
    }

    /// Returns whether it is to end, or has ended.
    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    /// Makes all queues finish what they have begun, and end.
    pub(super) fn end(&self, how: End) {
        lock(&self.end).get_or_insert(how);
        self.wake();
    }

    /// How it has ended, if it has.
    pub(super) fn ended(&self) -> Option<End> {
        *lock(&self.end)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic under these locks leaves nothing half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
