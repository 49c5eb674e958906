//! Decides which of some entities has the smallest tag: a leftist heap (Crane 1972) that is linked by numbers through a
//! fixed table, so that any number of heaps share the table without memory of their own. `wf2q` keeps its entities in it.
//!
//! A node's rank is the length of its right spine, and no right child outranks its left one: a right spine is at most
//! logarithmic, and joining two heaps walks right spines only. Everything else is joining.

/// The links of a node; a node is in one heap at most.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    left: u32,
    right: u32,
    up: u32,
    /// 1 for a leaf; 0 stands for no node.
    rank: u32,
}

/// What can be in a heap: it has links, and a tag for each `BY` to be ordered by.
pub(super) trait Node {
    fn links(&self) -> &Links;
    fn links_mut(&mut self) -> &mut Links;
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
        rank: 1,
    };
}

impl<const BY: usize> Heap<BY> {
    pub(super) const EMPTY: Self = Self(NONE);

    /// The node with the smallest tag.
    #[inline]
    pub(super) fn first(self) -> Option<u32> {
        (self.0 != NONE).then_some(self.0)
    }

    /// Adds a node that is in no heap.
    #[inline]
    pub(super) fn push<N: Node>(&mut self, nodes: &mut [N], id: u32) {
        debug_assert_eq!(nodes[id as usize].links().rank, 1);
        self.0 = join::<BY, N>(nodes, self.0, id);
        nodes[self.0 as usize].links_mut().up = NONE;
    }

    /// Removes a node of this heap, wherever it stands.
    #[inline]
    pub(super) fn remove<N: Node>(&mut self, nodes: &mut [N], id: u32) {
        let Links { left, right, up, .. } = *nodes[id as usize].links();
        *nodes[id as usize].links_mut() = Links::UNLINKED;
        let joined = join::<BY, N>(nodes, left, right);
        if joined != NONE {
            nodes[joined as usize].links_mut().up = up;
        }
        if up == NONE {
            debug_assert_eq!(self.0, id, "removal from a heap that the node is not in");
            self.0 = joined;
            return;
        }
        let parent = nodes[up as usize].links_mut();
        if parent.left == id {
            parent.left = joined;
        } else {
            parent.right = joined;
        }
        mend(nodes, up);
    }

    /// Asserts order, links and ranks; returns the members.
    pub(super) fn check<N: Node>(self, nodes: &[N]) -> Vec<u32> {
        let mut members = Vec::new();
        let mut todo: Vec<(u32, u32)> = self.first().map(|id| (id, NONE)).into_iter().collect();
        while let Some((id, up)) = todo.pop() {
            let node = &nodes[id as usize];
            let links = node.links();
            assert_eq!(links.up, up, "link up from entity {id}");
            assert!(rank(nodes, links.left) >= rank(nodes, links.right));
            assert_eq!(links.rank, rank(nodes, links.right) + 1, "rank of entity {id}");
            for child in [links.left, links.right]
                .into_iter()
                .filter(|&child| child != NONE)
            {
                assert!(!before(nodes[child as usize].tag::<BY>(), node.tag::<BY>()));
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

/// Joins two heaps; the caller sets the result's link up. Recursive: two right spines deep, which is 2 log n.
fn join<const BY: usize, N: Node>(nodes: &mut [N], a: u32, b: u32) -> u32 {
    if a == NONE || b == NONE {
        return if a == NONE { b } else { a };
    }
    let swapped = before(nodes[b as usize].tag::<BY>(), nodes[a as usize].tag::<BY>());
    let (top, other) = if swapped { (b, a) } else { (a, b) };
    let right = join::<BY, N>(nodes, nodes[top as usize].links().right, other);
    nodes[right as usize].links_mut().up = top;
    nodes[top as usize].links_mut().right = right;
    level(nodes, top);
    top
}

/// Puts the child of higher rank left; says whether the node's rank has changed.
#[inline]
fn level<N: Node>(nodes: &mut [N], id: u32) -> bool {
    let Links {
        left,
        right,
        rank: old,
        ..
    } = *nodes[id as usize].links();
    let (l, r) = (rank(nodes, left), rank(nodes, right));
    let links = nodes[id as usize].links_mut();
    if l < r {
        (links.left, links.right) = (right, left);
    }
    links.rank = l.min(r) + 1;
    links.rank != old
}

/// Mends ranks from a node whose child has changed, upwards until nothing changes.
fn mend<N: Node>(nodes: &mut [N], mut id: u32) {
    while level(nodes, id) {
        id = nodes[id as usize].links().up;
        if id == NONE {
            return;
        }
    }
}

#[inline]
fn rank<N: Node>(nodes: &[N], id: u32) -> u32 {
    nodes.get(id as usize).map_or(0, |node| node.links().rank)
}

/// No node.
const NONE: u32 = u32::MAX;
