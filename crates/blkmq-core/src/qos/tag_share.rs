//! One hardware context's share of a shared tag set while others need tags: a max-min fair share, so that
//! a context whose thread is not running, or whose requests take long, does not keep all tags. `tag` uses
//! it.
//!
//! Each context periodically publishes how many tags it can use, and computes its own share from the published
//! numbers: a context that needs less than ⌈depth / users⌉ gets that, the others divide the rest, and no share
//! is below four. Nothing shared is written or read in between. Inside a context the share is divided evenly
//! among the disks that are active there, so that a slow disk does not keep it from a fast one. Behind an
//! elevator the gate's holder issues for all contexts, and `share` divides by disks.

use std::sync::atomic::{AtomicU64, Ordering};

use blkmq_sync::CachePadded;
use blkmq_sync::tag_bitmap::TagBitmap;

use super::SHARE_MIN;
use crate::ids::{DiskId, HctxId};
use crate::time::{Instant, Nanos};

/// The tags that the hardware contexts of a queue share, and how many each context wants.
#[derive(Debug)]
pub(crate) struct SharedTags {
    pub(crate) set: TagBitmap,
    /// By context: in the high bits the time of the publication, in periods from 1 on; in the low bits the number.
    wants: Box<[CachePadded<AtomicU64>]>,
}

/// One context's use of the set.
#[derive(Debug)]
pub(crate) struct Use {
    in_use: u32,
    share: u32,
    /// The most tags in use since the share was computed, and whether that was too few.
    peak: u32,
    wants_more: bool,
    look_at: Instant,
    /// By disk; empty if there is only one.
    disks: Box<[DiskUse]>,
    disk_share: u32,
}

#[derive(Clone, Debug, Default)]
struct DiskUse {
    in_use: u32,
    /// It had requests to issue not long ago.
    is_active: bool,
    seen_at: Instant,
}

/// Why there is no tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TagError {
    /// No tag is free, or the context has used up its share of a shared set.
    Tag,
    /// The disk has used up its share of the context's share.
    OfDisk,
}

impl SharedTags {
    pub(crate) fn new(depth: u32, hctxs: u16) -> Self {
        Self {
            set: TagBitmap::new(depth),
            wants: (0..hctxs).map(|_| CachePadded::default()).collect(),
        }
    }

    fn publish(&self, hctx: HctxId, want: u32, now: Instant) {
        let word = (period(now) << WANT_BITS) | u64::from(want.min(WANT_MAX));
        // Relaxed, as the loads: a hint, and nothing else goes with it.
        self.wants[usize::from(hctx.0)].store(word, Ordering::Relaxed);
    }

    /// How many tags each recently active context wants.
    fn wanted(&self, now: Instant) -> impl Iterator<Item = u32> + '_ {
        let oldest = period(now).saturating_sub(LINGER_PERIODS);
        self.wants
            .iter()
            .map(|want| want.load(Ordering::Relaxed))
            .filter(move |word| *word != 0 && word >> WANT_BITS >= oldest)
            .map(|word| word as u32 & WANT_MAX)
    }

    /// How many of `depth` tags each context that wants more than its share may hold.
    fn share(&self, depth: u32, now: Instant) -> u32 {
        let mut share = 0;
        // Each turn gives to the others what contexts with small demand do not need; a few turns are nearly exact.
        for _ in 0..TURNS {
            let (mut rest, mut users) = (depth, 0);
            for want in self.wanted(now) {
                if want < share {
                    rest = rest.saturating_sub(want);
                } else {
                    users += 1;
                }
            }
            let next = if users == 0 { depth } else { rest.div_ceil(users) };
            if next <= share {
                break;
            }
            share = next;
        }
        share.max(SHARE_MIN)
    }
}

impl Use {
    pub(crate) fn new(disks: usize) -> Self {
        Self {
            in_use: 0,
            share: u32::MAX,
            peak: 0,
            wants_more: false,
            look_at: Instant(0),
            disks: vec![DiskUse::default(); if disks > 1 { disks } else { 0 }].into(),
            disk_share: u32::MAX,
        }
    }

    /// The reason why `hctx` cannot take one more tag for `disk`. A request of the context, or of that disk, must
    /// end first.
    #[inline]
    pub(crate) fn lacks(
        &mut self,
        tags: &SharedTags,
        hctx: HctxId,
        disk: DiskId,
        depth: u32,
        now: Instant,
    ) -> Option<TagError> {
        let mut must_look = now >= self.look_at;
        if let Some(disk) = self.disks.get_mut(disk.index()) {
            disk.seen_at = now;
            must_look |= !std::mem::replace(&mut disk.is_active, true);
        }
        if must_look {
            self.look(tags, hctx, depth, now);
        }
        let of_disk = self.disks.get(disk.index()).map_or(0, |disk| disk.in_use);
        if of_disk >= self.disk_share {
            return Some(TagError::OfDisk);
        }
        let is_full = self.in_use >= self.share;
        self.wants_more |= is_full;
        is_full.then_some(TagError::Tag)
    }

