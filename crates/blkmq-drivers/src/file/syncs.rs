//! The syncs of a disk that overlap: a successful one is reported when the results of all others that
//! overlapped it are known, and none has failed. `slot` asks; all hardware contexts of the drive take
//! part.
//!
//! Linux reports an error of write-back once for each open file (`errseq_t`). Of two concurrent
//! syncs the first to check gets the error, and the other succeeds, although the data that it was
//! to make durable is lost. `cargo xtask crashes` has observed that.

use std::sync::atomic::{AtomicU64, Ordering};

/// The syncs of one disk that are under way.
#[derive(Debug)]
pub(super) struct Syncs {
    /// The number of syncs begun. The number of a sync is this count.
    begun: AtomicU64,
    /// The numbers of those under way; 0 is a free cell.
    cells: Box<[AtomicU64]>,
    /// Syncs under way that found no free cell.
    uncounted: AtomicU64,
}

/// A sync under way: its cell, if it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Begun(Option<u8>);

/// The latest sync for which another one has to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fence(u64);

impl Fence {
    /// Nothing.
    pub(super) const NONE: Self = Self(0);
}

impl Syncs {
    pub(super) fn new() -> Self {
        Self {
            begun: AtomicU64::new(0),
            cells: (0..CELLS).map(|_| AtomicU64::new(0)).collect(),
            uncounted: AtomicU64::new(0),
        }
    }

    /// To be called before the kernel gets a sync.
    ///
    /// SeqCst throughout, and never often: code that sees in [`Syncs::is_past`] that a sync has
    /// ended also sees the failure that was stored before [`Syncs::end`]. A sync that is not
    /// visible there yet began after the other one was over in the kernel, and has taken no error
    /// from it.
    pub(super) fn begin(&self) -> Begun {
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        for step in 0..CELLS {
            let cell = (number as usize + step) % CELLS;
            let taken = self.cells[cell].compare_exchange(0, number, Ordering::SeqCst, Ordering::SeqCst);
            if taken.is_ok() {
                return Begun(Some(cell as u8));
            }
        }
        self.uncounted.fetch_add(1, Ordering::SeqCst);
        Begun(None)
    }

    /// To be called when the result of a sync is known, and recorded if it failed. Returns the
    /// fence for which it has to wait.
    pub(super) fn end(&self, begun: Begun) -> Fence {
        match begun.0 {
            Some(cell) => self.cells[cell as usize].store(0, Ordering::SeqCst),
            None => {
                self.uncounted.fetch_sub(1, Ordering::SeqCst);
            }
        }
        Fence(self.begun.load(Ordering::SeqCst))
    }

    /// Returns whether every sync up to the fence has ended.
    pub(super) fn is_past(&self, fence: Fence) -> bool {
        let is_over = |cell: &AtomicU64| {
            let number = cell.load(Ordering::SeqCst);
            number == 0 || number > fence.0
        };
        self.uncounted.load(Ordering::SeqCst) == 0 && self.cells.iter().all(is_over)
    }
}

/// More than there are reactors, each of which has at most one flush of a disk under way.
const CELLS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sync_waits_for_those_that_overlapped_it_and_not_for_later_ones() {
        let syncs = Syncs::new();
        let (first, second) = (syncs.begin(), syncs.begin());
        let fence = syncs.end(first);
        assert!(!syncs.is_past(fence));
        let third = syncs.begin();
        syncs.end(second);
        assert!(syncs.is_past(fence), "the third began later");
        assert!(syncs.is_past(syncs.end(third)));
    }

    #[test]
    fn syncs_beyond_the_cells_are_waited_for_too() {
        let syncs = Syncs::new();
        let mut begun: Vec<_> = (0..CELLS + 2).map(|_| syncs.begin()).collect();
        let fence = syncs.end(begun.remove(0));
        let last = begun.pop().unwrap();
        for each in begun {
            syncs.end(each);
        }
        assert!(!syncs.is_past(fence));
        syncs.end(last);
        assert!(syncs.is_past(fence));
    }
}
