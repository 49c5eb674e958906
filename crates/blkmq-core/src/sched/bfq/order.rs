//! The requests of one queue by position: a treap (Seidel and Aragon 1996) linked
//! through the slots' numbers. The thousands of queues of an elevator share its table, and an empty queue
//! needs no memory. `index` is faster, but only for few and large sets.

use crate::sched::slots::SlotId;

/// The places of all slots in the orders of their queues.
#[derive(Debug)]
pub(super) struct Order {
    nodes: Vec<Node>,
    /// Makes the next priority.
    seed: u32,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    key: u64,
    left: u32,
    right: u32,
    up: u32,
    /// No child has a smaller priority: random priorities keep the tree flat.
    priority: u32,
}

/// The order of one queue; requests of the same position are in the order of their insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Root(u32);

/// The neighbours of a position; valid until the order changes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gap {
    pub(super) before: Option<SlotId>,
    pub(super) behind: Option<SlotId>,
}

impl Root {
    pub(super) const EMPTY: Self = Self(NONE);
}

impl Order {
    /// Makes room for `slots_max` slots.
    pub(super) fn new(slots_max: usize) -> Self {
        let node = Node {
            key: 0,
            left: NONE,
            right: NONE,
            up: NONE,
            priority: 0,
        };
        Self {
            nodes: vec![node; slots_max],
            seed: 1,
        }
    }

    /// Finds the last request at `key` or before it, and the first one behind.
    #[inline]
    pub(super) fn gap(&self, root: Root, key: u64) -> Gap {
        let (mut at, mut before, mut behind) = (root.0, NONE, NONE);
        while let Some(node) = self.nodes.get(at as usize) {
            if node.key <= key {
                before = at;
                at = node.right;
            } else {
                behind = at;
                at = node.left;
            }
        }
        Gap {
            before: slot(before),
            behind: slot(behind),
        }
    }

    /// The first request at `key` or behind it.
    #[inline]
    pub(super) fn first_from(&self, root: Root, key: u64) -> Option<SlotId> {
        let (mut at, mut found) = (root.0, NONE);
        while let Some(node) = self.nodes.get(at as usize) {
            if node.key < key {
                at = node.right;
            } else {
                found = at;
                at = node.left;
            }
        }
        slot(found)
    }

    /// The last request before `key`.
    pub(super) fn last_before(&self, root: Root, key: u64) -> Option<SlotId> {
        key.checked_sub(1).and_then(|key| self.gap(root, key).before)
    }

    /// The position of a request that is in an order.
    #[inline]
    pub(super) fn key(&self, id: SlotId) -> u64 {
        self.nodes[id.0 as usize].key
    }

    /// Inserts a request into the gap that was found for its position.
    #[inline]
    pub(super) fn insert(&mut self, root: &mut Root, gap: Gap, key: u64, id: SlotId) {
        let up = match (gap.before, gap.behind) {
            (Some(before), _) if self.nodes[before.0 as usize].right == NONE => {
                self.nodes[before.0 as usize].right = id.0;
                before.0
            }
            (_, Some(behind)) => {
                debug_assert_eq!(self.nodes[behind.0 as usize].left, NONE, "a stale gap");
                self.nodes[behind.0 as usize].left = id.0;
                behind.0
            }
            _ => {
                debug_assert_eq!(*root, Root::EMPTY, "a stale gap");
                root.0 = id.0;
                NONE
            }
        };
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 17;
        self.seed ^= self.seed << 5;
        self.nodes[id.0 as usize] = Node {
            key,
            left: NONE,
            right: NONE,
            up,
            priority: self.seed,
        };
        self.rise(root, id.0);
    }

    /// Removes a request.
    #[inline]
    pub(super) fn remove(&mut self, root: &mut Root, id: SlotId) {
        let Node { left, right, up, .. } = self.nodes[id.0 as usize];
        let joined = self.join(left, right);
        self.replace(root, up, id.0, joined);
    }

    /// Lowers a request's position. The caller makes sure that the order stays the same.
    pub(super) fn lower_key(&mut self, id: SlotId, key: u64) {
        self.nodes[id.0 as usize].key = key;
    }

    /// The requests in order. For checks and rare operations: it allocates.
    pub(super) fn list(&self, root: Root) -> Vec<SlotId> {
        let (mut list, mut above, mut at) = (Vec::new(), Vec::new(), root.0);
        while at != NONE || !above.is_empty() {
            while at != NONE {
                above.push(at);
                at = self.nodes[at as usize].left;
            }
            let id = above.pop().expect("looked at above");
            list.push(SlotId(id));
            at = self.nodes[id as usize].right;
        }
        list
    }

