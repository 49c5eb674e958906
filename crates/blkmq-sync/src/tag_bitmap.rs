//! The tags of a tag set, each with at most one owner, and the contexts that wait for one.
//!
//! A tag is taken for a request before the request is issued, and freed when it completes. Waiters are
//! hardware contexts that found no tag; [`crate::run_work`] wakes them.
//!
//! The bits lie in words of 4 to 64 tags, each on a cache line of its own: even a small set has several
//! words, so that allocators whose hints differ rarely write the same line.
//!
//! Pairings: `free` clears its bit with Release, `alloc` sets it with Acquire: what the last owner did with
//! the tag's request happened before what the next owner does.
//!
//! **No lost wake-up.** The waiter: `alloc` fails, register, full fence, `alloc` once more. The freer:
//! `free`, full fence, look for waiters. One of the two fences comes first: either the freer sees the waiter,
//! or the waiter sees the tag. [`TagBitmap::alloc_or_wait`] is the waiter's side in one call,
//! [`TagBitmap::take_waiters`] contains the freer's fence.

use crate::CachePadded;
use crate::atomic::{AtomicU64, Ordering, fence_after_rmw};

/// A set of tags `0..depth`, each free or owned, and the set of waiters.
#[derive(Debug)]
pub struct TagBitmap {
    depth: u32,
    /// A word holds `1 << word_shift` tags.
    word_shift: u32,
    /// A bit is set while its tag is owned.
    words: Box<[CachePadded<AtomicU64>]>,
    /// A bit for each of [`WAITERS_MAX`] waiters.
    waiters: CachePadded<[AtomicU64; 2]>,
}

/// Waiters are numbered below this.
pub const WAITERS_MAX: u32 = 128;

/// Even a small set is spread over about this many words.
const SPREAD: u32 = 8;
const WORD_SHIFT_MIN: u32 = 2;
const WORD_SHIFT_MAX: u32 = 6;

impl TagBitmap {
    /// A set of `depth` free tags. All memory is allocated here: 128 bytes for each word, which is up to 64
    /// tags.
    ///
    /// # Panics
    /// If `depth` is 0.
    #[must_use]
    pub fn new(depth: u32) -> Self {
        assert!(depth > 0, "a tag set needs at least one tag");
        let mut word_shift = WORD_SHIFT_MAX;
        while word_shift > WORD_SHIFT_MIN && SPREAD << word_shift > depth {
            word_shift -= 1;
        }
        let words = (0..depth.div_ceil(1 << word_shift))
            .map(|_| CachePadded::new(AtomicU64::new(0)))
            .collect();
        let waiters = CachePadded::new([AtomicU64::new(0), AtomicU64::new(0)]);
        Self {
            depth,
            word_shift,
            words,
            waiters,
        }
    }

    /// Number of tags.
    #[must_use]
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// Takes a free tag, or returns None if none was found. Any thread; never blocks.
    ///
    /// The search starts at `hint`, which is set to the tag that was found. Each allocator keeps its own, and
    /// begins with one spread over `0..depth`; the lowest free tag of the hint's word is taken, so hot tags
    /// are used again.
    #[inline]
    pub fn alloc(&self, hint: &mut u32) -> Option<u32> {
        self.alloc_limited(hint, self.depth)
    }

    /// Like [`TagBitmap::alloc`], for tags below `limit` only: the set's depth can be lowered while tags are
    /// owned. A limit above the depth means the depth.
    #[inline]
    pub fn alloc_limited(&self, hint: &mut u32, limit: u32) -> Option<u32> {
        let limit = limit.min(self.depth);
        let words = limit.div_ceil(1 << self.word_shift);
        let mut index = *hint >> self.word_shift;
        for _ in 0..words {
            if index >= words {
                index = 0;
            }
            let first = index << self.word_shift;
            if let Some(bit) = self.alloc_in(index, limit - first) {
                *hint = first + bit;
                return Some(first + bit);
            }
            index += 1;
        }
        None
    }

    /// Frees a tag. The caller then calls [`TagBitmap::take_waiters`], once for a batch. Any thread.
    ///
    /// # Panics
    /// If `tag` is not a tag of this set, or is free.
    #[inline]
    pub fn free(&self, tag: u32) {
        assert!(
            tag < self.depth,
            "tag {tag} is not below the depth {}",
            self.depth
        );
        let bit = 1 << (tag & ((1 << self.word_shift) - 1));
        // Release: pairs with the Acquire of the next `alloc` of this tag.
        let before = self.words[(tag >> self.word_shift) as usize].fetch_and(!bit, Ordering::Release);
        assert!(before & bit != 0, "tag {tag} was freed twice");
    }

