//! Decides whose turn it is, in virtual time alone: hierarchical B-WF2Q+. It knows entities with weights and budgets, and
//! what each was served; no clock, no request, no policy. `mod` asks it, and tells it what was dispatched.
//!
//! After Bennett and Zhang, "WF2Q: worst-case fair weighted fair queueing" (1996) and "Hierarchical packet fair queueing
//! algorithms" (1997); serving budgets in the place of packets after Valente and Checconi (2010), Valente and Andreolini
//! (2012).
//!
//! An entity is a leaf (a client's queue) or a group, which is an entity of its parent and schedules its own members. Each
//! has a **start** tag: what it was served over its weight, on its tree's axis of virtual time. Its **finish** is where the
//! start will be when its budget is used up. Whoever has not had more than its due (start at or before the tree's time) is
//! eligible; of these the one with the smallest finish is next. A group's budget is that of its member that is next.
//!
//! ```text
//!                    time passes start           is next
//!   activate ─► Waiting ───────────────► Eligible ─────► Serving ──┐ release, has more: back to Waiting or Eligible
//!                  ▲                        ▲                      │
//!     activate     │                        │                      ▼ release, has nothing
//!   Out ◄─────────────────────────────────────────────────────── Lingering
//!           time passes start: what it had in advance is used up
//! ```
//! A tree's time advances with each service by its amount over the weight of all entities that are not `Out`. Who leaves
//! with more than its due lingers, its weight counted, until time has caught up: that keeps the weighted sum of all starts
//! where time is. Without it time would run ahead of those that stay, and a newcomer, who starts at that time, would
//! wait for all of them to catch up.
//!
//! Order alone gives shares only to those that always have something waiting. `lead` bounds how far the members of a group
//! may run ahead of each other, so that those keep their shares too that have all they ask for in flight.

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
    /// How much one member may have in advance of the slowest, if all shared it by weight, in bytes; 0 for no bound.
    reach: u64,
    /// Nobody is held by the bound for now.
    is_open: bool,
    /// Of its siblings and itself only this one is served.
    only: Option<EntityId>,
    /// Groups below the root whose members are all held by the bound: their parents do not count them as waiting.
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
            reach: 0,
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

    /// The leaf whose entity this is.
    #[inline]
    pub(super) fn leaf_of(&self, id: EntityId) -> usize {
        id.index() - self.trees.len()
    }

    /// Says whether an entity waits for its turn.
    pub(super) fn waits(&self, id: EntityId) -> bool {
        matches!(self.entities[id.index()].state, State::Waiting | State::Eligible)
    }

    /// Makes a leaf that has nothing a member of another group or class, and forgets what it was served.
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

    /// Forgets what an entity that has nothing was served.
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
    }

    /// Makes a group a member of `parent`; what it has, and what it was served in advance, goes with it. Nobody is being
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

    /// Sets an entity's weight, which counts at once: what it had in advance, or too little, is the same amount of service
    /// as before.
    pub(super) fn set_weight(&mut self, id: EntityId, weight: u32) {
        let counts = self.entities[id.index()].counts;
        self.weigh(id, weight, counts);
    }

    /// Makes so much of an entity's weight count.
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

    /// A leaf has something again: it will use about `budget`. If it is urgent, and has not had more than its due, it goes
    /// before those that had something all the time; so do its groups, if this makes them active.
    ///
    /// Being urgent changes the order among the eligible and no tag of the future: the share stays what it is.
    pub(super) fn activate(&mut self, id: EntityId, budget: u32, is_urgent: bool) {
        let entity = &mut self.entities[id.index()];
        debug_assert!(matches!(entity.state, State::Out | State::Lingering));
        entity.budget = budget;
        self.enter(id, is_urgent);
        self.refresh(self.entities[id.index()].parent, is_urgent);
    }

    /// Chooses the leaf that is next, and makes it and its groups the served ones, until [`Wf2q::release`].
    ///
    /// `last_class_due` says of a group whether its last class is to go before the others this time.
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

    /// Says whether the one that is next has come back within its due: see [`Wf2q::activate`].
    pub(super) fn is_next_urgent(&mut self) -> bool {
        let next = self.first_class(ROOT).and_then(|class| self.next(ROOT, class));
        next.is_some_and(|id| self.entities[id as usize].is_urgent)
    }

    /// The member of a class of a group that is next.
    #[inline]
    fn next(&mut self, group: u32, class: usize) -> Option<u32> {
        if let Some(only) = self.only
            && (self.entities[only.index()].parent, class) == (group, usize::from(CLASS_OF_GROUPS))
        {
            return self.waits(only).then_some(only.0);
        }
        let reach = self.reach_now();
        self.trees[group as usize][class].next_eligible(&mut self.entities, reach)
    }

    /// Makes a leaf that waits for its turn, and its groups, the served ones, whatever the order says. Nobody is being
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
            entity.presence.serve(amount);
            debug_assert_eq!(entity.state, State::Serving);
            entity.start = entity.start.wrapping_add(entity.span(amount));
            let start = entity.start;
            let tree = &mut self.trees[entity.parent as usize][usize::from(entity.class)];
            // Who is present and has everything in flight has its part of the drive as well.
            let weight = tree.weight.max(tree.lead.weight());
            let time = tree.time.wrapping_add((u64::from(amount) << UNIT_BITS) / weight);
            tree.time = tree.not_beyond_all(time, start, self.reach);
            at = entity.parent;
        }
    }

    /// Ends the turn of the leaf that is being served; `budget` is for its next one, if it has more.
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

    /// Makes a group's place in its parent what its members make of it, and so on upwards.
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

    /// The budget of a group's member that is next.
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

    /// An entity that has something comes in, at its tree's time, or where what it had in advance or is still due puts it.
    fn enter(&mut self, id: EntityId, is_urgent: bool) {
        let lead = self.lead(id);
        if self.entities[id.index()].state == State::Lingering {
            self.take_out(id);
        }
        let earliest = self.earliest_start(id);
        let entity = &mut self.entities[id.index()];
        // A tag from before time wrapped around may seem to lie far ahead: nobody can have had so much in advance.
        let is_wrapped = lead > 0 && lead as u64 > entity.span(u32::MAX);
        if lead <= 0 || is_wrapped {
            if is_wrapped || before(entity.start, earliest) {
                entity.start = earliest;
            }
            entity.is_urgent = is_urgent;
        }
        self.count(id);
        self.put_in(id);
    }

    /// How far an entity's start lies before its tree's time, if positive: what it had in advance.
    fn lead(&mut self, id: EntityId) -> i64 {
        let time = self.tree_of(id).time;
        self.entities[id.index()].start.wrapping_sub(time) as i64
    }

    /// Puts an entity that is `Out` where its tags want it.
    fn put_in(&mut self, id: EntityId) {
        self.tree_of(id).weight += u64::from(self.entities[id.index()].weight);
        self.reinsert(id);
    }

    /// Puts an entity whose weight is counted where its tags want it.
    #[inline]
    fn reinsert(&mut self, id: EntityId) {
        let entity = &mut self.entities[id.index()];
        let due_in = if entity.is_urgent {
            0
        } else {
            entity.span(entity.budget)
        };
        entity.finish = entity.start.wrapping_add(due_in);
        let (start, reach) = (entity.start, self.reach_now());
        let entity = &self.entities[id.index()];
        let tree = &mut self.trees[entity.parent as usize][usize::from(entity.class)];
        let waits = before(tree.time, start) || !tree.allows(&mut self.entities, reach, start);
        let entity = &mut self.entities[id.index()];
        if waits {
            entity.state = State::Waiting;
            tree.waiting.push(&mut self.entities, id.0);
        } else {
            entity.state = State::Eligible;
            tree.eligible.push(&mut self.entities, id.0);
        }
    }

    /// The served entity has nothing any more.
    #[inline]
    fn retire(&mut self, id: EntityId) {
        let weight = u64::from(self.entities[id.index()].weight);
        self.entities[id.index()].state = State::Out;
        self.tree_of(id).weight -= weight;
        self.linger(id);
    }

    /// Lets an entity that is `Out` linger, if it was served in advance.
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
/// The class in which groups are members of their parents.
pub(super) const CLASS_OF_GROUPS: u8 = 1;
const ROOT: u32 = 0;

#[cfg(test)]
mod tests;
