//! Decides which of a thread's queues are looked at in a turn: those that something is under way in, and all if other threads have
//! published something. A host of many disks that mostly idle pays for those that do not. Kept by `place`.

use blkmq_core::local::LocalQueue;
use blkmq_core::mapper::stack;
use blkmq_core::queue::Effects;
use blkmq_core::time::Instant;

/// One thread's side of all queues.
pub(crate) struct Queues {
    all: Vec<LocalQueue>,
    /// Those that are looked at, by number.
    active: Vec<u32>,
    is_active: Vec<bool>,
}

impl Queues {
    pub(crate) fn new(all: Vec<LocalQueue>) -> Self {
        let count = all.len();
        Self {
            all,
            active: (0..count as u32).collect(),
            is_active: vec![true; count],
        }
    }

    /// Says whether all are always looked at: with so few, to choose would cost more.
    #[inline]
    pub(crate) fn are_few(&self) -> bool {
        self.all.len() <= FEW
    }

    /// A queue that something is about to be submitted to.
    #[inline]
    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut LocalQueue> {
        if !*self.is_active.get(index)? {
            self.activate(index);
        }
        self.all.get_mut(index)
    }

    #[cold]
    fn activate(&mut self, index: usize) {
        self.is_active[index] = true;
        self.active.push(index as u32);
    }

    /// Other threads have published something, for whichever queue: all are looked at in the next turn.
    pub(crate) fn activate_all(&mut self) {
        for index in 0..self.all.len() {
            if !self.is_active[index] {
                self.activate(index);
            }
        }
    }

    /// Runs those that are looked at. One that had nothing to do, and has nothing now, is not looked at again; so each has one
    /// turn after its last bio has ended, in which that is told to the others ([`LocalQueue::answered`]).
    pub(crate) fn run(&mut self, now: Instant, fx: &mut Effects) {
        let are_few = self.are_few();
        let Self {
            all,
            active,
            is_active,
        } = self;
        let mut n = 0;
        while let Some(&index) = active.get(n) {
            let queue = &mut all[index as usize];
            let was_quiet = !are_few && queue.is_quiet();
            queue.run(now, fx);
            if was_quiet && queue.is_quiet() {
                is_active[index as usize] = false;
                active.swap_remove(n);
            } else {
                n += 1;
            }
        }
    }

    /// Those that are looked at.
    #[inline]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &LocalQueue> {
        self.active.iter().map(|&index| &self.all[index as usize])
    }

    /// Calls `f` with each of those that are looked at.
    #[inline]
    pub(crate) fn for_each(&mut self, mut f: impl FnMut(&mut LocalQueue)) {
        for &index in &self.active {
            f(&mut self.all[index as usize]);
        }
    }

    /// Takes the last one out.
    pub(crate) fn pop(&mut self) -> Option<LocalQueue> {
        let last = self.all.pop()?;
        self.is_active.pop();
        self.active.retain(|&index| (index as usize) < self.all.len());
        Some(last)
    }

    /// Puts one behind the others.
    pub(crate) fn push(&mut self, queue: LocalQueue) {
        self.all.push(queue);
        self.is_active.push(false);
        self.activate(self.all.len() - 1);
    }
}

impl stack::Queues for Queues {
    #[inline]
    fn queue(&mut self, index: usize) -> &mut LocalQueue {
        self.get_mut(index)
            .expect("a table's leaves are on queues that there are")
    }

    #[inline]
    fn unplug(&mut self, now: Instant, fx: &mut Effects) {
        self.for_each(|queue| queue.unplug(now, fx));
    }
}

/// So many queues are all looked at in each turn.
const FEW: usize = 8;
