//! A loom model of the ring between processes: the interleavings that it must survive.

use loom::thread;

use super::*;
use crate::model::check;

struct Words(Vec<AtomicU64>);

impl Memory for Words {
    fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

fn memory() -> Arc<dyn Memory> {
    let words = (0..words_of(1)).map(|_| AtomicU64::new(0)).collect();
    // loom's own `Arc` does not turn into one of a trait's by itself.
    Arc::from_std(std::sync::Arc::new(Words(words)))
}

/// The one slot is written anew while the other side may still read it.
#[test]
fn records_are_whole_and_in_order_and_each_is_taken_or_counted() {
    check(|| {
        let memory = memory();
        let (mut producer, mut consumer) = (Producer::new(Arc::clone(&memory)), Consumer::new(memory));
        let pushing = thread::spawn(move || (1..=2).for_each(|number| producer.push([number; RECORD_WORDS])));
        let mut latest = 0;
        let mut taken = 0;
        let mut take = |consumer: &mut Consumer| {
            let look = |record: Record| {
                assert_eq!(record, [record[0]; RECORD_WORDS], "a torn record");
                assert!(record[0] > latest, "{} after {latest}", record[0]);
                latest = record[0];
                Ok::<_, ()>(())
            };
            taken += consumer.drain(look).unwrap();
        };
        take(&mut consumer);
        pushing.join().unwrap();
        take(&mut consumer);
        assert_eq!(taken + consumer.take_dropped(), 2);
    });
}
