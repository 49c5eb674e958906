//! Hierarchical B-WF2Q+: whose turn it is, in virtual time alone. It knows entities with weights,
//! budgets and their service; no clock, no request, no policy.
//! `mod` asks it for the next leaf, and reports what was dispatched.
//!
//! After Bennett and Zhang, "WF2Q: worst-case fair weighted fair queueing" (1996) and "Hierarchical packet fair queueing
//! algorithms" (1997); serving budgets in the place of packets after Valente and Checconi (2010), Valente and Andreolini
//! (2012).
//!
//! An entity is a leaf (a client's queue) or a group, which is an entity of its parent and schedules its own
//! members. Each has a **start** tag: its service over its weight, on its tree's axis of virtual time. Its
//! **finish** tag is where the start will be when its budget is used up. An entity that has not had more
//! than its due (start at or before the tree's time) is eligible; of these, the one with the smallest finish
//! is next. A group's budget is that of its next member.
//!
//! ```text
//!                    time passes start           is next
//!   activate ─► Waiting ───────────────► Eligible ─────► Serving ──┐ release, has more: back to Waiting or Eligible
//!                  ▲                        ▲                      │
//!     activate     │                        │                      ▼ release, has nothing
//!   Out ◄─────────────────────────────────────────────────────── Lingering
//!           time passes start: what it had in advance is used up
//! ```
//! A tree's time advances with each service by its amount over the weight of all entities that are not
//! `Out`. An entity that leaves with more than its due lingers, with its weight counted, until time has
//! caught up: this keeps the weighted sum of all starts equal to the time. Otherwise time would run ahead of
//! the entities that stay, and a newcomer, which starts at that time, would wait for all of them.
//!
//! Order alone gives shares only to entities that always have requests waiting. `lead` bounds how far the
//! members of a group may run ahead of each other, so that members that have all their requests in flight
//! keep their shares too.

mod check;
mod entity;
mod lead;
mod pass;
mod tree;

use self::entity::{COUNTS_ALL, Entity, State, UNIT_BITS, WEIGHT_UNIT, effective, inverse};
pub(super) use self::entity::{EntityId, leaf_number};
use self::tree::Tree;
use super::heap::{Links, before};

/// The scheduler: a table of entities, of which the first are groups, and the trees of the groups.
#[derive(Debug)]
pub(super) struct Wf2q {
    entities: Vec<Entity>,
    /// A tree for each class of each group.
    trees: Vec<[Tree; CLASSES]>,
    /// The bound of a member's lead over the slowest one, in bytes that all members share by weight; 0 for no bound.
    lead_max: u64,
    /// What the drive does, in bytes per second; 0 while unknown.
    rate: u64,
    /// The bound holds no member for now.
    is_open: bool,
    /// If set, none of this entity's siblings is served, except those that ask for less than their due.
    only: Option<EntityId>,
    /// Groups below the root whose waiting members are all held by the bound: their parents do not count these
    /// groups as waiting.
    held: Vec<u32>,
}

impl Wf2q {
    /// Makes `groups` groups, all of them members of the first one, the root, and `leaves` leaves.
    pub(super) fn new(groups: usize, leaves: usize) -> Self {
        let entity = Entity {
            links: Links::UNLINKED,
            state: State::Out,
            presence: lead::Presence::ABSENT,
            is_urgent: false,
            class: CLASS_OF_GROUPS,
            parent: ROOT,
            given: 1,
            counts: COUNTS_ALL,
            weight: WEIGHT_UNIT,
            inverse: inverse(WEIGHT_UNIT),
            budget: 0,
            start: 0,
            finish: 0,
        };
        Self {
            entities: vec![entity; groups + leaves],
            trees: vec![[const { Tree::EMPTY }; CLASSES]; groups],
            lead_max: 0,
            rate: 0,
            is_open: false,
            only: None,
            held: Vec::with_capacity(groups),
        }
    }

