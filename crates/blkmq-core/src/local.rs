//! One reactor's side of one queue: a `LocalQueue` joins `sw_ctx`, `gate` and `hw_ctx`. Requests go from
//! the plug directly to the driver, or through the gate and the elevator; `complete` has the way back.
//!
//! ```text
//!  submit ─► sw_ctx ─► unplug ─┬─ issue_direct ───────────────────────► hw_ctx ─► driver
//!                              └─ insert list ─► GATE ─► elevator ─────► hw_ctx ─► driver
//!  Effects::ended ◄─ sw_ctx ◄─ (mail to the owner) ◄─ end_request ◄─ completed ◄─ reap, expire ◄─ driver
//! ```

mod asked;
mod complete;
mod direct;
#[cfg(feature = "baselines")]
mod every_context;
mod flushes;
mod in_flight;
mod mail;
mod through_gate;

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blkmq_sync::mpsc::Receiver;
use blkmq_sync::spsc::Producer;

pub use self::in_flight::InFlight;
use crate::bio::{Bio, Full, Passed, Status, Submission};
use crate::driver::{DisksError, Done, HctxDriver};
use crate::gate::Report;
use crate::hw_ctx::{Hold, HwCtx, Outcome};
use crate::ids::{HctxId, ReactorId, ReactorSet};
use crate::plug;
use crate::queue::{Effects, Mail, Queue, QueueHandle, QueueRef, UNATTACHED};
use crate::request::Request;
use crate::stat::StatsMode;
use crate::sw_ctx::SwCtx;
use crate::tag::Tags;
use crate::time::{Instant, Nanos};
use crate::trace::Tracer;

/// One reactor's side of one queue: its software context and the hardware context that it owns.
///
/// Made and used on the reactor's own thread. No call blocks.
#[expect(
    clippy::redundant_allocation,
    reason = "the outer count is this thread's alone; the inner one is shared between reactors"
)]
pub struct LocalQueue {
    /// Counted by this thread alone: a guard of the gate borrows from a clone, which must not cost a shared write.
    queue: Rc<Arc<Queue>>,
    me: ReactorId,
    sw: SwCtx,
    hw: Option<HwCtx>,
    mailbox: Receiver<Mail>,
    inserts: Producer<Box<Request>>,
    reports: Producer<Report>,
    /// When to call the elevator again, if this reactor was the last inside the gate.
    sched_timer: Option<Instant>,
    /// `advance` stopped at its limit; more can be done without an event.
    is_unfinished: bool,
    /// Time of the last `run`.
    ran_at: Instant,
    /// Completions taken from the driver. Like the next three, empty between calls: it keeps its memory.
    done: Vec<Done>,
    /// This reactor's own requests that ended together.
    own_done: Vec<Box<Request>>,
    /// Requests of a plug that have no caps, on a queue without elevator.
    direct: Vec<Box<Request>>,
    ended_inside: Vec<(Box<Request>, Status)>,
    /// By reactor: the mail that is posted to it when this call ends, at the latest.
    outboxes: Box<[Vec<Mail>]>,
    outgoing: ReactorSet,
    /// Records the steps of requests here; the hardware context has a copy.
    tracer: Option<Tracer>,
}

impl QueueHandle {
    /// Says whether the reactor owns a hardware context and therefore needs a driver.
    pub fn owns_hctx(&self) -> bool {
        self.queue.hctx_owner(self.id) == self.id
    }

    /// The queue.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// The reactor that this handle is for.
    pub fn id(&self) -> ReactorId {
        self.id
    }

