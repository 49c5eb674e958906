//! What `room` asks of the trees for a probe, and how it takes members out of the floor: others are not held for a member that is
//! passed over.

use super::entity::{COUNTS_ALL, Entity, EntityId, State, effective};
use super::{CLASS_OF_GROUPS, ROOT, Wf2q};

impl Wf2q {
    /// Others are not held for a member any longer, and so much of its weight counts, in 1/1024.
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

    /// Says whether others are not held for a member, or for a group that it is in.
    #[inline]
    pub(in super::super) fn is_passed_over(&self, id: EntityId) -> bool {
        self.with_groups(id)
            .any(|id| self.entities[id.index()].presence.is_passed_over)
    }

    /// Says whether the leaf that is next is one for which, or for whose group, others are not held.
    pub(in super::super) fn is_next_passed_over(&mut self) -> bool {
        let mut group = ROOT;
        while let Some(id) = self.first_class(group).and_then(|class| self.next(group, class)) {
            if self.entities[id as usize].presence.is_passed_over {
                return true;
            }
            if !self.is_group(id) {
                break;
            }
            group = id;
        }
        false
    }

    /// Members of the group of this one that move at its pace: they have all they ask for in flight, as it has. Others would be held
    /// for them if they were not for this one.
    pub(in super::super) fn alike(&self, id: EntityId) -> impl Iterator<Item = EntityId> {
        let parent = self.entities[id.index()].parent;
        let is_alike = move |entity: &Entity| {
            let is_in_flight = matches!(entity.state, State::Out | State::Lingering);
            entity.parent == parent && entity.presence.is_counted && is_in_flight
        };
        let ids = self.entities.iter().enumerate().skip(1);
        ids.filter(move |(_, entity)| is_alike(entity))
            .map(|(id, _)| EntityId(id as u32))
    }

    /// What a member was served, in bytes.
    pub(in super::super) fn served(&self, id: EntityId) -> u64 {
        self.entities[id.index()].presence.served
    }

    /// The group that a member is in.
    pub(in super::super) fn parent(&self, id: EntityId) -> EntityId {
        EntityId(self.entities[id.index()].parent)
    }

    /// A member's weight, and the sum of the weights of those in its group for which others are held, itself among them.
    pub(in super::super) fn part(&self, id: EntityId) -> (u64, u64) {
        let entity = &self.entities[id.index()];
        let own = u64::from(effective(entity.given, COUNTS_ALL));
        let tree = &self.trees[entity.parent as usize][usize::from(CLASS_OF_GROUPS)];
        let is_among = entity.presence.is_counted;
        (own, tree.lead.weight() + if is_among { 0 } else { own })
    }

    /// Serves this one alone of its group, or all of them again.
    pub(in super::super) fn set_only(&mut self, only: Option<EntityId>) {
        let old = std::mem::replace(&mut self.only, only);
        for id in old.into_iter().chain(only) {
            self.refresh(self.entities[id.index()].parent, false);
        }
    }
}
