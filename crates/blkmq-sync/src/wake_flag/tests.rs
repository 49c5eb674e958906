//! Tests of the wake flag, with real threads where several are needed.

use std::sync::atomic::{AtomicU64 as StdU64, Ordering as StdOrdering};
use std::thread;

use super::*;

#[test]
fn nobody_wakes_an_owner_that_is_awake() {
    let flag = WakeFlag::new();
    assert!(!flag.notify());
    assert!(!flag.is_notified());
}

#[test]
fn owner_hears_once_of_what_was_published() {
    let flag = WakeFlag::new();
    assert!(!flag.take_news());
    assert!(!flag.notify() && !flag.notify());
    assert!(flag.take_news() && !flag.take_news());
    assert!(!flag.notify());
    assert!(flag.prepare_to_sleep(), "told while it was awake");
    assert!(!flag.cancel_sleep());
    assert!(!flag.prepare_to_sleep());
    assert!(flag.notify() && flag.cancel_sleep() && !flag.take_news());
}

#[test]
fn one_notifier_in_each_sleep_is_told_to_wake() {
    let flag = WakeFlag::new();
    for _ in 0..3 {
        flag.prepare_to_sleep();
        assert!(!flag.is_notified());
        assert!(flag.notify());
        assert!(flag.is_notified());
        assert!(!flag.notify());
        assert!(flag.cancel_sleep());
        assert!(!flag.notify());
    }
    flag.prepare_to_sleep();
    assert!(!flag.cancel_sleep(), "nobody notified");
}

#[test]
fn sleeper_is_woken_for_every_piece_of_work() {
    const SENDERS: u64 = 3;
    const ITEMS: u64 = 10_000;
    let (flag, work, wakes) = (WakeFlag::new(), StdU64::new(0), StdU64::new(0));
    let (mut sleeps, mut seen) = (0, 0);
    let owner = thread::current();
    thread::scope(|scope| {
        for _ in 0..SENDERS {
            scope.spawn(|| {
                for n in 0..ITEMS {
                    work.fetch_add(1, StdOrdering::Relaxed);
                    if flag.notify() {
                        wakes.fetch_add(1, StdOrdering::Relaxed);
                        owner.unpark();
                    }
                    if n % 64 == 0 {
                        thread::yield_now();
                    }
                }
            });
        }
        while seen < SENDERS * ITEMS {
            flag.prepare_to_sleep();
            if work.load(StdOrdering::Relaxed) == seen {
                sleeps += 1;
                while !flag.is_notified() {
                    thread::park(); // Sleeps for ever if a wake-up is lost.
                }
            }
            flag.cancel_sleep();
            seen = work.load(StdOrdering::Relaxed);
        }
    });
    assert!(wakes.into_inner() >= sleeps, "each sleep was ended by a wake-up");
}
