//! Loom models of the many-to-one ring: interleavings that it must survive, and planted faults that they
//! must find.

use loom::thread;

use super::*;
use crate::WakeFlag;
use crate::atomic::faults::Fault;
use crate::model::{check, check_with, join_all};

#[test]
fn two_senders_hand_over_every_item_once() {
    check(|| {
        let (sender, mut receiver) = channel(2);
        let senders = [10, 20].map(|first| {
            let sender = sender.clone();
            thread::spawn(move || sender.push(first).expect("room"))
        });
        let mut sum = 0;
        while sum < 30 {
            match receiver.pop() {
                Some(item) => sum += item,
                None => thread::yield_now(),
            }
        }
        assert_eq!(sum, 30);
        assert!(receiver.is_empty());
        join_all(senders);
    });
}

#[test]
fn slot_is_used_again_only_after_its_item_was_taken() {
    check(|| {
        let (sender, mut receiver) = channel(1);
        let pushing = thread::spawn(move || {
            for item in 1..=2 {
                while sender.push(item).is_err() {
                    thread::yield_now();
                }
            }
        });
        for expected in 1..=2 {
            let item = loop {
                match receiver.pop() {
                    Some(item) => break item,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(item, expected);
        }
        pushing.join().unwrap();
    });
}

#[test]
fn full_ring_takes_one_of_two_and_drops_it_once() {
    check(|| {
        let (sender, receiver) = channel(1);
        let other = sender.clone();
        let other = thread::spawn(move || other.push(loom::sync::Arc::new(())).is_ok());
        let mine = sender.push(loom::sync::Arc::new(())).is_ok();
        let theirs = other.join().unwrap();
        assert!(mine ^ theirs);
        drop(receiver);
    });
}

/// The mailbox as a reactor uses it: senders push and notify, the receiver checks, and goes to sleep. A
/// sender that has its ticket but has not written its item hides the item behind it; a sleep that begins then
/// must still be ended.
fn a_mailbox_and_its_sleeping_owner() {
    let (sender, mut receiver) = channel(2);
    let flag = Arc::new(WakeFlag::new());
    let senders = [1, 2].map(|item| {
        let (sender, flag) = (sender.clone(), Arc::clone(&flag));
        thread::spawn(move || {
            sender.push(item).expect("room");
            let _ = flag.notify(); // A sender that must wake the owner does so: `is_notified` stands for that.
        })
    });
    let owner = Arc::clone(&flag);
    let owner = thread::spawn(move || {
        let mut sum = 0;
        loop {
            owner.prepare_to_sleep();
            if receiver.is_empty() && !owner.is_notified() {
                return (receiver, sum);
            }
            owner.cancel_sleep();
            receiver.drain(|item| sum += item);
        }
    });
    join_all(senders);
    let (mut receiver, mut sum) = owner.join().unwrap();
    if !receiver.is_empty() {
        assert!(flag.is_notified(), "the owner sleeps beside a full mailbox");
    }
    receiver.drain(|item| sum += item);
    assert_eq!(sum, 3);
}

#[test]
fn sleeping_owner_is_woken_for_every_item() {
    check(a_mailbox_and_its_sleeping_owner);
}

#[test]
#[should_panic(expected = "sleeps beside a full mailbox")]
fn notifier_without_its_fence_is_found() {
    check_with(Fault::NoFullFence, a_mailbox_and_its_sleeping_owner);
}

#[test]
fn items_pushed_together_are_next_to_each_other() {
    check(|| {
        let (sender, mut receiver) = channel(4);
        let other = sender.clone();
        let together = thread::spawn(move || {
            let mut items = vec![10, 11];
            sender.push_all(&mut items);
            assert!(items.is_empty(), "room");
        });
        let alone = thread::spawn(move || other.push(1).expect("room"));
        receiver.peek(1, |item| assert!([1, 10, 11].contains(item)));
        join_all([together, alone]);
        let mut taken = Vec::new();
        receiver.drain(|item| taken.push(item));
        assert!(
            [[10, 11, 1], [1, 10, 11]].contains(&[taken[0], taken[1], taken[2]]),
            "{taken:?}"
        );
    });
}

#[test]
fn items_pushed_together_wait_until_there_is_room_for_all() {
    check(|| {
        let (sender, mut receiver) = channel(2);
        sender.push(0).expect("room");
        let pushing = thread::spawn(move || {
            let mut items = vec![1, 2];
            while !items.is_empty() {
                sender.push_all(&mut items);
                thread::yield_now();
            }
        });
        for expected in 0..=2 {
            let item = loop {
                match receiver.pop() {
                    Some(item) => break item,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(item, expected);
        }
        pushing.join().unwrap();
    });
}
