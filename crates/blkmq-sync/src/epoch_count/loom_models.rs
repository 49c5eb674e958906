//! Loom models of the freeze count: interleavings that it must survive, and planted faults that they must
//! find.

use loom::thread;

use super::*;
use crate::atomic::faults::Fault;
use crate::atomic::{Arc, UnsafeCell};
use crate::model::{check, check_with, join_all};

/// A queue, and what its users read and the freezer replaces (the elevator): loom reports both at once.
struct Queue {
    state: FreezeState,
    elevator: UnsafeCell<u32>,
}

// SAFETY: this is what the model must show: users read inside, or in flight; the freezer writes when drained.
// Loom reports violations.
unsafe impl Sync for Queue {}

impl Queue {
    fn new(shards: usize) -> Arc<Self> {
        Arc::new(Self {
            state: FreezeState::new(shards),
            elevator: UnsafeCell::new(0),
        })
    }

    fn use_elevator(&self) {
        self.elevator.with(|elevator| {
            // SAFETY: as for `Sync`.
            let _ = unsafe { elevator.read() };
        });
    }

    fn replace_elevator(&self) {
        self.elevator.with_mut(|elevator| {
            // SAFETY: as for `Sync`.
            unsafe { elevator.write(1) };
        });
    }

    /// Submits one request, which is used inside and, after the stay, in flight.
    fn submit(&self, shard: usize) -> bool {
        if !self.state.enter(shard) {
            return false;
        }
        self.use_elevator();
        self.state.add_started(shard, 1);
        self.state.exit(shard);
        true
    }

    fn complete(&self, shard: usize) {
        self.use_elevator();
        self.state.add_finished(shard, 1);
    }

    fn freeze_and_replace_if_drained(&self) {
        self.state.start_freeze();
        if self.state.is_drained() {
            self.replace_elevator();
        }
        self.state.end_freeze();
    }
}

fn a_user_and_a_freezer() {
    let queue = Queue::new(1);
    let user = Arc::clone(&queue);
    let user = thread::spawn(move || {
        for _ in 0..2 {
            if user.submit(0) {
                user.complete(0);
            }
        }
    });
    let freezer = Arc::clone(&queue);
    let freezer = thread::spawn(move || freezer.freeze_and_replace_if_drained());
    join_all([user, freezer]);
    assert!(queue.state.is_drained() && queue.state.outstanding() == 0);
}

#[test]
fn nobody_is_inside_or_in_flight_on_a_drained_queue() {
    check(a_user_and_a_freezer);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn user_without_its_fence_is_found() {
    check_with(Fault::NoLightFence, a_user_and_a_freezer);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn freezer_without_its_fence_is_found() {
    check_with(Fault::NoHeavyFence, a_user_and_a_freezer);
}

#[test]
fn request_that_finishes_on_another_shard_is_waited_for() {
    check(|| {
        let queue = Queue::new(2);
        assert!(queue.submit(0));
        let (completer, user) = (Arc::clone(&queue), Arc::clone(&queue));
        let completer = thread::spawn(move || completer.complete(1));
        let user = thread::spawn(move || {
            if user.submit(0) {
                user.complete(0);
            }
        });
        let freezer = Arc::clone(&queue);
        let freezer = thread::spawn(move || freezer.freeze_and_replace_if_drained());
        join_all([completer, user, freezer]);
        assert!(queue.state.is_drained());
    });
}

/// The thread that asks whether the queue has drained need not be the one that froze it.
fn a_freeze_by_another_thread() {
    let queue = Queue::new(1);
    let (user, freezer) = (Arc::clone(&queue), Arc::clone(&queue));
    let user = thread::spawn(move || {
        if user.submit(0) {
            user.complete(0);
        }
    });
    let freezer = thread::spawn(move || freezer.state.start_freeze());
    let asker = Arc::clone(&queue);
    let asker = thread::spawn(move || {
        if asker.state.is_frozen() && asker.state.is_drained() {
            asker.replace_elevator();
        }
    });
    join_all([freezer, user, asker]);
}

#[test]
fn thread_that_learns_of_a_freeze_may_ask_whether_it_has_drained() {
    check(a_freeze_by_another_thread);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn freeze_learned_of_without_a_fence_is_found() {
    check_with(Fault::NoHeavyFence, a_freeze_by_another_thread);
}

#[test]
fn freeze_always_drains() {
    check(|| {
        let queue = Queue::new(1);
        let user = Arc::clone(&queue);
        let user = thread::spawn(move || {
            if user.submit(0) {
                user.complete(0);
            }
        });
        queue.state.start_freeze();
        while !queue.state.is_drained() {
            thread::yield_now();
        }
        queue.replace_elevator();
        assert!(queue.state.end_freeze());
        user.join().unwrap();
    });
}
