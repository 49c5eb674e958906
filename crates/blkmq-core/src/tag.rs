//! Decides how many requests one hardware context may have in flight, and under which numbers.
//! `hw_ctx` takes a tag before it issues and frees it when the request ends.

use std::sync::Arc;

use blkmq_sync::tag_bitmap::TagBitmap;

use crate::ids::{HctxId, Tag};

/// Whose tags a hardware context uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TagMode {
    /// Each hardware context has so many of its own.
    PerHctx(u32),
    /// All hardware contexts of the queue share so many (a host-wide tag set). Behind an elevator other than `bfq`, each
    /// disk that is active has a share of them, so that a slow disk does not keep them from a fast one:
    /// max(⌈depth / active disks⌉, 4).
    Shared(u32),
}

impl TagMode {
    /// Returns how many requests one hardware context can have in flight at most.
    pub const fn depth(self) -> u32 {
        match self {
            Self::PerHctx(depth) | Self::Shared(depth) => depth,
        }
    }
}

/// The most tags of a set.
pub(crate) const DEPTH_MAX: u32 = 65_536;

/// One hardware context's way to its tags.
#[derive(Debug)]
pub(crate) enum Tags {
    /// Its own: the free ones, the last freed on top, since its slot is still in the cache.
    Own { free: Vec<u32>, depth: u32 },
    /// Shared with other contexts, which are to be told of tags that this one has freed.
    Shared {
        set: Arc<TagBitmap>,
        hint: u32,
        freed: u32,
    },
}

impl Tags {
    pub(crate) fn new(mode: TagMode, shared: Option<&Arc<TagBitmap>>) -> Self {
        match shared {
            Some(set) => Self::Shared {
                set: Arc::clone(set),
                hint: 0,
                freed: 0,
            },
            None => Self::Own {
                free: (0..mode.depth()).rev().collect(),
                depth: mode.depth(),
            },
        }
    }

    /// Takes a free tag, if fewer than `limit` are in use.
    ///
    /// Without one, a context of a shared set is registered as waiting: whoever frees a tag runs it.
    #[inline]
    pub(crate) fn take(&mut self, limit: u32, waiter: HctxId) -> Option<Tag> {
        match self {
            Self::Own { free, depth } => {
                let in_use = *depth - free.len() as u32;
                if in_use >= limit {
                    return None;
                }
                free.pop().map(Tag)
            }
            // Registers before it looks a second time, so that a tag freed in between is not missed.
            Self::Shared { set, hint, .. } => set.alloc_or_wait(hint, limit, waiter.0.into()).map(Tag),
        }
    }

    /// Gives a tag back. Others may wait for it: [`Tags::take_freed`], at the end of the batch, says so.
    #[inline]
    pub(crate) fn give_back(&mut self, tag: Tag) {
        match self {
            Self::Own { free, .. } => {
                debug_assert!(!free.contains(&tag.0), "tag {tag} freed twice");
                free.push(tag.0);
            }
            Self::Shared { set, freed, .. } => {
                set.free(tag.0);
                *freed += 1;
            }
        }
    }

    /// How many tags that others may wait for have been given back since the last call.
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

    #[test]
    fn own_tags_are_unique_and_stop_at_the_limit() {
        let mut tags = Tags::new(TagMode::PerHctx(4), None);
        let taken: Vec<_> = std::iter::from_fn(|| tags.take(3, HctxId(0))).collect();
        assert_eq!(taken, [Tag(0), Tag(1), Tag(2)]);
        tags.give_back(Tag(1));
        assert_eq!(tags.take(3, HctxId(0)), Some(Tag(1)));
        assert_eq!(tags.take(4, HctxId(0)), Some(Tag(3)));
        assert_eq!(tags.take(4, HctxId(0)), None);
    }

    #[test]
    fn who_finds_no_shared_tag_is_told_of_the_next_one_freed() {
        let set = Arc::new(TagBitmap::new(1));
        let mode = TagMode::Shared(1);
        let (mut a, mut b) = (Tags::new(mode, Some(&set)), Tags::new(mode, Some(&set)));
        let tag = a.take(1, HctxId(0)).unwrap();
        assert_eq!(b.take(1, HctxId(5)), None);
        a.give_back(tag);
        assert_eq!((a.take_freed(), set.take_waiters()), (1, 1 << 5));
        assert_eq!((a.take_freed(), b.take_freed()), (0, 0));
        let tag = b.take(1, HctxId(5)).unwrap();
        b.give_back(tag);
        assert_eq!((b.take_freed(), set.take_waiters()), (1, 0));
    }
}
