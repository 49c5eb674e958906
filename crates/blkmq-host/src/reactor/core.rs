//! One thread's side of all queues, and its sleep: the part that reactors and attached threads have in
//! common. `reactor` adds services, `attach` a library user.
//!
//! The thread announces sleep in the wake flag before its last check for work, so that a thread that
//! publishes work after that check wakes it; see `blkmq_sync::wake_flag`.

mod encrypted;
mod waiting;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use blkmq_core::bio::{Bio, Full, Submission};
use blkmq_core::driver::HctxDriver;
use blkmq_core::ids::{GroupId, HctxId, ReactorId};
use blkmq_core::local::{InFlight, LocalQueue};
use blkmq_core::mapper::stack::{Queues as _, Stack};
use blkmq_core::poll::{Wait, WakeLatency};
use blkmq_core::queue::{Effects, QueueHandle};
use blkmq_core::time::Instant;
use blkmq_core::trace;
use blkmq_sync::WakeFlag;

use crate::clock::Clock;
use crate::device::Device;
use crate::disk::QueueId;
use crate::error::Error;
use crate::reactor::encrypt::Encrypter;
use crate::reactor::moved::Moved;
use crate::reactor::queues::{Queues, empty_queue, no_drive};
use crate::reactor::shared::{ReactorQueues, Shared};
use crate::reactor::sleep;
use crate::reactor::wait::WaitPolicy;
use crate::uring::ring::{Completion, RingClient, RingHandle};

/// One thread's side of the engine.
pub(crate) struct ReactorCore {
    queues: Queues,
    /// The handles of queues that are detached already, while it closes.
    given_up: Vec<QueueHandle>,
    /// The bios of mapped disks.
    stack: Stack,
    /// The bios of encrypted disks.
    encrypter: Encrypter,
    fx: Effects,
    now: Instant,
    clock: Clock,
    id: ReactorId,
    ring: RingHandle,
    /// Watches the event by which others wake this thread.
    wake: RingClient,
    policy: WaitPolicy,
    mode: Wait,
    /// How late this thread wakes when it sleeps.
    host: WakeLatency,
    /// A queue must run once more before this thread waits.
    runs_again: bool,
    /// Other threads have published work since all queues were run.
    is_told: bool,
    moved: Moved,
    /// A beat is pending in the ring.
    has_heartbeat: bool,
    shared: Arc<Shared>,
    ready: Vec<u16>,
    woken: Vec<Completion>,
    /// Records the steps of requests, if a trace is taken.
    trace: Option<Rc<RefCell<trace::Sender>>>,
}

impl ReactorCore {
    /// Attaches the handles of `reactor_queues`, on the thread that will use them.
    ///
    /// # Errors
    /// The ring or driver that could not be opened; the handles are returned too.
    pub(crate) fn open(
        shared: &Arc<Shared>,
        reactor_queues: ReactorQueues,
    ) -> Result<Self, (Error, ReactorQueues)> {
        let (ring, drivers) = match open_ring_and_drivers(shared, &reactor_queues) {
            Ok(opened) => opened,
            Err(error) => return Err((error, reactor_queues)),
        };
        sleep::precise_timers();
        let id = reactor_queues.id;
        let host = sleep::known(&ring, shared.clock);
        let wake = ring.open_client();
        watch(&wake, shared, id);
        let handles = reactor_queues.handles.into_iter().zip(drivers);
        let queues: Vec<LocalQueue> = handles.map(|(handle, driver)| handle.attach(driver)).collect();
        let requests: u32 = queues
            .iter()
            .map(|queue| queue.queue().requests_per_reactor())
            .sum();
        // As many bios may wait as there are requests. A bio in parts uses some of each.
        let stack = Stack::new(
            Arc::clone(&shared.mapped),
            2 * requests,
            requests.min(DIVIDED_MAX),
        );
        let clock = shared.clock;
        Ok(Self {
            queues: Queues::new(queues),
            given_up: Vec::new(),
            stack,
            encrypter: Encrypter::default(),
            fx: Effects::with_capacity(ENDED_AT_ONCE),
            now: clock.now(),
            clock,
            id,
            ring,
            wake,
            policy: WaitPolicy::new(shared.wait, shared.spin_max),
            mode: shared.wait,
            host,
            runs_again: false,
            is_told: false,
            moved: Moved::default(),
            has_heartbeat: false,
            shared: Arc::clone(shared),
            ready: Vec::with_capacity(64),
            woken: Vec::with_capacity(4),
            trace: None,
        })
    }

