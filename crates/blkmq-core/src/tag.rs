//! The tags of one hardware context: how many requests it may have in flight, and under which numbers.
//! `hw_ctx` takes a tag before it issues and frees it when the request ends.

use std::sync::Arc;

use crate::ids::{DiskId, HctxId, Tag};
use crate::qos::tag_share::{SharedTags, TagError, Use};
use crate::time::Instant;

/// Whose tags a hardware context uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TagMode {
    /// Each hardware context has so many of its own.
    PerHctx(u32),
    /// All hardware contexts of the queue share this many (a host-wide tag set). Behind an elevator other than
    /// `bfq`, each active disk has a share of them, so that a slow disk does not keep them from a fast one:
    /// max(⌈depth / active disks⌉, 4). Without an elevator, each hardware context has such a share, plus the parts
    /// of other contexts' shares that they do not need.
    Shared(u32),
}

impl TagMode {
    /// Returns how many requests one hardware context can have in flight at most.
    pub const fn depth(self) -> u32 {
        match self {
            Self::PerHctx(depth) | Self::Shared(depth) => depth,
        }
    }

    /// The same mode, with at least this depth.
    pub(crate) fn at_least(self, depth: u32) -> Self {
        match self {
            Self::PerHctx(own) => Self::PerHctx(own.max(depth)),
            Self::Shared(all) => Self::Shared(all.max(depth)),
        }
    }
}

/// Largest number of tags of a set.
pub(crate) const DEPTH_MAX: u32 = 65_536;

/// Separate from the path of queues with own tags, which must stay short.
#[inline(never)]
fn take_shared(
    tags: &SharedTags,
    hint: &mut u32,
    own: &mut Use,
    limit: u32,
    whose: TagRequest,
    now: Instant,
) -> Result<Tag, TagError> {
    let TagRequest { hctx, disk, .. } = whose;
    if !whose.is_past_shares
        && let Some(lack) = own.lacks(tags, hctx, disk, limit, now)
    {
        return Err(lack);
    }
    let Some(tag) = tags.set.alloc_or_wait(hint, limit, hctx.0.into()) else {
        own.found_none(tags, hctx, now);
        return Err(TagError::Tag);
    };
    own.took(disk);
    Ok(Tag(tag))
}

#[inline(never)]
fn give_back_shared(tags: &SharedTags, own: &mut Use, freed: &mut u32, tag: Tag, disk: DiskId) {
    tags.set.free(tag.0);
    own.gave(disk);
    *freed += 1;
}

/// The request that a tag is for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TagRequest {
    pub(crate) hctx: HctxId,
    pub(crate) disk: DiskId,
    pub(crate) is_past_shares: bool,
}

/// One hardware context's access to its tags.
#[derive(Debug)]
pub(crate) enum Tags {
    /// Its own: the free ones, the last freed on top, since that tag's slot is still in the cache.
    Own { free: Vec<u32>, depth: u32 },
    /// Shared with other contexts, which must be told of tags that this context frees.
    Shared {
        tags: Arc<SharedTags>,
        hint: u32,
        freed: u32,
        own: Use,
    },
}

impl Tags {
    pub(crate) fn new(mode: TagMode, shared: Option<&Arc<SharedTags>>, disks: usize) -> Self {
        match shared {
            Some(tags) => Self::Shared {
                tags: Arc::clone(tags),
                hint: 0,
                freed: 0,
                own: Use::new(disks),
            },
            None => Self::Own {
                free: (0..mode.depth()).rev().collect(),
                depth: mode.depth(),
            },
        }
    }

    /// Divides the tags among `disks` disks from now on; no tag may be taken.
    pub(crate) fn fit_disks(&mut self, disks: usize) {
        if let Self::Shared { own, .. } = self {
            *own = Use::new(disks);
        }
    }

