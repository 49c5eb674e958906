//! Decides the way of a request through one reactor: from the plug straight to the driver, or through the gate and the
//! elevator; and the way back. One `LocalQueue` is one reactor's side of one queue; it joins `sw_ctx`, `gate` and `hw_ctx`.
//!
//! ```text
//!  submit ─► sw_ctx ─► unplug ─┬─ issue_direct ───────────────────────► hw_ctx ─► driver
//!                              └─ insert list ─► GATE ─► elevator ─────► hw_ctx ─► driver
//!  Effects::ended ◄─ sw_ctx ◄─ (mail to the owner) ◄─ end_request ◄─ completed ◄─ reap, expire ◄─ driver
//! ```

mod complete;
mod direct;
#[cfg(feature = "baselines")]
mod every_context;
mod flushes;
mod mail;
mod through_gate;

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blkmq_sync::mpsc::Receiver;
use blkmq_sync::spsc::Producer;

use crate::bio::{Bio, Passed, Status};
use crate::driver::{DisksError, Done, HctxDriver};
use crate::gate::Report;
use crate::hw_ctx::{Hold, HwCtx, Outcome};
use crate::ids::{HctxId, ReactorId, ReactorSet};
use crate::plug;
use crate::poll::{Verdict, Wait, Waited, WakeLatency};
use crate::queue::{Effects, Mail, Queue, QueueHandle, QueueRef, UNATTACHED};
use crate::request::Request;
use crate::stat::StatsMode;
use crate::sw_ctx::SwCtx;
use crate::tag::Tags;
use crate::time::{Instant, Nanos};
use crate::trace::Tracer;

/// One reactor's side of one queue: its software context and the hardware context that it owns.
///
/// Made and used on the reactor's own thread. All calls return at once.
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
    /// When the elevator wants to be asked again, if this reactor was the last to hear.
    sched_timer: Option<Instant>,
    /// `advance` stopped before all was done that needs no event.
    is_unfinished: bool,
    /// When it ran last.
    ran_at: Instant,
    /// Completions being taken, and requests that ended inside the gate: kept for their memory.
    done: Vec<Done>,
    /// Requests of this reactor's that have ended together, likewise.
    home: Vec<Box<Request>>,
    /// Requests without caps among others of a plug, on a queue without elevator.
    direct: Vec<Box<Request>>,
    ended_inside: Vec<(Box<Request>, Status)>,
    /// By reactor: what goes to it when this call ends, at the latest; and to whom something goes.
    outboxes: Box<[Vec<Mail>]>,
    outgoing: ReactorSet,
    /// Who is told what happens to requests here; the hardware context has it, too.
    tracer: Option<Tracer>,
}

impl QueueHandle {
    /// Says whether the reactor owns a hardware context, and so needs a driver.
    pub fn owns_hctx(&self) -> bool {
        self.queue.hctx_owner(self.id) == self.id
    }

    /// The queue.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// The reactor whose handle it is.
    pub fn id(&self) -> ReactorId {
        self.id
    }

    /// Takes the handle, on the reactor's own thread.
    ///
    /// # Panics
    /// Unless a driver is given exactly if the reactor owns a hardware context.
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
            // Who was attached before has counted too.
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
            home: Vec::with_capacity(queue.requests_per_reactor() as usize),
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
    /// Takes a bio in. It is staged until [`LocalQueue::unplug`], or until the plug is full.
    ///
    /// A bio that the disk refuses (range, read-only, unsupported) ends at once, with its status, in `fx.ended`.
    ///
    /// # Errors
    /// Gives the bio back if as many bios wait as the queue has requests per reactor, or, if there is not much room left, too
    /// many of its group: submit it after another's end.
    // A call of its own wherever it is used: what is inlined into large loops runs out of registers.
    #[inline(never)]
    pub fn submit(&mut self, bio: Bio, now: Instant, fx: &mut Effects) -> Result<(), Bio> {
        self.sw.submit(&self.queue, bio, fx)?;
        if self.sw.plug.is_due() {
            self.unplug(now, fx);
        }
        Ok(())
    }

    /// Takes in a mapped disk's bio that goes as it is to a place on one of this queue's disks
    /// ([`crate::mapper::stack::Stack::redirect`]).
    ///
    /// # Errors
    /// As for [`LocalQueue::submit`]; the bio has the place in it then.
    #[inline(never)]
    pub fn submit_passed(&mut self, bio: Bio, to: Passed, now: Instant, fx: &mut Effects) -> Result<(), Bio> {
        self.sw.submit_passed(&self.queue, bio, to, fx)?;
        if self.sw.plug.is_due() {
            self.unplug(now, fx);
        }
        Ok(())
    }