    pub(crate) fn id(&self) -> ReactorId {
        self.id
    }

    /// Detaches and returns the handles, for another thread to attach.
    ///
    /// # Errors
    /// Returns the core, if a bio or request is still under way.
    pub(crate) fn close(mut self) -> Result<ReactorQueues, Box<Self>> {
        while let Some(queue) = self.queues.pop() {
            match queue.detach() {
                Ok(handle) => self.given_up.push(handle),
                Err(queue) => {
                    self.queues.push(*queue);
                    return Err(Box::new(self));
                }
            }
        }
        let handles = self.given_up.drain(..).rev().collect();
        Ok(ReactorQueues { id: self.id, handles })
    }

    /// Adds its side of one more queue, in the place `index`.
    ///
    /// # Errors
    /// If the drive could not open a driver.
    pub(crate) fn add_queue(
        &mut self,
        index: QueueId,
        handle: QueueHandle,
        device: &dyn Device,
    ) -> Result<(), Error> {
        let driver = open_driver(&self.ring, &handle, device);
        let (queue, opened) = match driver {
            Ok(driver) => (handle.attach(driver), Ok(())),
            // Other threads have this queue in this place, until they are told to remove it.
            Err(error) => (empty_queue(), Err(error)),
        };
        self.queues.put(index.index(), queue);
        self.queues.set_trace(self.trace.as_ref());
        opened
    }

    /// Starts recording the steps of requests, or stops it (`None`).
    pub(crate) fn set_trace(&mut self, to: Option<trace::Sender>) {
        self.trace = to.map(|sender| Rc::new(RefCell::new(sender)));
        self.queues.set_trace(self.trace.as_ref());
    }

    /// Removes its side of a queue that has no disks any more. Says whether it did: not while requests are under way.
    pub(crate) fn remove_queue(&mut self, index: QueueId) -> bool {
        self.queues.remove(index.index())
    }

    /// Its side of a queue.
    pub(crate) fn queue(&mut self, index: QueueId) -> &mut LocalQueue {
        self.queues
            .get_mut(index.index())
            .expect("a queue of this engine")
    }