    /// Tags owned now: exact if none is allocated or freed meanwhile, otherwise approximate.
    #[must_use]
    pub fn in_use(&self) -> u32 {
        self.words
            .iter()
            .map(|word| word.load(Ordering::Relaxed).count_ones())
            .sum()
    }

    /// Whether `tag` is owned now.
    #[must_use]
    pub fn is_in_use(&self, tag: u32) -> bool {
        let word = self.words[(tag >> self.word_shift) as usize].load(Ordering::Relaxed);
        word >> (tag & ((1 << self.word_shift) - 1)) & 1 != 0
    }

    /// Takes a tag below `limit`, or leaves `waiter` registered: a thread that frees a tag later then finds it.
    ///
    /// # Panics
    /// If `waiter` is not below [`WAITERS_MAX`].
    pub fn alloc_or_wait(&self, hint: &mut u32, limit: u32, waiter: u32) -> Option<u32> {
        if let Some(tag) = self.alloc_limited(hint, limit) {
            return Some(tag);
        }
        self.register_waiter(waiter);
        let tag = self.alloc_limited(hint, limit)?;
        // If a freer has taken the registration already, the waiter is run once more than needed: harmless.
        self.deregister_waiter(waiter);
        Some(tag)
    }

    /// Registers a waiter after a failed `alloc`. The caller must try `alloc` once more afterwards, and
    /// deregister if it succeeds. This call contains the full fence between the two. Any thread; registering
    /// twice is registering once.
    ///
    /// # Panics
    /// If `waiter` is not below [`WAITERS_MAX`].
    pub fn register_waiter(&self, waiter: u32) {
        let (word, bit) = self.waiter(waiter);
        // Release: pairs with the Acquire in `take_waiters`: it also publishes what the waiter wrote before.
        word.fetch_or(bit, Ordering::AcqRel);
        // Pairs with the fence in `take_waiters`: registered before the last try for a tag.
        fence_after_rmw();
    }

    /// Removes a registration. False if a freer has taken it already (and is going to run the waiter).
    ///
    /// # Panics
    /// If `waiter` is not below [`WAITERS_MAX`].
    pub fn deregister_waiter(&self, waiter: u32) -> bool {
        let (word, bit) = self.waiter(waiter);
        word.fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }

    /// Takes all registrations, as a bit for each waiter; the caller must run each of them. Called after
    /// [`TagBitmap::free`], by the same thread, once for a batch. Without waiters, this is two loads of a
    /// line that is written only when a waiter registers.
    #[inline]
    #[must_use = "waiters that nobody runs wait for ever"]
    pub fn take_waiters(&self) -> u128 {
        // Pairs with the fence in `register_waiter`: freed before the check for waiters. `free` was the
        // access before it that must be ordered, and is a read-modify-write.
        fence_after_rmw();
        let low = take_all(&self.waiters[0]);
        let high = take_all(&self.waiters[1]);
        u128::from(high) << 64 | u128::from(low)
    }

    /// Whether a waiter is registered at this moment.
    #[must_use]
    pub fn has_waiters(&self) -> bool {
        self.waiters.iter().any(|word| word.load(Ordering::Relaxed) != 0)
    }

    /// Takes the lowest free bit below `limit` of one word.
    #[inline(always)]
    fn alloc_in(&self, index: u32, limit: u32) -> Option<u32> {
        let word = &self.words[index as usize];
        let allowed = u64::MAX >> (64 - limit.min(1 << self.word_shift));
        let mut seen = word.load(Ordering::Relaxed);
        loop {
            let free = !seen & allowed;
            if free == 0 {
                return None;
            }
            let bit = free & free.wrapping_neg();
            // Acquire: pairs with the Release in `free`.
            match word.compare_exchange_weak(seen, seen | bit, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(bit.trailing_zeros()),
                Err(now) => seen = now,
            }
        }
    }

    fn waiter(&self, waiter: u32) -> (&AtomicU64, u64) {
        assert!(waiter < WAITERS_MAX, "waiter {waiter} is not below {WAITERS_MAX}");
        (&self.waiters[(waiter / 64) as usize], 1 << (waiter % 64))
    }
}

#[inline(always)]
fn take_all(word: &AtomicU64) -> u64 {
    // Relaxed: ordered by the fence before it.
    if word.load(Ordering::Relaxed) == 0 {
        return 0;
    }
    // Acquire: pairs with the Release in `register_waiter`.
    word.swap(0, Ordering::AcqRel)
}

#[cfg(all(test, loom))]
mod loom_models;
#[cfg(all(test, not(loom)))]
mod tests;