    /// The entity of a group.
    #[inline]
    pub(super) fn group(&self, group: usize) -> EntityId {
        debug_assert!(group < self.trees.len());
        EntityId(group as u32)
    }

    /// The entity of a leaf.
    #[inline]
    pub(super) fn leaf(&self, leaf: usize) -> EntityId {
        EntityId((self.trees.len() + leaf) as u32)
    }

    /// The leaf of an entity.
    #[inline]
    pub(super) fn leaf_of(&self, id: EntityId) -> usize {
        id.index() - self.trees.len()
    }

    /// Says whether an entity waits for its turn.
    pub(super) fn waits(&self, id: EntityId) -> bool {
        matches!(self.entities[id.index()].state, State::Waiting | State::Eligible)
    }

    /// Moves a leaf without requests to another group or class, and forgets its service.
    pub(super) fn place_leaf(&mut self, id: EntityId, parent: usize, class: usize, weight: u32) {
        self.forget(id);
        let tree = self.trees[parent][class].time;
        let entity = &mut self.entities[id.index()];
        entity.parent = parent as u32;
        entity.class = class as u8;
        entity.start = tree;
        (entity.given, entity.counts) = (weight, COUNTS_ALL);
        entity.set_weight(effective(weight, COUNTS_ALL));
    }

    /// Forgets the service of an entity without requests.
    pub(super) fn forget(&mut self, id: EntityId) {
        let entity = &self.entities[id.index()];
        assert!(
            matches!(entity.state, State::Out | State::Lingering),
            "entity {} is to be forgotten and has something",
            id.0
        );
        self.take_out(id);
        self.count_again(id);
        self.discount(id);
        self.entities[id.index()].presence.forget_pauses();
    }

    /// Makes a group a member of `parent`; the group keeps its requests and its lead. No entity may be being
    /// served.
    pub(super) fn move_group(&mut self, id: EntityId, parent: usize) {
        let Entity {
            state, parent: old, ..
        } = self.entities[id.index()];
        if old == parent as u32 {
            return;
        }
        assert_ne!(state, State::Serving, "group {} moves while it is served", id.0);
        let lead = self.lead(id);
        self.take_out(id);
        self.discount(id);
        self.move_busy(id, parent as u32);
        let time = self.trees[parent][usize::from(CLASS_OF_GROUPS)].time;
        let entity = &mut self.entities[id.index()];
        entity.parent = parent as u32;
        entity.start = time.wrapping_add(lead.max(0) as u64);
        if matches!(state, State::Waiting | State::Eligible) {
            self.refresh(old, false);
            self.refresh(id.0, false);
        }
    }

    /// Sets an entity's weight, which counts at once: its lead or lag stays the same amount of service.
    pub(super) fn set_weight(&mut self, id: EntityId, weight: u32) {
        let counts = self.entities[id.index()].counts;
        self.weigh(id, weight, counts);
    }

    /// Sets an entity's weight, and the part of it that counts.
    fn weigh(&mut self, id: EntityId, given: u32, counts: u32) {
        let entity = &mut self.entities[id.index()];
        let (old, weight) = (entity.weight, effective(given, counts));
        (entity.given, entity.counts) = (given, counts);
        if old == weight || id.0 == ROOT {
            entity.set_weight(weight);
            return;
        }
        let lead = i128::from(self.lead(id)) * i128::from(old) / i128::from(weight);
        let was_counted = self.discount(id);
        let state = self.entities[id.index()].state;
        if state != State::Serving {
            self.take_out(id);
        } else {
            let tree = self.tree_of(id);
            tree.weight = tree.weight - u64::from(old) + u64::from(weight);
        }
        let time = self.tree_of(id).time;
        let entity = &mut self.entities[id.index()];
        entity.set_weight(weight);
        entity.start = time.wrapping_add(lead as u64);
        self.limit_due(id);
        self.bring_within_bound(id);
        if was_counted {
            self.count(id);
        }
        match state {
            State::Waiting | State::Eligible => {
                self.put_in(id);
                self.refresh(self.entities[id.index()].parent, false);
            }
            State::Lingering => self.linger(id),
            State::Out | State::Serving => {}
        }
    }

