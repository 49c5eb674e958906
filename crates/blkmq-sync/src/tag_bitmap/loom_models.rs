//! Loom models of the tag bitmap: interleavings that it must survive, and planted faults that they must
//! find.

use loom::thread;

use super::*;
use crate::atomic::faults::Fault;
use crate::atomic::{Arc, UnsafeCell};
use crate::model::{check, check_with, join_all};

#[test]
fn tag_has_one_owner_at_a_time() {
    struct Shared {
        tags: TagBitmap,
        /// What the owner of a tag may touch: loom reports two owners at once.
        requests: [UnsafeCell<u32>; 2],
    }
    // SAFETY: this is what the model must show: only the owner of its tag touches a cell. Loom reports violations.
    unsafe impl Sync for Shared {}
    fn use_a_tag(shared: &Shared, mut hint: u32) {
        if let Some(tag) = shared.tags.alloc(&mut hint) {
            shared.requests[tag as usize].with_mut(|request| {
                // SAFETY: as above.
                unsafe { request.write(hint) };
            });
            shared.tags.free(tag);
        }
    }
    check(|| {
        let requests = [UnsafeCell::new(0), UnsafeCell::new(0)];
        let shared = Arc::new(Shared {
            tags: TagBitmap::new(2),
            requests,
        });
        let users = [0, 1, 0].map(|hint| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || use_a_tag(&shared, hint))
        });
        join_all(users);
        assert_eq!(shared.tags.in_use(), 0);
    });
}

#[test]
fn two_allocators_find_two_tags() {
    check(|| {
        let tags = Arc::new(TagBitmap::new(2));
        let allocators = [0, 1].map(|_| {
            let tags = Arc::clone(&tags);
            thread::spawn(move || tags.alloc(&mut 0).expect("two tags for two"))
        });
        let [one, other] = allocators.map(|allocator| allocator.join().unwrap());
        assert_ne!(one, other);
    });
}

/// Two threads and one tag. Each takes it and frees it, or stays registered; a thread that frees it wakes the
/// waiters that it finds. Returns the threads that were left waiting and those that were woken.
fn wait_or_use(tags: &TagBitmap, me: u32, alloc: impl Fn(&TagBitmap, u32) -> Option<u32>) -> (u128, u128) {
    match alloc(tags, me) {
        None => (1 << me, 0),
        Some(tag) => {
            tags.free(tag);
            (0, tags.take_waiters())
        }
    }
}

fn two_threads_and_one_tag(alloc: impl Fn(&TagBitmap, u32) -> Option<u32> + Copy + 'static) {
    let tags = Arc::new(TagBitmap::new(1));
    let other = Arc::clone(&tags);
    let other = thread::spawn(move || wait_or_use(&other, 70, alloc));
    let mine = wait_or_use(&tags, 3, alloc);
    let theirs = other.join().unwrap();
    let (waiting, woken) = (mine.0 | theirs.0, mine.1 | theirs.1);
    assert_eq!(waiting & !woken, 0, "a waiter sleeps on");
    assert_eq!(
        mine.1 & theirs.1,
        0,
        "a waiter was woken twice for one registration"
    );
    assert!(tags.in_use() == 0 && !tags.has_waiters());
}

fn alloc_as_documented(tags: &TagBitmap, me: u32) -> Option<u32> {
    tags.alloc_or_wait(&mut 0, 1, me)
}

#[test]
fn no_wake_up_is_lost_between_a_waiter_and_a_freer() {
    check(|| two_threads_and_one_tag(alloc_as_documented));
}

#[test]
#[should_panic(expected = "a waiter sleeps on")]
fn waiter_and_a_freer_without_their_fences_are_found() {
    check_with(Fault::NoFenceAfterRmw, || {
        two_threads_and_one_tag(alloc_as_documented)
    });
}

#[test]
#[should_panic(expected = "a waiter sleeps on")]
fn waiter_that_does_not_look_again_is_found() {
    check(|| {
        two_threads_and_one_tag(|tags, me| {
            let tag = tags.alloc(&mut 0);
            if tag.is_none() {
                tags.register_waiter(me);
            }
            tag
        });
    });
}

#[test]
fn of_two_waiters_for_one_tag_both_are_woken() {
    check(|| {
        let tags = Arc::new(TagBitmap::new(1));
        assert_eq!(tags.alloc(&mut 0), Some(0));
        let waiters = [3, 4].map(|me| {
            let tags = Arc::clone(&tags);
            thread::spawn(move || wait_or_use(&tags, me, alloc_as_documented))
        });
        let freer = Arc::clone(&tags);
        let freer = thread::spawn(move || {
            freer.free(0);
            freer.take_waiters()
        });
        let [one, other] = waiters.map(|waiter| waiter.join().unwrap());
        let (waiting, woken) = (one.0 | other.0, one.1 | other.1 | freer.join().unwrap());
        assert_eq!(waiting & !woken, 0, "a waiter sleeps on");
    });
}