    /// Issues, or inserts into the elevator, what is staged. Call it after a batch of submissions.
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

    /// Does what has become due: takes mail and completions in, runs the hardware context, looks after timers.
    /// Call it once a round, and whenever the reactor was kicked or [`LocalQueue::next_wakeup`] has come.
    #[inline]
    pub fn run(&mut self, now: Instant, fx: &mut Effects) {
        self.ran_at = now;
        let mut must_run = self.take_mail(fx);
        self.sw.keep_swept(&self.queue);
        if let Some(hw) = &mut self.hw {
            hw.poll_if(self.queue.is_polled());
            // Whoever asks for a run of a restless driver may have left something for its `reap`: what is taken before that is
            // answered by it, and what comes later has a round of its own.
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

    /// Is told that all bios that the latest [`LocalQueue::run`] ended are with who submitted them, and what these wanted in
    /// return is submitted. Who never says so is taken for prompt.
    #[inline]
    pub fn answered(&self) {
        if self.queue.is_scheduled() {
            // Relaxed: a time by itself; who reads it acts on it a little later or sooner.
            let answered = &self.queue.reactor(self.me).answered;
            answered.store(self.ran_at.0, Ordering::Relaxed);
        }
    }

    /// Makes room for as many disks as the queue's tables have been made for; the queue is frozen and drained
    /// ([`Queue::fit_disks`]).
    pub fn fit_disks(&mut self) {
        let disks = self.queue.fitted_disks();
        self.sw.fit_disks(disks);
        if let Some(hw) = &mut self.hw {
            hw.fit_disks(disks, self.queue.requests_max());
        }
    }

    /// Looks again which disks there are, as the driver does.
    ///
    /// # Errors
    /// What the driver says.
    pub fn refresh_disks(&mut self) -> Result<(), DisksError> {
        self.sw.refresh_disks(&self.queue);
        if let Some(tracer) = &self.tracer {
            tracer.renumbered();
        }
        self.hw.as_mut().map_or(Ok(()), HwCtx::refresh_disks)
    }

    /// Has somebody told from now on what happens to requests on this reactor, or nobody.
    pub fn set_tracer(&mut self, tracer: Option<Tracer>) {
        if let Some(hw) = &mut self.hw {
            hw.tracer.clone_from(&tracer);
        }
        if let Some(tracer) = &tracer {
            tracer.renumbered();
        }
        self.tracer = tracer;
    }

    /// Says when [`LocalQueue::run`] must be called although nothing arrives; a time in the past means at once.
    pub fn next_wakeup(&self) -> Option<Instant> {
        let run = &self.queue.reactor(self.me).run;
        if self.has_mail() {
            return Some(Instant(0));
        }
        let hw = self.hw.as_ref()?;
        [run.deadline().map(Instant), hw.next_event(), self.sched_timer]
            .into_iter()
            .flatten()
            .min()
    }

    /// Says whether there is something to do here that needs no event: to be asked once more after announcing sleep.
    #[inline]
    pub fn has_mail(&self) -> bool {
        let run = &self.queue.reactor(self.me).run;
        !self.mailbox.is_empty()
            || (self.is_unfinished && !self.sw.is_idle())
            || (self.hw.is_some() && run.is_wanted() && !run.is_stopped())
            // Held back by a freeze that has ended meanwhile: its kick may have come before the announcement of sleep.
            || (self.sw.has_work_to_start() && !self.queue.is_frozen())
    }

    /// Says whether nothing is under way here and nothing becomes due: until something is submitted, or the reactor is kicked,
    /// [`LocalQueue::run`] would find nothing to do.
    pub fn is_quiet(&self) -> bool {
        let hw_is_quiet =
            |hw: &HwCtx| hw.in_flight == 0 && !hw.needs_idle_poll && hw.dispatch_list_is_empty();
        self.sw.is_at_rest() && self.hw.as_ref().is_none_or(hw_is_quiet) && self.next_wakeup().is_none()
    }

    /// Says whether something is in flight whose end is found by [`LocalQueue::run`] alone: the driver announces nothing.
    #[inline]
    pub fn must_poll(&self) -> bool {
        self.hw
            .as_ref()
            .is_some_and(|hw| hw.in_flight > 0 && hw.is_polled())
    }

    /// Decides how the reactor is to wait for what is in flight at its hardware context. `host` is what is known of its sleeping.
    pub fn verdict(&mut self, wait: Wait, host: &mut WakeLatency, now: Instant) -> Verdict {
        let policy = self.queue.poll_policy();
        let hw = self.hw.as_mut();
        hw.map_or(Verdict::Block, |hw| hw.verdict(wait, policy, host, now))
    }

    /// Is told how the reactor spent the time until now, before [`LocalQueue::run`] is called.
    pub fn waited(&mut self, how: Waited, until: Instant) {
        if let Some(hw) = &mut self.hw {
            hw.waited(how, until);
        }
    }

    /// How many bios of this reactor's submitters have not ended.
    #[inline]
    pub fn outstanding(&self) -> u32 {
        self.sw.outstanding
    }

    /// How many requests this reactor's driver has.
    #[inline]
    pub fn hctx_in_flight(&self) -> u32 {
        self.hw.as_ref().map_or(0, |hw| hw.in_flight)
    }

    /// Says whether an end of something of this reactor's may come at any moment: bios or requests are under way, and the drive has
    /// not been silent for a while with all that it was given. To be asked at each wait.
    #[inline]
    pub fn expects_end(&mut self, now: Instant) -> bool {
        let is_still = self.hw.as_mut().is_some_and(|hw| hw.is_still(now));
        !is_still && (self.outstanding() > 0 || self.hctx_in_flight() > 0)
    }

    /// How often this reactor entered the gate.
    pub fn gate_entered(&self) -> u64 {
        self.shard().events.gate_entered.get()
    }

    /// The shared side.
    pub fn queue(&self) -> &Arc<Queue> {
        &self.queue
    }

    /// Gives the handle back, for another thread to take.
    ///
    /// # Errors
    /// Gives everything back if something of this reactor is still under way.
    pub fn detach(self) -> Result<QueueHandle, Box<Self>> {
        let hw_idle = self
            .hw
            .as_ref()
            .is_none_or(|hw| hw.in_flight == 0 && hw.dispatch_list_is_empty());
        if !self.sw.is_at_rest() || !hw_idle || !self.mailbox.is_empty() {
            return Err(Box::new(self));
        }
        // Release: as at the end of a grace period: nothing of anybody's is here.
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

    /// Asserts what must always hold between calls. Costly; the simulator calls it after every event.
    ///
    /// # Panics
    /// If it does not hold.
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

    /// Sends what is staged on its way, if the queue lets requests start now.
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

    /// Says whether a request meets an elevator or a cap.
    fn goes_through_gate(&self, rq: &Request) -> bool {
        self.queue.is_scheduled() || self.queue.is_gated() && self.queue.group_states.is_capped(rq.group())
    }

    /// The scheduled path: publish on the own insert list, then try the gate. Without an elevator it is that of requests
    /// with caps alone; the others go first, and directly.
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

    /// Goes through the gate after something was published, or has somebody do it who can.
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

    /// Issues what the driver, or a missing tag, pushed back earlier. Nothing else goes before it.
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

    /// Makes sure that somebody runs this context again after a request was pushed back.
    fn hold(&mut self, hold: Hold, now: Instant) {
        let hw = self.hw.as_ref().expect("a request was pushed back by it");
        let shard = self.shard();
        shard.events.pushed_back.add(1);
        // With something in flight here, its completion runs the context; a shared tag that is missing has this context
        // registered as waiting. Else only time helps.
        if hw.in_flight == 0 && hold != Hold::Tag {
            let _ = self.queue.reactor(self.me).run.run_delayed((now + RERUN_DELAY).0);
        }
    }

    /// Runs the hardware context if it has to be, or if somebody asked for it: then its run work is `taken`.
    fn run_work(&mut self, taken: bool, must_run: bool, now: Instant, fx: &mut Effects) {
        if taken || must_run {
            self.run_hctx(now, fx);
        }
        if taken && self.queue.reactor(self.me).run.finish() {
            // Asked for again meanwhile: in the next round.
            fx.kicks.insert(self.me);
        }
    }

    /// One run of the hardware context: what was pushed back first, then the elevator.
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

    /// Goes on with what waits in the software context, as far as it can: flushes, waiting bios, the plug.
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
                return;
            }
        }
        // A bio of a great many parts, say, at a driver that completes inline: others of this thread are due.
        self.is_unfinished = true;
    }

    /// Runs the hardware contexts that may wait for what was freed in this batch.
    #[inline]
    fn rerun(&mut self, fx: &mut Effects) {
        let freed = self.hw.as_mut().map_or(0, HwCtx::take_freed);
        if freed > 0 {
            self.queue.rerun(freed, self.me, fx);
        }
    }

    /// Leaves the queue, on which requests may have been issued.
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

/// Plugs filled and flushed in one call, before the reactor is due: 512 requests.
const ADVANCES_MAX: u32 = 16;
/// When a context runs again whose driver lacks a resource that nobody announces.
const RERUN_DELAY: Nanos = Nanos::from_millis(3);