    /// Attaches the reactor to the queue. Called on the reactor's own thread.
    ///
    /// # Panics
    /// If the reactor owns a hardware context and no driver is given, or the other way round.
    pub fn attach(self, driver: Option<Box<dyn HctxDriver>>) -> LocalQueue {
        assert_eq!(
            driver.is_some(),
            self.owns_hctx(),
            "reactor {}: a driver for each context",
            self.id
        );
        let queue = &self.queue;
        let mode = queue.tag_mode();
        let hw = driver.map(|driver| {
            let tags = Tags::new(mode, queue.shared_tags.as_ref(), queue.fitted_disks());
            let id = HctxId(self.id.0);
            let mut hw = HwCtx::new(
                id,
                driver,
                tags,
                mode.depth(),
                queue.requests_max(),
                queue.timeout,
            );
            hw.poll_if(queue.is_polled());
            // The counter goes on from where an earlier attachment left it.
            hw.issued = queue.reactor(self.id).shard.events.issued.get();
            hw
        });
        LocalQueue {
            me: self.id,
            sw: SwCtx::new(queue, self.id),
            hw,
            mailbox: self.mailbox,
            inserts: self.inserts,
            reports: self.reports,
            sched_timer: None,
            is_unfinished: false,
            ran_at: Instant(0),
            done: Vec::with_capacity(mode.depth() as usize),
            own_done: Vec::with_capacity(queue.requests_per_reactor() as usize),
            direct: Vec::with_capacity(plug::REQUESTS_MAX),
            ended_inside: Vec::with_capacity(queue.requests_max()),
            outboxes: (0..queue.reactors())
                .map(|_| Vec::with_capacity(plug::REQUESTS_MAX))
                .collect(),
            outgoing: ReactorSet::default(),
            tracer: None,
            queue: Rc::new(self.queue),
        }
    }
}

impl LocalQueue {
    /// Submits a bio. It stays in the plug until [`LocalQueue::unplug`], or until the plug is full.
    ///
    /// A bio that the disk refuses (range, read-only, unsupported) ends at once, with its status, in `fx.ended`.
    ///
    /// # Errors
    /// Returns the bio if as many bios wait as the queue has requests per reactor or, when little room is
    /// left, if too many of its group wait. Submit it again when another bio has ended.
    // Never inlined: in large loops the inlined code runs out of registers.
    #[inline(never)]
    pub fn submit(&mut self, bio: Bio, now: Instant, fx: &mut Effects) -> Result<(), Bio> {
        self.sw.submit(&self.queue, bio, fx)?;
        if self.sw.plug.is_due() {
            self.unplug(now, fx);
        }
        Ok(())
    }

    /// Submits a bio that is still to be made: the usual one is written where it stays until it has ended, and
    /// copied nowhere before.
    ///
    /// # Errors
    /// If there is no room, as for [`LocalQueue::submit`].
    #[inline(never)]
    pub fn submit_new(&mut self, new: &Submission, now: Instant, fx: &mut Effects) -> Result<(), Full> {
        self.sw.submit_new(&self.queue, new, fx)?;
        if self.sw.plug.is_due() {
            self.unplug(now, fx);
        }
        Ok(())
    }

    /// Submits a mapped disk's bio that goes unsplit to a place on one of this queue's disks
    /// ([`crate::mapper::stack::Stack::redirect`]).
    ///
    /// # Errors
    /// As for [`LocalQueue::submit`]; the returned bio contains the place.
    #[inline(never)]
    pub fn submit_passed(&mut self, bio: Bio, to: Passed, now: Instant, fx: &mut Effects) -> Result<(), Bio> {
        self.sw.submit_passed(&self.queue, bio, to, fx)?;
        if self.sw.plug.is_due() {
            self.unplug(now, fx);
        }
        Ok(())
    }

    /// Issues the requests in the plug, or inserts them into the elevator. Call it after a batch of submissions.
    #[inline]
    pub fn unplug(&mut self, now: Instant, fx: &mut Effects) {
        if !self.sw.plug.list.is_empty() {
            self.flush_plug(now, fx);
        }
        if !self.sw.is_idle() {
            self.advance(now, fx);
        }
        self.post();
        self.rerun(fx);
    }

