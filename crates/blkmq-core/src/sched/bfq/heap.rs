//! A heap of entities by their tags: a skew heap (Sleator and Tarjan 1986), linked by
//! numbers through a fixed table, so that any number of heaps share the table without memory of their own.
//! `wf2q` keeps its entities in it.
//!
//! A join of two heaps walks down their right spines and swaps the children of each node on the way, so no
//! spine stays long. Every operation is a join and takes amortised logarithmic time.

/// The links of a node in a heap; a node has one set for each heap that it can be in at the same time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    left: u32,
    right: u32,
    up: u32,
}

/// An element of a heap: it has links, and a tag for each order `BY`.
pub(super) trait Node {
    fn links<const BY: usize>(&self) -> &Links;
    fn links_mut<const BY: usize>(&mut self) -> &mut Links;
    /// The tag; tags wrap around, and those of one heap are less than half the range apart.
    fn tag<const BY: usize>(&self) -> u64;
}

/// A heap of nodes of one table: the number of the node with the smallest tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Heap<const BY: usize>(u32);

impl Links {
    pub(super) const UNLINKED: Self = Self {
        left: NONE,
        right: NONE,
        up: NONE,
    };
}

impl<const BY: usize> Heap<BY> {
    pub(super) const EMPTY: Self = Self(NONE);

    /// The node with the smallest tag.
    #[inline]
    pub(super) fn first(self) -> Option<u32> {
        (self.0 != NONE).then_some(self.0)
    }

    /// A node that `is_wanted`, if there is one; of nodes above each other, the one with the smaller tag.
    pub(super) fn find<N: Node>(self, nodes: &[N], mut is_wanted: impl FnMut(u32) -> bool) -> Option<u32> {
        let (mut at, mut from) = (self.first()?, NONE);
        loop {
            let Links { left, right, up } = *nodes[at as usize].links::<BY>();
            let comes_down = from == up;
            if comes_down && is_wanted(at) {
                return Some(at);
            }
            let next = if comes_down && left != NONE {
                left
            } else if (comes_down || from == left) && right != NONE {
                right
            } else {
                up
            };
            if next == NONE {
                return None;
            }
            (from, at) = (at, next);
        }
    }

    /// Adds a node that is in no heap.
    #[inline]
    pub(super) fn push<N: Node>(&mut self, nodes: &mut [N], id: u32) {
        self.0 = join::<BY, N>(nodes, self.0, id);
    }

    /// Removes a node of this heap, at any place.
    #[inline]
    pub(super) fn remove<N: Node>(&mut self, nodes: &mut [N], id: u32) {
        let links = nodes[id as usize].links_mut::<BY>();
        let Links { left, right, up } = std::mem::replace(links, Links::UNLINKED);
        let joined = join::<BY, N>(nodes, left, right);
        if let Some(node) = nodes.get_mut(joined as usize) {
            node.links_mut::<BY>().up = up;
        }
        if up == NONE {
            debug_assert_eq!(self.0, id, "removal from a heap that the node is not in");
            self.0 = joined;
            return;
        }
        let above = nodes[up as usize].links_mut::<BY>();
        if above.left == id {
            above.left = joined;
        } else {
            above.right = joined;
        }
    }

    /// Asserts order and links; returns the members.
    pub(super) fn check<N: Node>(self, nodes: &[N]) -> Vec<u32> {
        let mut members = Vec::new();
        let mut todo: Vec<(u32, u32)> = self.first().map(|id| (id, NONE)).into_iter().collect();
        while let Some((id, up)) = todo.pop() {
            let node = &nodes[id as usize];
            let links = node.links::<BY>();
            assert_eq!(links.up, up, "link up from entity {id}");
            let children = [links.left, links.right].into_iter();
            for child in children.filter(|&child| child != NONE) {
                let tag = nodes[child as usize].tag::<BY>();
                assert!(!before(tag, node.tag::<BY>()), "entity {child} below {id}");
                todo.push((child, id));
            }
            members.push(id);
            assert!(members.len() <= nodes.len(), "a heap has a loop");
        }
        members
    }
}

/// Says whether tag `a` comes before tag `b`.
#[inline]
pub(super) fn before(a: u64, b: u64) -> bool {
    (a.wrapping_sub(b) as i64) < 0
}

/// Joins two heaps whose tops have no parent, or whose tops the caller is about to link again.
#[inline]
fn join<const BY: usize, N: Node>(nodes: &mut [N], a: u32, b: u32) -> u32 {
    if a == NONE || b == NONE {
        return if a == NONE { b } else { a };
    }
    let (tag_a, tag_b) = (nodes[a as usize].tag::<BY>(), nodes[b as usize].tag::<BY>());
    let ((top, mut other), mut tag_other) = if before(tag_b, tag_a) {
        ((b, a), tag_a)
    } else {
        ((a, b), tag_b)
    };
    let mut at = top;
    loop {
        let links = nodes[at as usize].links_mut::<BY>();
        let right = std::mem::replace(&mut links.right, links.left);
        if right == NONE {
            links.left = other;
            nodes[other as usize].links_mut::<BY>().up = at;
            return top;
        }
        let tag_right = nodes[right as usize].tag::<BY>();
        let mut next = right;
        if before(tag_other, tag_right) {
            std::mem::swap(&mut next, &mut other);
            tag_other = tag_right;
        }
        nodes[at as usize].links_mut::<BY>().left = next;
        nodes[next as usize].links_mut::<BY>().up = at;
        at = next;
    }
}

/// No node.
const NONE: u32 = u32::MAX;
