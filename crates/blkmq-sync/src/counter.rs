//! A counter that one thread adds to and any thread reads, without a read-modify-write.
//!
//! Each reactor keeps its own counters (a statistics shard); a reader adds up the shards of all reactors.

use crate::atomic::{AtomicU64, Ordering};

/// A number that one thread writes and any thread reads whole.
///
/// The owner adds with a plain load and a plain store, so counting costs no locked instruction. Two threads
/// that write the same counter lose additions (nothing worse): give each its own and add them up. All
/// accesses are relaxed, because a statistic orders nothing; a reader sees each counter only grow if the
/// owner only adds.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// A counter at zero.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds `n`, wrapping. Called by the owning thread only.
    #[inline]
    pub fn add(&self, n: u64) {
        let now = self.0.load(Ordering::Relaxed).wrapping_add(n);
        self.0.store(now, Ordering::Relaxed);
    }

    /// Replaces the value (a gauge). Called by the owning thread only.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The value as this thread sees it now. Any thread may call it.
    #[inline]
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn owner_adds_and_sets_and_anyone_reads() {
        let counter = Counter::new();
        counter.add(3);
        counter.add(4);
        assert_eq!(counter.get(), 7);
        counter.set(2);
        assert_eq!(
            std::thread::scope(|s| s.spawn(|| counter.get()).join().expect("reader")),
            2
        );
    }

    #[test]
    fn reader_never_sees_the_owner_go_back() {
        let counter = Counter::new();
        std::thread::scope(|s| {
            s.spawn(|| (0..100_000).for_each(|_| counter.add(1)));
            let mut last = 0;
            while last < 100_000 {
                let now = counter.get();
                assert!(now >= last, "counter went from {last} back to {now}");
                last = now;
            }
        });
    }
}

#[cfg(all(test, loom))]
mod loom_models {
    use super::*;
    use crate::atomic::Arc;

    #[test]
    fn reader_sees_whole_values_that_only_grow() {
        loom::model(|| {
            let counter = Arc::new(Counter::new());
            let owner = Arc::clone(&counter);
            let owner = loom::thread::spawn(move || (0..2).for_each(|_| owner.add(1 << 33)));
            let first = counter.get();
            let second = counter.get();
            assert!(second >= first && second.is_multiple_of(1 << 33));
            owner.join().unwrap();
            assert_eq!(counter.get(), 2 << 33);
        });
    }
}
