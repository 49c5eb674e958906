//! The cached part of an image's map, which every reactor reads without a lock: where the granules of a disk
//! lie. `image` fills it from the library's tables; `hctx` looks a request up in it.
//!
//! It has pages of 512 entries, in sets of four. A page's tag changes whenever its content is another page's, so
//! a reader that finds the same tag before and after has read an entry of that page:
//!
//! ```text
//!  reader:  tag ─► entry ─► tag again                       (the same: the entry counts; else unknown)
//!  writer:  tag of nothing ─► all entries unknown ─► new tag ─► entries
//! ```
//!
//! An entry that is forgotten is forgotten for all who look afterwards. Who has looked before has announced
//! that, and is waited for (`guests`): so all accesses are SeqCst.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Where a granule lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// Nobody has looked, or the page was needed for others.
    Unknown,
    /// In a file of the image, by its number there, at this byte.
    Data { file: u8, host: u64, is_writable: bool },
    /// Nowhere: it reads as zeroes, and has to be allocated before it is written.
    Zero,
    /// Only the library can read it: it is compressed, or its parts lie apart.
    Special,
}

impl Entry {
    fn pack(self) -> u64 {
        match self {
            Self::Unknown => 0,
            Self::Data {
                file,
                host,
                is_writable,
            } => {
                let kind = if is_writable { WRITABLE } else { READABLE };
                kind | u64::from(file) << FILE_SHIFT | (host / SECTOR) << HOST_SHIFT
            }
            Self::Zero => ZERO,
            Self::Special => SPECIAL,
        }
    }

    #[inline]
    fn unpack(raw: u64) -> Self {
        match raw & KIND {
            READABLE | WRITABLE => Self::Data {
                file: (raw >> FILE_SHIFT) as u8 & FILE_MAX,
                host: (raw >> HOST_SHIFT) * SECTOR,
                is_writable: raw & KIND == WRITABLE,
            },
            ZERO => Self::Zero,
            SPECIAL => Self::Special,
            _ => Self::Unknown,
        }
    }
}

/// The cache of one image.
pub(super) struct Map {
    pages: Box<[Page]>,
    /// The logarithm of the bytes of a granule.
    granule_bits: u32,
    writer: Mutex<Writer>,
}

struct Page {
    tag: AtomicU64,
    entries: OnceLock<Box<[AtomicU64]>>,
}

impl Page {
    /// Forgets those of its granules that are from `first` to before `end`.
    fn forget(&self, first: u64, end: u64) {
        let Some(number) = (self.tag.load(Ordering::SeqCst) >> GENERATION_BITS).checked_sub(1) else {
            return;
        };
        let start = number * ENTRIES;
        let (from, to) = (first.max(start), end.min(start + ENTRIES));
        if from < to
            && let Some(entries) = self.entries.get()
        {
            let range = (from - start) as usize..(to - start) as usize;
            entries[range]
                .iter()
                .for_each(|entry| entry.store(0, Ordering::SeqCst));
        }
    }
}

/// Who changes the map: one at a time.
pub(super) struct Writer {
    /// Changes of the image's tables so far: what was looked up before one must not be entered after it.
    pub(super) version: u64,
    generation: u16,
    /// The page of a set that is given up next.
    victim: u8,
}

impl Map {
    /// Makes an empty cache of at most `bytes` (at least four pages) for granules of `1 << granule_bits` bytes.
    pub(super) fn new(bytes: u64, granule_bits: u32) -> Self {
        let sets = (bytes / PAGE_BYTES / WAYS as u64).max(1);
        let sets = 1usize << sets.min(1 << 40).ilog2();
        let page = || Page {
            tag: AtomicU64::new(NO_PAGE),
            entries: OnceLock::new(),
        };
        Self {
            pages: (0..sets * WAYS).map(|_| page()).collect(),
            granule_bits,
            writer: Mutex::new(Writer {
                version: 0,
                generation: 0,
                victim: 0,
            }),
        }
    }

    /// The logarithm of the bytes of a granule.
    pub(super) fn granule_bits(&self) -> u32 {
        self.granule_bits
    }

    /// Bytes of the disk for which one page has the entries.
    pub(super) fn page_span(&self) -> u64 {
        ENTRIES << self.granule_bits
    }

    /// Looks a granule up.
    #[inline]
    pub(super) fn get(&self, granule: u64) -> Entry {
        let (number, at) = (granule / ENTRIES, (granule % ENTRIES) as usize);
        for page in self.set(number) {
            let tag = page.tag.load(Ordering::SeqCst);
            if tag >> GENERATION_BITS != number + 1 {
                continue;
            }
            let Some(entries) = page.entries.get() else {
                continue;
            };
            let raw = entries[at].load(Ordering::SeqCst);
            if page.tag.load(Ordering::SeqCst) == tag {
                return Entry::unpack(raw);
            }
        }
        Entry::Unknown
    }

    /// The right to change it.
    pub(super) fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a granule.
    pub(super) fn set_entry(&self, writer: &mut Writer, granule: u64, entry: Entry) {
        let (number, at) = (granule / ENTRIES, (granule % ENTRIES) as usize);
        let page = match self.find(number) {
            Some(page) => page,
            None => self.take_page(writer, number),
        };
        if let Some(entries) = page.entries.get() {
            entries[at].store(entry.pack(), Ordering::SeqCst);
        }
    }

