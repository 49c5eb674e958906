//! Decides how one thread runs its side of all queues and how it sleeps: the part that reactors and attached
//! threads have in common. `reactor` puts services on it, `attach` a library user.
//!
//! Sleeping is announced in the wake flag before the last look for work, so that whoever publishes work after that
//! look wakes it; see `blkmq_sync::wake_flag`.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use blkmq_core::bio::Bio;
use blkmq_core::driver::HctxDriver;
use blkmq_core::ids::{GroupId, HctxId, ReactorId};
use blkmq_core::local::LocalQueue;
use blkmq_core::mapper::stack::{Queues as _, Stack};
use blkmq_core::poll::{Verdict, Wait, Waited, WakeLatency};
use blkmq_core::queue::{Effects, QueueHandle};
use blkmq_core::time::{Instant, Nanos};
use blkmq_core::trace;
use blkmq_sync::WakeFlag;

use crate::clock::Clock;
use crate::device::Device;
use crate::disk::QueueId;
use crate::error::Error;
use crate::reactor::moved::Moved;
use crate::reactor::queues::{Queues, empty_queue};
use crate::reactor::shared::{ReactorQueues, Shared};
use crate::reactor::sleep;
use crate::reactor::wait::{Expected, WaitPolicy};
use crate::uring::ring::{BEAT, Completion, RingClient, RingHandle};

/// One thread's side of the engine.
pub(crate) struct ReactorCore {
    queues: Queues,
    /// The handles of queues behind these, while it closes.
    given_up: Vec<QueueHandle>,
    /// The bios of mapped disks.
    stack: Stack,
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
    /// A queue wants to be run once more before this thread waits.
    runs_again: bool,
    /// Other threads have published something since all queues were looked at.
    is_told: bool,
    moved: Moved,
    /// The ring will complete a beat.
    is_beating: bool,
    shared: Arc<Shared>,
    ready: Vec<u16>,
    woken: Vec<Completion>,
    /// Where the steps of requests are told.
    trace: Option<Rc<RefCell<trace::Sender>>>,
}

