//! The processors on which a reactor runs that serves the queues of some.

use std::cell::{Cell, RefCell};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The calling thread stays on some processors, as long as one of these exists.
pub(super) struct Bound(());

thread_local! {
    /// How many of them exist for this thread, and where it might run before.
    static COUNT: Cell<u32> = const { Cell::new(0) };
    static FORMER: RefCell<Option<CpuSet>> = const { RefCell::new(None) };
}

impl Bound {
    /// Binds the calling thread to those of `processors` on which it may run. `None` if there are
    /// none, or the system refuses.
    pub(super) fn to(processors: &[usize]) -> Option<Self> {
        let former = sched_getaffinity(None).ok()?;
        if COUNT.get() == 0 {
            let mut to = CpuSet::new();
            let may = |processor: &&usize| **processor < CpuSet::MAX_CPU && former.is_set(**processor);
            processors
                .iter()
                .filter(may)
                .for_each(|processor| to.set(*processor));
            if to.count() == 0 {
                return None;
            }
            sched_setaffinity(None, &to).ok()?;
            FORMER.replace(Some(former));
        }
        COUNT.set(COUNT.get() + 1);
        Some(Self(()))
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        COUNT.set(COUNT.get() - 1);
        if COUNT.get() == 0
            && let Some(former) = FORMER.take()
        {
            // Restores the former processors; if that fails, the thread stays where it is.
            let _ = sched_setaffinity(None, &former);
        }
    }
}

/// The number of possible processors, from a list of Linux: `0-1`, or `0,2-3`. `None` if it is no
/// such list.
pub(super) fn count(list: &str) -> Option<usize> {
    let ranges = list.trim().split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        last.checked_sub(first).map(|more| more + 1)
    });
    ranges.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted_as_linux_lists_them() {
        assert_eq!(count("0-1\n"), Some(2));
        assert_eq!(count("0\n"), Some(1));
        assert_eq!(count("0,2-3"), Some(3));
        assert_eq!((count(""), count("3-1"), count("all")), (None, None, None));
    }

    #[test]
    fn thread_is_where_it_was_when_nothing_keeps_it_any_more() {
        let thread = std::thread::spawn(|| {
            let before = sched_getaffinity(None).unwrap();
            let first = (0..CpuSet::MAX_CPU)
                .find(|number| before.is_set(*number))
                .unwrap();
            let (one, two) = (Bound::to(&[first]), Bound::to(&[first]));
            assert_eq!(sched_getaffinity(None).unwrap().count(), 1);
            drop(one);
            assert_eq!(sched_getaffinity(None).unwrap().count(), 1);
            drop(two);
            assert_eq!(sched_getaffinity(None).unwrap(), before);
        });
        thread.join().unwrap();
    }
}
