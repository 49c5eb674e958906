//! What submitters need to know of the tree behind the gate: whether a bio's group has no caps, has caps,
//! is gone (its nearest living ancestor takes the bio), or takes no bio at all. It is one word per group,
//! rarely written, read once for each bio. Another word has what who shares something else than the drive needs of it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::{GroupTree, ROOT, WEIGHT_DEFAULT};
use crate::ids::GroupId;

/// The state of every group of a queue.
#[derive(Debug)]
pub(crate) struct GroupStates {
    words: Box<[AtomicU32]>,
    /// Its parent, then its weight in 16 bits.
    shares: Box<[AtomicU64]>,
    /// All groups below this number live: a check that costs one comparison.
    living_below: AtomicU32,
}

impl GroupStates {
    /// The states of the groups of a tree.
    pub(crate) fn new(tree: &GroupTree) -> Self {
        let group_states = Self {
            words: (0..tree.capacity()).map(|_| AtomicU32::new(NOBODY)).collect(),
            shares: (0..tree.capacity()).map(|_| AtomicU64::new(0)).collect(),
            living_below: AtomicU32::new(0),
        };
        group_states.update(tree);
        group_states
    }

    /// Maximum number of groups.
    pub(crate) fn capacity(&self) -> usize {
        self.words.len()
    }

    /// Says whether a group certainly takes bios; false for some that do.
    #[inline]
    pub(crate) fn is_surely_living(&self, id: GroupId) -> bool {
        id.0 < self.living_below.load(Ordering::Relaxed)
    }

    /// Says whether a group takes bios. This can change a moment later: then its ancestor takes them, and no
    /// other group gets the id until the caller's reactor has noted the removal (`sw_ctx`).
    #[inline]
    pub(crate) fn is_living(&self, id: GroupId) -> bool {
        self.words
            .get(id.index())
            .is_some_and(|word| word.load(Ordering::Relaxed) <= CAPPED)
    }

    /// Says whether the group, or one that it is part of, has caps.
    #[inline]
    pub(crate) fn is_capped(&self, id: GroupId) -> bool {
        // A removed group may have capped ancestors: the gate checks.
        self.words[id.index()].load(Ordering::Relaxed) != FREE
    }

    /// The group that takes a group's bios: itself, its nearest living ancestor, or none if it is not in use.
    pub(crate) fn effective_group(&self, mut id: GroupId) -> Option<GroupId> {
        loop {
            match self.words.get(id.index())?.load(Ordering::Relaxed) {
                FREE | CAPPED => return Some(id),
                NOBODY => return None,
                // Each step goes to an ancestor, so the loop ends.
                word => id = GroupId(word & !LEFT_TO),
            }
        }
    }

    /// The group that one is part of, and its weight; those of a child of the root with the default weight if it is not in
    /// use.
    pub(crate) fn parent_and_weight(&self, id: GroupId) -> (GroupId, u16) {
        // One word is one group's state, and no other memory depends on it.
        match self
            .shares
            .get(id.index())
            .map(|word| word.load(Ordering::Relaxed))
        {
            None | Some(0) => (ROOT, WEIGHT_DEFAULT),
            Some(word) => (GroupId((word >> 16) as u32), word as u16),
        }
    }

    /// Copies what has changed in the tree. Called inside the gate.
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
        for (index, word) in self.shares.iter().enumerate() {
            let node = tree.get(GroupId(index as u32));
            let share = node.map_or(0, |node| u64::from(node.parent.0) << 16 | u64::from(node.weight));
            word.store(share, Ordering::Relaxed);
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