    /// How many disks have shares; 0 if there is only one.
    pub(crate) fn disks(&self) -> usize {
        self.disks.len()
    }

    /// Says whether `disk` has less than its share.
    pub(crate) fn has_room(&self, disk: DiskId) -> bool {
        self.disks
            .get(disk.index())
            .is_none_or(|disk| disk.in_use < self.disk_share)
    }

    /// Counts a tag that was taken.
    #[inline]
    pub(crate) fn took(&mut self, disk: DiskId) {
        self.in_use += 1;
        self.peak = self.peak.max(self.in_use);
        if let Some(disk) = self.disks.get_mut(disk.index()) {
            disk.in_use += 1;
        }
    }

    /// Notes that no tag was free, and publishes this at once.
    pub(crate) fn found_none(&mut self, tags: &SharedTags, hctx: HctxId, now: Instant) {
        if !std::mem::replace(&mut self.wants_more, true) {
            tags.publish(hctx, WANT_MAX, now);
        }
    }

    /// Notes that a request of `disk` waits behind others.
    pub(crate) fn expect(&mut self, disk: DiskId) {
        if let Some(disk) = self.disks.get_mut(disk.index()) {
            disk.seen_at = Instant(u64::MAX);
            if !std::mem::replace(&mut disk.is_active, true) {
                self.look_at = Instant(0);
            }
        }
    }

    /// Counts a tag that was freed.
    #[inline]
    pub(crate) fn gave(&mut self, disk: DiskId) {
        self.in_use -= 1;
        if let Some(disk) = self.disks.get_mut(disk.index()) {
            disk.in_use -= 1;
        }
    }

    #[cold]
    fn look(&mut self, tags: &SharedTags, hctx: HctxId, depth: u32, now: Instant) {
        self.look_at = now + PERIOD;
        let want = if self.wants_more { WANT_MAX } else { self.peak + 1 };
        tags.publish(hctx, want, now);
        self.peak = self.in_use;
        self.wants_more = false;
        self.share = tags.share(depth.min(tags.set.depth()), now);
        let mut users = 0;
        for disk in self.disks.iter_mut().filter(|disk| disk.is_active) {
            disk.is_active = disk.in_use > 0 || now.since(disk.seen_at) <= LINGER;
            users += u32::from(disk.is_active);
        }
        self.disk_share = if users > 1 {
            self.share.div_ceil(users)
        } else {
            u32::MAX
        };
    }
}

fn period(now: Instant) -> u64 {
    now.0 / PERIOD.0 + 1
}

/// How often an active context publishes and computes its share.
const PERIOD: Nanos = Nanos::from_millis(1);
/// How long a context's demand counts: longer than its thread is off the CPU when many threads share one.
const LINGER: Nanos = Nanos::from_millis(50);
const LINGER_PERIODS: u64 = LINGER.0 / PERIOD.0;
const WANT_BITS: u32 = 17;
/// More than there are tags.
const WANT_MAX: u32 = (1 << WANT_BITS) - 1;
const TURNS: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Instant = Instant(1_000_000_000);

    fn share_of(wants: &[u32], depth: u32) -> u32 {
        let tags = SharedTags::new(depth, wants.len() as u16);
        for (hctx, want) in wants.iter().enumerate() {
            tags.publish(HctxId(hctx as u16), *want, NOW);
        }
        tags.share(depth, NOW)
    }

    #[test]
    fn those_who_want_more_than_there_is_divide_what_the_modest_leave() {
        assert_eq!(share_of(&[WANT_MAX; 8], 256), 32);
        assert_eq!(share_of(&[WANT_MAX; 3], 256), 86, "rounded up");
        assert_eq!(share_of(&[WANT_MAX, 1, 1, 1], 256), 253);
        assert_eq!(share_of(&[WANT_MAX, WANT_MAX, 10, 70], 256), 88);
        assert_eq!(share_of(&[WANT_MAX], 256), 256);
        assert_eq!(share_of(&[10, 20], 256), 256, "nobody wants more");
        assert_eq!(share_of(&[WANT_MAX; 100], 256), 4, "the least");
    }

    #[test]
    fn context_that_was_not_at_work_lately_gets_no_share() {
        let tags = SharedTags::new(64, 2);
        tags.publish(HctxId(0), WANT_MAX, NOW);
        let later = NOW + Nanos(PERIOD.0 * (LINGER_PERIODS + 1));
        tags.publish(HctxId(1), WANT_MAX, later);
        assert_eq!(tags.share(64, later), 64);
        assert_eq!(tags.share(64, NOW + PERIOD), 32);
    }
}