    /// What each group has at the drivers of this thread.
    pub(crate) fn in_flight(&self) -> Vec<((QueueId, GroupId), InFlight)> {
        // The batch may have begun before this thread slept.
        let now = self.clock.now();
        // A queue with requests in flight is active.
        let queues = self
            .queues
            .numbered()
            .filter(|(_, queue)| queue.hctx_in_flight() > 0);
        queues
            .flat_map(|(id, queue)| {
                let groups = queue.in_flight_of_groups(now).into_iter();
                groups.map(move |(group, has)| ((id, group), has))
            })
            .collect()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn ring(&self) -> &RingHandle {
        &self.ring
    }

    /// The time of this batch.
    #[inline]
    pub(crate) fn now(&self) -> Instant {
        self.now
    }

    /// Begins a batch: reads the clock.
    #[inline]
    pub(crate) fn read_clock(&mut self) -> Instant {
        self.now = self.clock.now();
        self.moved.clear();
        self.encrypter.begin_turn();
        self.now
    }

    /// Says whether a group may move `bytes` more in this turn. If not, another turn follows at once.
    pub(crate) fn may_move(&mut self, of: (QueueId, GroupId), bytes: u64) -> bool {
        let may = self.moved.admit(of, bytes, self.clock.now());
        self.runs_again |= !may;
        may
    }

    #[inline]
    pub(crate) fn submit(&mut self, queue: QueueId, bio: Bio) -> Result<(), Bio> {
        if let Some(queue) = self.queues.get_mut(queue.index()) {
            return queue.submit(bio, self.now, &mut self.fx);
        }
        if self.encrypter.has(bio.disk) {
            return self.submit_encrypted(bio);
        }
        // The same as `Stack::submit`, but without a call and a copy of the bio.
        let Some((queue, to)) = self.stack.redirect(&bio) else {
            return self.stack.submit(bio, &mut self.queues, self.now, &mut self.fx);
        };
        let queue = self.queues.queue(queue);
        let sent = queue.submit_passed(bio, to, self.now, &mut self.fx);
        sent.map_err(|bio| self.stack.take_back(bio))
    }

    /// Submits a bio that is still to be made. Like [`Self::submit`] otherwise.
    #[inline]
    pub(crate) fn submit_new(&mut self, queue: QueueId, new: &Submission) -> Result<(), Full> {
        match self.queues.get_mut(queue.index()) {
            Some(queue) => queue.submit_new(new, self.now, &mut self.fx),
            None => self.submit(queue, new.bio()).map_err(|_| Full),
        }
    }

    /// Issues staged requests and wakes the reactors that must run.
    #[inline]
    pub(crate) fn unplug(&mut self) {
        if self.encrypter.is_used() {
            self.encrypt();
        }
        self.queues.unplug(self.now, &mut self.fx);
        self.complete_parts();
        self.send_kicks();
    }

    /// Tells the queues that the bios that `run_queues` ended are delivered and the responses submitted.
    #[inline]
    pub(crate) fn answered(&self) {
        self.queues.iter().for_each(LocalQueue::answered);
    }

    /// Handles mailboxes, completions, run work and timers of all queues.
    #[inline]
    pub(crate) fn run_queues(&mut self) {
        self.runs_again = false;
        if !self.queues.are_few() && (self.is_told || self.wakeup().take_news()) {
            self.is_told = false;
            self.queues.activate_all();
        }
        self.queues.run(self.now, &mut self.fx);
        self.complete_parts();
        self.send_kicks();
    }

    /// Reports ended parts to their mapped disks' bios.
    #[inline]
    fn complete_parts(&mut self) {
        if self.stack.is_due(&self.fx) {
            self.runs_again |= self
                .stack
                .complete_parts(&mut self.queues, self.now, &mut self.fx);
        }
    }

    /// The bios that have ended and were not taken yet.
    #[inline]
    pub(crate) fn ended(&mut self) -> &mut Vec<Bio> {
        if self.stack.is_due(&self.fx) {
            // A submission that filled a plug may have ended bios since the queues were run.
            self.stack.restore_passed(&mut self.fx);
        }
        if self.encrypter.is_used() {
            self.take_encrypted();
        }
        &mut self.fx.ended
    }

    /// Hands the ring's completions to their clients and returns the clients that got some, except that of the
    /// wake-up event.
    pub(crate) fn reap_ring(&mut self) -> &[u16] {
        self.ready.clear();
        if self.ring.in_flight() == 0 {
            return &self.ready;
        }
        // The kernel posts a few at a time: behind many others, a completion would otherwise take several turns.
        for _ in 0..REAPS_MAX {
            if self.ring.reap() == 0 {
                break;
            }
        }
        self.ring.take_ready(&mut self.ready);
        let wake = self.wake.id();
        if self.ready.contains(&wake) {
            self.ready.retain(|&client| client != wake);
            self.woken.clear();
            self.wake.take(&mut self.woken);
            for woken in &self.woken {
                if woken.user == HEARTBEAT_PASSED {
                    self.has_heartbeat = false;
                } else if !woken.has_more() {
                    watch(&self.wake, &self.shared, self.id);
                }
            }
        }
        &self.ready
    }

    /// Says whether a driver of this thread has work in the ring.
    pub(crate) fn uses_ring(&self) -> bool {
        // One entry watches the wake-up event, one may be a beat.
        self.ring.in_flight() > 1 + u32::from(self.has_heartbeat)
    }

    /// Says whether the end of a bio of this thread, or of a request at its drivers, is expected.
    pub(crate) fn expects_io(&mut self) -> bool {
        let (mut is_expected, now) = (false, self.now);
        // All of them, since each notes the time.
        self.queues
            .for_each(|queue| is_expected |= queue.expects_end(now));
        is_expected
    }

    fn has_mail(&self) -> bool {
        let has_news = !self.queues.are_few() && (self.is_told || self.wakeup().has_news());
        has_news || self.queues.iter().any(LocalQueue::has_mail)
    }

    #[inline]
    fn wakeup(&self) -> &WakeFlag {
        self.shared.wakeups[self.id.index()].flag()
    }

    #[inline]
    fn send_kicks(&mut self) {
        if !self.fx.kicks.is_empty() {
            let mut kicks = std::mem::take(&mut self.fx.kicks);
            // The queue that asks for this has just been run, so the next turn runs it.
            self.runs_again |= kicks.contains(self.id);
            kicks.remove(self.id);
            self.shared.kick(kicks);
        }
    }
}

/// The events that a core waits for in addition to its own.
pub(crate) trait News {
    /// Says whether there is any. Called again and again while the core polls.
    fn is_there(&self) -> bool;

