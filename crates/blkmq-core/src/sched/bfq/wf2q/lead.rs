//! The bound on how far the members of a group may run ahead of each other.
//! `wf2q` asks before it makes a member eligible; `idling` decides which members are no longer present.
//!
//! A member is served only while its start is at most the *bound* ahead of the *floor*, the start of the
//! slowest member that is *present*: it has requests waiting or in flight, or may return at once.
//!
//! Order alone shares a drive only among members that always have requests waiting. A member that has all
//! its requests in flight is behind its due and cannot be served more. The bound limits the others' lead
//! over it, so they have fewer requests in flight, it finds the drive less full, and it gets its share.
//!
//! After MQFQ (Hedayati and others, USENIX ATC 2019: the throttling bound T and its lazily kept minimum) and
//! SFQ(D) (Jin, Chase and Kaur, SIGMETRICS 2004). There, flows are flat and the slowest backlogged one
//! counts; here, each group bounds its own members, and members with all requests in flight count too.
//!
//! The bound applies only to groups and to what competes with groups: the clients of one group are one
//! tenant's connections, and a deep one need not wait for a shallow one.

use super::super::heap::{Heap, Links, before};
use super::super::idling::Return;
use super::super::probing::is_low;
use super::entity::{BY_KNOWN_START, Entity, EntityId, UNIT_BITS};
use super::tree::Tree;
use super::{CLASS_OF_GROUPS, ROOT, Wf2q};

/// An entity's state for the floor of its tree.
#[derive(Clone, Debug)]
pub(super) struct Presence {
    links: Links,
    /// Its start when the floor was computed last: starts grow, so this is never too high.
    known_start: u64,
    pub(super) is_counted: bool,
    /// Of a group: it is listed as one whose waiting members are all held.
    pub(super) is_noted: bool,
    /// It was absent only for a moment: it keeps the due of that time.
    keeps_due: bool,
    /// Others were held for it, and it got nothing more: it has no due from that time.
    pub(super) is_stalled: bool,
    /// It counts only from this much service on: until then it asks for less than its due.
    modest_until: u64,
    /// It never counts, and keeps its due.
    pub(super) is_passed_over: bool,
    /// Its service, in bytes.
    pub(super) served: u64,
    /// Of a leaf: 1 while it has a request, waiting or in flight; of a group: the number of such members.
    pub(super) busy: u32,
}

/// Of a tree: its present members.
#[derive(Clone, Debug)]
pub(super) struct Lead {
    present: Heap<BY_KNOWN_START>,
    /// The sum of their weights, and how many of them are groups.
    weight: u64,
    groups: u32,
    /// No present member's start is lower; computed again only when that matters.
    floor: u64,
    /// The highest start of any member.
    highest: u64,
}

impl Wf2q {
    /// Sets the bound of a member's lead over the slowest one, in bytes that all members share by weight; 0 for no bound.
    pub(in super::super) fn set_lead_max(&mut self, bytes: u64) {
        self.lead_max = bytes;
    }

    /// Switches the bound off for now, or on again; members that were held keep their due.
    pub(in super::super) fn set_open(&mut self, is_open: bool) {
        self.is_open = is_open;
    }

    /// The bound in force now.
    #[inline]
    pub(in super::super) fn lead_max_now(&self) -> u64 {
        if self.is_open { 0 } else { self.lead_max }
    }

    /// Sets what the drive does, in bytes per second.
    pub(in super::super) fn set_rate(&mut self, bytes: u64) {
        self.rate = bytes;
    }

