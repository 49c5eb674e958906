//! The tenant tree: the groups (tenants) of a queue, which group is part of which, and what each may
//! take. The gate protects it; elevators keep copies of what they need and learn of every change
//! (`sched`).
//!
//! ```text
//!  Free ──create──► Living ──remove──► Leaving ──retire──► Free
//! ```
//! A leaving group takes no more bios (its parent takes them), but requests of it may be under way. It stays
//! in the tree until none is, so that elevators, caps and statistics never meet a number that another group
//! has by now.

mod caps;
mod control;
mod error;
mod standing;

pub use caps::{Cap, CapKind, Caps, Debts};
pub use control::Change;
pub use error::GroupError;
pub(crate) use standing::GroupStates;

use crate::ids::GroupId;
use crate::time::Nanos;

/// The tenant tree of one queue: a table of groups made at set-up, of which some are in use.
#[derive(Clone, Debug)]
pub struct GroupTree {
    entries: Box<[Entry]>,
}

/// One group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// The group that it is part of; the root is its own parent.
    pub parent: GroupId,
    /// Its share against its siblings, [`WEIGHT_MIN`] to [`WEIGHT_MAX`].
    pub weight: u16,
    /// Caps on what it and all groups below it take together.
    pub caps: Caps,
    /// The time that nine of ten of its requests should take at most, queueing included; see `target`.
    pub latency_target: Option<Nanos>,
}

