//! Whose slice is next: bios that wait to be encrypted or decrypted, a line for each group. Groups that wait have
//! the processor in the proportion of their weights, each among the groups of one parent, as they have the drive below:
//! start-time fair queueing (Goyal, Vin and Cheng 1996), at each level of the tree of groups.
//!
//! ```text
//!  all queues ─┬─ own line                      chosen at each level: what begins at the earliest virtual time.
//!              ├─ /a ── own line                A slice moves the time of its line, and of each group above it,
//!              └─ /b ─┬─ own line               on by bytes / weight.
//!                     └─ /b/c ── own line
//! ```
//! A group that comes back begins where the others are, or where it was if that is later. So a pause saves up nothing,
//! and ends no debt. A bio that is encrypted at once, while nobody waits, is not charged.

use std::collections::{BTreeMap, VecDeque};

use blkmq_core::group::{LEVELS_MAX, ROOT, WEIGHT_DEFAULT};
use blkmq_core::ids::GroupId;

use crate::disk::QueueId;

/// The lines of waiting bios.
#[derive(Default)]
pub(super) struct Turns {
    /// [`TOP`], and each group that has waited on this thread.
    nodes: Vec<Node>,
    places: BTreeMap<(QueueId, GroupId), u32>,
    waiting: usize,
    line_max: usize,
    /// Nodes that become busy; kept for its memory.
    awoken: Vec<u32>,
}

/// A group's line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Line(u32);

/// A group.
#[derive(Default)]
struct Node {
    /// The queue whose tree says what its weight is, and its number there.
    of: (QueueId, GroupId),
    /// Read again whenever it becomes busy.
    parent: u32,
    /// Bios wait in it, or in a group below it: it is in its parent's list.
    is_busy: bool,
    /// When it begins next, in the virtual time of its parent.
    start: u64,
    /// The virtual time in which its own line and its children have their turns: when the last chosen of them began.
    clock: u64,
    line: VecDeque<u32>,
    /// When its own line begins next, in its own virtual time.
    line_start: u64,
    /// Its children that are busy.
    children: Vec<u32>,
}

