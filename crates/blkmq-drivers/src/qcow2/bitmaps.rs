//! The dirty bitmaps of an image: which parts of its disk have changed since each was made. Whoever changes the disk
//! sets bits in memory before; `stored` has them in the file, which says that they are used meanwhile.
//!
//! ```text
//!  idle:    the file has them as they are       in use: the file says so, and that nobody may rely on what it has
//!           nobody writes to the disk      ──mark──►
//!                                          ◄──store──    (closed, handed over, below a snapshot)
//! ```
//!
//! While they are idle, the cached map lets no request write, so that whoever does has marked them before.

mod directory;
mod header;
mod stored;

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use blkmq_host::device::{BitmapInfo, Changed};

use self::stored::Stored;
pub(super) use self::stored::{are_named, clusters, names, not_there};

/// The bitmaps of an image.
#[derive(Debug, Default)]
pub(super) struct Bitmaps {
    /// Those whose bits are known. Replaced while nobody uses the image.
    list: RwLock<List>,
    /// How often that has happened.
    version: AtomicU64,
    /// The file has bitmaps and does not say that they are used: before a change of the disk, it has to. SeqCst: it is seen
    /// by whoever comes after the moment in which nobody used the image.
    is_idle: AtomicBool,
    /// What the file has of them. Whoever waits for the image to be unused does not have it.
    stored: Mutex<Stored>,
}

/// Bitmaps, as those who set bits have them.
pub(super) type List = Arc<Vec<Arc<Bitmap>>>;

/// A bitmap in memory.
#[derive(Debug)]
pub(super) struct Bitmap {
    pub(super) name: String,
    pub(super) granularity_bits: u32,
    /// Changes of the disk set its bits.
    pub(super) is_enabled: bool,
    /// Bytes of the disk.
    size: u64,
    words: Box<[AtomicU64]>,
}

