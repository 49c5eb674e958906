//! Loom models of the wake flag: interleavings that it must survive, and planted faults that they must
//! find.

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

    /// The owner: sleeps as soon as it finds nothing new, and continues if it was notified by then. Returns
    /// how often it announced a sleep, and how much work it has seen.
    fn go_to_sleep(&self) -> (u32, u32) {
        let mut seen = 0;
        for sleeps in 1.. {
            self.flag.prepare_to_sleep();
            if self.work() == seen && !self.flag.is_notified() {
                return (sleeps, seen);
            }
            self.flag.cancel_sleep();
            seen = self.work();
        }
        unreachable!("there is an end to the work")
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
    let owner = Arc::clone(&shared);
    let owner = thread::spawn(move || owner.go_to_sleep());
    join_all(notifiers);
    let (sleeps, seen) = owner.join().unwrap();
    if shared.work() != seen {
        assert!(shared.flag.is_notified(), "the owner sleeps on");
    }
    let wakes = shared.wakes.load(Ordering::Relaxed);
    assert!(wakes <= sleeps, "{wakes} wake-ups for {sleeps} sleeps");
}

#[test]
fn no_wake_up_is_lost_and_none_is_doubled() {
    check(a_sleeper_and_two_notifiers);
}

#[test]
#[should_panic(expected = "the owner sleeps on")]
fn notifier_without_its_fence_is_found() {
    check_with(Fault::NoFullFence, a_sleeper_and_two_notifiers);
}

#[test]
#[should_panic(expected = "the owner sleeps on")]
fn owner_without_its_fence_is_found() {
    check_with(Fault::NoFenceAfterRmw, a_sleeper_and_two_notifiers);
}

/// Two notifiers, and an owner that looks for work only if it is notified that there is some.
fn an_owner_that_looks_when_told() {
    let shared = Arc::new(Shared::default());
    let notifiers = [0, 1].map(|me| {
        let shared = Arc::clone(&shared);
        thread::spawn(move || {
            shared.work[me].store(1, Ordering::Relaxed);
            let _ = shared.flag.notify();
        })
    });
    let owner = Arc::clone(&shared);
    let owner = thread::spawn(move || {
        let mut seen = 0;
        if owner.flag.take_news() {
            seen = owner.work();
        }
        let was_told = owner.flag.prepare_to_sleep();
        if was_told {
            seen = owner.work();
        }
        if owner.flag.cancel_sleep() {
            seen = owner.work();
        }
        seen
    });
    join_all(notifiers);
    let mut seen = owner.join().unwrap();
    if shared.flag.take_news() {
        seen = shared.work();
    }
    assert_eq!(seen, 2, "work that the owner was not told of");
}

#[test]
fn owner_is_told_of_all_work() {
    check(an_owner_that_looks_when_told);
}

#[test]
#[should_panic(expected = "work that the owner was not told of")]
fn notifier_without_its_fence_leaves_work_untold() {
    check_with(Fault::NoFullFence, an_owner_that_looks_when_told);
}

#[test]
#[should_panic(expected = "work that the owner was not told of")]
fn owner_without_its_fence_leaves_work_unseen() {
    check_with(Fault::NoFenceAfterRmw, an_owner_that_looks_when_told);
}

#[test]
fn two_notifiers_of_one_sleep_are_told_to_wake_once() {
    check(|| {
        let flag = Arc::new(WakeFlag::new());
        flag.prepare_to_sleep();
        let notifiers = [0, 1].map(|_| {
            let flag = Arc::clone(&flag);
            thread::spawn(move || flag.notify())
        });
        let told = notifiers.map(|notifier| notifier.join().unwrap());
        assert!(told[0] ^ told[1], "told to wake: {told:?}");
        assert!(flag.is_notified() && flag.cancel_sleep());
    });
}

#[test]
fn cancelled_sleep_knows_whether_a_wake_up_is_under_way() {
    check(|| {
        let flag = Arc::new(WakeFlag::new());
        let (owner, notifier) = (Arc::clone(&flag), Arc::clone(&flag));
        let notifier = thread::spawn(move || notifier.notify());
        let owner = thread::spawn(move || {
            owner.prepare_to_sleep();
            owner.cancel_sleep()
        });
        assert_eq!(owner.join().unwrap(), notifier.join().unwrap());
    });
}