impl Turns {
    /// Takes memory for as many bios as can wait. A line is made when its group waits for the first time.
    pub(super) fn reserve(&mut self, bios: usize) {
        self.line_max = bios;
        self.nodes.reserve(GROUPS);
        self.awoken.reserve(LEVELS_MAX + 1);
        self.nodes.push(Node {
            line: VecDeque::with_capacity(bios),
            children: Vec::with_capacity(GROUPS),
            ..Node::default()
        });
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Puts a bio at the end of its group's line. `tree` says which group another one is part of, and its weight.
    pub(super) fn push(
        &mut self,
        number: u32,
        of: (QueueId, GroupId),
        tree: impl Fn((QueueId, GroupId)) -> (GroupId, u16),
    ) {
        let at = self.place(of);
        self.nodes[at as usize].line.push_back(number);
        self.waiting += 1;
        self.wake(at, tree);
    }

    /// Puts the bio back that was the last one to be taken, before all others of its line.
    pub(super) fn put_back(
        &mut self,
        number: u32,
        line: Line,
        tree: impl Fn((QueueId, GroupId)) -> (GroupId, u16),
    ) {
        self.nodes[line.0 as usize].line.push_front(number);
        self.waiting += 1;
        self.wake(line.0, tree);
    }

    /// Takes the bio whose turn it is out of its line.
    pub(super) fn next(&mut self) -> Option<(u32, Line)> {
        if self.is_empty() {
            return None;
        }
        let mut at = TOP;
        loop {
            let node = &self.nodes[at as usize];
            let own = (!node.line.is_empty()).then_some(node.line_start);
            let starts = node
                .children
                .iter()
                .map(|&child| (self.nodes[child as usize].start, child));
            let first = starts.min_by_key(|(start, _)| *start);
            let child = first.filter(|(start, _)| own.is_none_or(|own| *start < own));
            let node = &mut self.nodes[at as usize];
            let Some((start, child)) = child else {
                node.clock = node.line_start;
                break;
            };
            (node.clock, at) = (start, child);
        }
        let line = &mut self.nodes[at as usize].line;
        let number = line
            .pop_front()
            .expect("a busy group without busy children has bios");
        self.waiting -= 1;
        self.rest(at);
        Some((number, Line(at)))
    }

    /// Charges a slice of a bio of this line to its group and to those above it.
    pub(super) fn charge(
        &mut self,
        Line(mut at): Line,
        bytes: u64,
        tree: impl Fn((QueueId, GroupId)) -> (GroupId, u16),
    ) {
        self.nodes[at as usize].line_start += virtual_time(bytes, WEIGHT_DEFAULT);
        while at != TOP {
            let node = &mut self.nodes[at as usize];
            node.start += virtual_time(bytes, tree(node.of).1);
            at = node.parent;
        }
    }

    /// The place of a group. The roots of all queues are one.
    fn place(&mut self, of: (QueueId, GroupId)) -> u32 {
        if of.1 == ROOT {
            return TOP;
        }
        let (nodes, line_max) = (&mut self.nodes, self.line_max);
        *self.places.entry(of).or_insert_with(|| {
            nodes.push(Node {
                of,
                line: VecDeque::with_capacity(line_max),
                ..Node::default()
            });
            nodes.len() as u32 - 1
        })
    }

    /// A group has its first bio, or one more: it and those above it are busy.
    fn wake(&mut self, at: u32, tree: impl Fn((QueueId, GroupId)) -> (GroupId, u16)) {
        let node = &mut self.nodes[at as usize];
        if node.line.len() == 1 {
            node.line_start = node.line_start.max(node.clock);
        }
        let mut awoken = std::mem::take(&mut self.awoken);
        let mut next = at;
        while next != TOP && !self.nodes[next as usize].is_busy {
            awoken.push(next);
            let of = self.nodes[next as usize].of;
            let parent = self.place((of.0, tree(of).0));
            // Groups that move meanwhile may look like a circle.
            next = match awoken.contains(&parent) || awoken.len() > LEVELS_MAX {
                true => TOP,
                false => parent,
            };
            let node = &mut self.nodes[awoken[awoken.len() - 1] as usize];
            if node.parent != next {
                // Another virtual time.
                (node.parent, node.start) = (next, 0);
            }
        }
        for child in awoken.drain(..) {
            let parent = self.nodes[child as usize].parent as usize;
            self.nodes[parent].children.push(child);
            let clock = self.nodes[parent].clock;
            let node = &mut self.nodes[child as usize];
            (node.is_busy, node.start) = (true, node.start.max(clock));
        }
        self.awoken = awoken;
    }

    /// A group has lost a bio: it and those above it may have nothing left.
    fn rest(&mut self, mut at: u32) {
        while at != TOP {
            let node = &mut self.nodes[at as usize];
            if !node.line.is_empty() || !node.children.is_empty() {
                return;
            }
            node.is_busy = false;
            let parent = node.parent;
            self.nodes[parent as usize].children.retain(|child| *child != at);
            at = parent;
        }
    }
}

/// How far bytes move the virtual time of a group of this weight. It lasts for years of the smallest weight's alone.
fn virtual_time(bytes: u64, weight: u16) -> u64 {
    bytes * UNITS / u64::from(weight.max(1))
}

/// All queues' roots.
const TOP: u32 = 0;
/// Groups that wait before memory is taken for more.
const GROUPS: usize = 16;
/// Of virtual time, for one byte of weight 1: the smallest slice of the largest weight has some, too.
const UNITS: u64 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    const QUEUE: QueueId = QueueId(3);
    const KIB: u64 = 1 << 10;

    /// Whose slices of 16 KiB are done, if each of these groups has as many bios as it can want.
    fn slices(groups: &[u32], count: usize, tree: fn(u32) -> (u32, u16)) -> Vec<usize> {
        let tree = |(queue, group): (QueueId, GroupId)| {
            assert_eq!(queue, QUEUE);
            let (parent, weight) = tree(group.0);
            (GroupId(parent), weight)
        };
        let mut turns = Turns::default();
        turns.reserve(8);
        for &group in groups {
            (0..2).for_each(|_| turns.push(group, (QUEUE, GroupId(group)), tree));
        }
        let mut done = vec![0; groups.len()];
        for _ in 0..count {
            let (group, line) = turns.next().expect("bios wait");
            turns.charge(line, 16 * KIB, tree);
            turns.push(group, (QUEUE, GroupId(group)), tree);
            done[groups.iter().position(|of| *of == group).expect("one of them")] += 1;
        }
        done
    }

