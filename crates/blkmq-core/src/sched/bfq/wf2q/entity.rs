//! An entity of a tree: a leaf or a group, with its weight and its tags.

use super::super::heap::{Links, Node};
use super::lead;

/// The number of an entity: its group's number, or its queue's after all groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct EntityId(pub(super) u32);

#[derive(Clone, Debug)]
pub(super) struct Entity {
    pub(super) links: Links,
    pub(super) state: State,
    pub(super) presence: lead::Presence,
    /// Until it is served next, its finish is its start, or, of one that asks for less than its due, before all.
    pub(super) is_urgent: bool,
    pub(super) class: u8,
    /// The group that schedules it; the root's is the root.
    pub(super) parent: u32,
    /// The weight as configured, and how much of it counts, in 1/1024.
    pub(super) given: u32,
    pub(super) counts: u32,
    /// The product of both, in 1/[`WEIGHT_UNIT`].
    pub(super) weight: u32,
    /// 2^(32 + [`UNIT_BITS`]) over the weight.
    pub(super) inverse: u64,
    pub(super) budget: u32,
    pub(super) start: u64,
    pub(super) finish: u64,
}

/// Where an entity is; see the diagram in `wf2q`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Out,
    Waiting,
    Eligible,
    Serving,
    Lingering,
}

impl Entity {
    pub(super) fn set_weight(&mut self, weight: u32) {
        self.weight = weight;
        self.inverse = inverse(weight);
    }

    /// How far `amount` of service moves the start.
    #[inline]
    pub(super) fn span(&self, amount: u32) -> u64 {
        ((u128::from(amount) * u128::from(self.inverse)) >> 32) as u64
    }
}

impl Node for Entity {
    #[inline]
    fn links<const BY: usize>(&self) -> &Links {
        if BY == BY_KNOWN_START {
            self.presence.links()
        } else {
            &self.links
        }
    }

    #[inline]
    fn links_mut<const BY: usize>(&mut self) -> &mut Links {
        if BY == BY_KNOWN_START {
            self.presence.links_mut()
        } else {
            &mut self.links
        }
    }

    #[inline]
    fn tag<const BY: usize>(&self) -> u64 {
        match BY {
            BY_START => self.start,
            BY_FINISH => self.finish,
            _ => self.presence.known_start(),
        }
    }
}

impl EntityId {
    #[inline]
    pub(in super::super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// The number of the leaf that has this entity, if there are `groups` groups; `None` for a group's entity.
pub(in super::super) fn leaf_number(id: EntityId, groups: usize) -> Option<usize> {
    id.index().checked_sub(groups)
}

/// The part of a configured weight that counts, in 1/[`WEIGHT_UNIT`].
pub(super) fn effective(given: u32, counts: u32) -> u32 {
    assert!(given > 0, "a weight of 0");
    let weight = u64::from(given) * u64::from(WEIGHT_UNIT) * u64::from(counts) / u64::from(COUNTS_ALL);
    (weight as u32).max(1)
}

pub(super) fn inverse(weight: u32) -> u64 {
    (1 << (32 + UNIT_BITS)) / u64::from(weight)
}

/// Virtual time counts service over weight in units of 2^-20: the rounding error is far below a byte, and
/// tags of one tree differ by less than 2^52, so they can wrap around.
pub(super) const UNIT_BITS: u32 = 20;
/// Weights are counted in fractions, since only a part of a small weight may count.
pub(super) const WEIGHT_UNIT: u32 = 32;
/// All of a weight counts.
pub(super) const COUNTS_ALL: u32 = 1024;
pub(super) const BY_START: usize = 0;
pub(super) const BY_FINISH: usize = 1;
pub(super) const BY_KNOWN_START: usize = 2;