    /// Takes in mail and completions, runs the hardware context if it must run, and handles expired timers.
    /// Call it once a turn, when the reactor was kicked, and at [`LocalQueue::next_wakeup`].
    #[inline]
    pub fn run(&mut self, now: Instant, fx: &mut Effects) {
        self.ran_at = now;
        self.sw.begin_turn();
        let mut must_run = self.take_mail(fx);
        self.sw.advance_grace_period(&self.queue);
        if let Some(hw) = &mut self.hw {
            hw.poll_if(self.queue.is_polled());
            // A run asked for a driver that needs idle polls may be meant for its `reap`. So the run work is taken
            // before `reap`, which then sees the driver's news; run work that comes later causes another turn.
            let needs_idle_poll = hw.needs_idle_poll;
            let run = &self.queue.reactor(self.me).run;
            let was_taken = needs_idle_poll && run.take(now.0);
            must_run |= self.reap(now, fx);
            must_run |= self.sched_timer.take_if(|at| *at <= now).is_some();
            let run = &self.queue.reactor(self.me).run;
            let taken = if needs_idle_poll {
                was_taken
            } else {
                run.take(now.0)
            };
            self.run_work(taken, must_run, now, fx);
        }
        if !self.sw.is_idle() {
            self.advance(now, fx);
        }
        self.post();
        self.rerun(fx);
    }

    /// Notes that the submitters have all bios that the latest [`LocalQueue::run`] ended, and that the bios
    /// that they sent in response are submitted. A reactor that never calls this is assumed to respond at once.
    #[inline]
    pub fn answered(&self) {
        if self.queue.is_scheduled() {
            // Relaxed: the time stands alone; a reader that sees it late only acts a little later.
            let answered = &self.queue.reactor(self.me).answered;
            answered.store(self.ran_at.0, Ordering::Relaxed);
        }
    }

    /// Grows this reactor's tables to the number of disks in the queue's tables ([`Queue::fit_disks`]).
    /// The queue must be frozen and drained.
    pub fn fit_disks(&mut self) {
        let disks = self.queue.fitted_disks();
        self.sw.fit_disks(disks);
        if let Some(hw) = &mut self.hw {
            hw.fit_disks(disks, self.queue.requests_max());
        }
    }

    /// Copies the queue's list of disks again, and has the driver do the same.
    ///
    /// # Errors
    /// The driver's error.
    pub fn refresh_disks(&mut self) -> Result<(), DisksError> {
        self.sw.refresh_disks(&self.queue);
        if let Some(tracer) = &self.tracer {
            tracer.renumbered();
        }
        self.hw.as_mut().map_or(Ok(()), HwCtx::refresh_disks)
    }

    /// Starts recording the steps of this reactor's requests, or stops it (`None`).
    pub fn set_tracer(&mut self, tracer: Option<Tracer>) {
        if let Some(hw) = &mut self.hw {
            hw.tracer.clone_from(&tracer);
        }
        if let Some(tracer) = &tracer {
            tracer.renumbered();
        }
        self.tracer = tracer;
    }

    /// Detaches the reactor and returns its handle, which another thread may attach.
    ///
    /// # Errors
    /// Returns `self` if a bio, request or mail of this reactor is still under way.
    pub fn detach(self) -> Result<QueueHandle, Box<Self>> {
        let hw_idle = self
            .hw
            .as_ref()
            .is_none_or(|hw| hw.in_flight == 0 && hw.dispatch_list_is_empty());
        if !self.sw.is_at_rest() || !hw_idle || !self.mailbox.is_empty() {
            return Err(Box::new(self));
        }
        // Release: as at the end of a grace period: no bio or request is here.
        let grace_period_done = &self.queue.reactor(self.me).grace_period_done;
        self.queue
            .reactor(self.me)
            .answered
            .store(u64::MAX, Ordering::Relaxed);
        grace_period_done.store(UNATTACHED, Ordering::Release);
        Ok(QueueHandle {
            queue: Arc::clone(&self.queue),
            id: self.me,
            mailbox: self.mailbox,
            inserts: self.inserts,
            reports: self.reports,
        })
    }

