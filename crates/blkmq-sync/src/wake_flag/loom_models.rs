//! Decides which interleavings the wake flag must survive, and which planted faults a model must find.

use loom::thread;

use super::*;
use crate::atomic::faults::Fault;
use crate::atomic::{Arc, AtomicU32};
use crate::model::{check, check_with, join_all};

#[derive(Default)]
struct Shared {
    flag: WakeFlag,
    /// Each notifier's publication: a plain store.
    work: [AtomicU32; 2],
    wakes: AtomicU32,
}

impl Shared {
    fn work(&self) -> u32 {
        self.work.iter().map(|work| work.load(Ordering::Relaxed)).sum()
    }
}

/// Two notifiers, and an owner that goes to sleep until it has seen the work of both.
fn a_sleeper_and_two_notifiers() {
    let shared = Arc::new(Shared::default());
    let notifiers = [0, 1].map(|me| {
        let shared = Arc::clone(&shared);
        thread::spawn(move || {
            shared.work[me].store(1, Ordering::Relaxed);
            if shared.flag.notify() {
                shared.wakes.fetch_add(1, Ordering::Relaxed);
            }
        })
    });
    let (mut sleeps, mut seen, mut is_asleep) = (0, 0, false);
    while seen < 2 && !is_asleep {
        sleeps += 1;
        shared.flag.prepare_to_sleep();
        is_asleep = shared.work() == seen && !shared.flag.is_notified();
        if !is_asleep {
            shared.flag.cancel_sleep();
            seen = shared.work();
        }
    }
    join_all(notifiers);
    assert!(!is_asleep || shared.flag.is_notified(), "the owner sleeps on");
    let wakes = shared.wakes.load(Ordering::Relaxed);
    assert!(wakes <= sleeps, "{wakes} wake-ups for {sleeps} sleeps");
}

#[test]
fn no_wake_up_is_lost_and_none_is_doubled() {
    check(a_sleeper_and_two_notifiers);
}

#[test]
#[should_panic(expected = "the owner sleeps on")]
fn a_notifier_without_its_fence_is_found() {
    check_with(Fault::NoFullFence, a_sleeper_and_two_notifiers);
}

#[test]
#[should_panic(expected = "the owner sleeps on")]
fn an_owner_without_its_fence_is_found() {
    check_with(Fault::NoFenceAfterRmw, a_sleeper_and_two_notifiers);
}

#[test]
fn two_notifiers_of_one_sleep_are_told_to_wake_once() {
    check(|| {
        let flag = Arc::new(WakeFlag::new());
        flag.prepare_to_sleep();
        let other = Arc::clone(&flag);
        let other = thread::spawn(move || other.notify());
        let mine = flag.notify();
        let theirs = other.join().unwrap();
        assert!(mine ^ theirs, "told to wake: {mine} and {theirs}");
        assert!(flag.is_notified() && flag.cancel_sleep());
    });
}

#[test]
fn a_cancelled_sleep_knows_whether_a_wake_up_is_under_way() {
    check(|| {
        let flag = Arc::new(WakeFlag::new());
        let other = Arc::clone(&flag);
        let other = thread::spawn(move || other.notify());
        flag.prepare_to_sleep();
        let is_coming = flag.cancel_sleep();
        assert_eq!(is_coming, other.join().unwrap());
    });
}