    /// Handles a leaf's first request. `came` is called for the leaf and for its groups that had no request until
    /// now, with their service; it says how each comes back.
    #[inline]
    pub(in super::super) fn begin(&mut self, id: EntityId, mut came: impl FnMut(EntityId, u64) -> Return) {
        let mut at = id.0;
        loop {
            let entity = &mut self.entities[at as usize];
            entity.presence.busy += 1;
            if entity.presence.busy > 1 || at == ROOT {
                return;
            }
            let back = came(EntityId(at), entity.presence.served);
            let parent = entity.parent;
            entity.presence.keeps_due = back.is_moment;
            entity.presence.modest_until = 0;
            if back.asks < self.rate && self.asks_little(EntityId(at), back.asks) {
                self.discount(EntityId(at));
                self.entities[at as usize].presence.modest_until = back.modest_until;
            }
            at = parent;
        }
    }

    /// Says whether a member asks for less than its due.
    fn asks_little(&self, id: EntityId, asks: u64) -> bool {
        let (own, weights) = self.part(id);
        let due = (u128::from(self.rate) * u128::from(own) / u128::from(weights)) as u64;
        is_low(asks, due)
    }

    /// Says whether a member pauses by nature, and asks for less than its due: nobody is held for it.
    #[inline]
    pub(in super::super) fn is_modest(&self, id: EntityId) -> bool {
        self.entities[id.index()].presence.is_modest()
    }

    /// Says whether a member, or a group above it, is modest.
    pub(in super::super) fn is_within_modest(&self, id: EntityId) -> bool {
        let mut at = id.0;
        while at != ROOT {
            let entity = &self.entities[at as usize];
            if entity.presence.is_modest() {
                return true;
            }
            at = entity.parent;
        }
        false
    }

    /// Handles the end of a leaf's last request. `left` is called for the leaf and its groups without requests now.
    #[inline]
    pub(in super::super) fn end(&mut self, id: EntityId, mut left: impl FnMut(EntityId)) {
        let mut at = id.0;
        loop {
            let entity = &mut self.entities[at as usize];
            entity.presence.busy -= 1;
            if entity.presence.busy > 0 || at == ROOT {
                return;
            }
            left(EntityId(at));
            at = entity.parent;
        }
    }

    /// Checks the members for which others are held. `is_gone` is called with such a member, its service and
    /// whether it has requests; if it is true, the member is waited for no longer, until it has a new request.
    /// Says whether a member that was held may be served now.
    pub(in super::super) fn dismiss(&mut self, mut is_gone: impl FnMut(EntityId, u64, bool) -> bool) -> bool {
        let mut any = false;
        for n in (0..=self.held.len()).rev() {
            let group = n.checked_sub(1).map_or(ROOT, |n| self.held[n]);
            while self.is_held(group) {
                let Some(id) = self.floor_of(group) else {
                    break;
                };
                let is_busy = self.is_busy(id);
                if !is_gone(id, self.served(id), is_busy) {
                    break;
                }
                self.discount(id);
                self.entities[id.index()].presence.is_stalled = is_busy;
                any = true;
            }
        }
        any
    }

    /// The member for which others are held, if there is one.
    pub(in super::super) fn holder(&mut self) -> Option<EntityId> {
        if self.is_held(ROOT) {
            return self.floor_of(ROOT);
        }
        let group = self.held.first().copied()?;
        self.floor_of(group)
    }

    /// A leaf and the groups that contain it, from the inside out, without the root.
    pub(in super::super) fn with_groups(&self, id: EntityId) -> impl Iterator<Item = EntityId> {
        let above = |id: &EntityId| Some(EntityId(self.entities[id.index()].parent));
        std::iter::successors(Some(id), above).take_while(|id| id.0 != ROOT)
    }

    /// Says whether a group has waiting members and none that may be served.
    fn is_held(&mut self, group: u32) -> bool {
        let class = usize::from(CLASS_OF_GROUPS);
        self.trees[group as usize][class].has_members() && self.next(group, class).is_none()
    }

    /// The slowest present member of a group.
    fn floor_of(&mut self, group: u32) -> Option<EntityId> {
        let tree = &mut self.trees[group as usize][usize::from(CLASS_OF_GROUPS)];
        tree.look_at_floor(&mut self.entities).map(EntityId)
    }

