//! Changes to the tenant tree of a running queue. Each change is made as a whole, inside the gate, and
//! reported to the elevator; the entry of a removed group becomes free when no request can carry its
//! number.
//!
//! A removed group's entry is reused only when no bio and no request carries its number. Nothing counts them
//! for that: each reactor owns a fixed number of requests, and once each of them has been free since the
//! reactor noted the removal, none carries the number (`sw_ctx`, a *grace period*).

use super::{Caps, Debts, GroupError};
use crate::gate::GateState;
use crate::ids::GroupId;
use crate::queue::{Busy, Queue};
use crate::time::{Instant, Nanos};

/// The result of a change of the tree, unless the gate is in use at this moment.
pub type Change<T> = Result<Result<T, GroupError>, Busy>;

/// The tenant tree. Callable on any thread; after a change, kick all reactors.
impl Queue {
    /// Adds a group. Its number may have been that of a retired group.
    ///
    /// # Errors
    /// [`Busy`] if the gate is held at this moment; inside, the reason why the group cannot be added.
    pub fn create_group(&self, parent: GroupId, weight: u16) -> Change<GroupId> {
        self.change_groups(|state| {
            let id = state.groups.create(parent, weight)?;
            state.throttle.retime(&state.groups);
            state.notify_elevator(id);
            Ok(id)
        })
    }

    /// Changes a group's weight.
    ///
    /// # Errors
    /// As [`Queue::create_group`].
    pub fn set_group_weight(&self, id: GroupId, weight: u16) -> Change<()> {
        self.change_groups(|state| {
            state.groups.set_weight(id, weight)?;
            state.notify_elevator(id);
            Ok(())
        })
    }

    /// Makes a group, with all groups below it, part of another.
    ///
    /// # Errors
    /// As [`Queue::create_group`].
    pub fn move_group(&self, id: GroupId, parent: GroupId) -> Change<()> {
        self.change_groups(|state| {
            state.groups.move_to(id, parent)?;
            state.throttle.retime(&state.groups);
            state.notify_elevator(id);
            Ok(())
        })
    }

    /// Sets the time that nine of ten of a group's requests should take at most; groups without a target are
    /// held back while it is missed.
    ///
    /// # Errors
    /// As [`Queue::create_group`].
    pub fn set_group_latency_target(&self, id: GroupId, target: Option<Nanos>) -> Change<()> {
        self.change_groups(|state| {
            state.groups.set_latency_target(id, target)?;
            state.notify_elevator(id);
            Ok(())
        })
    }

    /// Caps what a group and all groups below it take together; waiting requests get new times. Debts are
    /// kept: what was taken under the old caps is paid at the new rate.
    ///
    /// # Errors
    /// As [`Queue::create_group`].
    pub fn set_group_caps(&self, id: GroupId, caps: Caps, now: Instant) -> Change<()> {
        self.change_groups(|state| {
            caps.check(self.limits())?;
            state.groups.set_caps(id, caps)?;
            state.throttle.set_caps(id, caps, now);
            state.throttle.retime(&state.groups);
            if !caps.is_none() {
                self.throttle_from_now_on();
            }
            state.notify_elevator(id);
            Ok(())
        })
    }

    /// What a group owes its own caps, for a queue in another process that takes over this queue's groups.
    ///
    /// # Errors
    /// [`Busy`] if the gate is held at this moment.
    pub fn group_debts(&self, id: GroupId, now: Instant) -> Result<Debts, Busy> {
        self.look(|state| state.throttle.debts(id, now))
    }

    /// Adds to what a group owes its own caps; the group pays for it before it continues.
    ///
    /// # Errors
    /// As [`Queue::create_group`].
    pub fn add_group_debts(&self, id: GroupId, debts: &Debts, now: Instant) -> Change<()> {
        self.change_groups(|state| {
            state.throttle.owe(id, debts, now);
            state.throttle.retime(&state.groups);
            Ok(())
        })
    }

    /// What the elevator has learnt of a group, in the elevator's own numbers: none without an elevator, or
    /// if it learns nothing.
    ///
    /// # Errors
    /// As [`Queue::group_debts`].
    pub fn group_learnt(&self, id: GroupId) -> Result<Vec<u64>, Busy> {
        self.look(|state| {
            let elevator = state.group_aware();
            elevator.map_or_else(Vec::new, |elevator| elevator.learnt(id))
        })
    }

