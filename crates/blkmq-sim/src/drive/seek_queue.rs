//! The queue of commands inside a rotating disk: the next is the one that the arm reaches first, as in
//! disks with a queue of their own. `model` decides how long each takes.

use std::collections::VecDeque;

use blkmq_core::time::{Instant, Nanos};

use super::model::{Arm, Model, Work};
use crate::rng::Rng;

/// The commands that wait for one arm, each with a value of the caller's.
#[derive(Debug)]
pub struct SeekQueue<T> {
    model: Model,
    arm: Arm,
    rng: Rng,
    waiting: VecDeque<Waiting<T>>,
}

#[derive(Debug)]
struct Waiting<T> {
    came: Instant,
    work: Work,
    what: T,
}

impl<T> SeekQueue<T> {
    /// A disk of 7200 rotations per minute and `size` bytes. It has room for `depth` commands; more
    /// make it grow.
    pub fn new(size: u64, depth: u32, rng: Rng) -> Self {
        Self {
            model: Model::Rotating {
                rpm: 7200,
                seek_min: Nanos::from_micros(800),
                seek_max: Nanos::from_millis(16),
                track: 1 << 20,
            },
            arm: Arm::new(size),
            rng,
            waiting: VecDeque::with_capacity(depth as usize),
        }
    }

    /// Adds a command that arrives now.
    pub fn push(&mut self, now: Instant, work: Work, what: T) {
        let came = now;
        self.waiting.push_back(Waiting { came, work, what });
    }

    /// Says whether no command waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Removes the command that the arm reaches first from its position, unless one has waited too
    /// long, and moves the arm. Returns the command's value and the time that it takes from now.
    pub fn take(&mut self, now: Instant) -> Option<(T, Nanos)> {
        let next = self.waiting.remove(self.choose(now)?)?;
        let time = self.model.service(&next.work, now, &mut self.arm, &mut self.rng);
        Some((next.what, time))
    }

    fn choose(&self, now: Instant) -> Option<usize> {
        if self.waiting.front()?.came + WAIT_MAX < now {
            return Some(0);
        }
        let time = |waiting: &Waiting<T>| {
            let (mut arm, mut rng) = (self.arm, self.rng.clone());
            self.model.service(&waiting.work, now, &mut arm, &mut rng)
        };
        (0..self.waiting.len()).min_by_key(|&place| time(&self.waiting[place]))
    }
}

/// A command that has waited this long is next.
const WAIT_MAX: Nanos = Nanos::from_millis(500);

#[cfg(test)]
mod tests {
    use blkmq_core::bio::Op;

    use super::*;

    fn read(position: u64) -> Work {
        Work {
            op: Op::Read,
            position,
            len: 4096,
            owed: 0,
        }
    }

    #[test]
    fn arm_takes_what_it_reaches_first_and_what_has_waited_for_too_long() {
        let mut queue = SeekQueue::new(512 << 30, 4, Rng::new(1, 1));
        queue.push(Instant(0), read(256 << 30), "far");
        queue.push(Instant(0), read(0), "here");
        assert_eq!(queue.take(Instant(0)).map(|(what, _)| what), Some("here"));
        queue.push(Instant(0), read(4096), "behind it");
        let late = Instant(0) + WAIT_MAX + Nanos(1);
        assert_eq!(queue.take(late).map(|(what, _)| what), Some("far"));
        assert_eq!(queue.take(late).map(|(what, _)| what), Some("behind it"));
        assert!(queue.is_empty() && queue.take(late).is_none());
    }
}