    /// Activates a leaf that has requests again and will use about `budget`. If it is urgent, and has not had
    /// more than its due, it goes before entities that were active all the time; so do its groups, if this makes
    /// them active.
    ///
    /// Urgency changes the order among eligible entities and no later tag: the share stays the same. One that asks for less
    /// than its due goes before all, so it does not wait while another one makes up for what it missed.
    pub(super) fn activate(&mut self, id: EntityId, budget: u32, is_urgent: bool) {
        let entity = &mut self.entities[id.index()];
        debug_assert!(matches!(entity.state, State::Out | State::Lingering));
        entity.budget = budget;
        self.enter(id, is_urgent);
        self.refresh(self.entities[id.index()].parent, is_urgent);
    }

    /// Chooses the next leaf, and makes it and its groups the served ones, until [`Wf2q::release`].
    ///
    /// `last_class_due` says whether a group's last class goes before the others this time.
    pub(super) fn pick(&mut self, mut last_class_due: impl FnMut(usize) -> bool) -> Option<EntityId> {
        self.look_at_held();
        let mut group = ROOT;
        let mut class = self.first_class(group)?;
        loop {
            let last = &self.trees[group as usize][CLASSES - 1];
            if class < CLASSES - 1 && last.has_members() && last_class_due(group as usize) {
                class = CLASSES - 1;
            }
            let id = self.next(group, class)?;
            let tree = &mut self.trees[group as usize][class];
            match self.entities[id as usize].state {
                State::Waiting => tree.waiting.remove(&mut self.entities, id),
                _ => tree.eligible.remove(&mut self.entities, id),
            }
            let entity = &mut self.entities[id as usize];
            entity.state = State::Serving;
            entity.is_urgent = false;
            if !self.is_group(id) {
                return Some(EntityId(id));
            }
            group = id;
            class = self.first_class(group).expect("an active group has members");
        }
    }

    /// Says whether the next leaf is urgent: see [`Wf2q::activate`].
    pub(super) fn is_next_urgent(&mut self) -> bool {
        let next = self.first_class(ROOT).and_then(|class| self.next(ROOT, class));
        next.is_some_and(|id| self.entities[id as usize].is_urgent)
    }

    /// The next member of a class of a group.
    #[inline]
    fn next(&mut self, group: u32, class: usize) -> Option<u32> {
        let lead_max = self.lead_max_now();
        let next = self.trees[group as usize][class].next_eligible(&mut self.entities, lead_max);
        match self.only {
            Some(only)
                if (self.entities[only.index()].parent, class) == (group, usize::from(CLASS_OF_GROUPS)) =>
            {
                self.next_modest(group)
                    .or_else(|| self.waits(only).then_some(only.0))
            }
            _ => next,
        }
    }

    /// An eligible member of a group that asks for less than its due, whoever is before it.
    #[cold]
    fn next_modest(&self, group: u32) -> Option<u32> {
        let eligible = self.trees[group as usize][usize::from(CLASS_OF_GROUPS)].eligible;
        eligible.find(&self.entities, |id| self.is_modest(EntityId(id)))
    }

    /// Makes a waiting leaf and its groups the served ones, regardless of the order. No entity may be being
    /// served.
    pub(super) fn seize(&mut self, id: EntityId) {
        let mut at = id.0;
        while at != ROOT {
            let weight = u64::from(self.entities[at as usize].weight);
            self.take_out(EntityId(at));
            self.tree_of(EntityId(at)).weight += weight;
            let entity = &mut self.entities[at as usize];
            entity.state = State::Serving;
            entity.is_urgent = false;
            at = entity.parent;
        }
    }

