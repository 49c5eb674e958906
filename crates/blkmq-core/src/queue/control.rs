//! The control operations on a running queue: freeze, quiesce, change of elevator, tunables and depth.

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use super::{Busy, Queue, shares};
use crate::group::GroupTree;
use crate::qos::share::Shares;
use crate::sched::{Elevator, ElevatorType, Setup, TunableError};

/// An elevator that is not yet in its queue, with the sizes that it was made for. After the exchange it
/// holds the former elevator, which is also large: drop it when the queue has thawed.
pub struct NextElevator {
    kind: &'static ElevatorType,
    elevator: Option<Box<dyn Elevator>>,
    shares: Shares,
    groups: GroupTree,
    /// Requests and disks.
    made_for: (usize, usize),
}

impl Queue {
    /// Lets no further request start. Started requests continue, and caps hold none of them back (they are
    /// charged, so the averages hold afterwards). Nests. Kick everybody, then wait until [`Queue::is_drained`].
    pub fn freeze_begin(&self) {
        self.usage.start_freeze();
        if self.is_throttled() {
            self.run_all();
        }
    }

    /// Says whether a frozen queue has no request under way.
    pub fn is_drained(&self) -> bool {
        self.usage.is_drained()
    }

    /// Says whether requests cannot start now: frozen or quiesced.
    pub fn is_frozen(&self) -> bool {
        self.usage.is_frozen()
    }

    /// Ends one freeze. Kick everybody afterwards: bios may wait.
    ///
    /// # Panics
    /// If the queue is not frozen.
    pub fn freeze_end(&self) {
        self.usage.end_freeze();
    }

    /// Stops issuing; completions continue. Nests. Kick everybody, then wait until [`Queue::is_quiesced`].
    pub fn quiesce_begin(&self) {
        // In this order: a queue that is frozen and not quiesced drains.
        self.issuing.start_freeze();
        self.usage.start_freeze();
    }

    /// Says whether, since [`Queue::quiesce_begin`], nothing is being issued.
    pub fn is_quiesced(&self) -> bool {
        self.usage.is_vacant() && self.issuing.is_vacant()
    }

    /// Ends one quiesce and queues a run of every context. Kick everybody afterwards.
    ///
    /// # Panics
    /// If the queue is not quiesced.
    pub fn quiesce_end(&self) {
        self.usage.end_freeze();
        self.issuing.end_freeze();
        self.run_all();
    }

