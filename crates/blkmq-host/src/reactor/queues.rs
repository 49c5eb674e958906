//! The queues of one thread that run in a turn: the *active* ones, where something is under way, and all
//! if other threads have published work. So on a host with many idle disks a turn costs only the busy
//! ones. `reactor::core` owns it.

use std::cell::RefCell;
use std::rc::Rc;

use blkmq_core::bio::Status;
use blkmq_core::driver::{Done, HctxDriver, Issued};
use blkmq_core::group::{ROOT, WEIGHT_DEFAULT};
use blkmq_core::ids::{Cookie, GroupId};
use blkmq_core::local::LocalQueue;
use blkmq_core::mapper::stack;
use blkmq_core::queue::{Effects, Queue, QueueConfig, QueueHandle, TagMode};
use blkmq_core::request::Request;
use blkmq_core::time::Instant;
use blkmq_core::trace::{Sender, Tracer};

use crate::disk::QueueId;

/// One thread's side of all queues.
pub(crate) struct Queues {
    all: Vec<Entry>,
    /// The active queues, by number.
    active: Vec<u32>,
}

struct Entry {
    queue: LocalQueue,
    is_active: bool,
    /// It had nothing to do at its last run.
    was_quiet: bool,
}

impl Queues {
    pub(crate) fn new(queues: Vec<LocalQueue>) -> Self {
        let mut all = Self {
            all: Vec::with_capacity(queues.len()),
            active: Vec::with_capacity(queues.len()),
        };
        queues.into_iter().for_each(|queue| all.push(queue));
        all
    }

    /// Says whether all queues are always active: with so few, the choice would cost more.
    #[inline]
    pub(crate) fn are_few(&self) -> bool {
        self.all.len() <= FEW
    }

    /// The queue, for a submission: it becomes active.
    #[inline]
    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut LocalQueue> {
        let entry = self.all.get_mut(index)?;
        if !entry.is_active {
            activate(entry, &mut self.active, index);
        }
        Some(&mut entry.queue)
    }

    /// Which group one of a queue is part of, and its weight.
    pub(crate) fn parent_and_weight(&self, index: usize, group: GroupId) -> (GroupId, u16) {
        let entry = self.all.get(index);
        entry.map_or((ROOT, WEIGHT_DEFAULT), |entry| {
            entry.queue.queue().parent_and_weight(group)
        })
    }

    /// Makes all queues active in the next turn, since other threads have published work for some queue.
    pub(crate) fn activate_all(&mut self) {
        let idle = self
            .all
            .iter_mut()
            .enumerate()
            .filter(|(_, entry)| !entry.is_active);
        idle.for_each(|(index, entry)| activate(entry, &mut self.active, index));
    }

    /// Runs the active queues. A queue that had nothing to do in the turn before, and has nothing now, becomes
    /// inactive; so each queue has one whole turn after its last bio has ended, at whose end this is reported
    /// to the others ([`LocalQueue::answered`]).
    #[inline]
    pub(crate) fn run(&mut self, now: Instant, fx: &mut Effects) {
        if self.are_few() {
            self.for_each(|queue| queue.run(now, fx));
        } else {
            self.run_and_retire(now, fx);
        }
    }

    fn run_and_retire(&mut self, now: Instant, fx: &mut Effects) {
        let Self { all, active } = self;
        active.retain(|&index| {
            let entry = &mut all[index as usize];
            let is_quiet = entry.queue.is_quiet();
            entry.is_active = !(is_quiet && entry.was_quiet);
            entry.was_quiet = is_quiet;
            if entry.is_active {
                entry.queue.run(now, fx);
            }
            entry.is_active
        });
    }

