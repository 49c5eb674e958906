//! The members of one class of one group: those that wait, are eligible or linger, and the next one.

use super::super::heap::{Heap, before};
use super::entity::{BY_FINISH, BY_START, Entity, State};
use super::lead;

/// The members of one class of one group.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    pub(super) time: u64,
    /// Of all members that are not `Out`.
    pub(super) weight: u64,
    pub(super) waiting: Heap<BY_START>,
    pub(super) eligible: Heap<BY_FINISH>,
    pub(super) lingering: Heap<BY_START>,
    pub(super) lead: lead::Lead,
}

impl Tree {
    pub(super) const EMPTY: Self = Self {
        time: 0,
        weight: 0,
        waiting: Heap::EMPTY,
        eligible: Heap::EMPTY,
        lingering: Heap::EMPTY,
        lead: lead::Lead::EMPTY,
    };

    #[inline]
    pub(super) fn has_members(&self) -> bool {
        self.eligible.first().or(self.waiting.first()).is_some()
    }

    /// Updates the eligible and the lingering members. If none is eligible, time jumps to the first start, unless
    /// that is too far ahead of the slowest one. Returns the next member. None of this tree may be being served.
    #[inline]
    pub(super) fn next_eligible(&mut self, entities: &mut [Entity], lead_max: u64) -> Option<u32> {
        if self.eligible.first().is_none() {
            let start = entities[self.waiting.first()? as usize].start;
            if !self.allows(entities, lead_max, start) {
                return None;
            }
            if before(self.time, start) {
                self.time = start;
            }
        }
        while let Some(id) = self.lingering.first() {
            let entity = &mut entities[id as usize];
            if before(self.time, entity.start) {
                break;
            }
            entity.state = State::Out;
            self.weight -= u64::from(entity.weight);
            self.lingering.remove(entities, id);
        }
        while let Some(id) = self.waiting.first() {
            let start = entities[id as usize].start;
            if before(self.time, start) || !self.allows(entities, lead_max, start) {
                break;
            }
            let entity = &mut entities[id as usize];
            entity.state = State::Eligible;
            self.waiting.remove(entities, id);
            self.eligible.push(entities, id);
        }
        self.eligible.first()
    }
}
