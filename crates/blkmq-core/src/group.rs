//! Decides which groups (tenants) a queue knows, how they hang together and what each may take: the tenant tree. The gate
//! protects it; elevators keep what they need of it by themselves and are told of every change (`sched`).

use crate::ids::GroupId;

/// The tenant tree of one queue: a table of groups made at set-up, of which some are in use.
#[derive(Clone, Debug)]
pub struct GroupTree {
    nodes: Box<[Option<Node>]>,
}

/// One group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// The group that it is part of; the root's is the root.
    pub parent: GroupId,
    /// Its share against its siblings, [`WEIGHT_MIN`] to [`WEIGHT_MAX`].
    pub weight: u16,
}

impl GroupTree {
    /// A tree of the root and `count - 1` children of it with the default weight.
    ///
    /// # Panics
    /// If `count` is 0: there is always a root.
    pub fn flat(count: u32) -> Self {
        assert!(count > 0, "a tree without a root");
        let node = Node {
            parent: ROOT,
            weight: WEIGHT_DEFAULT,
        };
        Self {
            nodes: vec![Some(node); count as usize].into(),
        }
    }

    /// How many groups there can be: every id is below.
    pub fn capacity(&self) -> usize {
        self.nodes.len()
    }

    /// A group, if it is in use.
    pub fn get(&self, id: GroupId) -> Option<&Node> {
        self.nodes.get(id.index())?.as_ref()
    }

    /// The groups in use.
    pub fn iter(&self) -> impl Iterator<Item = (GroupId, &Node)> {
        let numbered = self.nodes.iter().enumerate();
        numbered.filter_map(|(id, node)| Some((GroupId(id as u32), node.as_ref()?)))
    }
}

/// The group that all others are part of.
pub const ROOT: GroupId = GroupId(0);
/// The smallest weight.
pub const WEIGHT_MIN: u16 = 1;
/// The weight of a group that was given none.
pub const WEIGHT_DEFAULT: u16 = 100;
/// The largest weight.
pub const WEIGHT_MAX: u16 = 1000;