    /// Counts service of the leaf that is being served.
    #[inline]
    pub(super) fn serve(&mut self, id: EntityId, amount: u32) {
        let mut at = id.0;
        self.entities[ROOT as usize].presence.serve(amount);
        while at != ROOT {
            let entity = &mut self.entities[at as usize];
            let is_modest_no_more = entity.presence.serve(amount);
            debug_assert_eq!(entity.state, State::Serving);
            entity.start = entity.start.wrapping_add(entity.span(amount));
            let start = entity.start;
            let tree = &mut self.trees[entity.parent as usize][usize::from(entity.class)];
            // A member that is present and has all its requests in flight also has its part of the drive.
            let weight = tree.weight.max(tree.lead.weight());
            let time = tree.time.wrapping_add((u64::from(amount) << UNIT_BITS) / weight);
            tree.time = tree.not_beyond_all(time, start, self.lead_max);
            let parent = entity.parent;
            if is_modest_no_more || self.entities[at as usize].presence.is_stalled {
                self.count_served(EntityId(at));
            }
            at = parent;
        }
    }

    /// Ends the turn of the leaf that is being served; `budget` is for its next turn, if it has requests.
    pub(super) fn release(&mut self, id: EntityId, budget: Option<u32>) {
        match budget {
            Some(budget) => {
                self.entities[id.index()].budget = budget;
                self.reinsert(id);
            }
            None => self.retire(id),
        }
        let mut group = self.entities[id.index()].parent;
        while group != ROOT {
            match self.next_budget(group) {
                Some(budget) => {
                    self.entities[group as usize].budget = budget;
                    self.reinsert(EntityId(group));
                }
                None => self.retire(EntityId(group)),
            }
            group = self.entities[group as usize].parent;
        }
    }

    /// Updates a group's place in its parent after a change of its members, and so on upwards.
    fn refresh(&mut self, mut group: u32, is_urgent: bool) {
        while group != ROOT {
            let id = EntityId(group);
            let entity = &self.entities[group as usize];
            let (state, old) = (entity.state, entity.budget);
            let active = matches!(state, State::Waiting | State::Eligible);
            if state == State::Serving {
                return;
            }
            match self.next_budget(group) {
                Some(budget) if active && budget == old => return,
                Some(budget) if active => {
                    self.take_out(id);
                    self.entities[group as usize].budget = budget;
                    self.put_in(id);
                }
                Some(budget) => {
                    self.entities[group as usize].budget = budget;
                    self.enter(id, is_urgent);
                }
                None if active => {
                    self.take_out(id);
                    self.linger(id);
                }
                None => return,
            }
            group = self.entities[group as usize].parent;
        }
    }

    /// The budget of a group's next member.
    #[inline]
    fn next_budget(&mut self, group: u32) -> Option<u32> {
        let class = self.first_class(group)?;
        let Some(next) = self.next(group, class) else {
            self.note_held(group);
            return None;
        };
        Some(self.entities[next as usize].budget)
    }

    /// The first class of a group in which a member waits for its turn.
    #[inline]
    fn first_class(&self, group: u32) -> Option<usize> {
        self.trees[group as usize].iter().position(Tree::has_members)
    }

    /// Enters an entity with requests into its tree, at the tree's time, shifted by its lead or by its due.
    fn enter(&mut self, id: EntityId, is_urgent: bool) {
        let lead = self.lead(id);
        if self.entities[id.index()].state == State::Lingering {
            self.take_out(id);
        }
        let earliest = self.earliest_start(id);
        let entity = &mut self.entities[id.index()];
        // A tag from before time wrapped around may seem to lie far ahead: no entity can have such a lead.
        let is_wrapped = lead > 0 && lead as u64 > entity.span(u32::MAX);
        if lead <= 0 || is_wrapped {
            if is_wrapped || before(entity.start, earliest) {
                entity.start = earliest;
            }
            entity.is_urgent = is_urgent;
        }
        if self.is_modest(id) {
            // It asks for less than its due, and is not held for a slower one.
            self.bring_within_bound(id);
        }
        self.count(id);
        self.put_in(id);
    }