    /// Says whether a member has requests, waiting or in flight.
    pub(in super::super) fn is_busy(&self, id: EntityId) -> bool {
        self.entities[id.index()].presence.busy > 0
    }

    /// Makes groups whose members are no longer held wait for their turn again.
    #[inline]
    pub(super) fn look_at_held(&mut self) {
        if !self.held.is_empty() {
            self.look_at_each_held();
        }
    }

    #[cold]
    fn look_at_each_held(&mut self) {
        for n in (0..self.held.len()).rev() {
            let group = self.held.swap_remove(n);
            self.entities[group as usize].presence.is_noted = false;
            self.refresh(group, false);
        }
    }

    /// Lists a group whose waiting members are all held.
    #[cold]
    pub(super) fn note_held(&mut self, group: u32) {
        let presence = &mut self.entities[group as usize].presence;
        if !std::mem::replace(&mut presence.is_noted, true) {
            self.held.push(group);
        }
    }

    /// The earliest start of an entity that is not ahead. Service that it missed while it was present, or absent
    /// for a moment, is still due to it, up to some limits. An entity that was absent for longer begins at the
    /// tree's time, and not beyond the bound.
    pub(super) fn earliest_start(&mut self, id: EntityId) -> u64 {
        let lead_max = self.lead_max;
        let Presence {
            is_counted,
            keeps_due,
            is_passed_over,
            ..
        } = self.entities[id.index()].presence;
        let is_stalled = std::mem::take(&mut self.entities[id.index()].presence.is_stalled);
        let bound = self.bound_with(id, lead_max);
        let tree = self.tree_of(id);
        if !tree.is_bounded(lead_max) {
            return tree.time;
        }
        if is_counted {
            return tree.time.wrapping_sub(DUE_PRESENT * bound);
        }
        if is_stalled {
            // However long the others went on, they are not held for that now.
            return tree.time.wrapping_sub(bound);
        }
        if keeps_due || is_passed_over {
            return tree.time.wrapping_sub(DUE_AWAY * bound);
        }
        let parent = self.entities[id.index()].parent;
        self.floor_of(parent);
        let tree = self.tree_of(id);
        let highest = tree.lead.floor.wrapping_add(bound);
        if before(highest, tree.time) {
            highest
        } else {
            tree.time
        }
    }

    /// How far ahead of the floor a start may be, with this entity among those that count, so that it is the same amount
    /// of all service whatever the weight of the entity.
    fn bound_with(&self, id: EntityId, lead_max: u64) -> u64 {
        let entity = &self.entities[id.index()];
        let own = if entity.presence.is_counted {
            0
        } else {
            entity.weight
        };
        let tree = &self.trees[entity.parent as usize][usize::from(entity.class)];
        let weight = tree.lead.weight() + u64::from(own);
        (lead_max << UNIT_BITS) / weight.max(1)
    }

    /// Counts an entity with requests for the floor from now on.
    #[inline]
    pub(super) fn count(&mut self, id: EntityId) {
        let entity = &mut self.entities[id.index()];
        let Presence {
            is_counted,
            is_passed_over,
            ..
        } = entity.presence;
        let is_exempt = is_passed_over || entity.presence.is_modest();
        if is_counted || is_exempt || entity.class != CLASS_OF_GROUPS {
            return;
        }
        let is_group = self.is_group(id.0);
        let entity = &mut self.entities[id.index()];
        let tree = &mut self.trees[entity.parent as usize][usize::from(CLASS_OF_GROUPS)];
        if !is_group && tree.lead.groups == 0 {
            return;
        }
        entity.presence.is_counted = true;
        entity.presence.known_start = entity.start;
        if tree.lead.present.first().is_none() || before(entity.start, tree.lead.floor) {
            tree.lead.floor = entity.start;
        }
        tree.lead.weight += u64::from(entity.weight);
        tree.lead.groups += u32::from(is_group);
        tree.lead.present.push(&mut self.entities, id.0);
    }

