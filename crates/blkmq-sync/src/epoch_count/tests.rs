//! Tests of the freeze count, with real threads where several are needed.

use std::sync::atomic::AtomicBool;
use std::thread;

use super::*;

#[test]
fn frozen_queue_lets_nobody_in() {
    let state = FreezeState::new(2);
    assert!(state.enter(0) && !state.is_frozen());
    state.start_freeze();
    assert!(state.is_frozen() && !state.enter(1));
    assert!(!state.is_drained(), "shard 0 is inside");
    state.exit(0);
    assert!(state.is_drained());
    assert!(state.end_freeze());
    assert!(state.enter(1));
}

#[test]
fn freezes_nest() {
    let state = FreezeState::new(1);
    state.start_freeze();
    state.start_freeze();
    assert!(!state.end_freeze());
    assert!(!state.enter(0));
    assert!(state.end_freeze());
    assert!(state.enter(0));
}

#[test]
fn request_started_on_one_shard_may_finish_on_another() {
    let state = FreezeState::new(2);
    assert!(state.enter(0));
    state.add_started(0, 3);
    state.exit(0);
    state.start_freeze();
    state.add_finished(1, 2);
    assert_eq!(state.outstanding(), 1);
    assert!(!state.is_drained());
    state.add_finished(0, 1);
    assert!(state.is_drained());
}

#[test]
#[should_panic(expected = "end_freeze without start_freeze")]
fn ending_what_was_not_begun_panics() {
    FreezeState::new(1).end_freeze();
}

#[test]
fn nobody_works_on_a_drained_queue() {
    const USERS: usize = 3;
    let state = FreezeState::new(USERS);
    let (is_changing, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        for shard in 0..USERS {
            let (state, is_changing, is_over) = (&state, &is_changing, &is_over);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    if !state.enter(shard) {
                        thread::yield_now();
                        continue;
                    }
                    state.add_started(shard, 1);
                    assert!(!is_changing.load(Ordering::Relaxed), "inside a drained queue");
                    state.exit(shard);
                    assert!(
                        !is_changing.load(Ordering::Relaxed),
                        "in flight on a drained queue"
                    );
                    state.add_finished(shard, 1);
                }
            });
        }
        for _ in 0..500 {
            state.start_freeze();
            while !state.is_drained() {
                thread::yield_now();
            }
            is_changing.store(true, Ordering::Relaxed);
            std::hint::spin_loop();
            is_changing.store(false, Ordering::Relaxed);
            state.end_freeze();
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!(state.outstanding(), 0);
}