    /// The active queues.
    #[inline]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &LocalQueue> {
        self.active.iter().map(|&index| &self.all[index as usize].queue)
    }

    /// The same with their numbers.
    pub(crate) fn numbered(&self) -> impl Iterator<Item = (QueueId, &LocalQueue)> {
        let entry = |&index: &u32| (QueueId(index as u16), &self.all[index as usize].queue);
        self.active.iter().map(entry)
    }

    /// Calls `f` with each active queue.
    #[inline]
    pub(crate) fn for_each(&mut self, mut f: impl FnMut(&mut LocalQueue)) {
        for &index in &self.active {
            f(&mut self.all[index as usize].queue);
        }
    }

    /// Has each queue record its requests' steps, under its number, or stops it (`None`).
    pub(crate) fn set_trace(&mut self, to: Option<&Rc<RefCell<Sender>>>) {
        for (index, entry) in self.all.iter_mut().enumerate() {
            let tracer = to.map(|to| Tracer::new(Rc::clone(to), index as u16));
            entry.queue.set_tracer(tracer);
        }
    }

    /// Takes the last one out.
    pub(crate) fn pop(&mut self) -> Option<LocalQueue> {
        let last = self.all.pop()?;
        self.active.retain(|&index| (index as usize) < self.all.len());
        Some(last.queue)
    }

    /// Puts one behind the others, or in the place of one that was removed.
    pub(crate) fn put(&mut self, index: usize, queue: LocalQueue) {
        if index == self.all.len() {
            return self.push(queue);
        }
        let entry = &mut self.all[index];
        entry.queue = queue;
        entry.was_quiet = false;
        if !entry.is_active {
            activate(entry, &mut self.active, index);
        }
    }

    /// Removes one, if nothing is under way in it; a queue without disks replaces it. Says whether it is gone.
    pub(crate) fn remove(&mut self, index: usize) -> bool {
        let Some(entry) = self.all.get_mut(index) else {
            return true;
        };
        let queue = std::mem::replace(&mut entry.queue, empty_queue());
        match queue.detach() {
            Ok(_) => true,
            Err(queue) => {
                entry.queue = *queue;
                false
            }
        }
    }

    /// Puts one behind the others.
    pub(crate) fn push(&mut self, queue: LocalQueue) {
        self.active.push(self.all.len() as u32);
        self.all.push(Entry {
            queue,
            is_active: true,
            was_quiet: false,
        });
    }
}

/// A queue without disks, which refuses all bios.
pub(super) fn empty_queue() -> LocalQueue {
    empty_handle().attach(Some(Box::new(NoDrive)))
}

/// The driver of such a queue.
pub(super) fn no_drive() -> Box<dyn HctxDriver> {
    Box::new(NoDrive)
}

/// The handle of a queue without disks.
pub(crate) fn empty_handle() -> QueueHandle {
    let config = QueueConfig {
        tags: TagMode::PerHctx(1),
        requests_per_reactor: 1,
        ..QueueConfig::new("removed", 1)
    };
    let (_, handles) = Queue::new(config).expect("one reactor and no disk are possible");
    handles.into_iter().next().expect("one reactor")
}

/// The driver of a queue without disks, to which no request is issued.
struct NoDrive;

impl HctxDriver for NoDrive {
    fn issue(&mut self, _: &Request, _: Cookie, _: bool, _: Instant) -> Issued {
        Issued::Done(Status::Invalid)
    }

    fn reap(&mut self, _: Instant, _: &mut Vec<Done>) {}
}

#[cold]
#[inline(never)]
fn activate(entry: &mut Entry, active: &mut Vec<u32>, index: usize) {
    (entry.is_active, entry.was_quiet) = (true, false);
    active.push(index as u32);
}

impl stack::Queues for Queues {
    #[inline]
    fn queue(&mut self, index: usize) -> &mut LocalQueue {
        self.get_mut(index).expect(ON_A_QUEUE)
    }

    #[inline]
    fn unplug(&mut self, now: Instant, fx: &mut Effects) {
        self.for_each(|queue| queue.unplug(now, fx));
    }
}

pub(crate) const ON_A_QUEUE: &str = "a table's leaves are on queues that there are";
/// Up to this many queues, all are active in each turn.
const FEW: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn queues(count: usize) -> Queues {
        Queues::new((0..count).map(|_| empty_queue()).collect())
    }

    #[test]
    fn queue_is_looked_at_for_one_whole_turn_after_it_has_become_quiet() {
        let mut queues = queues(FEW + 1);
        let mut fx = Effects::with_capacity(1);
        let mut turn = |queues: &mut Queues, now| {
            queues.run(Instant(now), &mut fx);
            queues.iter().count()
        };
        assert_eq!(turn(&mut queues, 1), FEW + 1, "all are told of this turn");
        assert_eq!(turn(&mut queues, 2), 0);
        queues.get_mut(3).expect("it is there");
        assert_eq!(turn(&mut queues, 3), 1);
        assert_eq!(turn(&mut queues, 4), 0);
        queues.activate_all();
        assert_eq!(turn(&mut queues, 5), FEW + 1);
    }

    #[test]
    fn few_queues_are_always_looked_at() {
        let mut queues = queues(FEW);
        let mut fx = Effects::with_capacity(1);
        (0..4).for_each(|now| queues.run(Instant(now), &mut fx));
        assert_eq!(queues.iter().count(), FEW);
    }
}
