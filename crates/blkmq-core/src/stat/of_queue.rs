//! Decides what a queue tells of its statistics, and which requests its reactors count: `queue` as far as `stat` is concerned.

use super::{Delays, EventStats, GroupStats, StatsMode};
use crate::ids::GroupId;
use crate::queue::{Busy, Queue};
use crate::request::Request;

impl Queue {
    /// Adds up what a group did.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn group_stats(&self, group: GroupId) -> GroupStats {
        self.stats.own(self.shards(), group)
    }

    /// Adds up what groups did that were part of this one and are gone, with all that was part of them.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn group_stats_of_the_gone(&self, group: GroupId) -> GroupStats {
        self.stats.of_the_gone(group)
    }

    /// Adds up what a group and all that is or was part of it did; all there is, for the root.
    ///
    /// # Errors
    /// [`Busy`] if somebody is inside the gate at this moment.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn group_stats_recursive(&self, group: GroupId) -> Result<GroupStats, Busy> {
        let mut state = self.gate.try_enter().ok_or(Busy)?;
        if self.stats.mode.is_under_gate() {
            state.fold_reports(&self.stats);
        }
        let mut sum = GroupStats::default();
        for (id, _) in state.groups.iter() {
            if state.groups.chain(id).any(|(above, _)| above == group) {
                sum.add(&self.group_stats(id));
                sum.add(&self.group_stats_of_the_gone(id));
            }
        }
        self.leave_gate(state);
        Ok(sum)
    }

    /// Tells how long requests of top-level groups waited behind whose.
    pub fn delays(&self) -> Delays {
        self.stats.delays(self.shards())
    }

    /// Adds up how often what happened.
    pub fn event_stats(&self) -> EventStats {
        super::events(self.shards())
    }

    /// Says whether the caller, a reactor outside the gate, is to count a request.
    #[inline]
    pub(crate) fn counts_outside(&self, rq: &Request) -> bool {
        let mode = self.stats.mode;
        mode == StatsMode::Outside || mode.is_under_gate() && !rq.stamp.is_set()
    }

    /// Adds what a group did to what is known of the dead of its parent, and forgets it. Nothing of it is under way.
    pub(crate) fn bury_stats(&self, group: GroupId, parent: GroupId) {
        self.stats.bury(self.shards(), group, parent);
    }
}