impl ReactorCore {
    /// Takes the handles of `reactor_queues`, on the thread that will stay.
    ///
    /// # Errors
    /// What could not be had, and the handles.
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
        // As many may wait beside the requests. A bio in parts has some of each.
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
            is_beating: false,
            shared: Arc::clone(shared),
            ready: Vec::with_capacity(64),
            woken: Vec::with_capacity(4),
            trace: None,
        })
    }

    pub(crate) fn id(&self) -> ReactorId {
        self.id
    }

    /// Gives the handles back, for another thread to take.
    ///
    /// # Errors
    /// The core, if something is still under way.
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

    /// Takes its side of one more queue, in the place `index`.
    ///
    /// # Errors
    /// What the drive could not open.
    pub(crate) fn add_queue(
        &mut self,
        index: QueueId,
        handle: QueueHandle,
        device: &dyn Device,
    ) -> Result<(), Error> {
        let driver = open_driver(&self.ring, &handle, device);
        let (queue, opened) = match driver {
            Ok(driver) => (handle.attach(driver), Ok(())),
            // The others have theirs in this place, until they are told to let it go.
            Err(error) => (empty_queue(), Err(error)),
        };
        self.queues.put(index.index(), queue);
        self.queues.set_trace(self.trace.as_ref());
        opened
    }

    /// Has the steps of requests told there from now on, or nowhere.
    pub(crate) fn set_trace(&mut self, to: Option<trace::Sender>) {
        self.trace = to.map(|sender| Rc::new(RefCell::new(sender)));
        self.queues.set_trace(self.trace.as_ref());
    }

    /// Lets its side of a queue go that has no disks any more. Says whether it could: not while something is under way.
    pub(crate) fn remove_queue(&mut self, index: QueueId) -> bool {
        self.queues.remove(index.index()).is_some()
    }

    /// Its side of a queue.
    pub(crate) fn queue(&mut self, index: QueueId) -> &mut LocalQueue {
        self.queues
            .get_mut(index.index())
            .expect("a queue of this engine")
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
        self.now
    }

    /// Says whether a group may have so many bytes more moved in this turn. If not there is another turn at once.
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
        // As `Stack::submit` would, which is a call, and copies the bio for it.
        let Some((queue, to)) = self.stack.redirect(&bio) else {
            return self.stack.submit(bio, &mut self.queues, self.now, &mut self.fx);
        };
        let queue = self.queues.queue(queue);
        let sent = queue.submit_passed(bio, to, self.now, &mut self.fx);
        sent.map_err(|bio| self.stack.take_back(bio))
    }

    /// Issues what is staged and wakes whom that concerns.
    #[inline]
    pub(crate) fn unplug(&mut self) {
        self.queues.unplug(self.now, &mut self.fx);
        self.complete_parts();
        self.send_kicks();
    }

    /// Tells the queues that what `run_queues` ended is delivered and answered.
    #[inline]
    pub(crate) fn answered(&self) {
        self.queues.iter().for_each(LocalQueue::answered);
    }

    /// Looks after mailboxes, completions, run work and timers of all queues.
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

    /// Brings ends of parts to the bios of mapped disks that they are of.
    #[inline]
    fn complete_parts(&mut self) {
        if self.stack.is_due(&self.fx) {
            self.runs_again |= self
                .stack
                .complete_parts(&mut self.queues, self.now, &mut self.fx);
        }
    }

    /// The bios that have ended and not been taken.
    #[inline]
    pub(crate) fn ended(&mut self) -> &mut Vec<Bio> {
        if self.stack.is_due(&self.fx) {
            // A submission that filled a plug may have ended some since the queues were run.
            self.stack.restore_passed(&mut self.fx);
        }
        &mut self.fx.ended
    }

    /// Hands the ring's completions to their clients and returns the clients that got some, that of the wake-up event aside.
    pub(crate) fn reap_ring(&mut self) -> &[u16] {
        self.ready.clear();
        if self.ring.in_flight() == 0 {
            return &self.ready;
        }
        // The kernel posts a few at a time: behind many of others, those of somebody who waits would take as many turns.
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
                if woken.user == BEATEN {
                    self.is_beating = false;
                } else if !woken.has_more() {
                    watch(&self.wake, &self.shared, self.id);
                }
            }
        }
        &self.ready
    }

    /// Says whether a driver of this thread has work in the ring.
    pub(crate) fn uses_ring(&self) -> bool {
        // One entry watches the wake-up event, one may beat.
        self.ring.in_flight() > 1 + u32::from(self.is_beating)
    }

    /// Says whether the end of a bio of this thread, or of a request at its drivers, is expected.
    pub(crate) fn expects_io(&mut self) -> bool {
        let (mut is_expected, now) = (false, self.now);
        // All of them, for each takes note of the time.
        self.queues
            .for_each(|queue| is_expected |= queue.expects_end(now));
        is_expected
    }

    /// Waits until something has happened or `alarm`, whichever is first, in the way the policy says.
    /// `others` knows of what the core does not.
    pub(crate) fn wait(&mut self, expected: Expected, alarm: Option<Instant>, mut others: impl News) {
        let alarm = self.earliest_alarm(alarm);
        let start = self.clock.now();
        if alarm.is_some_and(|at| at <= start) {
            return;
        }
        let verdict = self.verdict(expected, start);
        let spin = match verdict {
            Verdict::SleepUntil(wake) if alarm.is_none_or(|at| wake <= at) => {
                return self.doze(wake, &mut others);
            }
            Verdict::SleepUntil(_) => Nanos::ZERO,
            // Only running the queues shows what has ended: the next turn does.
            Verdict::Spin if self.is_polled() => return self.ring.submit(),
            Verdict::Spin => self.policy.spin_for_drive(),
            Verdict::Block => self.policy.spin_for(expected, start, alarm),
        };
        if spin > Nanos::ZERO {
            self.ring.submit();
            if self.has_news() || others.is_there() {
                // What the submission itself has completed: it says nothing about the world.
                return;
            }
            let end = alarm.map_or(start + spin, |at| at.min(start + spin));
            let found = self.look(end, &others);
            let is_alarm = alarm == Some(end);
            if expected != Expected::Nothing && (found || !is_alarm) {
                self.policy.looked(found);
            }
            if found || is_alarm || verdict == Verdict::Spin {
                self.waited(Waited::Looking, self.clock.now());
                return;
            }
        }
        self.block(alarm, &mut others);
    }

    /// Decides how to wait for all that is in flight.
    fn verdict(&mut self, expected: Expected, now: Instant) -> Verdict {
        if expected != Expected::Nothing && self.mode == Wait::Poll {
            return Verdict::Spin;
        }
        let Self {
            queues, host, mode, ..
        } = self;
        let mut verdict = Verdict::Block;
        queues.for_each(|queue| verdict = verdict.and(queue.verdict(*mode, host, now)));
        verdict
    }

    /// Sleeps until `wake`, unless woken before.
    fn doze(&mut self, wake: Instant, others: &mut impl News) {
        let left = wake.since(self.clock.now());
        self.sleep(Some(left), others);
        self.awoke(Some(wake), true);
    }

    /// Learns from a sleep that was to end at `until`, before something that was predicted (`ahead`) or with what was known: a
    /// drive that says when something ends is as good as woken by it.
    fn awoke(&mut self, until: Option<Instant>, ahead: bool) {
        let now = self.clock.now();
        let late = until.filter(|until| now >= *until).map(|until| now.since(until));
        late.into_iter().for_each(|late| self.host.observe(late));
        let how = match late {
            Some(_) if ahead => Waited::Asleep,
            late => Waited::Woken(late.unwrap_or(self.host.typical())),
        };
        self.waited(how, now);
    }

    /// Tells the queues how the time until now was spent.
    fn waited(&mut self, how: Waited, now: Instant) {
        self.queues.for_each(|queue| queue.waited(how, now));
    }

    /// Says whether something is in flight whose end is found by running the queues alone.
    fn is_polled(&self) -> bool {
        self.queues.iter().any(LocalQueue::must_poll)
    }

    /// Says whether there is something to do before waiting, bios that have ended aside.
    pub(crate) fn has_news(&self) -> bool {
        self.runs_again || self.ring.has_completed() || self.has_mail()
    }

    fn earliest_alarm(&self, alarm: Option<Instant>) -> Option<Instant> {
        let queues = self.queues.iter().filter_map(LocalQueue::next_wakeup);
        queues.chain(alarm).min()
    }

    /// Looks for news until `end`. Says whether there are some.
    fn look(&self, end: Instant, others: &impl News) -> bool {
        loop {
            for _ in 0..LOOKS_PER_CLOCK_READ {
                if self.has_news() || others.is_there() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if self.clock.now() >= end {
                return false;
            }
        }
    }

    /// Blocks until something happens, or `alarm`.
    fn block(&mut self, alarm: Option<Instant>, others: &mut impl News) {
        let mut timeout = alarm.map(|at| at.since(self.clock.now()));
        if timeout.is_some_and(|timeout| timeout >= BEAT) && self.is_for_io() {
            // A request's time limit, say. Arming a timer for each wait would cost as much as the wait's I/O.
            self.beat();
            timeout = None;
        }
        self.sleep(timeout, others);
        self.awoke(alarm.filter(|_| timeout.is_some()), false);
    }

    /// Submits what was pushed and sleeps, in one system call, for at most `timeout`.
    fn sleep(&mut self, timeout: Option<Nanos>, others: &mut impl News) {
        self.is_told |= self.wakeup().prepare_to_sleep();
        if !self.runs_again && !self.has_mail() && !others.before_sleep() {
            if self.is_for_io() {
                self.ring.wait(timeout);
            } else {
                self.ring.sleep(timeout);
            }
        }
        self.is_told |= self.wakeup().cancel_sleep();
    }

    fn is_for_io(&self) -> bool {
        self.queues.iter().any(|queue| queue.hctx_in_flight() > 0)
    }

    /// Sees to it that the ring completes something within about a [`BEAT`], so that a distant alarm is looked at again.
    fn beat(&mut self) {
        if !self.is_beating {
            self.is_beating = true;
            self.wake.push_beat(BEATEN);
        }
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
            // The queue that wants this has been looked at just now, so it is in the next turn.
            self.runs_again |= kicks.contains(self.id);
            kicks.remove(self.id);
            self.shared.kick(kicks);
        }
    }
}

