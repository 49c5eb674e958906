//! Tests of the one-to-one ring, with real threads where several are needed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use super::*;

#[test]
fn items_come_out_in_order_and_a_full_ring_gives_them_back() {
    let (mut producer, mut consumer) = ring(3);
    assert_eq!(producer.capacity(), 4, "3 is rounded up");
    for lap in 0..3 {
        for n in 0..4 {
            assert_eq!(producer.push(lap * 4 + n), Ok(()));
        }
        assert_eq!(producer.push(99), Err(99));
        assert_eq!((consumer.len(), producer.len()), (4, 4));
        for n in 0..4 {
            assert_eq!(consumer.pop(), Some(lap * 4 + n));
        }
        assert_eq!(consumer.pop(), None);
        assert!(consumer.is_empty() && producer.is_empty());
    }
}

#[test]
fn ring_of_one_works() {
    let (mut producer, mut consumer) = ring(0);
    assert_eq!(producer.push('a'), Ok(()));
    assert_eq!(producer.push('b'), Err('b'));
    assert!(!consumer.is_empty());
    assert_eq!(consumer.pop(), Some('a'));
    assert_eq!(producer.push('c'), Ok(()));
    assert_eq!(consumer.drain(|item| assert_eq!(item, 'c')), 1);
}

#[test]
fn leftovers_are_dropped_once_with_the_second_half() {
    let item = Arc::new(());
    let (mut producer, mut consumer) = ring(4);
    for _ in 0..3 {
        producer.push(Arc::clone(&item)).expect("room");
    }
    drop(consumer.pop());
    drop(consumer);
    assert_eq!(Arc::strong_count(&item), 3);
    drop(producer);
    assert_eq!(Arc::strong_count(&item), 1);
}

#[test]
fn panic_in_a_drain_loses_only_the_items_it_was_given() {
    let item = Arc::new(());
    let (mut producer, mut consumer) = ring(4);
    for n in 0..4 {
        producer.push((n, Arc::clone(&item))).expect("room");
    }
    let drained = catch_unwind(AssertUnwindSafe(|| {
        consumer.drain(|(n, _)| assert_ne!(n, 1, "on purpose"))
    }));
    assert!(drained.is_err());
    assert_eq!(Arc::strong_count(&item), 3, "two were dropped, once each");
    assert!(
        producer.push((4, Arc::clone(&item))).is_ok(),
        "their slots are free"
    );
    let mut rest = Vec::new();
    assert_eq!(consumer.drain(|(n, _)| rest.push(n)), 3);
    assert_eq!(rest, [2, 3, 4]);
}

#[test]
fn positions_may_wrap_around() {
    let (mut producer, mut consumer) = ring(2);
    let start = usize::MAX - 2;
    (
        producer.tail,
        producer.head_seen,
        consumer.head,
        consumer.tail_seen,
    ) = (start, start, start, start);
    producer.ring.head.store(start, Ordering::Relaxed);
    producer.ring.tail.store(start, Ordering::Relaxed);
    for n in 0..8 {
        producer.push(n).expect("room");
        producer.push(n + 100).expect("room");
        assert_eq!(producer.push(0), Err(0));
        assert_eq!(
            (consumer.pop(), consumer.pop(), consumer.pop()),
            (Some(n), Some(n + 100), None)
        );
    }
}

#[test]
fn two_threads_hand_over_every_item_once_and_in_order() {
    const ITEMS: u64 = 200_000;
    let (mut producer, mut consumer) = ring::<Box<u64>>(64);
    thread::scope(|scope| {
        scope.spawn(move || {
            for n in 0..ITEMS {
                let mut item = Box::new(n);
                while let Err(back) = producer.push(item) {
                    item = back;
                    thread::yield_now();
                }
            }
        });
        let mut next = 0;
        while next < ITEMS {
            if next % 3 == 0 {
                if let Some(item) = consumer.pop() {
                    assert_eq!(*item, next);
                    next += 1;
                }
            } else {
                consumer.drain(|item| {
                    assert_eq!(*item, next);
                    next += 1;
                });
            }
            if consumer.is_empty() {
                thread::yield_now();
            }
        }
        assert!(consumer.is_empty());
    });
}

#[test]
fn drain_announces_each_item_that_is_far_enough_behind() {
    let (mut producer, mut consumer) = ring(16);
    for first in [0, 10, 20] {
        for n in first..first + 10 {
            producer.push(n).expect("room");
        }
        let announced = std::cell::RefCell::new(Vec::new());
        let mut taken = Vec::new();
        let count = consumer.drain_announced(|n| announced.borrow_mut().push(*n), |n| taken.push(n));
        assert_eq!(count, 10);
        assert_eq!(taken, (first..first + 10).collect::<Vec<_>>());
        assert_eq!(
            announced.into_inner(),
            (first + AHEAD as i32..first + 10).collect::<Vec<_>>()
        );
    }
}
