//! Which parts of an image its base has already: a write makes one a part that has to be copied again.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The parts of an image by what has become of them. Parts that nobody has asked for are not kept, so memory is that of
/// what is in the image, whatever its size: two bits for a part.
#[derive(Debug)]
pub(super) struct Copied {
    /// The logarithm of the bytes of a part.
    bits: u32,
    words: Mutex<BTreeMap<u64, Word>>,
}

/// 64 parts, one after the other.
#[derive(Clone, Copy, Debug, Default)]
struct Word {
    /// The base has these, and nobody may write them without saying so.
    copied: u64,
    /// These have changed since somebody looked.
    changed: u64,
}

impl Copied {
    /// Of parts of `1 << bits` bytes, of which none is copied.
    pub(super) fn new(bits: u32) -> Self {
        Self {
            bits,
            words: Mutex::default(),
        }
    }

    /// A range with all of its parts.
    pub(super) fn whole(&self, range: &Range<u64>) -> Range<u64> {
        let part = 1u64 << self.bits;
        range.start - range.start % part..range.end.next_multiple_of(part)
    }

    /// Notes that a range is copied from now on.
    pub(super) fn begin(&self, range: &Range<u64>) {
        self.change(range, |word, parts| {
            word.copied |= parts;
            word.changed &= !parts;
        });
    }

    /// Notes that a range is about to change.
    pub(super) fn note_change(&self, range: &Range<u64>) {
        self.change(range, |word, parts| {
            word.copied &= !parts;
            word.changed |= parts;
        });
    }

    /// Returns whether a part of a range is copied.
    pub(super) fn has_any(&self, range: &Range<u64>) -> bool {
        let words = self.words();
        self.parts(range)
            .any(|(number, parts)| words.get(&number).is_some_and(|word| word.copied & parts != 0))
    }

    /// Returns whether the first byte of a range is copied, and for how many bytes of it that holds.
    pub(super) fn look(&self, range: &Range<u64>) -> (bool, u64) {
        let words = self.words();
        let is_copied = |part: u64| {
            let word = words.get(&(part / 64));
            word.is_some_and(|word| word.copied >> (part % 64) & 1 != 0)
        };
        let (first, end) = (range.start >> self.bits, range.end.div_ceil(1 << self.bits));
        let is_first = is_copied(first);
        let next = (first + 1..end).find(|part| is_copied(*part) != is_first);
        let end = next.map_or(range.end, |next| next << self.bits);
        (is_first, end - range.start)
    }

    /// Returns whether each part of a range is copied, or is known to have changed.
    pub(super) fn knows_all(&self, range: &Range<u64>) -> bool {
        let words = self.words();
        self.parts(range).all(|(number, parts)| {
            let word = words.get(&number).copied().unwrap_or_default();
            (word.copied | word.changed) & parts == parts
        })
    }

    /// What has changed, in ranges of whole parts.
    pub(super) fn changed(&self) -> Vec<Range<u64>> {
        let words = self.words();
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (number, word) in words.iter() {
            for part in (0..64).filter(|part| word.changed >> part & 1 != 0) {
                let start = (number * 64 + part) << self.bits;
                let end = start + (1 << self.bits);
                match ranges.last_mut() {
                    Some(last) if last.end == start => last.end = end,
                    _ => ranges.push(start..end),
                }
            }
        }
        ranges
    }

    /// Forgets all of it.
    pub(super) fn clear(&self) {
        self.words().clear();
    }

    fn change(&self, range: &Range<u64>, change: impl Fn(&mut Word, u64)) {
        let mut words = self.words();
        for (number, parts) in self.parts(range) {
            change(words.entry(number).or_default(), parts);
        }
    }

    /// The parts that a range touches, in words.
    fn parts(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, u64)> + use<> {
        let (first, end) = (range.start >> self.bits, range.end.div_ceil(1 << self.bits));
        let words = first / 64..end.max(first).div_ceil(64);
        words.map(move |number| {
            let from = first.max(number * 64) - number * 64;
            let to = end.min(number * 64 + 64) - number * 64;
            let below = |bit: u64| if bit == 64 { u64::MAX } else { (1 << bit) - 1 };
            (number, below(to) & !below(from))
        })
    }

    fn words(&self) -> MutexGuard<'_, BTreeMap<u64, Word>> {
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_copied_until_they_change_and_a_part_that_is_touched_counts() {
        let copied = Copied::new(12);
        assert_eq!(copied.whole(&(5000..8193)), 4096..12288);
        copied.begin(&(0..1 << 20));
        assert_eq!(copied.look(&(100..1 << 21)), (true, (1 << 20) - 100));
        assert!(copied.has_any(&((1 << 20) - 1..1 << 30)) && !copied.has_any(&(1 << 20..1 << 30)));
        copied.note_change(&(4097..4098));
        copied.note_change(&(300_000..303_000));
        copied.note_change(&(2 << 20..(2 << 20) + 1));
        assert_eq!(copied.look(&(0..1 << 20)), (true, 4096));
        assert_eq!(copied.look(&(4096..1 << 20)), (false, 4096));
        assert!(copied.knows_all(&(0..1 << 20)) && !copied.knows_all(&(0..(1 << 20) + 1)));
        let changed = vec![4096..8192, 299_008..303_104, 2 << 20..(2 << 20) + 4096];
        assert_eq!(copied.changed(), changed);
        copied.begin(&(0..1 << 20));
        assert_eq!(copied.changed(), changed[2..]);
        copied.clear();
        assert!(!copied.has_any(&(0..1 << 30)) && copied.changed().is_empty());
    }

    #[test]
    fn ranges_of_whole_words_and_empty_ones_are_taken() {
        let copied = Copied::new(9);
        copied.begin(&(64 * 512..128 * 512));
        assert!(copied.knows_all(&(64 * 512..128 * 512)) && !copied.has_any(&(0..64 * 512)));
        assert!(!copied.has_any(&(128 * 512..192 * 512)) && !copied.has_any(&(70 * 512..70 * 512)));
        copied.note_change(&(70 * 512..70 * 512));
        assert!(copied.changed().is_empty());
    }
}
