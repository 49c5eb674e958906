//! The control thread of a history: it freezes and quiesces the running queue, switches the elevator,
//! changes the depth, or changes groups (`tenants`). `world` calls it at the times that it returns.
//!
//! ```text
//!   Rest ─► begin ─► Waiting until it is so ─► (switch) ─► Holding ─► end ─► Rest
//! ```

use blkmq_core::queue::Queue;
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::{Instant, Nanos};

use crate::history::Fact;
use crate::rng::Rng;
use crate::setup;
use crate::stage::Stage;
use crate::tenants::Tenants;

/// The control thread.
#[derive(Debug)]
pub(crate) struct Control {
    spec: setup::Control,
    depth_max: u32,
    rng: Rng,
    state: State,
    /// How many freezes and quiesces are in force.
    nested: u32,
    /// It pretends to quiesce the queue: for a test of the oracle.
    pretends: bool,
    waiting_since: Instant,
    tenants: Tenants,
    pub(crate) actions: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Rest,
    Draining {
        switch_to: Option<&'static ElevatorType>,
    },
    Quieting,
    Frozen,
    Quiet,
}

/// What the world does after a step of the control thread.
pub(crate) struct Next {
    /// When the next step is, if there is one.
    pub(crate) at: Option<Instant>,
    /// All reactors must be woken.
    pub(crate) kick: bool,
}

impl Control {
    pub(crate) fn new(spec: setup::Control, depth_max: u32, pretends: bool, rng: Rng) -> Self {
        Self {
            spec,
            depth_max,
            rng,
            state: State::Rest,
            nested: 0,
            pretends,
            waiting_since: Instant(0),
            tenants: Tenants::default(),
            actions: 0,
        }
    }

    /// Returns when the next action is.
    pub(crate) fn next_action(&mut self, now: Instant) -> Option<Instant> {
        let (least, most) = self.spec.every?;
        Some(now + Nanos(self.rng.from_to(least.0, most.0)))
    }

    /// Says whether it stops the queue, or is about to.
    pub(crate) fn is_holding(&self) -> bool {
        self.state != State::Rest
    }

    /// Does the next step. With `last` it begins nothing new.
    pub(crate) fn step(&mut self, queue: &Queue, stage: &Stage, last: bool) -> Next {
        let now = stage.now.get();
        match self.state {
            State::Rest if last => Next {
                at: None,
                kick: false,
            },
            State::Rest => self.begin(queue, stage),
            State::Draining { switch_to } if queue.is_drained() => self.drained(queue, stage, switch_to),
            State::Quieting if self.pretends || queue.is_quiesced() => self.quiesced(stage),
            State::Draining { .. } | State::Quieting => self.wait(now),
            State::Frozen | State::Quiet => self.end(queue, stage),
        }
    }

    fn begin(&mut self, queue: &Queue, stage: &Stage) -> Next {
        self.actions += 1;
        self.waiting_since = stage.now.get();
        let spec = &self.spec;
        match self
            .rng
            .weighted(&[spec.freeze, spec.quiesce, spec.switch, spec.depth, spec.groups])
        {
            0 => self.freeze(queue, stage, None),
            1 => self.quiesce(queue, stage),
            2 => {
                let to = self.rng.pick(&sched::BUILT_IN);
                self.freeze(queue, stage, Some(to))
            }
            3 => self.set_depth(queue, stage),
            _ => self.change_group(queue, stage),
        }
    }

    fn freeze(&mut self, queue: &Queue, stage: &Stage, switch_to: Option<&'static ElevatorType>) -> Next {
        self.nested = self.rng.from_to(1, 2) as u32;
        (0..self.nested).for_each(|_| queue.freeze_begin());
        stage.note(Fact::Freeze { begin: true });
        self.state = State::Draining { switch_to };
        self.soon(stage.now.get(), true)
    }

