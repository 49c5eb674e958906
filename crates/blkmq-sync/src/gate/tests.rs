//! Tests of the gate, with real threads where several are needed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64 as StdU64, Ordering as StdOrdering};
use std::thread;

use super::*;

#[test]
fn one_is_inside_and_others_leave_a_mark() {
    let gate = Gate::new(1);
    let mut inside = gate.try_enter().expect("free");
    *inside += 1;
    assert!(gate.is_held());
    for _ in 0..3 {
        assert!(gate.try_enter().is_none());
    }
    let inside = inside.leave().expect_err("marked: once more");
    assert_eq!(*inside, 2);
    assert!(inside.leave().is_ok(), "all marks were taken off");
    assert!(!gate.is_held() && gate.try_enter().is_some());
}

#[test]
fn leaving_in_any_case_tells_of_the_mark() {
    let mut gate = Gate::new(());
    assert!(!gate.try_enter().expect("free").leave_owing());
    let inside = gate.try_enter().expect("free");
    assert!(gate.try_enter().is_none());
    assert!(inside.leave_owing());
    assert!(!gate.is_owed(), "the debt is the caller's");
    assert!(gate.try_enter().expect("free").leave().is_ok());
    *gate.get_mut() = ();
}

#[test]
fn dropped_guard_leaves_its_mark_to_the_next_holder() {
    let gate = Gate::new(());
    drop(gate.try_enter());
    assert!(!gate.is_held() && !gate.is_owed());

    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let _inside = gate.try_enter();
        assert!(gate.try_enter().is_none());
        panic!("on purpose");
    }));
    assert!(unwound.is_err() && gate.is_owed() && !gate.is_held());
    let inside = gate.try_enter().expect("open after a panic");
    let inside = inside.leave().expect_err("the debt: once more");
    assert!(inside.leave().is_ok() && !gate.is_owed());
}

#[test]
fn debt_that_nobody_paid_is_told_by_leave_owing() {
    let gate = Gate::new(());
    let inside = gate.try_enter();
    assert!(gate.try_enter().is_none());
    drop(inside);
    assert!(gate.try_enter().expect("open").leave_owing());
    assert!(!gate.is_owed());
}

#[test]
fn guard_is_shared_only_where_its_value_is() {
    fn assert_send_sync<T: Send + Sync>() {}
    assert_send_sync::<Gate<std::cell::Cell<u8>>>();
    assert_send_sync::<GateGuard<'static, u8>>();
}

#[test]
fn everything_published_is_seen_and_nobody_is_inside_twice() {
    const THREADS: usize = 4;
    const ITEMS: u64 = 30_000;
    /// What the holder keeps: a torn update would show as a difference between the two.
    #[derive(Default)]
    struct Inside {
        seen: u64,
        seen_again: u64,
    }
    let gate = Gate::new(Inside::default());
    let published: [StdU64; THREADS] = Default::default();
    thread::scope(|scope| {
        for mine in &published {
            let (gate, published) = (&gate, &published);
            scope.spawn(move || {
                for n in 1..=ITEMS {
                    mine.store(n, StdOrdering::Relaxed);
                    let mut next = gate.try_enter();
                    while let Some(mut inside) = next {
                        inside.seen = published.iter().map(|p| p.load(StdOrdering::Relaxed)).sum();
                        assert!(inside.seen_again <= inside.seen, "two were inside");
                        inside.seen_again = inside.seen;
                        next = inside.leave().err();
                    }
                }
            });
        }
    });
    let mut gate = gate;
    assert_eq!(
        gate.get_mut().seen,
        THREADS as u64 * ITEMS,
        "the last holder saw everything"
    );
}

#[test]
fn spinning_entrant_waits_for_the_holder_and_loses_nothing() {
    const THREADS: u64 = 4;
    const TIMES: u64 = 5_000;
    let gate = Gate::new(0u64);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..TIMES {
                    let mut guard = gate.enter_spinning();
                    *guard += 1;
                    assert!(!guard.leave_owing(), "nobody leaves a mark");
                }
            });
        }
    });
    let mut gate = gate;
    assert_eq!(*gate.get_mut(), THREADS * TIMES);
}
