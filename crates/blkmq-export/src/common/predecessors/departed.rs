//! Decides when a client that selected a disk may go on: when all connections have ended that had
//! left by then. Each departure has a number, and a waiter waits for all up to the latest one. So
//! nobody is asked twice, each waiter is woken once, and the cost of a step grows with the
//! logarithm of the number of leavers and waiters. `predecessors` keeps one for each disk.

use std::collections::{BTreeMap, BTreeSet};

/// The connections that have left a disk and not ended, and the waiters for their end, each with
/// its waker.
#[derive(Debug)]
pub(super) struct Departed<W> {
    next: u64,
    /// The departures that have not ended.
    leaving: BTreeSet<u64>,
    /// The waiters, by the last departure that each waits for.
    waiting: BTreeMap<Wait, W>,
}

/// The last departure that is waited for, and the waiter's own number.
pub(super) type Wait = (u64, u64);

impl<W> Departed<W> {
    pub(super) fn new() -> Self {
        Self {
            next: 0,
            leaving: BTreeSet::new(),
            waiting: BTreeMap::new(),
        }
    }

    /// A connection has left. Returns the number of the departure.
    pub(super) fn add(&mut self) -> u64 {
        self.next += 1;
        self.leaving.insert(self.next);
        self.next
    }

    /// Everything has ended that a leaver had begun. Returns the waiters that waited for nobody
    /// else.
    pub(super) fn end(&mut self, departure: u64) -> Vec<W> {
        self.leaving.remove(&departure);
        let mut woken = Vec::new();
        while let Some(first) = self.waiting.first_entry()
            && self.leaving.first().is_none_or(|left| *left > first.key().0)
        {
            woken.push(first.remove());
        }
        woken
    }

    /// Makes the waiter of a number wait for all that have left so far, if any.
    pub(super) fn wait(&mut self, number: u64, waker: W) -> Option<Wait> {
        let wait = (*self.leaving.last()?, number);
        self.waiting.insert(wait, waker);
        Some(wait)
    }

    /// A waiter waits no more.
    pub(super) fn give_up(&mut self, wait: Wait) {
        self.waiting.remove(&wait);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_is_woken_once_when_the_last_of_those_who_left_before_has_ended() {
        let mut departed = Departed::new();
        assert_eq!(departed.wait(0, 'n'), None, "nobody has left");
        let (first, second) = (departed.add(), departed.add());
        departed.wait(1, 'a').unwrap();
        departed.wait(2, 'b').unwrap();
        let third = departed.add();
        departed.wait(3, 'c').unwrap();
        assert_eq!(departed.end(third), [], "the others are still there");
        assert_eq!(departed.end(second), []);
        assert_eq!(departed.end(first), ['a', 'b', 'c']);
        assert_eq!(departed.wait(4, 'd'), None);
    }

    #[test]
    fn nobody_waits_for_those_who_leave_later() {
        let mut departed = Departed::new();
        let first = departed.add();
        departed.wait(1, 'a').unwrap();
        let given_up = departed.wait(2, 'b').unwrap();
        let second = departed.add();
        departed.give_up(given_up);
        assert_eq!(departed.end(first), ['a']);
        assert_eq!(departed.end(second), []);
    }
}
