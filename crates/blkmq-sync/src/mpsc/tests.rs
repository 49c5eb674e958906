//! Tests of the many-to-one ring, with real threads where several are needed.

use std::sync::Arc as StdArc;
use std::thread;

use super::*;

#[test]
fn items_come_out_in_order_and_a_full_ring_gives_them_back() {
    let (sender, mut receiver) = channel(3);
    assert_eq!(
        (sender.capacity(), receiver.capacity()),
        (4, 4),
        "3 is rounded up"
    );
    for lap in 0..3 {
        for n in 0..4 {
            assert_eq!(sender.push(lap * 4 + n), Ok(()));
        }
        assert_eq!(sender.clone().push(99), Err(99));
        for n in 0..4 {
            assert!(!receiver.is_empty());
            assert_eq!(receiver.pop(), Some(lap * 4 + n));
        }
        assert!(receiver.is_empty());
        assert_eq!(receiver.pop(), None);
    }
}

#[test]
fn ring_of_one_works() {
    let (sender, mut receiver) = channel(0);
    for n in 0..5 {
        assert_eq!(sender.push(n), Ok(()));
        assert_eq!(sender.push(99), Err(99));
        assert_eq!(receiver.drain(|item| assert_eq!(item, n)), 1);
    }
}

#[test]
fn leftovers_are_dropped_once_whichever_half_goes_first() {
    for receiver_first in [true, false] {
        let item = StdArc::new(());
        let (sender, mut receiver) = channel(4);
        for _ in 0..6 {
            let _ = sender.push(StdArc::clone(&item));
        }
        drop(receiver.pop());
        assert_eq!(StdArc::strong_count(&item), 4);
        if receiver_first {
            drop(receiver);
            assert_eq!(StdArc::strong_count(&item), 1);
            sender.push(StdArc::clone(&item)).expect("room");
            drop(sender);
        } else {
            drop(sender);
            drop(receiver);
        }
        assert_eq!(StdArc::strong_count(&item), 1);
    }
}

#[test]
fn drain_takes_at_most_one_ring_full() {
    let (sender, mut receiver) = channel(2);
    sender.push(0).expect("room");
    let refill = sender.clone();
    let taken = receiver.drain(|n| refill.push(n + 1).expect("the slot of the item taken is free"));
    assert_eq!(taken, 2);
    assert_eq!(receiver.pop(), Some(2));
}

#[test]
fn many_threads_hand_over_every_item_once_and_each_in_its_order() {
    const SENDERS: usize = 4;
    const ITEMS: usize = 40_000;
    let (sender, mut receiver) = channel::<Box<(usize, usize)>>(16);
    thread::scope(|scope| {
        for from in 0..SENDERS {
            let sender = sender.clone();
            scope.spawn(move || {
                for n in 0..ITEMS {
                    let mut item = Box::new((from, n));
                    while let Err(back) = sender.push(item) {
                        item = back;
                        thread::yield_now();
                    }
                }
            });
        }
        let mut next = [0; SENDERS];
        while next.iter().sum::<usize>() < SENDERS * ITEMS {
            match receiver.pop() {
                Some(item) => {
                    assert_eq!(item.1, next[item.0], "items of sender {} in order", item.0);
                    next[item.0] += 1;
                }
                None => thread::yield_now(),
            }
        }
        assert!(receiver.is_empty());
    });
}

#[test]
fn all_items_fit_or_none_is_taken() {
    let (sender, mut receiver) = channel(4);
    for lap in 0..3 {
        let mut items = vec![1, 2, 3];
        sender.push_all(&mut items);
        assert!(items.is_empty());
        items.extend([4, 5]);
        sender.push_all(&mut items);
        assert_eq!(items, [4, 5], "lap {lap}: one slot is free");
        let mut seen = None;
        receiver.peek(2, |item| seen = Some(*item));
        receiver.peek(3, |_| panic!("three are there"));
        receiver.peek(4, |_| panic!("a slot is not seen twice"));
        assert_eq!(seen, Some(3));
        let mut taken = Vec::new();
        receiver.drain(|item| taken.push(item));
        assert_eq!(taken, [1, 2, 3]);
    }
    sender.push_all(&mut vec![0; 5]);
    sender.push_all(&mut Vec::new());
    assert!(receiver.is_empty());
}

#[test]
fn items_of_many_threads_that_push_together_arrive_once() {
    let (sender, mut receiver) = channel(64);
    let senders = (0..3_u64).map(|thread| {
        let sender = sender.clone();
        thread::spawn(move || {
            for batch in 0..200_u64 {
                let mut items: Vec<_> = (0..7).map(|n| (thread, batch * 7 + n)).collect();
                while !items.is_empty() {
                    sender.push_all(&mut items);
                    thread::yield_now();
                }
            }
        })
    });
    let senders: Vec<_> = senders.collect();
    let mut next = [0; 3];
    while next != [1400; 3] {
        receiver.drain(|(thread, n)| {
            assert_eq!(n, next[thread as usize]);
            next[thread as usize] += 1;
        });
    }
    senders.into_iter().for_each(|sender| sender.join().unwrap());
}