    /// How far an entity's start is ahead of its tree's time; positive if it has a lead.
    fn lead(&mut self, id: EntityId) -> i64 {
        let time = self.tree_of(id).time;
        self.entities[id.index()].start.wrapping_sub(time) as i64
    }

    /// Puts an entity that is `Out` where its tags place it.
    fn put_in(&mut self, id: EntityId) {
        self.tree_of(id).weight += u64::from(self.entities[id.index()].weight);
        self.reinsert(id);
    }

    /// Puts an entity whose weight is counted where its tags place it.
    #[inline]
    fn reinsert(&mut self, id: EntityId) {
        let entity = &mut self.entities[id.index()];
        entity.finish = match (entity.is_urgent, entity.presence.is_modest()) {
            (true, true) => entity.start.wrapping_sub(BEFORE_ALL),
            (true, false) => entity.start,
            (false, _) => entity.start.wrapping_add(entity.span(entity.budget)),
        };
        let (start, lead_max) = (entity.start, self.lead_max_now());
        let entity = &self.entities[id.index()];
        let tree = &mut self.trees[entity.parent as usize][usize::from(entity.class)];
        let waits = before(tree.time, start) || !tree.allows(&mut self.entities, lead_max, start);
        let entity = &mut self.entities[id.index()];
        if waits {
            entity.state = State::Waiting;
            tree.waiting.push(&mut self.entities, id.0);
        } else {
            entity.state = State::Eligible;
            tree.eligible.push(&mut self.entities, id.0);
        }
    }

    /// Handles a served entity that has no requests left.
    #[inline]
    fn retire(&mut self, id: EntityId) {
        let weight = u64::from(self.entities[id.index()].weight);
        self.entities[id.index()].state = State::Out;
        self.tree_of(id).weight -= weight;
        self.linger(id);
    }

    /// Lets an entity that is `Out` linger, if it has a lead.
    fn linger(&mut self, id: EntityId) {
        if self.lead(id) <= 0 {
            return;
        }
        let entity = &mut self.entities[id.index()];
        entity.state = State::Lingering;
        let tree = &mut self.trees[entity.parent as usize][usize::from(entity.class)];
        tree.weight += u64::from(entity.weight);
        tree.lingering.push(&mut self.entities, id.0);
    }

    /// Takes an entity out of its tree, if it is there.
    fn take_out(&mut self, id: EntityId) {
        let entity = &mut self.entities[id.index()];
        let state = std::mem::replace(&mut entity.state, State::Out);
        let tree = &mut self.trees[entity.parent as usize][usize::from(entity.class)];
        let weight = u64::from(entity.weight);
        match state {
            State::Out => return,
            State::Waiting => tree.waiting.remove(&mut self.entities, id.0),
            State::Eligible => tree.eligible.remove(&mut self.entities, id.0),
            State::Lingering => tree.lingering.remove(&mut self.entities, id.0),
            State::Serving => panic!("entity {} is taken out while it is served", id.0),
        }
        tree.weight -= weight;
    }

    #[inline]
    fn is_group(&self, id: u32) -> bool {
        (id as usize) < self.trees.len()
    }

    #[inline]
    fn tree_of(&mut self, id: EntityId) -> &mut Tree {
        let entity = &self.entities[id.index()];
        &mut self.trees[entity.parent as usize][usize::from(entity.class)]
    }
}

/// Classes of a group's members: the first goes before the others.
pub(super) const CLASSES: usize = 3;
/// The finish of a member that is urgent and asks for less than its due is so far before its start: more than tags of one
/// tree differ.
const BEFORE_ALL: u64 = 1 << 54;
/// The class in which groups are members of their parents.
pub(super) const CLASS_OF_GROUPS: u8 = 1;
const ROOT: u32 = 0;

#[cfg(test)]
mod tests;