    /// Takes a free tag, if fewer than `limit` are in use, and, of a shared set and unless `whose.is_past_shares`, fewer here
    /// than this context's share and the disk's in it.
    ///
    /// If there is none, a context of a shared set is registered as waiting, and a context that frees a tag runs it.
    /// If the context holds its share, the end of one of its own requests lets it continue.
    #[inline(always)]
    pub(crate) fn take(
        &mut self,
        limit: u32,
        whose: impl FnOnce() -> TagRequest,
        now: Instant,
    ) -> Result<Tag, TagError> {
        match self {
            Self::Own { free, depth } => {
                let in_use = *depth - free.len() as u32;
                if in_use >= limit {
                    return Err(TagError::Tag);
                }
                free.pop().map(Tag).ok_or(TagError::Tag)
            }
            // Registers before it tries a second time, so that a tag freed in between is not missed.
            Self::Shared { tags, hint, own, .. } => take_shared(tags, hint, own, limit, whose(), now),
        }
    }

    /// Takes a free tag as [`Tags::take`] does, but of an own set alone.
    #[inline]
    pub(crate) fn take_own(&mut self, limit: u32) -> Option<Tag> {
        match self {
            Self::Own { free, depth } if *depth - (free.len() as u32) < limit => free.pop().map(Tag),
            _ => None,
        }
    }

    /// Frees a tag of a request of `disk`. Others may wait for it: see [`Tags::take_freed`], at the end of the batch.
    #[inline]
    pub(crate) fn give_back(&mut self, tag: Tag, disk: DiskId) {
        match self {
            Self::Own { free, .. } => {
                debug_assert!(!free.contains(&tag.0), "tag {tag} freed twice");
                free.push(tag.0);
            }
            Self::Shared { tags, freed, own, .. } => give_back_shared(tags, own, freed, tag, disk),
        }
    }

    /// How many disks have shares of the tags; 0 if there is only one disk.
    pub(crate) fn disks(&self) -> usize {
        match self {
            Self::Own { .. } => 0,
            Self::Shared { own, .. } => own.disks(),
        }
    }

    /// Notes that a request of `disk` waits behind others.
    pub(crate) fn expect(&mut self, disk: DiskId) {
        if let Self::Shared { own, .. } = self {
            own.expect(disk);
        }
    }

    /// Says whether `disk` has less than its share of this context's part of a shared set.
    pub(crate) fn has_room(&self, disk: DiskId) -> bool {
        match self {
            Self::Own { .. } => true,
            Self::Shared { own, .. } => own.has_room(disk),
        }
    }

    /// How many tags that others may wait for were freed since the last call.
    #[inline]
    pub(crate) fn take_freed(&mut self) -> u32 {
        match self {
            Self::Own { .. } => 0,
            Self::Shared { freed, .. } => std::mem::take(freed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Instant = Instant(0);

    fn by(hctx: u16) -> TagRequest {
        TagRequest {
            hctx: HctxId(hctx),
            disk: DiskId(0),
            is_past_shares: false,
        }
    }

    #[test]
    fn own_tags_are_unique_and_stop_at_the_limit() {
        let mut tags = Tags::new(TagMode::PerHctx(4), None, 1);
        let taken: Vec<_> = std::iter::from_fn(|| tags.take(3, || by(0), NOW).ok()).collect();
        assert_eq!(taken, [Tag(0), Tag(1), Tag(2)]);
        tags.give_back(Tag(1), DiskId(0));
        assert_eq!(tags.take(3, || by(0), NOW), Ok(Tag(1)));
        assert_eq!(tags.take(4, || by(0), NOW), Ok(Tag(3)));
        assert_eq!(tags.take(4, || by(0), NOW), Err(TagError::Tag));
    }

    #[test]
    fn context_without_a_shared_tag_is_woken_by_the_next_one_freed() {
        let set = Arc::new(SharedTags::new(1, 6));
        let mode = TagMode::Shared(1);
        let (mut a, mut b) = (Tags::new(mode, Some(&set), 1), Tags::new(mode, Some(&set), 1));
        let tag = a.take(1, || by(0), NOW).unwrap();
        assert_eq!(b.take(1, || by(5), NOW), Err(TagError::Tag));
        a.give_back(tag, DiskId(0));
        assert_eq!((a.take_freed(), set.set.take_waiters()), (1, 1 << 5));
        assert_eq!((a.take_freed(), b.take_freed()), (0, 0));
        let tag = b.take(1, || by(5), NOW).unwrap();
        b.give_back(tag, DiskId(0));
        assert_eq!((b.take_freed(), set.set.take_waiters()), (1, 0));
    }
}
