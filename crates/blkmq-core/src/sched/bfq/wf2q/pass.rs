//! What `probing` reads of the trees and changes in them: members that are passed over leave the floor, so
//! that others are not held for them.

use super::entity::{COUNTS_ALL, Entity, EntityId, State, effective};
use super::{CLASS_OF_GROUPS, Wf2q};

impl Wf2q {
    /// Passes over a member: others are not held for it, and `counts` of its weight counts, in 1/1024.
    pub(in super::super) fn pass_over(&mut self, id: EntityId, counts: u32) {
        self.discount(id);
        let entity = &mut self.entities[id.index()];
        entity.presence.is_passed_over = true;
        let given = entity.given;
        self.weigh(id, given, counts.clamp(1, COUNTS_ALL));
    }

    /// Others are held for a member again, if it has something.
    pub(in super::super) fn count_again(&mut self, id: EntityId) {
        let presence = &mut self.entities[id.index()].presence;
        if !std::mem::replace(&mut presence.is_passed_over, false) {
            return;
        }
        let (is_busy, given) = (presence.busy > 0, self.entities[id.index()].given);
        self.weigh(id, given, COUNTS_ALL);
        if is_busy {
            self.count(id);
        }
    }

    /// Says whether a member, or a group that contains it, is passed over.
    #[inline]
    pub(in super::super) fn is_passed_over(&self, id: EntityId) -> bool {
        self.with_groups(id)
            .any(|id| self.entities[id.index()].presence.is_passed_over)
    }

    /// Members of the group of this one that move at its pace: like it, they have all their requests in flight.
    /// Without this one, others would be held for them.
    pub(in super::super) fn same_pace(&self, id: EntityId) -> impl Iterator<Item = EntityId> {
        let parent = self.entities[id.index()].parent;
        let is_same_pace = move |entity: &Entity| {
            let is_in_flight = matches!(entity.state, State::Out | State::Lingering);
            entity.parent == parent && entity.presence.is_counted && is_in_flight
        };
        let ids = self.entities.iter().enumerate().skip(1);
        ids.filter(move |(_, entity)| is_same_pace(entity))
            .map(|(id, _)| EntityId(id as u32))
    }

    /// A member's service, in bytes.
    pub(in super::super) fn served(&self, id: EntityId) -> u64 {
        self.entities[id.index()].presence.served
    }

    /// The group of a member.
    pub(in super::super) fn parent(&self, id: EntityId) -> EntityId {
        EntityId(self.entities[id.index()].parent)
    }

    /// A member's weight, and the sum of the weights of the members of its group, itself included, for which
    /// others are held.
    pub(in super::super) fn part(&self, id: EntityId) -> (u64, u64) {
        let entity = &self.entities[id.index()];
        let own = u64::from(effective(entity.given, COUNTS_ALL));
        let tree = &self.trees[entity.parent as usize][usize::from(CLASS_OF_GROUPS)];
        let is_among = entity.presence.is_counted;
        (own, tree.lead.weight() + if is_among { 0 } else { own })
    }

    /// Serves only this member of its group, beside those that ask for less than their due, or all members again
    /// (`None`).
    pub(in super::super) fn set_only(&mut self, only: Option<EntityId>) {
        let old = std::mem::replace(&mut self.only, only);
        for id in old.into_iter().chain(only) {
            self.refresh(self.entities[id.index()].parent, false);
        }
    }
}