/// What a core waits for beside what it knows of itself.
pub(crate) trait News {
    /// Says whether there is some. Asked again and again while the core looks.
    fn is_there(&self) -> bool;

    /// The core is about to sleep: whatever is not told through the ring or the wake-up event is to be told from here on. Says
    /// whether there is some already.
    fn before_sleep(&mut self) -> bool;
}

/// There is nothing beside.
impl News for () {
    fn is_there(&self) -> bool {
        false
    }

    fn before_sleep(&mut self) -> bool {
        false
    }
}

type Drivers = Vec<Option<Box<dyn HctxDriver>>>;

/// Opens what can fail: the ring, and a driver for each hardware context that these handles own.
fn open_ring_and_drivers(
    shared: &Shared,
    reactor_queues: &ReactorQueues,
) -> Result<(RingHandle, Drivers), Error> {
    let ring = RingHandle::new(shared.ring).map_err(|source| Error::Ring {
        reactor: reactor_queues.id,
        source,
    })?;
    let entries = shared.entries();
    let handles = reactor_queues.handles.iter().zip(&entries);
    let drivers = handles
        .map(|(handle, (_, entry))| open_driver(&ring, handle, &*entry.device))
        .collect::<Result<_, Error>>()?;
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
    driver.transpose().map_err(|source| Error::Device {
        queue: handle.queue().name().to_owned(),
        source,
    })
}

/// Has each write of the wake-up event complete once in the ring.
fn watch(wake: &RingClient, shared: &Shared, id: ReactorId) {
    wake.push_poll(shared.wakeups[id.index()].event(), libc::POLLIN, true, RUNG);
}

/// User data of the wake-up event's entries: it was written; a beat has passed.
const RUNG: u64 = 0;
const BEATEN: u64 = 1;

/// Room for bios that end in one batch, before a list has to grow.
const ENDED_AT_ONCE: usize = 1024;
/// Bios of mapped disks that are under way in parts.
const DIVIDED_MAX: u32 = 1024;
const LOOKS_PER_CLOCK_READ: u32 = 8;
/// How often one turn asks for completions. Linux posts 20 at a time (6.13 and later).
const REAPS_MAX: usize = 3;