impl Node {
    /// A group without caps or latency target.
    pub fn new(parent: GroupId, weight: u16) -> Self {
        Self {
            parent,
            weight,
            caps: Caps::default(),
            latency_target: None,
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Entry {
    /// None while the entry is free.
    node: Option<Node>,
    /// Removed, but requests of it may be under way.
    leaves: bool,
}

impl GroupTree {
    /// A tree of the root alone, with room for `capacity` groups, the root included.
    ///
    /// # Panics
    /// If `capacity` is 0: there is always a root.
    pub fn new(capacity: u32) -> Self {
        assert!(capacity > 0, "a tree without a root");
        let mut entries: Box<[Entry]> = vec![Entry::default(); capacity as usize].into();
        entries[0].node = Some(Node::new(ROOT, WEIGHT_DEFAULT));
        Self { entries }
    }

    /// A full tree of the root and `count - 1` children of it with the default weight.
    ///
    /// # Panics
    /// If `count` is 0: there is always a root.
    pub fn flat(count: u32) -> Self {
        let mut tree = Self::new(count);
        for _ in 1..count {
            tree.create(ROOT, WEIGHT_DEFAULT).expect("there is room");
        }
        tree
    }

    /// Maximum number of groups: every id is below it.
    pub fn capacity(&self) -> usize {
        self.entries.len()
    }

    /// A group, if it is in use: living, or removed with requests that may be under way.
    #[inline]
    pub fn get(&self, id: GroupId) -> Option<&Node> {
        self.entries.get(id.index())?.node.as_ref()
    }

    /// The groups in use, see [`GroupTree::get`].
    pub fn iter(&self) -> impl Iterator<Item = (GroupId, &Node)> {
        let numbered = self.entries.iter().enumerate();
        numbered.filter_map(|(id, place)| Some((GroupId(id as u32), place.node.as_ref()?)))
    }

    /// Says whether a group takes bios: it is in use and was not removed.
    pub fn is_living(&self, id: GroupId) -> bool {
        self.get(id).is_some() && !self.entries[id.index()].leaves
    }

    /// The group itself, then the groups that it is part of, up to the root.
    pub fn chain(&self, id: GroupId) -> impl Iterator<Item = (GroupId, &Node)> {
        let step = |id: GroupId| self.get(id).map(|node| (id, node));
        std::iter::successors(step(id), move |&(id, node)| {
            (id != ROOT).then(|| step(node.parent)).flatten()
        })
    }

    /// Adds a group.
    ///
    /// # Errors
    /// If the parent is not living or is nested too deeply, the weight is out of range, or the table is full.
    pub fn create(&mut self, parent: GroupId, weight: u16) -> Result<GroupId, GroupError> {
        self.living(parent)?;
        check_weight(weight)?;
        if self.level(parent) == LEVELS_MAX {
            return Err(GroupError::Level { parent });
        }
        let Some(free) = self.entries.iter().position(|place| place.node.is_none()) else {
            return Err(GroupError::Full {
                capacity: self.capacity(),
                leaving: self.entries.iter().filter(|place| place.leaves).count(),
            });
        };
        self.entries[free].node = Some(Node::new(parent, weight));
        Ok(GroupId(free as u32))
    }

    /// Changes a group's weight.
    ///
    /// # Errors
    /// If the group is not living or is the root, or the weight is out of range.
    pub fn set_weight(&mut self, id: GroupId, weight: u16) -> Result<(), GroupError> {
        check_weight(weight)?;
        self.living_below_root(id, "weighted")?.weight = weight;
        Ok(())
    }

    /// Makes a group, with all groups below it, part of another.
    ///
    /// # Errors
    /// If one of the two is not living, the group is the root, the new parent is part of the group, or groups
    /// below it would be nested too deeply.
    pub fn move_to(&mut self, id: GroupId, parent: GroupId) -> Result<(), GroupError> {
        self.living(parent)?;
        let from = self.living_below_root(id, "moved")?.parent;
        if self.chain(parent).any(|(above, _)| above == id) {
            return Err(GroupError::Loop { id, parent });
        }
        self.node_mut(id).parent = parent;
        if self.iter().any(|(each, _)| self.level(each) > LEVELS_MAX) {
            self.node_mut(id).parent = from;
            return Err(GroupError::Level { parent });
        }
        Ok(())
    }

    /// Caps what a group and all groups below it take together.
    ///
    /// # Errors
    /// If the group is not living. The caller has checked the caps against the drive.
    pub fn set_caps(&mut self, id: GroupId, caps: Caps) -> Result<(), GroupError> {
        self.living(id)?;
        self.node_mut(id).caps = caps;
        Ok(())
    }

    /// Sets how long a group's requests should take.
    ///
    /// # Errors
    /// If the group is not living.
    pub fn set_latency_target(&mut self, id: GroupId, target: Option<Nanos>) -> Result<(), GroupError> {
        self.living(id)?;
        self.node_mut(id).latency_target = target;
        Ok(())
    }

    /// Removes a group and its caps. Its entry is free once it has been retired.
    ///
    /// # Errors
    /// If it is not living, is the root, or living groups are part of it.
    pub(crate) fn remove(&mut self, id: GroupId) -> Result<(), GroupError> {
        self.living_below_root(id, "removed")?;
        let is_child = |&(child, node): &(GroupId, &Node)| node.parent == id && self.is_living(child);
        if let Some((child, _)) = self.iter().find(is_child) {
            return Err(GroupError::HasChildren { id, child });
        }
        self.node_mut(id).caps = Caps::default();
        self.entries[id.index()].leaves = true;
        Ok(())
    }

    /// Frees the entry of a removed group that has nothing under way. Returns its parent.
    pub(crate) fn retire(&mut self, id: GroupId) -> GroupId {
        let place = std::mem::take(&mut self.entries[id.index()]);
        assert!(place.leaves, "group {id} retired before it was removed");
        let child = self.iter().find(|(_, node)| node.parent == id);
        assert!(child.is_none(), "group {id} retired before its child {child:?}");
        place.node.expect("a group that leaves is in use").parent
    }

    /// The group itself or its nearest ancestor that takes bios.
    pub(crate) fn nearest_living(&self, id: GroupId) -> GroupId {
        self.chain(id)
            .find(|(id, _)| self.is_living(*id))
            .map_or(ROOT, |(id, _)| id)
    }

    /// Depth of a group; the root's is 0.
    fn level(&self, id: GroupId) -> usize {
        self.chain(id).count() - 1
    }

    fn living(&self, id: GroupId) -> Result<&Node, GroupError> {
        let node = self.get(id).filter(|_| self.is_living(id));
        node.ok_or(GroupError::Unknown { id })
    }

    fn living_below_root(&mut self, id: GroupId, to_be: &'static str) -> Result<&mut Node, GroupError> {
        self.living(id)?;
        if id == ROOT {
            return Err(GroupError::Root { to_be });
        }
        Ok(self.node_mut(id))
    }

    fn node_mut(&mut self, id: GroupId) -> &mut Node {
        self.entries[id.index()].node.as_mut().expect("in use")
    }
}

fn check_weight(weight: u16) -> Result<(), GroupError> {
    if (WEIGHT_MIN..=WEIGHT_MAX).contains(&weight) {
        return Ok(());
    }
    Err(GroupError::Weight { weight })
}

/// The group that all others are below.
pub const ROOT: GroupId = GroupId(0);
/// The smallest weight.
pub const WEIGHT_MIN: u16 = 1;
/// The weight of a group that has none set.
pub const WEIGHT_DEFAULT: u16 = 100;
/// The largest weight.
pub const WEIGHT_MAX: u16 = 1000;
/// How deeply groups can be nested below the root.
pub const LEVELS_MAX: usize = 16;
/// Largest number of groups that a queue can have room for.
pub const GROUPS_MAX: u32 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> (GroupTree, GroupId, GroupId) {
        let mut tree = GroupTree::new(4);
        let a = tree.create(ROOT, 200).unwrap();
        let b = tree.create(a, 50).unwrap();
        (tree, a, b)
    }

    #[test]
    fn full_table_says_so_and_takes_a_retired_place_again() {
        let (mut tree, a, b) = tree();
        tree.create(ROOT, 1).unwrap();
        let full = tree.create(ROOT, 1).unwrap_err();
        assert!(full.to_string().contains("4"), "{full}");
        tree.remove(b).unwrap();
        let full = tree.create(ROOT, 1).unwrap_err();
        assert!(full.to_string().contains("1 of them"), "{full}");
        assert_eq!(tree.retire(b), a);
        assert_eq!(tree.create(ROOT, 1), Ok(b));
    }

    #[test]
    fn parent_is_not_removed_while_children_live() {
        let (mut tree, a, b) = tree();
        assert_eq!(tree.remove(a), Err(GroupError::HasChildren { id: a, child: b }));
        tree.remove(b).unwrap();
        assert_eq!(tree.nearest_living(b), a);
        tree.remove(a).unwrap();
        assert_eq!(tree.nearest_living(b), ROOT);
    }

    #[test]
    fn group_is_not_moved_below_itself_nor_too_deep() {
        let mut tree = GroupTree::new(40);
        let mut deepest = ROOT;
        for _ in 0..LEVELS_MAX {
            deepest = tree.create(deepest, 100).unwrap();
        }
        let first = tree.chain(deepest).nth(LEVELS_MAX - 1).unwrap().0;
        assert_eq!(
            tree.move_to(first, deepest),
            Err(GroupError::Loop {
                id: first,
                parent: deepest
            })
        );
        assert_eq!(
            tree.create(deepest, 100),
            Err(GroupError::Level { parent: deepest })
        );
        let other = tree.create(ROOT, 100).unwrap();
        assert_eq!(
            tree.move_to(first, other),
            Err(GroupError::Level { parent: other })
        );
        assert_eq!(
            tree.get(first).unwrap().parent,
            ROOT,
            "a refused move changes nothing"
        );
        tree.move_to(other, deepest).unwrap_err();
        tree.move_to(deepest, other).unwrap();
    }

    #[test]
    fn root_and_strangers_are_refused() {
        let (mut tree, a, _) = tree();
        for error in [tree.remove(ROOT), tree.move_to(ROOT, a), tree.set_weight(ROOT, 5)] {
            assert!(matches!(error, Err(GroupError::Root { .. })), "{error:?}");
        }
        let stranger = GroupId(3);
        for error in [
            tree.remove(stranger),
            tree.move_to(a, stranger),
            tree.set_weight(stranger, 5),
        ] {
            assert_eq!(error, Err(GroupError::Unknown { id: stranger }));
        }
        for weight in [0, 1001] {
            assert_eq!(tree.set_weight(a, weight), Err(GroupError::Weight { weight }));
        }
    }
}