    /// Asserts order, links and priorities.
    pub(super) fn check(&self, root: Root) {
        let list = self.list(root);
        for pair in list.windows(2) {
            assert!(self.key(pair[0]) <= self.key(pair[1]), "order of slots {pair:?}");
        }
        for id in list {
            let node = &self.nodes[id.0 as usize];
            assert_eq!(node.up == NONE, root.0 == id.0, "top of an order");
            for child in [node.left, node.right].into_iter().filter(|&child| child != NONE) {
                let child = &self.nodes[child as usize];
                assert!(
                    child.up == id.0 && child.priority >= node.priority,
                    "below slot {}",
                    id.0
                );
            }
        }
    }

    /// Rotates a new node up until its parent's priority is not greater.
    #[inline]
    fn rise(&mut self, root: &mut Root, id: u32) {
        loop {
            let Node { up, priority, .. } = self.nodes[id as usize];
            if up == NONE || self.nodes[up as usize].priority <= priority {
                return;
            }
            let above = self.nodes[up as usize].up;
            if self.nodes[up as usize].left == id {
                let inner = self.nodes[id as usize].right;
                self.nodes[up as usize].left = inner;
                self.set_up(inner, up);
                self.nodes[id as usize].right = up;
            } else {
                let inner = self.nodes[id as usize].left;
                self.nodes[up as usize].right = inner;
                self.set_up(inner, up);
                self.nodes[id as usize].left = up;
            }
            self.nodes[up as usize].up = id;
            self.replace(root, above, up, id);
        }
    }

    /// Joins two neighbouring trees; the caller sets the result's link up.
    fn join(&mut self, left: u32, right: u32) -> u32 {
        if left == NONE || right == NONE {
            return if left == NONE { right } else { left };
        }
        if self.nodes[left as usize].priority <= self.nodes[right as usize].priority {
            let joined = self.join(self.nodes[left as usize].right, right);
            self.nodes[left as usize].right = joined;
            self.nodes[joined as usize].up = left;
            left
        } else {
            let joined = self.join(left, self.nodes[right as usize].left);
            self.nodes[right as usize].left = joined;
            self.nodes[joined as usize].up = right;
            right
        }
    }

    /// Puts `new` where `old` is below `up`.
    #[inline]
    fn replace(&mut self, root: &mut Root, up: u32, old: u32, new: u32) {
        self.set_up(new, up);
        match self.nodes.get_mut(up as usize) {
            None => root.0 = new,
            Some(above) if above.left == old => above.left = new,
            Some(above) => above.right = new,
        }
    }

    #[inline]
    fn set_up(&mut self, id: u32, up: u32) {
        if let Some(node) = self.nodes.get_mut(id as usize) {
            node.up = up;
        }
    }
}

#[inline]
fn slot(id: u32) -> Option<SlotId> {
    (id != NONE).then_some(SlotId(id))
}

/// No slot.
const NONE: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// What an order must be equal to: slots by position and number of insertion.
    type Model = BTreeMap<(u64, u64), SlotId>;

    fn agree(order: &Order, root: Root, model: &Model) {
        order.check(root);
        let expected: Vec<SlotId> = model.values().copied().collect();
        assert_eq!(order.list(root), expected);
    }

    #[test]
    fn order_is_an_ordered_map_whatever_is_inserted_and_removed() {
        const SLOTS: u64 = 200;
        let (mut order, mut root, mut model) = (Order::new(SLOTS as usize), Root::EMPTY, Model::new());
        let mut chance = 7u64;
        let mut next = || {
            chance = chance
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            chance >> 33
        };
        let mut held = vec![None; SLOTS as usize];
        for number in 0..20_000 {
            let id = next() % SLOTS;
            let slot = SlotId(id as u32);
            if let Some(key) = held[id as usize].take() {
                order.remove(&mut root, slot);
                model.remove(&key);
            } else {
                let key = next() % 150;
                let gap = order.gap(root, key);
                let before = model.range(..=(key, u64::MAX)).next_back().map(|(_, id)| *id);
                let behind = model.range((key + 1, 0)..).next().map(|(_, id)| *id);
                assert_eq!((gap.before, gap.behind), (before, behind));
                let from = model.range((key, 0)..).next().map(|(_, id)| *id);
                assert_eq!(order.first_from(root, key), from);
                let last = model.range(..(key, 0)).next_back().map(|(_, id)| *id);
                assert_eq!(order.last_before(root, key), last);
                order.insert(&mut root, gap, key, slot);
                model.insert((key, number), slot);
                held[id as usize] = Some((key, number));
            }
            if number % 16 == 0 {
                agree(&order, root, &model);
            }
        }
        agree(&order, root, &model);
    }
}
