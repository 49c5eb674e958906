//! The record by which a daemon submits again what one that was killed had in flight: a list of the chains
//! that were taken and not returned lies in memory that the front end keeps. Its changes have the order of
//! the vhost-user specification ("Inflight I/O tracking", split virtqueue), so that recovery works whichever
//! change was the last.

use std::sync::atomic::{Ordering, compiler_fence};

use super::sys::Window;

/// The record of one ring.
#[derive(Debug)]
pub struct Inflight {
    record: Window,
    size: u16,
    counter: u64,
    /// Heads to be submitted again, the last one first.
    again: Vec<u16>,
    /// Heads that are returned and not yet published.
    batch: Vec<u16>,
}

impl Inflight {
    /// The record of a ring of `size` descriptors, in memory of at least [`record_bytes`] of that
    /// size.
    ///
    /// # Panics
    /// The memory is too small.
    pub fn new(record: Window, size: u16) -> Self {
        assert!(
            record.bytes() >= record_bytes(size) as usize,
            "a record that is too small"
        );
        Self {
            record,
            size,
            counter: 0,
            again: Vec::with_capacity(size.into()),
            batch: Vec::with_capacity(size.into()),
        }
    }

    /// Finds out what was in flight, by the used index that the driver sees. Returns the number of
    /// chains.
    pub(super) fn recover(&mut self, used: u16) -> u16 {
        if self.record.load::<u16>(VERSION) != 1 || self.record.load::<u16>(DESC_NUM) != self.size {
            for head in 0..self.size {
                self.record.store(self.place(head), 0_u8);
            }
            self.record.store(USED_INDEX, used);
            self.record.store(LAST_BATCH_HEAD, 0_u16);
            self.record.store(DESC_NUM, self.size);
            self.order();
            self.record.store(VERSION, 1_u16);
        }
        self.finish_batch(used);
        let mut found: Vec<(u64, u16)> = (0..self.size)
            .filter(|head| self.record.load::<u8>(self.place(*head)) == 1)
            .map(|head| (self.record.load(self.place(head) + COUNTER), head))
            .collect();
        found.sort_unstable();
        self.counter = found.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        self.again.extend(found.iter().rev().map(|(_, head)| head));
        found.len() as u16
    }

    /// The last batch was published, but its chains may still be marked.
    fn finish_batch(&mut self, used: u16) {
        let count = used.wrapping_sub(self.record.load(USED_INDEX));
        let mut head: u16 = self.record.load(LAST_BATCH_HEAD);
        for _ in 0..count.min(self.size) {
            if head >= self.size {
                break;
            }
            self.record.store(self.place(head), 0_u8);
            head = self.record.load(self.place(head) + NEXT);
        }
        self.order();
        self.record.store(USED_INDEX, used);
    }

    pub(super) fn to_repeat(&self) -> usize {
        self.again.len()
    }

    /// Returns whether some of its memory was taken away.
    pub(super) fn is_lost(&self) -> bool {
        self.record.is_lost()
    }

    #[inline]
    pub(super) fn next_to_repeat(&mut self) -> Option<u16> {
        self.again.pop()
    }

    #[inline]
    pub(super) fn take(&mut self, head: u16) {
        let place = self.place(head);
        self.record.store(place + COUNTER, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.order();
        self.record.store(place, 1_u8);
        self.order();
    }

    #[inline]
    pub(super) fn end(&mut self, head: u16) {
        let last: u16 = self.record.load(LAST_BATCH_HEAD);
        self.record.store(self.place(head) + NEXT, last);
        self.order();
        self.record.store(LAST_BATCH_HEAD, head);
        self.batch.push(head);
        self.order();
    }

    /// The driver sees the batch now.
    pub(super) fn publish(&mut self, used: u16) {
        self.order();
        while let Some(head) = self.batch.pop() {
            self.record.store(self.place(head), 0_u8);
        }
        self.order();
        self.record.store(USED_INDEX, used);
    }

    /// The process may be killed between two stores, and a killed process leaves its stores in program
    /// order: a compiler fence is enough.
    #[inline]
    fn order(&self) {
        compiler_fence(Ordering::SeqCst);
    }

    #[inline]
    fn place(&self, head: u16) -> usize {
        HEAD_BYTES + ENTRY_BYTES * usize::from(head)
    }
}

/// Resets a record, of this kind or packed: the version is at the same place.
pub(super) fn forget(record: &Window) {
    record.store(VERSION, 0_u16);
}

/// Bytes of the record of a ring of `size` descriptors.
pub fn record_bytes(size: u16) -> u64 {
    ((HEAD_BYTES + ENTRY_BYTES * usize::from(size)) as u64).next_multiple_of(64)
}

/// The head of a record: features (8 bytes), version, descriptors, head of the last batch, used index.
const VERSION: usize = 8;
const DESC_NUM: usize = 10;
const LAST_BATCH_HEAD: usize = 12;
const USED_INDEX: usize = 14;
const HEAD_BYTES: usize = 16;
/// An entry: whether it is in flight, 5 bytes of nothing, the next one of its batch, its number.
const NEXT: usize = 6;
const COUNTER: usize = 8;
const ENTRY_BYTES: usize = 16;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::sys::Mapping;
    use super::*;

    fn again(record: &Window, used: u16) -> (u16, Vec<u16>) {
        let mut inflight = Inflight::new(record.clone(), 8);
        let count = inflight.recover(used);
        let heads = std::iter::from_fn(|| inflight.next_to_repeat()).collect();
        (count, heads)
    }

    fn record() -> Window {
        let mapping = Arc::new(Mapping::anonymous(4096).unwrap());
        Window::new(&mapping, 0, record_bytes(8) as usize, 8).unwrap()
    }

    #[test]
    fn chains_in_flight_are_repeated_in_order_and_once() {
        let record = record();
        let mut first = Inflight::new(record.clone(), 8);
        assert_eq!(first.recover(100), 0);
        [5, 2, 7].into_iter().for_each(|head| first.take(head));
        first.end(2);
        first.publish(101);
        first.take(2);
        drop(first);
        assert_eq!(again(&record, 101), (3, vec![5, 7, 2]));
    }

    #[test]
    fn kill_between_the_used_index_and_the_marks_repeats_nothing_that_was_given_back() {
        let record = record();
        let mut first = Inflight::new(record.clone(), 8);
        first.recover(65_535);
        [1, 2, 3].into_iter().for_each(|head| first.take(head));
        first.end(3);
        first.end(1);
        drop(first);
        // Killed before the index was published: both are done again.
        assert_eq!(again(&record, 65_535), (3, vec![1, 2, 3]));
        // Killed behind it.
        assert_eq!(again(&record, 1), (1, vec![2]));
        assert_eq!(again(&record, 1), (1, vec![2]), "found out twice");
    }

    #[test]
    fn record_of_nonsense_names_no_head_that_does_not_exist() {
        let record = record();
        for at in 0..record.bytes() {
            record.store(at, 0xff_u8);
        }
        record.store(VERSION, 1_u16);
        record.store(DESC_NUM, 8_u16);
        for head in 0..8 {
            record.store(HEAD_BYTES + 16 * head, 1_u8);
        }
        let (count, heads) = again(&record, 17);
        assert_eq!((count, heads.len()), (8, 8));
        assert!(heads.iter().all(|head| *head < 8));
    }
}
