//! Decides how the tenant tree of a queue in use is changed: each change as a whole, inside the gate, the elevator told;
//! and when the place of a removed group is free again.
//!
//! A removed group's place is given away only when no bio and no request anywhere carries its number. Nobody counts them
//! for that: each reactor owns a fixed number of requests, and once each of them has been at home since the reactor took
//! note of the removal, none carries the number (`sw_ctx`, a *grace period*).

use super::{Caps, Debts, GroupError};
use crate::gate::GateState;
use crate::ids::GroupId;
use crate::queue::{Busy, Queue};
use crate::time::{Instant, Nanos};

/// What a change of the tree comes to, unless the gate is in use at this moment.
pub type Change<T> = Result<Result<T, GroupError>, Busy>;

/// The tenant tree. Any thread; after a change, kick everybody.
impl Queue {
    /// Adds a group. Its number may have been that of a group that is long gone.
    ///
    /// # Errors
    /// [`Busy`] if somebody is inside the gate at this moment; inside, why there can be no such group.
    pub fn create_group(&self, parent: GroupId, weight: u16) -> Change<GroupId> {
        self.change_groups(|state| {
            let id = state.groups.create(parent, weight)?;
            state.throttle.retime(&state.groups);
            state.tell_elevator(id);
            Ok(id)
        })
    }

    /// Changes a group's share.
    ///
    /// # Errors
    /// As [`Queue::create_group`].
    pub fn set_group_weight(&self, id: GroupId, weight: u16) -> Change<()> {
        self.change_groups(|state| {
            state.groups.set_weight(id, weight)?;
            state.tell_elevator(id);
            Ok(())
        })
    }

    /// Makes a group, with all that is below it, part of another.
    ///
    /// # Errors
    /// As [`Queue::create_group`].
    pub fn move_group(&self, id: GroupId, parent: GroupId) -> Change<()> {
        self.change_groups(|state| {
            state.groups.move_to(id, parent)?;
            state.throttle.retime(&state.groups);
            state.tell_elevator(id);
            Ok(())
        })
    }

    /// Says what nine of ten of a group's requests should take at most; groups without a target give way while it is missed.
    ///
    /// # Errors
    /// As [`Queue::create_group`].
    pub fn set_group_latency_target(&self, id: GroupId, target: Option<Nanos>) -> Change<()> {
        self.change_groups(|state| {
            state.groups.set_latency_target(id, target)?;
            state.tell_elevator(id);
            Ok(())
        })
    }

    /// Bounds what a group, with all that is below it, may take; what waits is timed anew. A debt is kept: what was taken
    /// under the old bounds is paid at the new rate.
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
            state.tell_elevator(id);
            Ok(())
        })
    }

    /// What a group owes its own caps: a queue that goes on with this one's groups, in another process, is to know it.
    ///
    /// # Errors
    /// [`Busy`] if somebody is inside the gate at this moment.
    pub fn group_debts(&self, id: GroupId, now: Instant) -> Result<Debts, Busy> {
        self.look(|state| state.throttle.debts(id, now))
    }

    /// Has a group owe its own caps so much more, which it pays for before it goes on.
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

    /// What the elevator has learnt of a group, in numbers of its own: none if there is none, or it learns nothing.
    ///
    /// # Errors
    /// As [`Queue::group_debts`].
    pub fn group_learnt(&self, id: GroupId) -> Result<Vec<u64>, Busy> {
        self.look(|state| {
            let elevator = state.elevator.as_ref();
            elevator.map_or_else(Vec::new, |elevator| elevator.learnt(id))
        })
    }

    /// Has the elevator begin with what another one of its name has learnt of a group.
    ///
    /// # Errors
    /// As [`Queue::create_group`].
    pub fn take_group_learnt(&self, id: GroupId, learnt: &[u64], now: Instant) -> Change<()> {
        self.change_groups(|state| {
            if let Some(elevator) = &mut state.elevator {
                elevator.take_learnt(id, learnt, now);
            }
            Ok(())
        })
    }

    /// Removes a group, with its caps. Its nearest living ancestor takes what is still submitted to it; what waits or is
    /// under way goes on. Its number is given to no other group while any of that is left.
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

    /// Frees the places of removed groups of which nothing is under way, as every other change of the tree does first.
    /// Returns how many removed groups are left.
    ///
    /// # Errors
    /// [`Busy`] if somebody is inside the gate at this moment.
    pub fn retire_groups(&self) -> Result<usize, Busy> {
        let left = self.change_groups(|state| Ok(state.leaving.len()))?;
        Ok(left.expect("looking at the tree does not fail"))
    }

    /// Returns a group's place in the tree, weight, caps and latency target; none if it does not live.
    ///
    /// # Errors
    /// [`Busy`] if somebody is inside the gate at this moment.
    pub fn group(&self, id: GroupId) -> Result<Option<super::Node>, Busy> {
        self.look(|state| {
            let node = state.groups.get(id).filter(|_| state.groups.is_living(id));
            node.copied()
        })
    }

    /// Returns how many requests wait for caps of their groups.
    ///
    /// # Errors
    /// [`Busy`] if somebody is inside the gate at this moment.
    pub fn held_for_caps(&self) -> Result<usize, Busy> {
        self.look(|state| state.throttle.held_back())
    }

    fn look<T>(&self, look: impl FnOnce(&GateState) -> T) -> Result<T, Busy> {
        let state = self.gate.try_enter().ok_or(Busy)?;
        let seen = look(&state);
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
            // What waits for caps, or gives way to a target, may go now, or at another time.
            if !state.throttle.is_empty() || gave_way {
                self.run_all();
            }
        }
        self.leave_gate(state);
        Ok(result)
    }

    fn retire(&self, id: GroupId, state: &mut GateState) {
        // The ends of its last requests may still lie in the lists of reports.
        state.fold_reports(&self.stats);
        let parent = state.groups.retire(id);
        if let Some(elevator) = &mut state.elevator {
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

    fn tell_elevator(&mut self, id: GroupId) {
        if let (Some(elevator), Some(node)) = (&mut self.elevator, self.groups.get(id)) {
            elevator.group_set(id, node);
        }
    }
}
