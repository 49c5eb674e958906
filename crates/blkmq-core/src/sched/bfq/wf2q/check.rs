//! The invariants of the trees, for tests.

use super::super::heap::before;
use super::entity::{EntityId, State};
use super::{CLASSES, ROOT, Wf2q};

impl Wf2q {
    /// Asserts that every entity is where its state says, its weight is counted, its tags are in order, and
    /// that a group is active exactly if one of its members is. `served` is the leaf being served.
    pub(in super::super) fn check(&self, served: Option<EntityId>) {
        self.check_lead();
        let mut found = vec![State::Out; self.entities.len()];
        let mut weights = vec![[0; CLASSES]; self.trees.len()];
        let mut at = served.map_or(ROOT, |id| id.0);
        while at != ROOT {
            let entity = &self.entities[at as usize];
            found[at as usize] = State::Serving;
            weights[entity.parent as usize][usize::from(entity.class)] += u64::from(entity.weight);
            at = entity.parent;
        }
        for (group, classes) in self.trees.iter().enumerate() {
            for (class, tree) in classes.iter().enumerate() {
                let members = [
                    (State::Waiting, tree.waiting.check(&self.entities)),
                    (State::Eligible, tree.eligible.check(&self.entities)),
                    (State::Lingering, tree.lingering.check(&self.entities)),
                ];
                for (state, id) in members
                    .iter()
                    .flat_map(|(state, ids)| ids.iter().map(move |id| (state, *id)))
                {
                    let entity = &self.entities[id as usize];
                    assert_eq!(
                        (entity.parent as usize, usize::from(entity.class)),
                        (group, class)
                    );
                    assert_eq!(found[id as usize], State::Out, "entity {id} is in two places");
                    assert!(*state != State::Eligible || !before(tree.time, entity.start));
                    let is_ordered = *state != State::Lingering && !entity.is_urgent;
                    assert!(!is_ordered || !before(entity.finish, entity.start));
                    found[id as usize] = *state;
                    weights[group][class] += u64::from(entity.weight);
                }
            }
        }
        for (id, entity) in self.entities.iter().enumerate().skip(1) {
            assert_eq!(entity.state, found[id], "state of entity {id}");
            if self.is_group(id as u32) && entity.state != State::Serving {
                let active = matches!(entity.state, State::Waiting | State::Eligible);
                let is_held = entity.presence.is_noted;
                assert_eq!(is_held, self.held.contains(&(id as u32)), "group {id} is noted");
                let has_members = self.first_class(id as u32).is_some();
                // The next pick examines a held group again.
                assert!(is_held || active == has_members, "group {id} and its members");
            }
        }
        for (group, classes) in self.trees.iter().enumerate() {
            for (class, tree) in classes.iter().enumerate() {
                assert_eq!(
                    tree.weight, weights[group][class],
                    "weight of class {class} of group {group}"
                );
            }
        }
    }
}
