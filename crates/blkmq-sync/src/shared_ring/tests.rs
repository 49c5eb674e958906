//! Tests of the ring between processes, with right and with wrong indices.

use super::*;

struct Words(Vec<AtomicU64>);

impl Memory for Words {
    fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

fn memory(records: usize) -> Arc<Words> {
    let words = (0..words_of(records)).map(|_| AtomicU64::new(0));
    Arc::new(Words(words.collect()))
}

fn record(number: u64) -> Record {
    [number, !number, number << 7, 1]
}

fn drained(consumer: &mut Consumer) -> Vec<Record> {
    let mut all = Vec::new();
    let keep = |record| {
        all.push(record);
        Ok::<_, ()>(())
    };
    consumer.drain(keep).expect("it cannot fail");
    all
}

#[test]
fn records_come_in_order_round_after_round_and_those_without_room_are_counted() {
    let memory = memory(4);
    let (mut producer, mut consumer) = (Producer::new(memory.clone()), Consumer::new(memory));
    for round in 0..3 {
        (0..6).for_each(|number| producer.push(record(10 * round + number)));
        let expected: Vec<Record> = (0..4).map(|number| record(10 * round + number)).collect();
        assert_eq!(drained(&mut consumer), expected);
        assert_eq!((consumer.take_dropped(), consumer.take_dropped()), (2, 0));
    }
    assert_eq!(drained(&mut consumer), Vec::<Record>::new());
}

#[test]
fn wrong_indices_of_the_other_half_cost_records_alone() {
    let shared = memory(4);
    let (mut producer, mut consumer) = (Producer::new(shared.clone()), Consumer::new(shared.clone()));
    for wrong in [1, 3, 4, 5, u64::MAX, 1 << 63] {
        shared.words()[HEAD].store(wrong, Ordering::Relaxed);
        (0..9).for_each(|number| producer.push(record(number)));
        shared.words()[TAIL].store(wrong, Ordering::Relaxed);
        assert!(drained(&mut consumer).len() <= 4);
    }
}

#[test]
fn drain_that_fails_gives_up_what_was_there() {
    let memory = memory(4);
    let (mut producer, mut consumer) = (Producer::new(memory.clone()), Consumer::new(memory));
    (0..3).for_each(|number| producer.push(record(number)));
    assert_eq!(consumer.drain(|_| Err("full")), Err("full"));
    producer.push(record(7));
    assert_eq!(drained(&mut consumer), [record(7)]);
}

#[test]
#[should_panic(expected = "are no ring")]
fn memory_of_another_size_is_no_ring() {
    let words = (0..words_of(4) + 1).map(|_| AtomicU64::new(0)).collect();
    let _ = Producer::new(Arc::new(Words(words)));
}
