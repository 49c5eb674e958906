//! The event queue: future events in the order of their times. Events of one time are taken in the order
//! in which they were added, so that a seed replays exactly.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use blkmq_core::time::Instant;

/// Future events, the earliest first.
#[derive(Debug)]
pub struct EventQueue<E> {
    heap: BinaryHeap<Entry<E>>,
    pushed: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at: Instant,
    order: u64,
    event: E,
}

impl<E> Default for EventQueue<E> {
    fn default() -> Self {
        Self {
            heap: BinaryHeap::new(),
            pushed: 0,
        }
    }
}

impl<E> EventQueue<E> {
    /// Adds an event.
    pub fn push(&mut self, at: Instant, event: E) {
        self.pushed += 1;
        self.heap.push(Entry {
            at,
            order: self.pushed,
            event,
        });
    }

    /// Removes and returns the earliest event with its time.
    pub fn pop(&mut self) -> Option<(Instant, E)> {
        self.heap.pop().map(|entry| (entry.at, entry.event))
    }

    /// Drops all events.
    pub fn clear(&mut self) {
        self.heap.clear();
    }
}

// The heap returns its greatest entry, so the comparison is inverted.
impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl<E> Eq for Entry<E> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_by_time_and_then_by_order_of_entry() {
        let mut queue = EventQueue::default();
        for (at, name) in [(5, "c"), (1, "a"), (5, "d"), (1, "b")] {
            queue.push(Instant(at), name);
        }
        let order: Vec<&str> = std::iter::from_fn(|| queue.pop().map(|(_, name)| name)).collect();
        assert_eq!(order, ["a", "b", "c", "d"]);
    }
}
