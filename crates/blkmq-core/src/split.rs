//! Splits a bio that does not fit one request, and joins the completions of its parts to one. `sw_ctx`
//! splits when a request is free for the next part, so a huge bio never needs more than there are.

use crate::bio::{Bio, Flags, Op, Origin, Parent, Status};
use crate::limits::Limits;

/// The bios that are under way in parts.
#[derive(Debug)]
pub(crate) struct Splits {
    slots: Vec<Option<Split>>,
    free: Vec<u32>,
}

/// One bio under way in parts.
#[derive(Debug)]
struct Split {
    bio: Bio,
    /// Bytes whose parts have not ended.
    left: u64,
    status: Status,
}

impl Splits {
    /// Makes a table for up to `max` bios.
    pub(crate) fn new(max: u32) -> Self {
        Self {
            slots: (0..max).map(|_| None).collect(),
            free: (0..max).rev().collect(),
        }
    }

    /// Keeps `bio` until its parts have ended, and returns the remainder to split: all of it, with `Flags::REST`.
    ///
    /// # Errors
    /// Returns the bio if the table is full.
    pub(crate) fn begin(&mut self, bio: Bio) -> Result<Bio, Bio> {
        let Some(index) = self.free.pop() else {
            return Err(bio);
        };
        let flags = bio.flags.with(Flags::REST);
        let rest = Bio {
            origin: Origin(Parent::Split(index)),
            flags,
            ..bio.clone()
        };
        let split = Split {
            left: bio.len,
            status: Status::Ok,
            bio,
        };
        let old = self.slots[index as usize].replace(split);
        debug_assert!(old.is_none(), "split {index} begun twice");
        Ok(rest)
    }

    /// Counts the end of one part; returns the whole bio, with the first error of its parts, when it was the last.
    pub(crate) fn part_ended(&mut self, index: u32, len: u64, status: Status) -> Option<Bio> {
        let slot = &mut self.slots[index as usize];
        let split = slot
            .as_mut()
            .expect("a part ended of a split that is not under way");
        assert!(
            len <= split.left,
            "split {index}: a part of {len} bytes ended with {} left",
            split.left
        );
        split.left -= len;
        split.status = split.status.and(status);
        if split.left > 0 {
            return None;
        }
        let Split { mut bio, status, .. } = slot.take().expect("checked above");
        bio.status = status;
        self.free.push(index);
        Some(bio)
    }

    /// Visits the bios that are under way in parts.
    pub(crate) fn for_each_bio(&mut self, visit: impl FnMut(&mut Bio)) {
        let used = self.slots.iter_mut().flatten();
        used.map(|split| &mut split.bio).for_each(visit);
    }

    /// How many bios are under way in parts.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

/// Says whether one request can carry the whole bio. `base` is where its disk starts on the queue.
#[inline]
pub(crate) fn fits(bio: &Bio, base: u64, limits: &Limits) -> bool {
    bio.len <= limits.length_max_with(bio.op, bio.flags, base + bio.offset)
        && bio.segments() <= u32::from(limits.segments_max)
}

/// Splits the first part that fits one request off `rest`; none if not even one block fits (pieces of memory
/// so small that a block has more of them than the drive takes).
pub(crate) fn cut(rest: &mut Bio, base: u64, limits: &Limits) -> Option<Bio> {
    let len = part_len(rest, base, limits);
    if len == 0 {
        return None;
    }
    let part = Bio {
        len,
        flags: rest.flags.without(Flags::REST),
        ..rest.clone()
    };
    rest.offset += len;
    rest.len -= len;
    rest.skip += len;
    Some(part)
}

fn part_len(rest: &Bio, base: u64, limits: &Limits) -> u64 {
    let len = rest
        .len
        .min(limits.length_max_with(rest.op, rest.flags, base + rest.offset));
    match rest.op {
        Op::Read | Op::Write => len.min(segments_len(rest, limits)),
        Op::Discard => aligned_discard(rest, base, len, limits),
        Op::WriteZeroes | Op::Flush => len,
    }
}

/// Returns how many bytes the largest allowed number of pieces holds, in whole blocks.
fn segments_len(bio: &Bio, limits: &Limits) -> u64 {
    if bio.segments() <= u32::from(limits.segments_max) {
        return bio.len;
    }
    let most = bio.pieces().take(limits.segments_max.into());
    let bytes: u64 = most.map(|piece| u64::from(piece.len())).sum();
    bytes - bytes % u64::from(limits.logical_block)
}

/// Aligns the end of a part of a discard to the drive's granules, if it is not the last part and a granule fits.
fn aligned_discard(rest: &Bio, base: u64, len: u64, limits: &Limits) -> u64 {
    if len == rest.len {
        return len;
    }
    let beyond = (base + rest.offset + len) % u64::from(limits.discard_granularity.max(1));
    if beyond < len { len - beyond } else { len }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bio(op: Op, offset: u64, len: u64) -> Bio {
        Bio {
            op,
            offset,
            len,
            ..Bio::default()
        }
    }

    fn cuts(bio: Bio, limits: &Limits) -> Vec<(u64, u64, u64)> {
        let mut rest = bio;
        let mut parts = Vec::new();
        while rest.len > 0 {
            let part = cut(&mut rest, 0, limits).unwrap();
            parts.push((part.offset, part.len, part.skip));
        }
        parts
    }

    #[test]
    fn parts_follow_each_other_and_stop_at_size_and_boundary() {
        let limits = Limits {
            transfer_max: 8192,
            boundary: 12288,
            ..Limits::default()
        };
        assert_eq!(
            cuts(bio(Op::Write, 4096, 20480), &limits),
            [(4096, 8192, 0), (12288, 8192, 8192), (20480, 4096, 16384)]
        );
    }

    #[test]
    fn discard_is_cut_at_granules() {
        let limits = Limits {
            discard_max: 10240,
            discard_granularity: 4096,
            ..Limits::default()
        };
        assert_eq!(
            cuts(bio(Op::Discard, 512, 16384), &limits),
            [(512, 7680, 0), (8192, 8704, 7680)]
        );
    }

    #[test]
    fn end_of_a_split_bio_is_the_first_error_of_its_parts() {
        let mut splits = Splits::new(1);
        let whole = Bio {
            cookie: 7,
            ..bio(Op::Read, 0, 12288)
        };
        let rest = splits.begin(whole).unwrap();
        assert!(splits.begin(bio(Op::Read, 0, 512)).is_err());
        let Parent::Split(index) = rest.origin.0 else {
            panic!("the rest knows its split")
        };
        assert!(splits.part_ended(index, 4096, Status::Ok).is_none());
        assert!(splits.part_ended(index, 4096, Status::Medium).is_none());
        let ended = splits.part_ended(index, 4096, Status::Io).unwrap();
        assert_eq!(
            (ended.cookie, ended.len, ended.status, splits.len()),
            (7, 12288, Status::Medium, 0)
        );
    }
}
