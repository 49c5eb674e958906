//! The handling of memory that a front end has shared and takes away (it truncates the file): the kernel's
//! SIGBUS would end the whole process. Instead the memory reads as zeroes, the mapping is *lost*, and its
//! users find that in their next turn. [`super::sys::Mapping`] registers what it maps; `queue` asks. The
//! kernel, in io_uring, only finds a bad address.

pub(super) mod sys;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// A mapping that is registered, until this is dropped.
#[derive(Debug)]
pub(super) struct Registered(&'static Entry);

impl Registered {
    /// Registers addresses that may be lost, `page` bytes at a time.
    pub(super) fn new(addresses: Range<usize>, page: usize) -> Self {
        sys::install();
        let entry = places().take();
        entry.is_lost.store(false, Ordering::Relaxed);
        entry.set(addresses, page);
        Self(entry)
    }

    /// Returns whether some of it was taken away.
    pub(super) fn is_lost(&self) -> bool {
        // Relaxed: the caller has seen `losses` change.
        self.0.is_lost.load(Ordering::Relaxed)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut places = places();
        self.0.set(0..0, 0);
        places.free.push(self.0);
    }
}

/// Changes whenever a mapping was lost.
#[inline]
pub(super) fn losses() -> usize {
    // Acquire: pairs with the Release in `lose`; what was lost is marked before.
    LOSSES.load(Ordering::Acquire)
}

/// Marks the mapping that contains an address as lost. Returns the page there and the whole
/// mapping. The signal handler calls it, so it neither allocates nor blocks.
fn lose(address: usize) -> Option<(Range<usize>, Range<usize>)> {
    let mut entry = Some(&FIRST);
    while let Some(looked_at) = entry {
        if let Some((all, page)) = looked_at.get()
            && all.contains(&address)
        {
            looked_at.is_lost.store(true, Ordering::Relaxed);
            // Release: pairs with the Acquire in `losses`.
            LOSSES.fetch_add(1, Ordering::Release);
            let start = (address - address % page).max(all.start);
            let end = start.saturating_add(page - start % page).min(all.end);
            return Some((start..end, all));
        }
        entry = looked_at.next.get().copied();
    }
    None
}

/// An entry of the list of mappings, which grows and is never freed. The signal handler reads it
/// while another thread may write to it: `version` is odd meanwhile, and differs afterwards.
#[derive(Debug)]
struct Entry {
    version: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    page: AtomicUsize,
    is_lost: AtomicBool,
    next: OnceLock<&'static Entry>,
}

impl Entry {
    const fn new() -> Self {
        Self {
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
            is_lost: AtomicBool::new(false),
            next: OnceLock::new(),
        }
    }

    /// The caller must own the entry.
    fn set(&self, addresses: Range<usize>, page: usize) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        // The odd version is seen before what follows.
        fence(Ordering::Release);
        self.start.store(addresses.start, Ordering::Relaxed);
        self.end.store(addresses.end, Ordering::Relaxed);
        self.page.store(page, Ordering::Relaxed);
        // Release: a reader of this version sees what was stored.
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// The addresses and the size of a page; `None` while another thread changes them: then they
    /// are not in use.
    fn get(&self) -> Option<(Range<usize>, usize)> {
        // Acquire: pairs with the Release at the end of `set`.
        let version = self.version.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Relaxed);
        let end = self.end.load(Ordering::Relaxed);
        let page = self.page.load(Ordering::Relaxed);
        // Pairs with the fence in `set`: had one of these been new, so would be the version.
        fence(Ordering::Acquire);
        let is_whole = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        (is_whole && page > 0).then_some((start..end, page))
    }
}

/// The free entries. A change of an entry needs this.
struct Places {
    free: Vec<&'static Entry>,
    /// The last of the list.
    last: &'static Entry,
}

impl Places {
    /// A free entry, a new one if there is none.
    fn take(&mut self) -> &'static Entry {
        self.free.pop().unwrap_or_else(|| {
            let new = self.last.next.get_or_init(|| Box::leak(Box::new(Entry::new())));
            self.last = new;
            new
        })
    }
}

fn places() -> MutexGuard<'static, Places> {
    PLACES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The head of the list; an entry that is never used.
static FIRST: Entry = Entry::new();
static PLACES: Mutex<Places> = Mutex::new(Places {
    free: Vec::new(),
    last: &FIRST,
});
static LOSSES: AtomicUsize = AtomicUsize::new(0);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_found_in_its_mapping_alone_and_as_long_as_that_is_registered() {
        // Addresses that nothing maps.
        const AT: usize = 0x7fff_0000_0000_0000;
        let low = Registered::new(AT..AT + 0x5000, 0x1000);
        let high = Registered::new(AT + 0x8000..AT + 0xa000, 0x4000);
        assert_eq!(lose(AT + 0x5000), None);
        let before = losses();
        assert_eq!(
            lose(AT + 0x4fff),
            Some((AT + 0x4000..AT + 0x5000, AT..AT + 0x5000))
        );
        assert!(low.is_lost() && !high.is_lost() && losses() != before);
        let all = AT + 0x8000..AT + 0xa000;
        assert_eq!(
            lose(AT + 0x9000),
            Some((all.clone(), all)),
            "a page is cut at the end"
        );
        drop(low);
        assert_eq!(lose(AT), None);
        assert!(!Registered::new(AT..AT + 0x1000, 0x1000).is_lost());
    }
}
