//! The oldest request in flight of each bucket: a list for each bucket through a table of tags, so that a
//! request costs a few stores and the oldest is found without a search.

use super::stats::{BUCKETS, Bucket};
use crate::ids::Tag;
use crate::time::Instant;

/// All requests in flight of one hardware context.
#[derive(Clone, Debug)]
pub(super) struct InFlight {
    entries: Box<[Entry]>,
    lists: [List; BUCKETS],
    /// Requests without a bucket.
    others: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    issued_at: Instant,
    before: u32,
    after: u32,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    #[default]
    Idle,
    Other,
    Of(Bucket),
}

#[derive(Clone, Copy, Debug)]
struct List {
    first: u32,
    last: u32,
}

impl InFlight {
    pub(super) fn new(depth: u32) -> Self {
        Self {
            entries: vec![Entry::default(); depth as usize].into(),
            lists: [List {
                first: NONE,
                last: NONE,
            }; BUCKETS],
            others: 0,
        }
    }

    /// Adds the request of `tag`, which was issued to the driver.
    #[inline]
    pub(super) fn add(&mut self, tag: Tag, bucket: Option<Bucket>, now: Instant) {
        debug_assert_eq!(
            self.entries[tag.index()].kind,
            Kind::Idle,
            "tag {tag} is in flight already"
        );
        let entry = &mut self.entries[tag.index()];
        entry.issued_at = now;
        let Some(bucket) = bucket else {
            entry.kind = Kind::Other;
            self.others += 1;
            return;
        };
        entry.kind = Kind::Of(bucket);
        let list = &mut self.lists[bucket.index()];
        entry.before = list.last;
        entry.after = NONE;
        match std::mem::replace(&mut list.last, tag.0) {
            NONE => list.first = tag.0,
            last => self.entries[last as usize].after = tag.0,
        }
    }

    /// Removes the request of `tag`. Returns when it was issued, and its bucket if it has one.
    #[inline]
    pub(super) fn remove(&mut self, tag: Tag) -> Option<(Bucket, Instant)> {
        let entry = &mut self.entries[tag.index()];
        match std::mem::take(&mut entry.kind) {
            Kind::Idle => None,
            Kind::Other => {
                self.others -= 1;
                None
            }
            Kind::Of(bucket) => {
                let Entry {
                    issued_at,
                    before,
                    after,
                    ..
                } = *entry;
                let list = &mut self.lists[bucket.index()];
                match before {
                    NONE => list.first = after,
                    before => self.entries[before as usize].after = after,
                }
                match after {
                    NONE => list.last = before,
                    after => self.entries[after as usize].before = before,
                }
                Some((bucket, issued_at))
            }
        }
    }

    /// Says whether requests without a bucket are in flight: for example, flushes.
    pub(super) fn has_others(&self) -> bool {
        self.others > 0
    }

    /// When the oldest request of a bucket was issued.
    #[inline]
    pub(super) fn oldest(&self, bucket: Bucket) -> Option<Instant> {
        let first = self.lists[bucket.index()].first;
        (first != NONE).then(|| self.entries[first as usize].issued_at)
    }
}

const NONE: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn oldest_of_each_bucket_is_known_whatever_ends_first(steps in prop::collection::vec((0u32..8, 0usize..3), 0..200)) {
            let mut in_flight = InFlight::new(8);
            let mut model: Vec<(u32, usize, u64)> = Vec::new();
            for (now, (tag, bucket)) in steps.into_iter().enumerate() {
                let now = now as u64;
                if let Some(at) = model.iter().position(|(other, ..)| *other == tag) {
                    let (_, bucket, issued) = model.remove(at);
                    let expected = (bucket < 2).then(|| (Bucket::all().nth(bucket).unwrap(), Instant(issued)));
                    prop_assert_eq!(in_flight.remove(Tag(tag)), expected);
                } else {
                    let of = (bucket < 2).then(|| Bucket::all().nth(bucket).unwrap());
                    in_flight.add(Tag(tag), of, Instant(now));
                    model.push((tag, bucket, now));
                }
                for (index, bucket) in Bucket::all().take(2).enumerate() {
                    let oldest = model.iter().filter(|(_, of, _)| *of == index).map(|(.., at)| Instant(*at)).min();
                    prop_assert_eq!(in_flight.oldest(bucket), oldest);
                }
                prop_assert_eq!(in_flight.has_others(), model.iter().any(|(_, of, _)| *of == 2));
            }
        }
    }
}
