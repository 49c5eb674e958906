//! Loom models of the one-to-one ring: interleavings that it must survive, and planted faults that they
//! must find.

use loom::thread;

use super::*;
use crate::model::check;

fn push_until_done(producer: &mut Producer<u32>, item: u32) {
    while producer.push(item).is_err() {
        thread::yield_now();
    }
}

#[test]
fn items_come_out_once_in_order_and_wrap_around() {
    check(|| {
        let (mut producer, mut consumer) = ring(2);
        let pushing = thread::spawn(move || (1..=3).for_each(|item| push_until_done(&mut producer, item)));
        let mut next = 1;
        while next <= 3 {
            match consumer.pop() {
                Some(item) => {
                    assert_eq!(item, next);
                    next += 1;
                }
                None => thread::yield_now(),
            }
        }
        pushing.join().unwrap();
        assert!(consumer.is_empty());
    });
}

#[test]
fn drain_takes_what_is_there_and_frees_its_slots() {
    check(|| {
        let (mut producer, mut consumer) = ring(2);
        let pushing = thread::spawn(move || (1..=3).for_each(|item| push_until_done(&mut producer, item)));
        let mut next = 1;
        while next <= 3 {
            let before = next;
            let taken = consumer.drain(|item| {
                assert_eq!(item, next);
                next += 1;
            });
            assert_eq!(taken as u32, next - before);
            thread::yield_now();
        }
        pushing.join().unwrap();
    });
}

#[test]
fn leftovers_are_dropped_once_whichever_half_goes_first() {
    check(|| {
        let (mut producer, mut consumer) = ring(2);
        // Loom reports an `Arc` of its own that is never dropped, and its cells one that is dropped twice.
        let pushing = thread::spawn(move || {
            for _ in 0..2 {
                producer.push(loom::sync::Arc::new(())).expect("room");
            }
        });
        drop(consumer.pop());
        drop(consumer);
        pushing.join().unwrap();
    });
}

/// The ring's publication with a relaxed store: the model must find the race on the item.
#[test]
#[should_panic(expected = "Causality violation")]
fn relaxed_publication_is_found() {
    check(|| {
        let shared = Arc::new((AtomicUsize::new(0), UnsafeCell::new(0_u32)));
        let writer = Arc::clone(&shared);
        thread::spawn(move || {
            // SAFETY: none: this is the fault to be found; loom stops before the read happens.
            writer.1.with_mut(|item| unsafe { item.write(1) });
            writer.0.store(1, Ordering::Relaxed);
        });
        if shared.0.load(Ordering::Acquire) == 1 {
            // SAFETY: as above.
            assert_eq!(shared.1.with(|item| unsafe { item.read() }), 1);
        }
    });
}
