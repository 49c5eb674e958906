//! A modelled reactor: each turn is one step of the loop that the host's reactors run. `world` gives it
//! its turns; the core's `LocalQueue` does the work.
//!
//! ```text
//!   Run ─► Submit (some bios a step) ─► Unplug ─┬─ did something ──► Run
//!    ▲                                          └─ Announce ─► Check ─┬─ found nothing ─► Asleep
//!    ├──────────────────────────── found something ───────────────────┘                     │
//!    └────────────────────────────── kick, interrupt, timer, client ────────────────────────┘
//! ```
//! An attached thread sometimes goes Away instead of announcing, and notices nothing until it is back.
//!
//! A kick before the announcement is dropped, as by the host's wake flag: the check must find the work.

use blkmq_core::bio::Status;
use blkmq_core::group::ROOT;
use blkmq_core::ids::ReactorId;
use blkmq_core::local::LocalQueue;
use blkmq_core::mapper::stack::Stack;
use blkmq_core::queue::Effects;
use blkmq_core::time::Instant;

use crate::cpu;
use crate::history::Fact;
use crate::rng::Rng;
use crate::setup::Sabotage;
use crate::stage::Stage;
use crate::workload::Client;

/// Where a reactor is in its loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Run,
    Submit,
    Unplug,
    Announce,
    Check,
    Asleep,
    /// Not polling, as an attached thread may stop to.
    Away,
}

/// One reactor on its CPU.
pub(crate) struct Reactor {
    pub(crate) id: ReactorId,
    /// Its side of each queue.
    locals: Vec<LocalQueue>,
    /// What splits its client's bios for them, if the client uses mapped disks.
    stack: Option<Stack>,
    pub(crate) client: Client,
    pub(crate) phase: Phase,
    /// Steps and timers that were planned in an earlier epoch are void.
    pub(crate) epoch: u64,
    /// It has been woken since it announced that it would sleep.
    pub(crate) notified: bool,
    /// Its ring has an event: an interrupt of the drive, or its client.
    pub(crate) ring: bool,
    /// Its timer, while it sleeps.
    pub(crate) timer: Option<Instant>,
    /// A pause of the client has been scheduled.
    pub(crate) pausing: bool,
    /// It has done something since it last checked whether to sleep.
    worked: bool,
    fx: Effects,
}

/// What the world has to do after a step.
pub(crate) struct Outcome {
    pub(crate) done: cpu::Done,
    pub(crate) kicks: Vec<ReactorId>,
    /// It sleeps now, until then.
    pub(crate) sleeps: Option<Option<Instant>>,
}

impl Reactor {
    pub(crate) fn new(id: ReactorId, locals: Vec<LocalQueue>, stack: Option<Stack>, client: Client) -> Self {
        Self {
            id,
            locals,
            stack,
            client,
            phase: Phase::Run,
            epoch: 0,
            notified: false,
            ring: false,
            timer: None,
            pausing: false,
            worked: false,
            fx: Effects::default(),
        }
    }

    /// Says whether it will look for work without being woken.
    pub(crate) fn is_awake(&self) -> bool {
        !matches!(self.phase, Phase::Asleep | Phase::Away)
    }

    /// Says whether a kick would reach it.
    pub(crate) fn hears(&self) -> bool {
        matches!(self.phase, Phase::Check | Phase::Asleep)
    }

    /// Returns how many bios it has under way, as the core counts them.
    pub(crate) fn outstanding(&self) -> u32 {
        let in_stack = self.stack.as_ref().map_or(0, Stack::outstanding);
        in_stack as u32 + self.locals.iter().map(LocalQueue::outstanding).sum::<u32>()
    }

    /// Asserts the invariants of the core between steps.
    pub(crate) fn check_invariants(&self) {
        self.locals.iter().for_each(LocalQueue::check_invariants);
        self.stack.iter().for_each(Stack::check_invariants);
    }

    /// Does one step.
    pub(crate) fn step(&mut self, stage: &Stage, rng: &mut Rng, sabotage: Option<Sabotage>) -> Outcome {
        let now = stage.now.get();
        let mut outcome = Outcome {
            done: cpu::Done::default(),
            kicks: Vec::new(),
            sleeps: None,
        };
        match self.phase {
            Phase::Run => {
                self.ring = false;
                self.locals
                    .iter_mut()
                    .for_each(|local| local.run(now, &mut self.fx));
                self.complete_parts(now);
                self.phase = Phase::Submit;
            }
            Phase::Submit => {
                outcome.done.submitted = self.submit_some(stage, rng);
                if !self.client.wants() || outcome.done.submitted == 0 {
                    self.phase = Phase::Unplug;
                }
            }
            Phase::Unplug => {
                self.locals
                    .iter_mut()
                    .for_each(|local| local.unplug(now, &mut self.fx));
                self.complete_parts(now);
                self.locals.iter().for_each(LocalQueue::answered);
                self.phase = Phase::Announce;
            }
            Phase::Announce => {
                self.notified = false;
                self.phase = Phase::Check;
            }
            Phase::Check => outcome.sleeps = self.check(stage),
            Phase::Asleep | Phase::Away => {}
        }
        self.take_effects(stage, sabotage, &mut outcome);
        if self.phase == Phase::Announce && std::mem::take(&mut self.worked) {
            self.phase = Phase::Run;
        }
        outcome
    }

