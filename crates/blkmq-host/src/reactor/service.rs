//! Decides what a door is to a reactor: an object that lives on it, is called when something has happened for
//! it, and never blocks. `reactor` calls it; it acts through [`Cx`].

use std::sync::Arc;

use blkmq_core::bio::Bio;
use blkmq_core::ids::{GroupId, ReactorId};
use blkmq_core::time::Instant;

use crate::disk::{Disk, QueueId};
use crate::reactor::core::ReactorCore;
use crate::reactor::shared::{Order, Shared};
use crate::uring::ring::{Completion, RingClient};

/// A connection or a listener, living on one reactor.
///
/// It is dropped once it says that it [is finished](Service::is_finished), all bios it submitted have ended
/// and all entries it pushed have completed; so what it owns outlives every use by drivers and kernel.
pub trait Service {
    /// Is called once, first.
    fn start(&mut self, _cx: &mut Cx<'_>) {}

    /// Entries that it pushed have completed.
    fn on_ring(&mut self, cx: &mut Cx<'_>, completed: &[Completion]);

    /// A bio that it submitted has ended; `status` is set, `cookie` is as submitted.
    fn on_end(&mut self, cx: &mut Cx<'_>, bio: Bio);

    /// The time it asked for with [`Cx::set_timer`] has come.
    fn on_timer(&mut self, _cx: &mut Cx<'_>) {}

    /// Somebody has used its [`Waker`]. May be called without reason, too: a waker outlives its service, whose place another
    /// may have taken.
    fn on_wake(&mut self, _cx: &mut Cx<'_>) {}

    /// A bio was refused before, and there may be room now. Called once for each refusal, and if one is refused then, again and
    /// again; of several services that wait for room for one group on one queue, one after the other.
    fn on_room(&mut self, _cx: &mut Cx<'_>) {}

    /// Is called once after each batch of the calls above, before the reactor waits: the moment to send what
    /// has gathered.
    fn end_of_batch(&mut self, _cx: &mut Cx<'_>) {}

    /// Says whether its peer publishes work in memory that both share, and has not been asked to tell of it: the reactor looks
    /// there itself, at every turn and while it waits by looking. Asked after each batch.
    fn is_looked_at(&self) -> bool {
        false
    }

    /// Says whether there is work in the shared memory: a load or two, since it is asked again and again.
    fn has_work(&self) -> bool {
        false
    }

    /// The reactor has found that it has work.
    fn on_work(&mut self, _cx: &mut Cx<'_>) {}

    /// The reactor stops looking: has the peer tell of work from here on, through the ring. Says whether there is some already.
    fn stop_looking(&mut self) -> bool {
        false
    }

    /// Says whether something is expected soon (a peer is there, I/O is under way), so that looking for it
    /// may pay.
    fn busy(&self) -> bool {
        false
    }

    /// The engine shuts down: finish what is under way, take no more.
    fn drain(&mut self, cx: &mut Cx<'_>);

    /// Says that it wants to be dropped.
    fn is_finished(&self) -> bool;
}

/// Makes a service on the reactor that it will live on.
pub type ServiceFactory = Box<dyn FnOnce() -> Box<dyn Service> + Send>;

/// Has [`Service::on_wake`] called, from any thread.
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

/// What a service can do while it is called.
pub struct Cx<'a> {
    pub(crate) core: &'a mut ReactorCore,
    pub(crate) state: &'a mut ServiceState,
}

/// What the reactor keeps for one service.
pub(crate) struct ServiceState {
    pub(crate) index: u32,
    pub(crate) ring_client: RingClient,
    pub(crate) timer: Option<Instant>,
    /// The earliest entry of this state in the reactor's heap of timers.
    pub(crate) timer_entered: Option<Instant>,
    /// Bios submitted and not ended.
    pub(crate) outstanding: u32,
    /// The latest submission was refused, of a bio for this queue and group; `on_room` is owed.
    pub(crate) refused: Option<(QueueId, GroupId)>,
    /// Where it stands in line for `on_room`.
    pub(crate) awaits_room: Option<(QueueId, GroupId)>,
    /// On the list for `end_of_batch`.
    pub(crate) is_touched: bool,
    /// Counted as busy.
    pub(crate) is_busy: bool,
    /// On the list of those that are looked at.
    pub(crate) is_looked_at: bool,
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
            is_looked_at: false,
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
    /// The bio, if too many are waiting, or its group has had enough data moved in this turn: [`Service::on_room`] says when to try
    /// again.
    pub fn submit(&mut self, queue: QueueId, mut bio: Bio) -> Result<(), Bio> {
        bio.client = self.state.index;
        let of = (queue, bio.group);
        if bio.len >= LARGE_BYTES && bio.op.has_data() && !self.core.may_move(of, bio.len) {
            self.state.refused = Some(of);
            return Err(bio);
        }
        let submitted = self.core.submit(queue, bio);
        match submitted {
            // One that was refused before this one still waits for room.
            Ok(()) => self.state.outstanding += 1,
            Err(_) => self.state.refused = Some(of),
        }
        submitted
    }

    /// How many bios it has submitted that have not ended.
    pub fn outstanding(&self) -> u32 {
        self.state.outstanding
    }

    /// What it pushes to and takes from the reactor's ring with.
    pub fn ring_client(&self) -> &RingClient {
        &self.state.ring_client
    }

    /// Asks for [`Service::on_timer`] at `at`, instead of any earlier wish.
    pub fn set_timer(&mut self, at: Instant) {
        self.state.timer = Some(at);
    }

    /// Takes the wish for [`Service::on_timer`] back.
    pub fn clear_timer(&mut self) {
        self.state.timer = None;
    }

    /// What others can wake it with.
    pub fn waker(&self) -> Waker {
        Waker {
            shared: Arc::clone(self.core.shared()),
            reactor: self.core.id(),
            index: self.state.index,
        }
    }

    /// The reactor it lives on.
    pub fn reactor(&self) -> ReactorId {
        self.core.id()
    }

    /// How many reactors serve.
    pub fn reactors(&self) -> usize {
        self.core.shared().inboxes.len()
    }

    /// Has a service made on a reactor, this one or another. While the engine shuts down the factory is
    /// dropped instead.
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

    /// Finds a disk by its number, as long as it is there.
    pub fn disk_of_number(&self, number: u32) -> Option<Disk> {
        self.disks().iter().find(|disk| disk.number == number).cloned()
    }

    /// Finds a disk by its name.
    pub fn disk(&self, name: &str) -> Option<Disk> {
        self.disks().iter().find(|disk| disk.name == name).cloned()
    }
}

/// Bios from this size on count in what a group may have moved in one turn; smaller ones are bounded by their number.
const LARGE_BYTES: u64 = 32 << 10;