    /// Moves an entity's start forward to the earliest that a present one may have: with a smaller weight, what it was due
    /// may be more than that, and all others would be brought behind it, and be held for it.
    pub(super) fn limit_due(&mut self, id: EntityId) {
        let lead_max = self.lead_max;
        let bound = self.bound_with(id, lead_max);
        let tree = self.tree_of(id);
        let earliest = tree.time.wrapping_sub(DUE_PRESENT * bound);
        let is_bounded = tree.is_bounded(lead_max);
        let entity = &mut self.entities[id.index()];
        if is_bounded && before(entity.start, earliest) {
            entity.start = earliest;
        }
    }

    /// Moves an entity's start back to the bound, if it is beyond: a small weight may have moved it far, and the tree's
    /// time with it.
    pub(super) fn bring_within_bound(&mut self, id: EntityId) {
        let lead_max = self.lead_max;
        self.floor_of(self.entities[id.index()].parent);
        let bound = self.bound_with(id, lead_max);
        let tree = self.tree_of(id);
        let highest = tree.lead.floor.wrapping_add(bound);
        let is_bounded = tree.is_bounded(lead_max);
        let entity = &mut self.entities[id.index()];
        if is_bounded && before(highest, entity.start) {
            entity.start = highest;
        }
    }

    /// Counts an entity again that is being served: it asks for more than its due, or it was stalled, and then it
    /// has no due from that time.
    #[cold]
    pub(super) fn count_served(&mut self, id: EntityId) {
        if std::mem::take(&mut self.entities[id.index()].presence.is_stalled) {
            let lead_max = self.lead_max;
            let bound = self.bound_with(id, lead_max);
            let earliest = self.tree_of(id).time.wrapping_sub(bound);
            let entity = &mut self.entities[id.index()];
            if before(entity.start, earliest) {
                entity.start = earliest;
            }
        }
        self.count(id);
    }

    /// Stops counting an entity for the floor; says whether it counted.
    pub(super) fn discount(&mut self, id: EntityId) -> bool {
        let is_group = self.is_group(id.0);
        let entity = &mut self.entities[id.index()];
        if !std::mem::replace(&mut entity.presence.is_counted, false) {
            return false;
        }
        let tree = &mut self.trees[entity.parent as usize][usize::from(CLASS_OF_GROUPS)];
        tree.lead.weight -= u64::from(entity.weight);
        tree.lead.groups -= u32::from(is_group);
        tree.lead.present.remove(&mut self.entities, id.0);
        true
    }

    /// Moves a group, with its requests under way, below another one.
    pub(super) fn move_busy(&mut self, id: EntityId, parent: u32) {
        if self.entities[id.index()].presence.busy == 0 {
            return;
        }
        let old = self.entities[id.index()].parent;
        self.end(EntityId(old), |_| {});
        self.begin(EntityId(parent), |_, _| Return::OF_NEWCOMER);
    }

    /// Asserts that all entities that count are present, and that the floor is below all of them.
    pub(super) fn check_lead(&self) {
        for (group, classes) in self.trees.iter().enumerate() {
            let tree = &classes[usize::from(CLASS_OF_GROUPS)];
            let members = tree.lead.present.check(&self.entities);
            let entities = || members.iter().map(|&id| &self.entities[id as usize]);
            assert_eq!(tree.lead.weight, entities().map(|e| u64::from(e.weight)).sum());
            let groups = members.iter().filter(|&&id| self.is_group(id)).count();
            assert_eq!(
                tree.lead.groups as usize, groups,
                "present groups of group {group}"
            );
            for entity in entities() {
                let Presence { known_start, .. } = entity.presence;
                assert!(entity.presence.is_counted && entity.parent as usize == group);
                assert!(!before(entity.start, known_start), "a start that ran back");
                assert!(!before(known_start, tree.lead.floor), "a member below the floor");
            }
        }
        let counted = self.entities.iter().filter(|entity| entity.presence.is_counted);
        let present = self.trees.iter().map(|classes| {
            let tree = &classes[usize::from(CLASS_OF_GROUPS)];
            tree.lead.present.check(&self.entities).len()
        });
        assert_eq!(counted.count(), present.sum(), "entities that count for a floor");
    }
}

