//! The methods of `queue` for `stat`: the statistics that a queue offers, and which requests its reactors
//! count.

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

    /// Adds up what removed groups did that were part of this one, and the groups that were part of those.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn group_stats_of_the_gone(&self, group: GroupId) -> GroupStats {
        self.stats.of_the_gone(group)
    }

    /// Adds up what a group did and all groups that are or were part of it; for the root, everything.
    ///
    /// # Errors
    /// [`Busy`] if the gate is held at this moment.
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

    /// Returns how long requests of which groups waited behind which.
    pub fn delays(&self) -> Delays {
        self.stats.delays(self.shards())
    }

    /// Adds up the counters of events.
    pub fn event_stats(&self) -> EventStats {
        super::events(self.shards())
    }

    /// Says whether the caller, a reactor outside the gate, must count a request.
    #[inline]
    pub(crate) fn counts_outside(&self, rq: &Request) -> bool {
        let mode = self.stats.mode;
        mode == StatsMode::Outside || mode.is_under_gate() && !rq.stamp.is_set()
    }

    /// Adds what a group did to the counters of its parent's removed groups, and clears it. The group has
    /// nothing under way.
    pub(crate) fn bury_stats(&self, group: GroupId, parent: GroupId) {
        self.stats.bury(self.shards(), group, parent);
    }
}