    /// Asserts the invariants that hold between calls. Costly; the simulator calls it after some events.
    ///
    /// # Panics
    /// If an invariant does not hold.
    pub fn check_invariants(&self) {
        self.sw.check_invariants();
        if let Some(hw) = &self.hw {
            hw.check_invariants();
        }
        assert!(
            self.outgoing.is_empty() && self.outboxes.iter().all(Vec::is_empty),
            "reactor {}: mail not posted",
            self.me
        );
        assert!(
            self.ended_inside.is_empty(),
            "reactor {}: ends left inside the gate",
            self.me
        );
        if let Some(state) = self.queue.gate.try_enter() {
            state.throttle.check_invariants();
            state.targets.check_invariants();
            if let Some(elevator) = &state.elevator {
                elevator.check_invariants();
            }
            assert!(
                !state.leave_owing(),
                "somebody came while a single-threaded check was inside"
            );
        }
    }

    /// Issues or inserts the requests in the plug, if the queue lets requests start now.
    fn flush_plug(&mut self, now: Instant, fx: &mut Effects) {
        let bios = self.sw.plug.list.iter().map(|rq| u64::from(rq.bios)).sum();
        let Some(entered) = self.queue.enter_to_start(self.me, bios) else {
            return;
        };
        let mut list = self.sw.plug.take();
        if let Some(tracer) = &self.tracer {
            tracer.queued(&list, |rq| self.goes_through_gate(rq), now);
        }
        if self.queue.is_gated() {
            self.insert(&mut list, now, fx);
        } else {
            self.send_direct(&mut list, now, fx);
        }
        self.leave(entered);
        self.sw.plug.keep_list(list);
    }

    /// Says whether a request goes to an elevator or its group has caps.
    fn goes_through_gate(&self, rq: &Request) -> bool {
        self.queue.is_scheduled() || self.queue.is_gated() && self.queue.group_states.is_capped(rq.group())
    }

    /// The scheduled path: publishes requests on this reactor's insert list, then tries the gate. Without an
    /// elevator only requests with caps take it; the others are issued first, by the direct path.
    #[inline(never)]
    fn insert(&mut self, list: &mut Vec<Box<Request>>, now: Instant, fx: &mut Effects) {
        let is_scheduled = self.queue.is_scheduled();
        let mut direct = std::mem::take(&mut self.direct);
        let before = direct.len();
        debug_assert_eq!(before, 0, "left from an earlier plug");
        let mut published = false;
        if is_scheduled && self.queue.stats.mode == StatsMode::Outside {
            self.shard().count_inserts(list);
        }
        for mut rq in list.drain(..) {
            if is_scheduled || self.queue.group_states.is_capped(rq.group()) {
                published = true;
                rq.inserted_at = now;
                self.publish(rq);
            } else {
                direct.push(rq);
            }
        }
        if !direct.is_empty() {
            self.send_direct(&mut direct, now, fx);
        }
        self.direct = direct;
        if published {
            self.look_at_published(now, fx);
        }
    }

    /// Dispatches through the gate after a publication; without a hardware context, runs the owner's context for it.
    fn look_at_published(&mut self, now: Instant, fx: &mut Effects) {
        #[cfg(feature = "baselines")]
        if self.dispatches_for_itself() {
            return self.insert_and_run_own(now, fx);
        }
        if self.hw.is_some() {
            self.dispatch_through_gate(now, fx);
        } else {
            let owner = self.queue.hctx_owner(self.me);
            self.queue.run_hctx(HctxId(owner.0), self.me, fx);
        }
    }

    fn publish(&mut self, rq: Box<Request>) {
        let pushed = self.inserts.push(rq);
        assert!(
            pushed.is_ok(),
            "reactor {}: insert list shorter than the requests there are",
            self.me
        );
    }