    /// Gives the elevator what another one of the same name has learnt of a group.
    ///
    /// # Errors
    /// As [`Queue::create_group`].
    pub fn take_group_learnt(&self, id: GroupId, learnt: &[u64], now: Instant) -> Change<()> {
        self.change_groups(|state| {
            if let Some(elevator) = state.group_aware() {
                elevator.take_learnt(id, learnt, now);
            }
            Ok(())
        })
    }

    /// Removes a group and its caps. Its nearest living ancestor takes what is still submitted to it;
    /// requests that wait or are under way continue. Its number is given to no other group before they have
    /// ended.
    ///
    /// # Errors
    /// As [`Queue::create_group`].
    pub fn remove_group(&self, id: GroupId) -> Change<()> {
        self.change_groups(|state| {
            state.groups.remove(id)?;
            state.throttle.set_caps(id, Caps::default(), Instant(0));
            state.throttle.retime(&state.groups);
            state.leaving.push_back((id, self.next_grace_period()));
            Ok(())
        })
    }

    /// Frees the entries of removed groups that have nothing under way, as every other change of the tree does first.
    /// Returns how many removed groups are left.
    ///
    /// # Errors
    /// [`Busy`] if the gate is held at this moment.
    pub fn retire_groups(&self) -> Result<usize, Busy> {
        let left = self.change_groups(|state| Ok(state.leaving.len()))?;
        Ok(left.expect("looking at the tree does not fail"))
    }

    /// Returns a group's parent, weight, caps and latency target; none if it is not living.
    ///
    /// # Errors
    /// [`Busy`] if the gate is held at this moment.
    pub fn group(&self, id: GroupId) -> Result<Option<super::Node>, Busy> {
        self.look(|state| {
            let node = state.groups.get(id).filter(|_| state.groups.is_living(id));
            node.copied()
        })
    }

    /// Returns the group that one is part of, and its weight, without a look at the gate: while the tree changes this is
    /// what was, or what will be. For those who share something else than the drive by weights.
    pub fn parent_and_weight(&self, id: GroupId) -> (GroupId, u16) {
        self.group_states.parent_and_weight(id)
    }

    /// Returns how many requests wait for caps of their groups.
    ///
    /// # Errors
    /// [`Busy`] if the gate is held at this moment.
    pub fn held_for_caps(&self) -> Result<usize, Busy> {
        self.look(|state| state.throttle.held_back())
    }

    fn look<T>(&self, look: impl FnOnce(&mut GateState) -> T) -> Result<T, Busy> {
        let mut state = self.gate.try_enter().ok_or(Busy)?;
        let seen = look(&mut state);
        self.leave_gate(state);
        Ok(seen)
    }

    fn change_groups<T>(&self, change: impl FnOnce(&mut GateState) -> Result<T, GroupError>) -> Change<T> {
        let mut state = self.gate.try_enter().ok_or(Busy)?;
        let grace_period_done = self.grace_period_done();
        while let Some(&(id, _)) = state
            .leaving
            .front()
            .filter(|(_, grace_period)| *grace_period <= grace_period_done)
        {
            state.leaving.pop_front();
            self.retire(id, &mut state);
        }
        let result = change(&mut state);
        if result.is_ok() {
            self.group_states.update(&state.groups);
            state.note_columns();
            let GateState { targets, groups, .. } = &mut *state;
            let gave_way = targets.keeps_back();
            targets.learn(groups);
            // Requests that wait for caps, or are held back for a target, may be ready now, or at another time.
            if !state.throttle.is_empty() || gave_way {
                self.run_all();
            }
        }
        self.leave_gate(state);
        Ok(result)
    }

    fn retire(&self, id: GroupId, state: &mut GateState) {
        // The ends of its last requests may still be in the lists of reports.
        state.fold_reports(&self.stats);
        let parent = state.groups.retire(id);
        if let Some(elevator) = state.group_aware() {
            elevator.group_gone(id);
        }
        state.count_idle();
        state.watch.group_gone(id);
        self.bury_stats(id, parent);
    }
}

impl GateState {
    fn note_columns(&mut self) {
        self.watch.groups_changed(&self.groups);
    }

    fn notify_elevator(&mut self, id: GroupId) {
        let elevator = self.elevator.as_mut();
        let elevator = elevator.and_then(|elevator| elevator.group_aware());
        if let (Some(elevator), Some(node)) = (elevator, self.groups.get(id)) {
            elevator.group_set(id, node);
        }
    }
}
