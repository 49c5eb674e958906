//! The earlier sessions of one disk: those whose clients have left and that have not ended. Each gets a
//! number when its client leaves, and a waiter waits for all up to the latest one. So nobody is asked
//! twice, each waiter is woken once, and the cost of a step grows with the logarithm of the number of
//! leavers and waiters. `sessions` keeps one for each disk.

use std::collections::{BTreeMap, BTreeSet};

/// The connections that have left a disk and not ended, and the waiters for their end, each with
/// its waker.
#[derive(Debug)]
pub(super) struct EarlierSessions<W> {
    next: u64,
    /// The numbers of sessions that have not ended.
    leaving: BTreeSet<u64>,
    /// The waiters, by the last session that each waits for.
    waiting: BTreeMap<Wait, W>,
}

/// The last session that is waited for, and the waiter's own number.
pub(super) type Wait = (u64, u64);

impl<W> EarlierSessions<W> {
    pub(super) fn new() -> Self {
        Self {
            next: 0,
            leaving: BTreeSet::new(),
            waiting: BTreeMap::new(),
        }
    }

    /// A connection has left. Returns its number among those that have.
    pub(super) fn add(&mut self) -> u64 {
        self.next += 1;
        self.leaving.insert(self.next);
        self.next
    }

    /// Everything has ended that a leaver had begun. Returns the waiters that waited for nobody
    /// else.
    pub(super) fn end(&mut self, session: u64) -> Vec<W> {
        self.leaving.remove(&session);
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
    fn waiter_is_woken_once_when_the_last_earlier_session_has_ended() {
        let mut earlier = EarlierSessions::new();
        assert_eq!(earlier.wait(0, 'n'), None, "nobody has left");
        let (first, second) = (earlier.add(), earlier.add());
        earlier.wait(1, 'a').unwrap();
        earlier.wait(2, 'b').unwrap();
        let third = earlier.add();
        earlier.wait(3, 'c').unwrap();
        assert_eq!(earlier.end(third), [], "the others are still there");
        assert_eq!(earlier.end(second), []);
        assert_eq!(earlier.end(first), ['a', 'b', 'c']);
        assert_eq!(earlier.wait(4, 'd'), None);
    }

    #[test]
    fn nobody_waits_for_those_who_leave_later() {
        let mut earlier = EarlierSessions::new();
        let first = earlier.add();
        earlier.wait(1, 'a').unwrap();
        let given_up = earlier.wait(2, 'b').unwrap();
        let second = earlier.add();
        earlier.give_up(given_up);
        assert_eq!(earlier.end(first), ['a']);
        assert_eq!(earlier.end(second), []);
    }
}