    /// Issues requests that the driver, or a missing tag, pushed back earlier. No other request goes before them.
    fn issue_dispatch_list(&mut self, now: Instant, fx: &mut Effects) {
        let depth = if self.queue.is_scheduled() {
            u32::MAX
        } else {
            self.queue.depth()
        };
        while let Some(rq) = self.hw.as_mut().and_then(HwCtx::next_from_dispatch_list) {
            let hw = self.hw.as_mut().expect("popped from it");
            let last = hw.dispatch_list_is_empty();
            match hw.issue(rq, depth, last, now) {
                Outcome::Queued | Outcome::NeedsTag => {}
                Outcome::Ended { rq, status } => self.completed(rq, status, now, fx),
                Outcome::PushedBack(hold) => {
                    self.hold(hold, now);
                    break;
                }
            }
        }
        if let Some(hw) = self.hw.as_mut().filter(|hw| !hw.dispatch_list_is_empty()) {
            hw.driver.commit();
        }
    }

    /// Makes sure that this context runs again after a request was pushed back.
    fn hold(&mut self, hold: Hold, now: Instant) {
        let shard = self.shard();
        shard.events.pushed_back.add(1);
        // A completion of a request in flight here runs the context, but what is in flight may hang while the driver has
        // room again: so a timer runs it as well. If a shared tag is missing, this context is registered as waiting.
        if hold != Hold::Tag {
            let _ = self.queue.reactor(self.me).run.run_delayed((now + RERUN_DELAY).0);
        }
    }

    /// Runs the hardware context if it `must_run`, or if its run work was `taken`.
    fn run_work(&mut self, taken: bool, must_run: bool, now: Instant, fx: &mut Effects) {
        if taken || must_run {
            self.run_hctx(now, fx);
        }
        if taken && self.queue.reactor(self.me).run.finish() {
            // A run was asked for meanwhile: it is done in the next turn.
            fx.kicks.insert(self.me);
        }
    }

    /// One run of the hardware context: first the requests that were pushed back, then the elevator.
    fn run_hctx(&mut self, now: Instant, fx: &mut Effects) {
        let Some(entered) = self.queue.enter_to_issue(self.me) else {
            return;
        };
        self.shard().events.runs.add(1);
        self.issue_dispatch_list(now, fx);
        if self.queue.is_gated() && self.hw.as_ref().is_some_and(|hw| hw.dispatch.is_empty()) {
            #[cfg(feature = "baselines")]
            if self.dispatches_for_itself() {
                self.dispatch_for_itself(now, fx);
                return self.leave(entered);
            }
            self.dispatch_through_gate(now, fx);
        }
        self.leave(entered);
    }

    /// Issues flushes, stages waiting bios and flushes the plug, as far as possible now.
    fn advance(&mut self, now: Instant, fx: &mut Effects) {
        self.is_unfinished = false;
        for _ in 0..ADVANCES_MAX {
            let mut progress = self.issue_flushes(now, fx);
            progress |= self.sw.admit(&self.queue, fx);
            let staged = self.sw.plug.list.len();
            if staged > 0 {
                self.flush_plug(now, fx);
                progress |= self.sw.plug.list.len() < staged;
            }
            if !progress {
                self.is_unfinished = self.sw.awaits_turn();
                return;
            }
        }
        // For example a bio of very many parts at a driver that completes inline: this thread has other work.
        self.is_unfinished = true;
    }

    /// Runs the hardware contexts that may wait for a tag or depth that this batch freed.
    #[inline]
    fn rerun(&mut self, fx: &mut Effects) {
        let freed = self.hw.as_mut().map_or(0, HwCtx::take_freed);
        if freed > 0 {
            self.queue.rerun(freed, self.me, fx);
        }
    }

    /// Leaves the queue and publishes the count of issued requests.
    #[inline]
    fn leave(&mut self, entered: QueueRef) {
        if let Some(hw) = &self.hw {
            self.shard().events.issued.set(hw.issued);
        }
        self.queue.leave(self.me, entered);
    }

    #[inline]
    fn shard(&self) -> &crate::stat::Shard {
        &self.queue.reactor(self.me).shard
    }
}

/// Most plugs that one call fills and flushes before it returns to the reactor: 512 requests.
const ADVANCES_MAX: u32 = 16;
/// Delay until a context runs again whose driver lacks a resource that nobody announces.
const RERUN_DELAY: Nanos = Nanos::from_millis(3);
