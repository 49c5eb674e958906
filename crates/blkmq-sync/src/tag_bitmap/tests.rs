//! Tests of the tag bitmap, with real threads where several are needed.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::thread::{self, Thread};

use super::*;

#[test]
fn every_tag_is_given_out_once_at_any_depth() {
    for depth in [1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 100, 512, 1000, 1024] {
        let tags = TagBitmap::new(depth);
        let mut given = vec![false; depth as usize];
        let mut hint = depth / 2;
        for n in 0..depth {
            assert_eq!(tags.in_use(), n);
            let tag = tags.alloc(&mut hint).expect("a free tag") as usize;
            assert!(!given[tag], "tag {tag} twice at depth {depth}");
            given[tag] = true;
        }
        assert_eq!(tags.alloc(&mut hint), None);
        for tag in 0..depth {
            assert!(tags.is_in_use(tag));
            tags.free(tag);
            assert!(!tags.is_in_use(tag));
        }
        assert_eq!(tags.in_use(), 0);
    }
}

#[test]
fn freed_tag_is_used_again_while_it_is_hot() {
    let tags = TagBitmap::new(64);
    let mut hint = 40;
    let tag = tags.alloc(&mut hint).expect("a free tag");
    assert_eq!(tag, 40);
    tags.free(tag);
    assert_eq!(tags.alloc(&mut hint), Some(40));
}

#[test]
fn hints_far_apart_use_different_words() {
    let tags = TagBitmap::new(32);
    let (mut one, mut other) = (0, 16);
    let pair = (tags.alloc(&mut one), tags.alloc(&mut other));
    assert_eq!(pair, (Some(0), Some(16)));
    assert_eq!(tags.words.len(), 8, "even a small set is spread");
}

#[test]
fn limit_lowers_the_depth_while_tags_are_out() {
    let tags = TagBitmap::new(64);
    let mut hint = 63;
    let high = tags.alloc(&mut hint).expect("a free tag");
    assert!(high >= 56);
    for n in 0..10 {
        let tag = tags.alloc_limited(&mut hint, 10).expect("a free tag below 10");
        assert!(tag < 10, "tag {tag}, the {n}th");
    }
    assert_eq!(tags.alloc_limited(&mut hint, 10), None);
    assert_eq!(tags.alloc_limited(&mut hint, 0), None);
    tags.free(high);
    assert_eq!(tags.in_use(), 10);
    assert!(
        tags.alloc_limited(&mut hint, 1000).is_some(),
        "a limit above the depth is the depth"
    );
}

#[test]
fn any_hint_is_allowed() {
    let tags = TagBitmap::new(5);
    let mut hint = u32::MAX;
    assert!(tags.alloc(&mut hint).is_some_and(|tag| tag < 5));
}

#[test]
#[should_panic(expected = "tag 3 was freed twice")]
fn freeing_a_free_tag_panics() {
    TagBitmap::new(8).free(3);
}

#[test]
#[should_panic(expected = "tag 9 is not below the depth 9")]
fn freeing_a_tag_of_another_set_panics() {
    TagBitmap::new(9).free(9);
}

#[test]
fn waiters_are_taken_all_at_once_and_only_once() {
    let tags = TagBitmap::new(1);
    assert_eq!(tags.take_waiters(), 0);
    for waiter in [0, 63, 64, 127, 63] {
        tags.register_waiter(waiter);
    }
    assert!(tags.has_waiters());
    assert!(tags.deregister_waiter(64));
    assert!(!tags.deregister_waiter(64));
    assert_eq!(tags.take_waiters(), 1 << 127 | 1 << 63 | 1);
    assert!(!tags.has_waiters());
    assert!(!tags.deregister_waiter(0));
}

#[test]
fn searcher_without_a_tag_is_registered_and_one_with_a_tag_is_not() {
    let tags = TagBitmap::new(1);
    let mut hint = 0;
    assert_eq!(tags.alloc_or_wait(&mut hint, 1, 7), Some(0));
    assert!(!tags.has_waiters());
    assert_eq!(tags.alloc_or_wait(&mut hint, 1, 7), None);
    tags.free(0);
    assert_eq!(tags.take_waiters(), 1 << 7);
}

#[test]
fn threads_never_own_the_same_tag() {
    const DEPTH: u32 = 24;
    let tags = TagBitmap::new(DEPTH);
    let owners: Vec<AtomicU32> = (0..DEPTH).map(|_| AtomicU32::new(0)).collect();
    thread::scope(|scope| {
        for me in 1..=4_u32 {
            let (tags, owners) = (&tags, &owners);
            scope.spawn(move || {
                let mut hint = me * DEPTH / 4;
                let mut held = Vec::new();
                for round in 0..30_000 {
                    if let Some(tag) = tags.alloc(&mut hint) {
                        let before = owners[tag as usize].swap(me, Ordering::Relaxed);
                        assert_eq!(before, 0, "tag {tag} has an owner");
                        held.push(tag);
                    }
                    if held.len() > round % 8 {
                        let tag = held.swap_remove(round % held.len());
                        assert_eq!(owners[tag as usize].swap(0, Ordering::Relaxed), me);
                        tags.free(tag);
                    }
                }
                for tag in held {
                    assert_eq!(owners[tag as usize].swap(0, Ordering::Relaxed), me);
                    tags.free(tag);
                }
            });
        }
    });
    assert_eq!(tags.in_use(), 0);
}

/// Four threads share two tags: a thread that finds none registers and sleeps until a thread that frees one wakes it.
#[test]
fn no_waiter_sleeps_for_ever() {
    const THREADS: u32 = 4;
    const ROUNDS: u32 = 5_000;
    let tags = TagBitmap::new(2);
    let met = std::sync::Barrier::new(THREADS as usize);
    let threads: [OnceLock<Thread>; THREADS as usize] = Default::default();
    thread::scope(|scope| {
        for me in 0..THREADS {
            let (tags, met, threads) = (&tags, &met, &threads);
            scope.spawn(move || {
                threads[me as usize].set(thread::current()).expect("once");
                met.wait();
                let mut hint = me;
                for round in 0..ROUNDS {
                    let tag = loop {
                        match tags.alloc_or_wait(&mut hint, 2, me) {
                            Some(tag) => break tag,
                            None => thread::park(), // For ever, if a wake-up is lost.
                        }
                    };
                    if round % 16 == 0 {
                        thread::yield_now();
                    }
                    tags.free(tag);
                    let waiters = tags.take_waiters();
                    for woken in (0..THREADS).filter(|other| waiters >> other & 1 != 0) {
                        threads[woken as usize].get().expect("all are there").unpark();
                    }
                }
            });
        }
    });
    assert!(tags.in_use() == 0 && !tags.has_waiters());
}
