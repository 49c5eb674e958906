//! Decides when who has selected a disk may go on: when everybody has ended who had left by then. Each departure has a number, and
//! who waits waits for all up to the latest one. So nobody is asked twice, each is woken once, and what a step costs grows with
//! the logarithm of those who leave and wait. Kept for each disk by `predecessors`.

use std::collections::{BTreeMap, BTreeSet};

/// Those who have left a disk and not ended, and those who wait for that, each with what it is woken by.
#[derive(Debug)]
pub(super) struct Departed<W> {
    next: u64,
    /// The departures whose end has not come.
    leaving: BTreeSet<u64>,
    /// Who waits, by the last departure that it waits for.
    waiting: BTreeMap<Wait, W>,
}

/// The departure up to which somebody waits, and its own number.
pub(super) type Wait = (u64, u64);

impl<W> Departed<W> {
    pub(super) fn new() -> Self {
        Self {
            next: 0,
            leaving: BTreeSet::new(),
            waiting: BTreeMap::new(),
        }
    }

    /// Somebody has left. Returns the number of the departure.
    pub(super) fn add(&mut self) -> u64 {
        self.next += 1;
        self.leaving.insert(self.next);
        self.next
    }

    /// All has ended that one who left had begun. Returns whom to wake: those who waited for nobody else.
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

    /// Has the one of a number wait for all that have left so far, if there are any.
    pub(super) fn wait(&mut self, number: u64, waker: W) -> Option<Wait> {
        let wait = (*self.leaving.last()?, number);
        self.waiting.insert(wait, waker);
        Some(wait)
    }

    /// Somebody waits no more.
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