    /// The last check before sleeping. Returns until when it sleeps, if it does.
    fn check(&mut self, stage: &Stage) -> Option<Option<Instant>> {
        let wakeup = self.locals.iter().filter_map(LocalQueue::next_wakeup).min();
        let due = wakeup.is_some_and(|at| at <= stage.now.get());
        let has_mail = self.locals.iter().any(LocalQueue::has_mail);
        if self.notified || self.ring || due || has_mail || self.client.wants() {
            self.phase = Phase::Run;
            return None;
        }
        self.phase = Phase::Asleep;
        self.timer = wakeup;
        stage.note(Fact::Sleep {
            reactor: self.id,
            until: wakeup.map(|at| at.0),
        });
        Some(wakeup)
    }

    /// Submits a few bios; returns how many.
    fn submit_some(&mut self, stage: &Stage, rng: &mut Rng) -> u64 {
        let mut count = 0;
        for _ in 0..rng.from_to(1, 16) {
            if !self.client.wants() {
                break;
            }
            let token = stage.tokens.get() + 1;
            stage.tokens.set(token);
            let bio = self.client.next_bio(u32::from(self.id.0), token);
            stage.note(Fact::Submit {
                reactor: self.id,
                token,
                op: bio.op,
                flags: bio.flags,
                disk: bio.disk,
                offset: bio.offset,
                len: bio.len,
            });
            count += 1;
            if !self.submit(bio, stage) {
                break;
            }
        }
        count
    }

    /// Submits one bio. Returns whether the core took it.
    fn submit(&mut self, mut bio: blkmq_core::bio::Bio, stage: &Stage) -> bool {
        if !stage.groups.borrow().contains(&bio.group) {
            bio.group = ROOT;
        }
        let token = bio.cookie;
        stage.oracle.borrow_mut().submit(self.id, &bio);
        self.worked = true;
        let now = stage.now.get();
        let submitted = match &mut self.stack {
            Some(stack) => stack.submit(bio, &mut self.locals, now, &mut self.fx),
            None => self.locals[0].submit(bio, now, &mut self.fx),
        };
        let Err(bio) = submitted else {
            return true;
        };
        stage.note(Fact::Refused {
            reactor: self.id,
            token,
        });
        let mut oracle = stage.oracle.borrow_mut();
        oracle.refused(token);
        if self.client.under_way() == 1 && self.fx.ended.is_empty() {
            oracle.fail(format!(
                "reactor {}: bio {token} refused with nothing under way",
                self.id
            ));
        }
        drop(oracle);
        self.client.refused(bio);
        false
    }

    /// Delivers the ends of parts to the bios of mapped disks, as the host's reactors do.
    fn complete_parts(&mut self, now: Instant) {
        if let Some(stack) = &mut self.stack
            && stack.is_due(&self.fx)
        {
            self.worked |= stack.complete_parts(&mut self.locals, now, &mut self.fx);
        }
    }

    fn take_effects(&mut self, stage: &Stage, sabotage: Option<Sabotage>, outcome: &mut Outcome) {
        if let Some(stack) = &mut self.stack
            && stack.is_due(&self.fx)
        {
            // A submission may have filled a plug, and a driver may have completed some of it at
            // once.
            stack.restore_passed(&mut self.fx);
        }
        let mut ended = std::mem::take(&mut self.fx.ended);
        let mut any = false;
        if sabotage == Some(Sabotage::EndsBeforeLastPart) {
            ended.extend(stage.oracle.borrow().half_done(self.id));
        }
        for mut bio in ended.drain(..) {
            any = true;
            match sabotage {
                Some(Sabotage::LosesError) => bio.status = Status::Ok,
                Some(Sabotage::EndsWithAnotherError) => {
                    let other = stage.oracle.borrow_mut().another_error(&bio);
                    bio.status = other.unwrap_or(bio.status);
                }
                _ => {}
            }
            outcome.done.ended += 1;
            stage.note(Fact::End {
                reactor: self.id,
                token: bio.cookie,
                status: bio.status,
            });
            if sabotage == Some(Sabotage::LosesEnd) && bio.cookie % 20 == 7 {
                continue;
            }
            stage.oracle.borrow_mut().end(self.id, &bio);
            if sabotage == Some(Sabotage::RepeatsEnd) && bio.cookie % 20 == 7 {
                stage.oracle.borrow_mut().end(self.id, &bio);
            }
            self.client.ended();
        }
        self.fx.ended = ended;
        self.worked |= any;
        if any && let Some(bio) = self.client.retry() {
            self.submit(bio, stage);
        }
        while let Some(to) = self.fx.kicks.pop() {
            if to == self.id {
                // It should run again, so it does one more turn before it sleeps.
                self.worked = true;
            } else {
                outcome.kicks.push(to);
            }
        }
        outcome.done.kicks = outcome.kicks.len() as u64;
        outcome.done.driver = stage.take_work();
    }
}