    /// Called before the core sleeps: from here on, all news must come through the ring or the wake-up event.
    /// Says whether there is any already.
    fn before_sleep(&mut self) -> bool;
}

/// No other events.
impl News for () {
    fn is_there(&self) -> bool {
        false
    }

    fn before_sleep(&mut self) -> bool {
        false
    }
}

type Drivers = Vec<Option<Box<dyn HctxDriver>>>;

/// Opens the ring, and a driver for each hardware context that these handles own: the steps that can fail.
fn open_ring_and_drivers(
    shared: &Shared,
    reactor_queues: &ReactorQueues,
) -> Result<(RingHandle, Drivers), Error> {
    let ring = RingHandle::new(shared.ring).map_err(|cause| Error::Ring {
        reactor: reactor_queues.id,
        cause,
    })?;
    let open = |(id, handle): (u16, &QueueHandle)| match shared.entry(QueueId(id)) {
        Some(entry) => open_driver(&ring, handle, &*entry.device),
        // The place of a queue that was removed.
        None => Ok(handle.owns_hctx().then(no_drive)),
    };
    let drivers = (0..).zip(&reactor_queues.handles).map(open);
    let drivers = drivers.collect::<Result<_, Error>>()?;
    Ok((ring, drivers))
}

/// Opens the driver of the hardware context that a handle owns, if it owns one.
fn open_driver(
    ring: &RingHandle,
    handle: &QueueHandle,
    device: &dyn Device,
) -> Result<Option<Box<dyn HctxDriver>>, Error> {
    let driver = handle
        .owns_hctx()
        .then(|| device.open_hctx(ring, HctxId(handle.id().0)));
    driver.transpose().map_err(|cause| Error::Device {
        queue: handle.queue().name().to_owned(),
        cause,
    })
}

/// Watches the wake-up event: each write of it completes once in the ring.
fn watch(wake: &RingClient, shared: &Shared, id: ReactorId) {
    wake.push_poll(shared.wakeups[id.index()].event(), libc::POLLIN, true, RUNG);
}

/// User data of entries: the wake-up event was written; a heartbeat has passed.
const RUNG: u64 = 0;
const HEARTBEAT_PASSED: u64 = 1;

/// Room for bios that end in one batch, before a list must grow.
const ENDED_AT_ONCE: usize = 1024;
/// Most bios of mapped disks that are under way in parts.
const DIVIDED_MAX: u32 = 1024;
/// How often one turn reaps completions. Linux posts 20 at a time (6.13 and later).
const REAPS_MAX: usize = 3;