impl Bitmap {
    /// A bitmap without a set bit, of a disk of `size` bytes.
    pub(super) fn new(name: String, granularity_bits: u32, is_enabled: bool, size: u64) -> Self {
        let count = size.div_ceil(1 << granularity_bits).div_ceil(64);
        Self {
            name,
            granularity_bits,
            is_enabled,
            size,
            words: (0..count).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Bytes of the disk.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes of its bits.
    pub(super) fn memory(&self) -> u64 {
        self.words.len() as u64 * 8
    }

    /// The same for a disk of another size, with its bits as far as there are.
    pub(super) fn resized(&self, size: u64) -> Self {
        let new = Self::new(self.name.clone(), self.granularity_bits, self.is_enabled, size);
        for (new, old) in new.words.iter().zip(&self.words) {
            new.store(old.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        new
    }

    /// Sets its bits from their bytes. Those behind its end are left out.
    fn fill(&self, at: usize, bytes: &[u8]) {
        for (word, bytes) in self.words.iter().skip(at / 8).zip(bytes.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(whole), Ordering::Relaxed);
        }
        let inside = self.bits() % 64;
        if let Some(last) = self.words.last().filter(|_| inside > 0) {
            last.fetch_and(u64::MAX >> (64 - inside), Ordering::Relaxed);
        }
    }

    /// Its bits as bytes.
    fn bytes(&self) -> Vec<u8> {
        let words = self.words.iter().map(|word| word.load(Ordering::Relaxed));
        let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        bytes.truncate(self.bits().div_ceil(8) as usize);
        bytes
    }

    fn bits(&self) -> u64 {
        self.size.div_ceil(1 << self.granularity_bits)
    }

    /// Sets the bits of a range, as far as it is on the disk: one that grows has what is behind zeroed before. Relaxed:
    /// whoever has to see them comes after the end of the request.
    #[inline]
    fn set(&self, range: &Range<u64>) {
        let end = range.end.min(self.size);
        if range.start >= end {
            return;
        }
        let bits = self.granularity_bits;
        let (first, last) = (range.start >> bits, (end - 1) >> bits);
        for number in first / 64..=last / 64 {
            let from = if number == first / 64 { first % 64 } else { 0 };
            let to = if number == last / 64 { last % 64 } else { 63 };
            let mask = (u64::MAX >> (63 - (to - from))) << from;
            let Some(word) = self.words.get(number as usize) else {
                debug_assert!(false, "{range:?} is not on the disk of {self:?}");
                return;
            };
            // Most are set already, and others read them.
            if word.load(Ordering::Relaxed) & mask != mask {
                word.fetch_or(mask, Ordering::Relaxed);
            }
        }
    }

    fn word(&self, number: u64) -> u64 {
        let word = self.words.get(number as usize);
        // What it does not have may have changed.
        word.map_or(u64::MAX, |word| word.load(Ordering::Relaxed))
    }

    /// Returns whether all of the range, which begins at a granule, has changed or has not, as far as one word says.
    fn run(&self, at: u64) -> (bool, u64) {
        let bit = at >> self.granularity_bits;
        let rest = self.word(bit / 64) >> (bit % 64);
        let is_changed = rest & 1 != 0;
        let same = match is_changed {
            true => rest.trailing_ones(),
            false => rest.trailing_zeros(),
        };
        let count = u64::from(same).min(64 - bit % 64);
        (is_changed, ((bit + count) << self.granularity_bits) - at)
    }

    /// Returns whether something in a range has changed.
    fn has_any(&self, range: Range<u64>) -> bool {
        let mut at = range.start;
        while at < range.end {
            let (is_changed, len) = self.run(at);
            if is_changed {
                return true;
            }
            at += len;
        }
        false
    }

    /// Appends what has changed of a range: at most `max` runs, in units of `unit` bytes, a power of two, of which each
    /// counts as changed if a part of it has.
    pub(super) fn changed(&self, range: Range<u64>, unit: u64, max: usize, out: &mut Vec<Changed>) {
        let first = out.len();
        let mut at = range.start;
        while at < range.end {
            let (mut is_changed, mut len) = self.run(at);
            if !(at + len).is_multiple_of(unit) || !at.is_multiple_of(unit) {
                let end = (at + 1).next_multiple_of(unit);
                let whole = (at + len) - (at + len) % unit;
                match whole > at && at.is_multiple_of(unit) {
                    true => len = whole - at,
                    false => {
                        is_changed = self.has_any(at - at % unit..end);
                        len = end - at;
                    }
                }
            }
            let len = len.min(range.end - at);
            let is_full = out.len() - first == max;
            match out[first..].last_mut() {
                Some(last) if last.is_changed == is_changed => last.len += len,
                _ if is_full => return,
                _ => out.push(Changed { len, is_changed }),
            }
            at += len;
        }
    }

    /// Bytes of the disk that have changed.
    fn changed_bytes(&self) -> u64 {
        let words = self.words.iter();
        let set: u64 = words
            .map(|word| u64::from(word.load(Ordering::Relaxed).count_ones()))
            .sum();
        (set << self.granularity_bits).min(self.size)
    }
}

impl Bitmaps {
    /// Those whose bits are known.
    pub(super) fn list(&self) -> List {
        Arc::clone(&self.list.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// How often there have been others. SeqCst, as `is_idle`: who sees a version finds its list.
    #[inline]
    pub(super) fn version(&self) -> u64 {
        self.version.load(Ordering::SeqCst)
    }

    /// Returns whether the file has to be marked before a change of the disk.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.is_idle.load(Ordering::SeqCst)
    }

    /// Replaces the list. Nobody uses the image.
    pub(super) fn change(&self, work: impl FnOnce(&mut Vec<Arc<Bitmap>>)) {
        let mut list = self.list.write().unwrap_or_else(PoisonError::into_inner);
        let mut changed = Vec::clone(&list);
        work(&mut changed);
        *list = Arc::new(changed);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// The disk becomes `size` bytes long: what is new counts as changed. Nobody uses the image.
    pub(super) fn grow(&self, size: u64) {
        self.change(|list| {
            for bitmap in list.iter_mut() {
                let longer = bitmap.resized(size);
                if longer.is_enabled {
                    longer.set(&(bitmap.size..size));
                }
                *bitmap = Arc::new(longer);
            }
        });
    }

    /// One of them.
    pub(super) fn find(&self, name: &str) -> Option<Arc<Bitmap>> {
        self.list().iter().find(|bitmap| bitmap.name == name).cloned()
    }

    /// All that the file has, for operators.
    pub(super) fn describe(&self) -> Vec<BitmapInfo> {
        let list = self.list();
        let stored = self.stored();
        let info = |(name, granularity, is_enabled): (String, u64, bool)| {
            let known = list.iter().find(|bitmap| bitmap.name == name);
            BitmapInfo {
                granularity,
                is_enabled,
                changed: known.map(|bitmap| bitmap.changed_bytes()),
                name,
            }
        };
        stored.describe().map(info).collect()
    }

    fn stored(&self) -> MutexGuard<'_, Stored> {
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sets the bits of a range that is about to change.
#[inline]
pub(super) fn set(list: &List, range: &Range<u64>) {
    list.iter()
        .filter(|bitmap| bitmap.is_enabled)
        .for_each(|bitmap| bitmap.set(range));
}

/// Checks what an operator asks for. Returns the logarithm of the granularity.
///
/// # Errors
/// It cannot be had.
pub(super) fn check(name: &str, granularity: u64, size: u64) -> io::Result<u32> {
    let refuse = |why: String| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    if name.is_empty() || name.len() > NAME_MAX || name.chars().any(char::is_control) {
        return refuse(format!(
            "a bitmap's name must have 1 to {NAME_MAX} bytes and no control characters"
        ));
    }
    let bits = granularity.trailing_zeros();
    if !granularity.is_power_of_two() || !directory::GRANULARITY_BITS.contains(&bits) {
        return refuse(format!(
            "granularity {granularity} is rejected: must be a power of two from 512 to 2147483648"
        ));
    }
    match size.div_ceil(granularity) / 8 > MEMORY_MAX {
        true => refuse(format!(
            "granularity {granularity} is rejected: its bits would take more than {} MiB; make it larger",
            MEMORY_MAX >> 20
        )),
        false => Ok(bits),
    }
}

/// As of the format, in bytes.
const NAME_MAX: usize = 1023;
/// Memory for the bits of all bitmaps of an image, in bytes.
pub(super) const MEMORY_MAX: u64 = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(bitmap: &Bitmap, range: Range<u64>, unit: u64, max: usize) -> Vec<(u64, bool)> {
        let mut found = Vec::new();
        bitmap.changed(range, unit, max, &mut found);
        found.iter().map(|run| (run.len, run.is_changed)).collect()
    }

    #[test]
    fn bits_of_a_range_are_set_and_found_as_runs() {
        let bitmap = Bitmap::new("a".to_owned(), 12, true, 1 << 20);
        bitmap.set(&(5000..5001));
        bitmap.set(&(4096 * 60..4096 * 200 + 1));
        bitmap.set(&(7..7));
        bitmap.set(&(1 << 20..1 << 30));
        let all = [
            (4096, false),
            (4096, true),
            (4096 * 58, false),
            (4096 * 141, true),
            (4096 * 55, false),
        ];
        assert_eq!(runs(&bitmap, 0..1 << 20, 512, 64), all);
        assert_eq!(runs(&bitmap, 0..1 << 20, 512, 2), all[..2]);
        assert_eq!(runs(&bitmap, 4608..9216, 512, 9), [(3584, true), (1024, false)]);
        // In larger units, each has what one of its granules has.
        let large = [
            (65536, true),
            (65536 * 2, false),
            (65536 * 10, true),
            (65536 * 3, false),
        ];
        assert_eq!(runs(&bitmap, 0..1 << 20, 65536, 64), large);
        assert_eq!(bitmap.changed_bytes(), 142 * 4096);
    }

    #[test]
    fn bits_survive_their_bytes_and_a_longer_disk() {
        let bitmap = Bitmap::new("a".to_owned(), 9, true, 100 * 512 + 1);
        bitmap.set(&(99 * 512..100 * 512 + 1));
        bitmap.set(&(0..1));
        let bytes = bitmap.bytes();
        assert_eq!((bytes.len(), bytes[0], bytes[12]), (13, 1, 0b1_1000));
        let again = Bitmap::new("b".to_owned(), 9, true, 100 * 512 + 1);
        again.fill(0, &[&bytes[..], &[255; 3]].concat());
        assert_eq!(again.bytes(), bytes);
        let bitmaps = Bitmaps::default();
        bitmaps.change(|list| list.push(Arc::new(again)));
        bitmaps.grow(1 << 20);
        let grown = bitmaps.find("b").unwrap();
        let start = 100 * 512;
        let wanted = [(512, true), (98 * 512, false), ((1 << 20) - 99 * 512, true)];
        assert_eq!(runs(&grown, 0..1 << 20, 512, 9), wanted);
        assert!(grown.has_any(start..start + 1) && bitmaps.version() == 2);
    }

    #[test]
    fn names_and_granularities_that_cannot_be_had_are_refused() {
        let refused = |name: &str, granularity, size| check(name, granularity, size).unwrap_err().to_string();
        assert!(refused("", 65536, 1 << 30).contains("1 to 1023 bytes"));
        assert!(refused("a\nb", 65536, 1 << 30).contains("no control characters"));
        assert!(refused("a", 1000, 1 << 30).contains("power of two"));
        assert!(refused("a", 256, 1 << 30).contains("power of two"));
        assert!(refused("a", 512, 1 << 40).contains("make it larger"));
        assert_eq!(check("a", 65536, 1 << 40).unwrap(), 16);
    }
}