    #[test]
    fn groups_that_wait_have_slices_by_their_weights() {
        let done = slices(&[1, 2, 3], 700, |group| (0, [0, 100, 200, 400][group as usize]));
        assert_eq!(done, [100, 200, 400]);
        assert_eq!(slices(&[1, 2], 100, |_| (0, 1000)), [50, 50]);
        // The root's own bios are those of a group with the default weight.
        assert_eq!(slices(&[0, 1], 400, |_| (0, 300)), [100, 300]);
    }

    #[test]
    fn groups_of_one_parent_share_what_that_one_has() {
        // 3 and 4 are part of 2.
        let tree = |group| match group {
            3 => (2, 100),
            4 => (2, 300),
            _ => (0, 100),
        };
        assert_eq!(slices(&[1, 3, 4], 800, tree), [400, 100, 300]);
        assert_eq!(slices(&[1, 3], 800, tree), [400, 400]);
        assert_eq!(slices(&[1, 2, 3], 800, tree), [400, 200, 200]);
    }

    #[test]
    fn group_that_comes_back_has_no_credit_and_keeps_its_debt() {
        let tree = |(_, group): (QueueId, GroupId)| (ROOT, if group.0 == 1 { 1 } else { 1000 });
        let mut turns = Turns::default();
        turns.reserve(8);
        turns.push(1, (QUEUE, GroupId(1)), tree);
        turns.push(2, (QUEUE, GroupId(2)), tree);
        let mut slices = [0, 0, 0];
        for _ in 0..4000 {
            let (group, line) = turns.next().expect("bios wait");
            turns.charge(line, 16 * KIB, tree);
            // Its line is empty after each slice.
            turns.push(group, (QUEUE, GroupId(group)), tree);
            slices[group as usize] += 1;
        }
        assert!((3..=5).contains(&slices[1]), "{slices:?}");
        turns.push(3, (QUEUE, GroupId(3)), tree);
        let next: Vec<u32> = (0..4)
            .map(|_| {
                let (group, line) = turns.next().expect("bios wait");
                turns.charge(line, 16 * KIB, tree);
                turns.push(group, (QUEUE, GroupId(group)), tree);
                group
            })
            .collect();
        // It does not have all slices that the others had before it came.
        assert_eq!(next.iter().filter(|group| **group == 3).count(), 2, "{next:?}");
    }

    #[test]
    fn bio_that_is_put_back_is_before_the_others_of_its_group() {
        let tree = |_| (ROOT, 100);
        let mut turns = Turns::default();
        turns.reserve(8);
        (0..3).for_each(|number| turns.push(number, (QUEUE, GroupId(1)), tree));
        turns.push(10, (QUEUE, GroupId(2)), tree);
        let mut order = Vec::new();
        let mut parts = 2;
        while let Some((number, line)) = turns.next() {
            turns.charge(line, 16 * KIB, tree);
            order.push(number);
            if number == 0 && parts > 1 {
                parts -= 1;
                turns.put_back(number, line, tree);
            }
        }
        assert_eq!(order, [0, 10, 0, 1, 2]);
        assert!(turns.is_empty());
    }

    #[test]
    fn groups_that_move_and_seem_to_be_part_of_each_other_are_served() {
        let tree = |(_, group): (QueueId, GroupId)| (GroupId(3 - group.0), 100);
        let mut turns = Turns::default();
        turns.reserve(8);
        for round in 0..3 {
            turns.push(1, (QUEUE, GroupId(1)), tree);
            turns.push(2, (QUEUE, GroupId(2)), tree);
            let mut taken = Vec::new();
            while let Some((number, line)) = turns.next() {
                turns.charge(line, 16 * KIB, tree);
                taken.push(number);
            }
            taken.sort_unstable();
            assert_eq!(taken, [1, 2], "round {round}");
        }
    }
}