    /// Forgets the granules from `first` to before `end`.
    pub(super) fn forget(&self, _writer: &mut Writer, first: u64, end: u64) {
        let numbers = first / ENTRIES..end.div_ceil(ENTRIES);
        if numbers.end.saturating_sub(numbers.start) < self.pages.len() as u64 {
            numbers
                .filter_map(|number| self.find(number))
                .for_each(|page| page.forget(first, end));
        } else {
            self.pages.iter().for_each(|page| page.forget(first, end));
        }
    }

    fn find(&self, number: u64) -> Option<&Page> {
        let is_its = |page: &&Page| page.tag.load(Ordering::SeqCst) >> GENERATION_BITS == number + 1;
        self.set(number).iter().find(is_its)
    }

    /// Gives a page of the set to another part of the disk.
    fn take_page(&self, writer: &mut Writer, number: u64) -> &Page {
        let set = self.set(number);
        let unused = set
            .iter()
            .position(|page| page.tag.load(Ordering::SeqCst) == NO_PAGE);
        let way = unused.unwrap_or_else(|| {
            writer.victim = writer.victim.wrapping_add(1);
            usize::from(writer.victim) % WAYS
        });
        let page = &set[way];
        page.tag.store(NO_PAGE, Ordering::SeqCst);
        let unknown = || (0..ENTRIES).map(|_| AtomicU64::new(0)).collect();
        let entries = page.entries.get_or_init(unknown);
        entries.iter().for_each(|entry| entry.store(0, Ordering::SeqCst));
        writer.generation = writer.generation.wrapping_add(1);
        let tag = (number + 1) << GENERATION_BITS | u64::from(writer.generation);
        page.tag.store(tag, Ordering::SeqCst);
        page
    }

    #[inline]
    fn set(&self, number: u64) -> &[Page] {
        let sets = self.pages.len() / WAYS;
        // Neighbours go to different sets, and far ones are mixed.
        let mixed = number ^ (number >> 12) ^ (number >> 24);
        let first = (mixed as usize & (sets - 1)) * WAYS;
        &self.pages[first..first + WAYS]
    }
}

/// Entries of a page.
const ENTRIES: u64 = 512;
const PAGE_BYTES: u64 = ENTRIES * 8;
/// Pages of a set.
const WAYS: usize = 4;
/// The tag of a page of nothing; those of others have the number of the page plus one above the generation.
const NO_PAGE: u64 = 0;
const GENERATION_BITS: u32 = 16;
const KIND: u64 = 7;
const READABLE: u64 = 1;
const WRITABLE: u64 = 2;
const ZERO: u64 = 3;
const SPECIAL: u64 = 4;
const FILE_SHIFT: u32 = 3;
/// The largest number of a file.
pub(super) const FILE_MAX: u8 = 63;
const HOST_SHIFT: u32 = 9;
/// Host offsets are multiples of this.
const SECTOR: u64 = 512;

#[cfg(test)]
mod tests {
    use super::*;

    fn data(file: u8, host: u64, is_writable: bool) -> Entry {
        Entry::Data {
            file,
            host,
            is_writable,
        }
    }

    #[test]
    fn entries_are_found_until_they_are_forgotten_or_their_page_is_needed() {
        let map = Map::new(0, 16);
        let mut writer = map.writer();
        assert_eq!(map.get(7), Entry::Unknown);
        let all = [
            data(0, 0x50000, true),
            data(63, (1 << 56) - 512, false),
            Entry::Zero,
            Entry::Special,
        ];
        for (granule, entry) in (5..).zip(all) {
            map.set_entry(&mut writer, granule, entry);
        }
        for (granule, entry) in (5..).zip(all) {
            assert_eq!(map.get(granule), entry);
        }
        map.forget(&mut writer, 6, 8);
        assert_eq!(map.get(5), all[0]);
        assert_eq!(
            (map.get(6), map.get(7), map.get(8)),
            (Entry::Unknown, Entry::Unknown, all[3])
        );
        for number in 1..=4 {
            map.set_entry(&mut writer, number * ENTRIES, Entry::Zero);
        }
        let kept = (0..=4)
            .filter(|number| map.get(number * ENTRIES + u64::from(*number == 0) * 5) != Entry::Unknown);
        assert_eq!(kept.count(), 4, "there is one set of four");
        map.forget(&mut writer, 0, u64::MAX);
        assert_eq!(map.get(4 * ENTRIES), Entry::Unknown);
    }

    /// A reader never sees the entry of another page, however fast pages change their place.
    #[test]
    fn readers_find_entries_of_their_own_page_only() {
        let map = Map::new(0, 16);
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..20_000u64 {
                    let number = round % 9;
                    map.set_entry(
                        &mut map.writer(),
                        number * ENTRIES,
                        data(0, (number + 1) * SECTOR, true),
                    );
                }
                is_over.store(true, Ordering::Relaxed);
            });
            while !is_over.load(Ordering::Relaxed) {
                for number in 0..9 {
                    let found = map.get(number * ENTRIES);
                    let own = data(0, (number + 1) * SECTOR, true);
                    assert!(found == Entry::Unknown || found == own, "{number}: {found:?}");
                }
            }
        });
    }
}
