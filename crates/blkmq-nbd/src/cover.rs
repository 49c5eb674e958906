//! The parts of a read's reply, checked to fit together: each byte once, and in the end all of them.
//! [`super::replies`] keeps one for each request.

use std::ops::Range;

/// The bytes of a request that have been answered. Parts in order cost nothing; others are stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cover {
    /// All bytes before this one are covered.
    next: u64,
    /// Covered beyond `next`: in order, apart from each other.
    ahead: Vec<Range<u64>>,
    errors: u8,
}

impl Cover {
    /// Nothing covered.
    pub const NEW: Self = Self {
        next: 0,
        ahead: Vec::new(),
        errors: 0,
    };

    /// Resets it. Keeps its memory.
    #[inline]
    pub fn clear(&mut self) {
        self.next = 0;
        self.ahead.clear();
        self.errors = 0;
    }

    /// Adds one more part. Returns false if a byte of it was covered before, or the parts are
    /// scattered too much.
    #[inline]
    pub fn add(&mut self, part: Range<u64>) -> bool {
        if part.start == self.next && self.ahead.is_empty() {
            self.next = part.end;
            return true;
        }
        self.add_out_of_order(part)
    }

    /// Returns whether the first `len` bytes are covered.
    #[inline]
    pub fn is_whole(&self, len: u64) -> bool {
        self.next >= len
    }

    /// Records an error among the parts. Returns false if there were too many of them.
    pub fn add_error(&mut self) -> bool {
        self.errors += 1;
        self.errors <= ERRORS_MAX
    }

    /// Returns whether an error was recorded.
    #[inline]
    pub fn has_errors(&self) -> bool {
        self.errors > 0
    }

    fn add_out_of_order(&mut self, part: Range<u64>) -> bool {
        let at = self.ahead.partition_point(|other| other.end <= part.start);
        let is_free = self.ahead.get(at).is_none_or(|other| part.end <= other.start);
        if part.start < self.next || !is_free || self.ahead.len() >= AHEAD_MAX {
            return false;
        }
        self.ahead.insert(at, part);
        let reached = self.ahead.iter().take_while(|part| {
            let follows = part.start == self.next;
            if follows {
                self.next = part.end;
            }
            follows
        });
        let count = reached.count();
        self.ahead.drain(..count);
        true
    }
}

/// Most parts that may be ahead of a gap, for one request.
const AHEAD_MAX: usize = 256;
/// Most error chunks in one reply.
const ERRORS_MAX: u8 = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn parts_in_any_order_make_a_whole() {
        let mut cover = Cover::NEW;
        for part in [6..8, 0..2, 4..6, 9..10, 2..4] {
            assert!(cover.add(part.clone()), "{part:?}");
        }
        assert!(cover.is_whole(8) && !cover.is_whole(9));
        assert!(cover.add(8..9) && cover.is_whole(10));
        cover.clear();
        assert_eq!(cover, Cover::NEW);
    }

    proptest! {
        #[test]
        fn part_is_refused_just_when_a_byte_of_it_was_there(
            parts in prop::collection::vec((0..40u64, 1..12u64), 1..20),
        ) {
            let (mut cover, mut bytes) = (Cover::NEW, [false; 64]);
            for (start, len) in parts {
                let range = start..start + len;
                let slots = &mut bytes[start as usize..(start + len) as usize];
                let is_free = slots.iter().all(|covered| !covered);
                prop_assert_eq!(cover.add(range), is_free);
                if is_free {
                    slots.fill(true);
                }
                let first_gap = bytes.iter().position(|covered| !covered).unwrap() as u64;
                prop_assert!(cover.is_whole(first_gap) && !cover.is_whole(first_gap + 1));
            }
        }
    }
}
