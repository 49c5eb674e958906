//! The interface between a front door and a reactor: a service is an object on one reactor, which is
//! called for its events and never blocks. `reactor` calls it; it acts through [`Cx`].

use std::sync::Arc;

use blkmq_core::bio::Bio;
use blkmq_core::ids::{GroupId, ReactorId};
use blkmq_core::time::Instant;

use crate::disk::{Disk, QueueId};
use crate::reactor::core::ReactorCore;
use crate::reactor::shared::{Order, Shared};
use crate::uring::ring::{Completion, RingClient};

/// A connection or a listener on one reactor.
///
/// It is dropped when it [is finished](Service::is_finished), all bios that it submitted have ended and all
/// entries that it pushed have completed; so its memory outlives every use by drivers and kernel.
pub trait Service {
    /// Called once, before all other calls.
    fn start(&mut self, _cx: &mut Cx<'_>) {}

    /// Entries that it pushed have completed.
    fn on_ring(&mut self, cx: &mut Cx<'_>, completed: &[Completion]);

    /// A bio that it submitted has ended; `status` is set, `cookie` is as submitted.
    fn on_end(&mut self, cx: &mut Cx<'_>, bio: Bio);

    /// The time set with [`Cx::set_timer`] has come.
    fn on_timer(&mut self, _cx: &mut Cx<'_>) {}

    /// Its [`Waker`] was used. Spurious calls are possible: a waker outlives its service, and another service may
    /// have taken the place.
    fn on_wake(&mut self, _cx: &mut Cx<'_>) {}

    /// A bio was refused before, and there may be room now. Called once for each refusal, and again if a bio is
    /// refused then; services that wait for room for the same group on the same queue are called one after the
    /// other.
    fn on_room(&mut self, _cx: &mut Cx<'_>) {}

    /// Called once after each batch of the calls above, before the reactor waits: the time to send what has
    /// gathered.
    fn end_of_batch(&mut self, _cx: &mut Cx<'_>) {}

    /// Says whether its peer publishes work in shared memory without notifications: then the reactor polls that
    /// memory, at every turn and while it waits by polling. Called after each batch.
    fn wants_busy_poll(&self) -> bool {
        false
    }

    /// Says whether there is work in the shared memory. It is called again and again, so it should cost a load or two.
    fn has_work(&self) -> bool {
        false
    }

    /// The reactor found work for it in the shared memory.
    fn on_work(&mut self, _cx: &mut Cx<'_>) {}

    /// The reactor stops polling: asks the peer for notifications, which come through the ring. Says whether
    /// there is work already.
    fn enable_notifications(&mut self) -> bool {
        false
    }

    /// Says whether an event is expected soon (a peer is there, I/O is under way), so that polling may pay.
    fn busy(&self) -> bool {
        false
    }

    /// The engine shuts down: the service must finish its work under way and take no more.
    fn drain(&mut self, cx: &mut Cx<'_>);

    /// Says whether it may be dropped.
    fn is_finished(&self) -> bool;
}

/// Makes a service, on its reactor.
pub type ServiceFactory = Box<dyn FnOnce() -> Box<dyn Service> + Send>;

/// Causes a call of [`Service::on_wake`], from any thread.
#[derive(Clone)]
pub struct Waker {
    shared: Arc<Shared>,
    reactor: ReactorId,
    index: u32,
}

impl Waker {
    /// Wakes the service, in a turn of its reactor that begins after this call.
    pub fn wake(&self) {
        self.shared.order(self.reactor, Order::Wake(self.index));
    }
}

impl std::fmt::Debug for Waker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Waker of service {} on reactor {}", self.index, self.reactor)
    }
}

/// The context of a service's call: what the service can use.
pub struct Cx<'a> {
    pub(crate) core: &'a mut ReactorCore,
    pub(crate) state: &'a mut ServiceState,
}

/// The reactor's state for one service.
pub(crate) struct ServiceState {
    pub(crate) index: u32,
    pub(crate) ring_client: RingClient,
    pub(crate) timer: Option<Instant>,
    /// The earliest entry of this state in the reactor's heap of timers.
    pub(crate) timer_entered: Option<Instant>,
    /// Bios submitted and not ended.
    pub(crate) outstanding: u32,
    /// Queue and group of the latest submission, if it was refused: a call of `on_room` is due.
    pub(crate) refused: Option<(QueueId, GroupId)>,
    /// The line in which it waits for `on_room`.
    pub(crate) awaits_room: Option<(QueueId, GroupId)>,
    /// On the list for `end_of_batch`.
    pub(crate) is_touched: bool,
    /// Counted as busy.
    pub(crate) is_busy: bool,
    /// On the list of polled services.
    pub(crate) is_busy_polled: bool,
}

impl ServiceState {
    pub(crate) fn new(index: u32, ring_client: RingClient) -> Self {
        Self {
            index,
            ring_client,
            timer: None,
            timer_entered: None,
            outstanding: 0,
            refused: None,
            awaits_room: None,
            is_touched: false,
            is_busy: false,
            is_busy_polled: false,
        }
    }
}

impl Cx<'_> {
    /// The time of this batch.
    pub fn now(&self) -> Instant {
        self.core.now()
    }

    /// Submits a bio; it ends with [`Service::on_end`], after this call. The bio's `client` is overwritten.
    ///
    /// # Errors
    /// Returns the bio, if too many are waiting, or if its group has moved its share of data in this turn. Submit
    /// it again at [`Service::on_room`].
    pub fn submit(&mut self, queue: QueueId, mut bio: Bio) -> Result<(), Bio> {
        bio.client = self.state.index;
        let of = (queue, bio.group);
        if bio.len >= LARGE_BYTES && bio.op.has_data() && !self.core.may_move(of, bio.len) {
            self.state.refused = Some(of);
            return Err(bio);
        }
        let submitted = self.core.submit(queue, bio);
        match submitted {
            // A bio that was refused before this one still waits for room.
            Ok(()) => self.state.outstanding += 1,
            Err(_) => self.state.refused = Some(of),
        }
        submitted
    }

    /// How many bios it has submitted that have not ended.
    pub fn outstanding(&self) -> u32 {
        self.state.outstanding
    }

    /// Its client of the reactor's ring.
    pub fn ring_client(&self) -> &RingClient {
        &self.state.ring_client
    }

    /// Sets the timer for [`Service::on_timer`] to `at`, and replaces any earlier one.
    pub fn set_timer(&mut self, at: Instant) {
        self.state.timer = Some(at);
    }

    /// Cancels the timer for [`Service::on_timer`].
    pub fn clear_timer(&mut self) {
        self.state.timer = None;
    }

    /// A handle with which other threads can wake it.
    pub fn waker(&self) -> Waker {
        Waker {
            shared: Arc::clone(self.core.shared()),
            reactor: self.core.id(),
            index: self.state.index,
        }
    }

    /// Its reactor.
    pub fn reactor(&self) -> ReactorId {
        self.core.id()
    }

    /// How many reactors serve.
    pub fn reactors(&self) -> usize {
        self.core.shared().inboxes.len()
    }

    /// Orders a service to be made on a reactor, this one or another. While the engine shuts down, the factory
    /// is dropped instead.
    ///
    /// # Panics
    /// If there is no such reactor.
    pub fn spawn_on(&mut self, reactor: ReactorId, factory: ServiceFactory) {
        let shared: &Arc<Shared> = self.core.shared();
        shared.order(reactor, Order::Add(factory));
    }

    /// All disks.
    pub fn disks(&self) -> Arc<[Disk]> {
        self.core.shared().disks()
    }

    /// Finds a disk by its number, while the disk exists.
    pub fn disk_of_number(&self, number: u32) -> Option<Disk> {
        self.disks().iter().find(|disk| disk.number == number).cloned()
    }

    /// Finds a disk by its name.
    pub fn disk(&self, name: &str) -> Option<Disk> {
        self.disks().iter().find(|disk| disk.name == name).cloned()
    }
}

/// Bios from this size on count towards the data that a group may move in one turn; smaller ones are bounded
/// by their number.
const LARGE_BYTES: u64 = 32 << 10;