    /// The queue's elevator.
    pub fn elevator(&self) -> &'static ElevatorType {
        *self.lock_elevator()
    }

    fn lock_elevator(&self) -> MutexGuard<'_, &'static ElevatorType> {
        // A single value, which is there even if a thread has panicked.
        self.elevator.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes an elevator for [`Queue::exchange_elevator`], before the queue freezes: its tables are large, and a
    /// frozen queue would wait for them.
    ///
    /// # Errors
    /// [`Busy`] if the gate is held at this moment.
    pub fn make_elevator(&self, kind: &'static ElevatorType) -> Result<NextElevator, Busy> {
        let state = self.gate.try_enter().ok_or(Busy)?;
        let groups = state.groups.clone();
        self.leave_gate(state);
        Ok(self.elevator_for(kind, groups))
    }

    fn elevator_for(&self, kind: &'static ElevatorType, groups: GroupTree) -> NextElevator {
        let made_for = (self.requests_max(), self.fitted_disks());
        NextElevator {
            kind,
            elevator: kind.build(&Setup {
                limits: &self.limits,
                requests_max: made_for.0,
                groups: &groups,
            }),
            shares: shares(self.tag_mode, kind, made_for.1, made_for.0),
            groups,
            made_for,
        }
    }

    /// Makes an elevator and puts it into a frozen, drained queue.
    ///
    /// # Errors
    /// As for [`Queue::exchange_elevator`].
    pub fn set_elevator(&self, kind: &'static ElevatorType) -> Result<(), Busy> {
        self.exchange_elevator(&mut self.make_elevator(kind)?)
    }

    /// Replaces the elevator of a frozen, drained queue.
    ///
    /// # Errors
    /// [`Busy`] if the queue is not frozen and drained, or the gate is held at this moment.
    pub fn exchange_elevator(&self, next: &mut NextElevator) -> Result<(), Busy> {
        if !self.usage.is_frozen() || !self.is_drained() {
            return Err(Busy);
        }
        let Some(mut state) = self.gate.try_enter() else {
            return Err(Busy);
        };
        // The last ends may still be in the lists of reports.
        state.fold_reports(&self.stats);
        assert!(
            state.is_empty(),
            "queue {}: requests in the gate of a drained queue",
            self.name
        );
        let is_as_it_was = next.made_for == (self.requests_max(), self.fitted_disks());
        if !is_as_it_was || !next.groups.iter().eq(state.groups.iter()) {
            *next = self.elevator_for(next.kind, state.groups.clone());
        }
        std::mem::swap(&mut state.elevator, &mut next.elevator);
        state.knows_groups = next.kind.knows_groups;
        state.depth_told = 0;
        std::mem::swap(&mut state.shares, &mut next.shares);
        // Drained: no reactor is about to enter the gate, so caps that were removed can be forgotten now.
        self.path.set(next.kind, &state.groups);
        *self.lock_elevator() = next.kind;
        // Nobody enters the gate for a queue without an elevator, so its limit is noted here.
        let elevator = state.elevator.as_deref();
        self.note_elevator_limit(elevator.and_then(|elevator| elevator.depth_limit()));
        self.leave_gate(state);
        Ok(())
    }

    /// Lists the elevator's tunables.
    ///
    /// # Errors
    /// [`Busy`] if the gate is held at this moment.
    pub fn tunables(&self) -> Result<Vec<(&'static str, u64)>, Busy> {
        let state = self.gate.try_enter().ok_or(Busy)?;
        let tunables = state
            .elevator
            .as_ref()
            .map_or_else(Vec::new, |elevator| elevator.tunables());
        self.leave_gate(state);
        Ok(tunables)
    }

    /// Sets a tunable of the elevator.
    ///
    /// # Errors
    /// [`Busy`] if the gate is held at this moment; the inner error is the elevator's.
    pub fn set_tunable(&self, name: &str, value: u64) -> Result<Result<(), TunableError>, Busy> {
        let mut state = self.gate.try_enter().ok_or(Busy)?;
        let result = match &mut state.elevator {
            Some(elevator) => elevator.set_tunable(name, value),
            None => Err(TunableError::unknown(self.elevator().name, name)),
        };
        self.leave_gate(state);
        Ok(result)
    }

    /// Says whether only the elevator's own decision holds requests back until one in flight has ended; false
    /// if the gate is held at this moment. For tests of work conservation.
    pub fn keeps_back(&self) -> bool {
        let Some(state) = self.gate.try_enter() else {
            return false;
        };
        let elevator = state.elevator.as_ref();
        let waits = elevator.is_some_and(|elevator| elevator.keeps_back()) || state.targets.keeps_back();
        let keeps_back = waits && state.is_all_taken_in();
        self.leave_gate(state);
        keeps_back
    }

    /// Bounds the requests in flight, with immediate effect: per context without elevator, in total with one.
    ///
    /// # Errors
    /// The largest possible depth, if `depth` is 0 or larger than that.
    pub fn set_depth(&self, depth: u32) -> Result<(), u32> {
        let max = self.tag_mode.depth();
        if !(1..=max).contains(&depth) {
            return Err(max);
        }
        self.depth.store(depth, Ordering::Relaxed);
        for reactor in &self.entries[..self.hctxs.into()] {
            let _ = reactor.run.run();
        }
        Ok(())
    }
}