impl Tree {
    /// Says whether a member with this start is not too far ahead to be served.
    #[inline]
    pub(super) fn allows(&mut self, entities: &mut [Entity], lead_max: u64, start: u64) -> bool {
        if !self.is_bounded(lead_max) {
            return true;
        }
        let bound = self.bound(lead_max);
        if !before(self.lead.floor.wrapping_add(bound), start) {
            return true;
        }
        self.look_at_floor(entities);
        !before(self.lead.floor.wrapping_add(bound), start)
    }

    /// The tree's time after a member with this start was served. While a member makes up for its absence, the
    /// others get no service: time does not run ahead of all of them, since otherwise service would seem due to
    /// each.
    #[inline]
    pub(super) fn not_beyond_all(&mut self, time: u64, start: u64, lead_max: u64) -> u64 {
        if before(self.lead.highest, start) {
            self.lead.highest = start;
        }
        if self.is_bounded(lead_max) && before(self.lead.highest, time) {
            return if before(self.lead.highest, self.time) {
                self.time
            } else {
                self.lead.highest
            };
        }
        time
    }

    #[inline]
    fn is_bounded(&self, lead_max: u64) -> bool {
        lead_max > 0 && self.lead.groups > 0
    }

    /// How far ahead of the floor a start may be.
    #[inline]
    fn bound(&self, lead_max: u64) -> u64 {
        (lead_max << UNIT_BITS) / self.lead.weight.max(1)
    }

    /// Moves the floor up to the lowest start of a present member, and returns that one.
    fn look_at_floor(&mut self, entities: &mut [Entity]) -> Option<u32> {
        loop {
            let id = self.lead.present.first()?;
            let entity = &mut entities[id as usize];
            let start = entity.start;
            if entity.presence.known_start == start {
                self.lead.floor = start;
                return Some(id);
            }
            self.lead.present.remove(entities, id);
            entities[id as usize].presence.known_start = start;
            self.lead.present.push(entities, id);
        }
    }
}

impl Presence {
    pub(super) const ABSENT: Self = Self {
        links: Links::UNLINKED,
        known_start: 0,
        is_counted: false,
        is_noted: false,
        keeps_due: false,
        is_stalled: false,
        modest_until: 0,
        is_passed_over: false,
        served: 0,
        busy: 0,
    };

    #[inline]
    pub(super) fn links(&self) -> &Links {
        &self.links
    }

    #[inline]
    pub(super) fn links_mut(&mut self) -> &mut Links {
        &mut self.links
    }

    /// Counts service; says whether this was more than a modest member asks for.
    #[inline]
    pub(super) fn serve(&mut self, bytes: u32) -> bool {
        let was_modest = self.is_modest();
        self.served += u64::from(bytes);
        was_modest && !self.is_modest()
    }

    /// Another member has the number from now on.
    pub(super) fn forget_pauses(&mut self) {
        (self.is_stalled, self.modest_until) = (false, 0);
    }

    #[inline]
    pub(super) fn is_modest(&self) -> bool {
        self.served < self.modest_until
    }

    #[inline]
    pub(super) fn known_start(&self) -> u64 {
        self.known_start
    }
}

/// Due service is kept up to so many times the bound, which is what the drive does in so many milliseconds:
/// for a member that is present, which only misses service during a probe, and for a member that was absent
/// or is passed over.
const DUE_PRESENT: u64 = 64;
const DUE_AWAY: u64 = 16;

impl Lead {
    pub(super) const EMPTY: Self = Self {
        present: Heap::EMPTY,
        weight: 0,
        groups: 0,
        floor: 0,
        highest: 0,
    };

    /// The sum of the weights of the present members.
    #[inline]
    pub(super) fn weight(&self) -> u64 {
        self.weight
    }
}
