//! The list of requests that wait for a tag where disks share tags: the next is one of a disk that may
//! have more tags, and the disks take turns. The cost grows with the number of disks, not of held
//! requests. `hw_ctx` holds requests in it.

use crate::ids::DiskId;
use crate::qos::lines::Lines;

/// Requests of disks that had used up their share of shared tags.
#[derive(Debug)]
pub(crate) struct TagWaitList<T> {
    /// One for each disk.
    lines: Lines<T>,
    /// The disk whose turn is next.
    turn: u32,
}

impl<T> TagWaitList<T> {
    /// Makes room for `room` requests of `disks` disks. With no disks nothing is ever held.
    pub(crate) fn new(disks: usize, room: usize) -> Self {
        Self {
            lines: Lines::new(disks, if disks > 0 { room } else { 0 }),
            turn: 0,
        }
    }

    /// Says whether nothing is held.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.lines.count() == 0
    }

    /// Holds a request behind the others of its disk.
    pub(crate) fn push(&mut self, disk: DiskId, rq: T) {
        self.lines.push(disk.0, rq);
    }

    /// Takes the first request of the next disk that may have more.
    pub(crate) fn take(&mut self, may_have_more: impl Fn(DiskId) -> bool) -> Option<T> {
        let disks = self.lines.lines();
        let mut in_turn = (self.turn..disks).chain(0..self.turn);
        let disk = in_turn.find(|&disk| !self.lines.is_empty(disk) && may_have_more(DiskId(disk)))?;
        self.turn = if disk + 1 < disks { disk + 1 } else { 0 };
        self.lines.pop(disk)
    }

    /// Visits all that is held.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.lines.iter()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn waiters_of_one_disk_cost_the_search_for_another_nothing() {
        let mut held = TagWaitList::new(3, 2000);
        (0..1000).for_each(|number| held.push(DiskId(0), number));
        held.push(DiskId(2), 5000);
        let asked = Cell::new(0);
        let only_the_last = |disk: DiskId| {
            asked.set(asked.get() + 1);
            disk == DiskId(2)
        };
        assert_eq!(held.take(only_the_last), Some(5000));
        assert!(asked.get() <= 3, "{} disks were asked", asked.get());
        assert_eq!(held.take(only_the_last), None);
    }

    #[test]
    fn disks_that_may_have_more_take_turns_and_keep_their_order() {
        let mut held = TagWaitList::new(2, 8);
        for (disk, number) in [(0, 1), (0, 2), (0, 3), (1, 10), (1, 11)] {
            held.push(DiskId(disk), number);
        }
        let order: Vec<i32> = std::iter::from_fn(|| held.take(|_| true)).collect();
        assert_eq!(order, [1, 10, 2, 11, 3]);
        assert!(held.is_empty());
    }
}