    fn quiesce(&mut self, queue: &Queue, stage: &Stage) -> Next {
        self.nested = self.rng.from_to(1, 2) as u32;
        if !self.pretends {
            (0..self.nested).for_each(|_| queue.quiesce_begin());
        }
        stage.note(Fact::Quiesce { begin: true });
        self.state = State::Quieting;
        self.soon(stage.now.get(), true)
    }

    fn set_depth(&mut self, queue: &Queue, stage: &Stage) -> Next {
        let to = self.rng.from_to(1, u64::from(self.depth_max)) as u32;
        if let Err(max) = queue.set_depth(to) {
            stage
                .oracle
                .borrow_mut()
                .fail(format!("depth {to} refused, the maximum is {max}"));
        }
        stage.oracle.borrow_mut().set_depth(CONTROLLED, to);
        stage.note(Fact::Depth { to });
        Next {
            at: self.next_action(stage.now.get()),
            kick: true,
        }
    }

    fn change_group(&mut self, queue: &Queue, stage: &Stage) -> Next {
        self.tenants.change(queue, stage, &mut self.rng);
        Next {
            at: self.next_action(stage.now.get()),
            kick: true,
        }
    }

    fn drained(&mut self, queue: &Queue, stage: &Stage, switch_to: Option<&'static ElevatorType>) -> Next {
        let mut oracle = stage.oracle.borrow_mut();
        let in_flight = oracle.in_flight_of(CONTROLLED);
        if in_flight > 0 {
            oracle.fail(format!("drained with {in_flight} requests at the drive"));
        }
        oracle.close(CONTROLLED, Some("frozen and drained"));
        drop(oracle);
        stage.note(Fact::Still { frozen: true });
        if let Some(kind) = switch_to {
            if queue.set_elevator(kind).is_err() {
                return self.soon(stage.now.get(), false);
            }
            stage
                .oracle
                .borrow_mut()
                .set_scheduled(CONTROLLED, kind != sched::NONE);
            stage.note(Fact::Switch { to: kind });
        }
        self.state = State::Frozen;
        self.later(stage.now.get())
    }

    fn quiesced(&mut self, stage: &Stage) -> Next {
        stage.oracle.borrow_mut().close(CONTROLLED, Some("quiesced"));
        stage.note(Fact::Still { frozen: false });
        self.state = State::Quiet;
        self.later(stage.now.get())
    }

    /// Ends one nested freeze or quiesce; the queue may continue after the last.
    fn end(&mut self, queue: &Queue, stage: &Stage) -> Next {
        self.nested -= 1;
        if self.nested == 0 {
            stage.oracle.borrow_mut().close(CONTROLLED, None);
        }
        if self.state == State::Frozen {
            queue.freeze_end();
            stage.note(Fact::Freeze { begin: false });
        } else {
            if !self.pretends {
                queue.quiesce_end();
            }
            stage.note(Fact::Quiesce { begin: false });
        }
        if self.nested > 0 {
            return self.soon(stage.now.get(), false);
        }
        self.state = State::Rest;
        Next {
            at: self.next_action(stage.now.get()),
            kick: true,
        }
    }

    fn wait(&mut self, now: Instant) -> Next {
        self.soon(now, false)
    }

    /// Returns since when it has been waiting for the queue to stop.
    pub(crate) fn waits_since(&self) -> Option<Instant> {
        matches!(self.state, State::Draining { .. } | State::Quieting).then_some(self.waiting_since)
    }

    fn soon(&mut self, now: Instant, kick: bool) -> Next {
        let at = Some(now + Nanos(self.rng.from_to(1_000, 30_000)));
        Next { at, kick }
    }

    fn later(&mut self, now: Instant) -> Next {
        let at = Some(now + Nanos(self.rng.from_to(1_000, 2_000_000)));
        Next { at, kick: false }
    }
}

/// The index of the queue that it controls.
pub(crate) const CONTROLLED: usize = 0;
