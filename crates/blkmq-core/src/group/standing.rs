//! Decides what becomes of a bio because of its group: it goes its way, or meets caps, or is its ancestor's, or is refused.
//! The tree behind the gate, as far as submitters need it: one word a group, seldom written, read once for each bio.

use std::sync::atomic::{AtomicU32, Ordering};

use super::GroupTree;
use crate::ids::GroupId;

/// The standing of every group of a queue.
#[derive(Debug)]
pub(crate) struct GroupStates {
    words: Box<[AtomicU32]>,
    /// All groups below this number live: the look at them that costs no more than a comparison.
    living_below: AtomicU32,
}

impl GroupStates {
    /// The states of the groups of a tree.
    pub(crate) fn new(tree: &GroupTree) -> Self {
        let group_states = Self {
            words: (0..tree.capacity()).map(|_| AtomicU32::new(NOBODY)).collect(),
            living_below: AtomicU32::new(0),
        };
        group_states.update(tree);
        group_states
    }

    /// How many groups there can be.
    pub(crate) fn capacity(&self) -> usize {
        self.words.len()
    }

    /// Says whether a group takes bios, for most that do.
    #[inline]
    pub(crate) fn is_surely_living(&self, id: GroupId) -> bool {
        id.0 < self.living_below.load(Ordering::Relaxed)
    }

    /// Says whether a group takes bios. A moment later it may not: it is its ancestors' then, and its id nobody else's
    /// until the caller's reactor has taken note (`sw_ctx`).
    #[inline]
    pub(crate) fn is_living(&self, id: GroupId) -> bool {
        self.words
            .get(id.index())
            .is_some_and(|word| word.load(Ordering::Relaxed) <= CAPPED)
    }

    /// Says whether the group, or one that it is part of, has caps.
    #[inline]
    pub(crate) fn is_capped(&self, id: GroupId) -> bool {
        // A removed one may have capped ancestors: the gate looks.
        self.words[id.index()].load(Ordering::Relaxed) != FREE
    }

    /// The group that takes a group's bios: itself, its nearest living ancestor, or nobody if it is not in use.
    pub(crate) fn effective_group(&self, mut id: GroupId) -> Option<GroupId> {
        loop {
            match self.words.get(id.index())?.load(Ordering::Relaxed) {
                FREE | CAPPED => return Some(id),
                NOBODY => return None,
                // Upwards, so this ends.
                word => id = GroupId(word & !LEFT_TO),
            }
        }
    }

    /// Takes over what has changed in the tree. For whoever is inside the gate.
    pub(crate) fn update(&self, tree: &GroupTree) {
        for (index, word) in self.words.iter().enumerate() {
            let id = GroupId(index as u32);
            let standing = if tree.get(id).is_none() {
                NOBODY
            } else if !tree.is_living(id) {
                LEFT_TO | tree.nearest_living(id).0
            } else if tree.chain(id).any(|(_, node)| !node.caps.is_none()) {
                CAPPED
            } else {
                FREE
            };
            word.store(standing, Ordering::Relaxed);
        }
        let living = self
            .words
            .iter()
            .take_while(|word| word.load(Ordering::Relaxed) <= CAPPED);
        self.living_below.store(living.count() as u32, Ordering::Relaxed);
    }
}

/// It takes bios.
const FREE: u32 = 0;
/// It takes bios, which must go through the gate.
const CAPPED: u32 = 1;
/// It is not in use.
const NOBODY: u32 = 2;
/// It was removed; the other bits are an ancestor's id.
const LEFT_TO: u32 = 1 << 31;
