//! A file that a power cut changes: what was made durable is left, and of the rest what chance keeps.
//! [`crate::mount`] lets the kernel write here; nothing in this file knows of FUSE.
//!
//! ```text
//!  write, punch, zero ─► volatile ── sync ────────► durable
//!                           │    └─ failed sync ──► lost: still read, never durable by a later sync
//!                           └────── forget ───────► by the seed: kept, kept in part, or dropped
//! ```
//!
//! Whatever is volatile reaches the medium sector by sector. Changes of different sectors get there in any order, so a later
//! one may be kept where an earlier one is dropped. Of two volatile changes of one sector the later one wins if it
//! is kept, as in a drive's cache, which has one copy of a sector.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use blkmq_testkit::Random;

/// What is written as a whole or not at all, in bytes.
pub const SECTOR_BYTES: usize = 512;

/// A sector's bytes; none of a sector that reads as zeroes.
type Content = Option<Arc<[u8; SECTOR_BYTES]>>;

/// The bytes of one file, durable and volatile.
#[derive(Debug)]
pub struct Medium {
    sectors: Vec<Sector>,
    /// Sectors with volatile changes.
    dirty: BTreeSet<usize>,
    /// Number of the latest change.
    latest: Change,
    /// Changes that a failed sync has lost: all up to this one that are still volatile.
    lost_up_to: Change,
    /// Sectors that take up room, and how many may.
    allocated: usize,
    allocated_max: usize,
}

/// The number of a change: a write, a hole, a range of zeroes.
pub type Change = u64;

#[derive(Clone, Debug, Default)]
struct Sector {
    durable: Content,
    /// Not durable, the oldest first. What is read is the last of them.
    volatile: Vec<(Change, Content)>,
    is_allocated: bool,
}

/// There is no room for what would have to be allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// What has become of volatile changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forgotten {
    /// Changes that were volatile.
    pub changes: u64,
    /// Those of which nothing is left.
    pub dropped: u64,
    /// Those of which some sectors are left.
    pub torn: u64,
}

impl Medium {
    /// Makes a medium of zeroes.
    ///
    /// # Panics
    /// If `bytes` is no multiple of [`SECTOR_BYTES`].
    pub fn new(bytes: usize) -> Self {
        assert_eq!(bytes % SECTOR_BYTES, 0, "{bytes} bytes are no whole sectors");
        Self {
            sectors: vec![Sector::default(); bytes / SECTOR_BYTES],
            dirty: BTreeSet::new(),
            latest: 0,
            lost_up_to: 0,
            allocated: 0,
            allocated_max: usize::MAX,
        }
    }

    /// Returns its size in bytes.
    pub fn bytes(&self) -> usize {
        self.sectors.len() * SECTOR_BYTES
    }

    /// Returns how many bytes take up room.
    pub fn allocated_bytes(&self) -> usize {
        self.allocated * SECTOR_BYTES
    }

    /// Lets no more than `bytes` take up room from now on; `None` for no limit.
    pub fn set_room(&mut self, bytes: Option<usize>) {
        self.allocated_max = bytes.map_or(usize::MAX, |bytes| bytes / SECTOR_BYTES);
    }

    /// Returns the number of the latest change.
    pub fn latest(&self) -> Change {
        self.latest
    }

    /// Reads what the latest changes have left; less where the file ends.
    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        let end = offset.saturating_add(len).min(self.bytes());
        let mut out = Vec::with_capacity(end.saturating_sub(offset));
        let mut at = offset;
        while at < end {
            let within = at % SECTOR_BYTES;
            let count = (SECTOR_BYTES - within).min(end - at);
            match self.sectors[at / SECTOR_BYTES].visible() {
                Some(bytes) => out.extend_from_slice(&bytes[within..within + count]),
                None => out.resize(out.len() + count, 0),
            }
            at += count;
        }
        out
    }

    /// Writes, which is volatile.
    ///
    /// # Errors
    /// [`Full`]: nothing was written.
    ///
    /// # Panics
    /// If the range is not inside of the file.
    pub fn write(&mut self, offset: usize, data: &[u8]) -> Result<Change, Full> {
        let range = sectors_of(offset, data.len());
        self.allocate(range.clone())?;
        self.latest += 1;
        let mut rest = data;
        let mut within = offset % SECTOR_BYTES;
        for index in range {
            let (piece, behind) = rest.split_at(rest.len().min(SECTOR_BYTES - within));
            let before = self.sectors[index].visible().as_deref();
            let mut bytes = *before.unwrap_or(&[0; SECTOR_BYTES]);
            bytes[within..within + piece.len()].copy_from_slice(piece);
            self.put(index, Some(Arc::new(bytes)));
            (rest, within) = (behind, 0);
        }
        Ok(self.latest)
    }

    /// Makes a range read as zeroes, which is volatile. As a hole it takes up no room.
    ///
    /// # Errors
    /// [`Full`]: nothing was zeroed.
    ///
    /// # Panics
    /// If the range is not inside of the file, or is not of whole sectors.
    pub fn zero(&mut self, offset: usize, len: usize, as_hole: bool) -> Result<Change, Full> {
        assert_eq!(
            (offset % SECTOR_BYTES, len % SECTOR_BYTES),
            (0, 0),
            "whole sectors"
        );
        let range = sectors_of(offset, len);
        if !as_hole {
            self.allocate(range.clone())?;
        }
        self.latest += 1;
        for index in range {
            self.put(index, None);
            if as_hole && std::mem::take(&mut self.sectors[index].is_allocated) {
                self.allocated -= 1;
            }
        }
        Ok(self.latest)
    }

    /// Makes everything from `end` on read as zeroes, which is volatile, and takes up no room.
    ///
    /// # Panics
    /// If `end` is not inside of the file.
    pub fn cut(&mut self, end: usize) {
        let whole = end.next_multiple_of(SECTOR_BYTES);
        self.latest += 1;
        for index in whole / SECTOR_BYTES..self.sectors.len() {
            let sector = &mut self.sectors[index];
            self.allocated -= usize::from(std::mem::take(&mut sector.is_allocated));
            if sector.visible().is_some() {
                self.put(index, None);
            }
        }
        if whole > end && self.sectors[end / SECTOR_BYTES].visible().is_some() {
            let mut bytes = [0; SECTOR_BYTES];
            let kept = end % SECTOR_BYTES;
            bytes[..kept].copy_from_slice(&self.read(end - kept, kept));
            self.put(end / SECTOR_BYTES, Some(Arc::new(bytes)));
        }
    }

    /// Makes every change up to `last` durable that no failed sync has lost.
    pub fn sync(&mut self, last: Change) {
        let (sectors, lost_up_to) = (&mut self.sectors, self.lost_up_to);
        self.dirty.retain(|index| {
            let sector = &mut sectors[*index];
            sector.sync(last, lost_up_to);
            !sector.volatile.is_empty()
        });
    }

    /// Makes the sectors of a range durable as they are, whatever was lost of them before.
    pub fn sync_range(&mut self, offset: usize, len: usize) {
        for index in sectors_of(offset, len) {
            let sector = &mut self.sectors[index];
            if let Some((_, content)) = sector.volatile.pop() {
                sector.durable = content;
                sector.volatile.clear();
                self.dirty.remove(&index);
            }
        }
    }

    /// Loses every change up to `last`: it goes on to be read, and no later sync makes it durable. So does Linux
    /// with pages whose write-back has failed: it marks them as clean.
    pub fn lose(&mut self, last: Change) {
        self.lost_up_to = self.lost_up_to.max(last);
    }

    /// Cuts the power: of what is volatile, the seed decides what is kept. What is there then is durable.
    pub fn forget(&mut self, seed: u64) -> Forgotten {
        let mut random = Random::new(seed);
        // From all dropped to all kept.
        let kept_of_four = random.below(5);
        let mut fates = self.volatile_changes();
        let mut forgotten = Forgotten {
            changes: fates.len() as u64,
            ..Forgotten::default()
        };
        for sectors in fates.values_mut() {
            let whole = sectors.clone();
            if random.below(4) >= kept_of_four {
                forgotten.dropped += 1;
                *sectors = 0..0;
            } else if whole.len() > 1 && random.below(3) == 0 {
                forgotten.torn += 1;
                let middle = whole.start + 1 + random.below(whole.len() as u64 - 1) as usize;
                *sectors = match random.below(2) {
                    0 => whole.start..middle,
                    _ => middle..whole.end,
                };
            }
        }
        for index in std::mem::take(&mut self.dirty) {
            let sector = &mut self.sectors[index];
            let is_kept = |(change, _): &(Change, Content)| fates[change].contains(&index);
            if let Some(at) = sector.volatile.iter().rposition(is_kept) {
                sector.durable = sector.volatile.swap_remove(at).1;
            }
            sector.volatile.clear();
        }
        self.lost_up_to = self.latest;
        self.count_allocated();
        forgotten
    }

    /// Returns, by volatile change, the range that its sectors span.
    fn volatile_changes(&self) -> BTreeMap<Change, Range<usize>> {
        let mut changes = BTreeMap::new();
        for index in &self.dirty {
            for (change, _) in &self.sectors[*index].volatile {
                let span: &mut Range<usize> = changes.entry(*change).or_insert(*index..*index + 1);
                span.end = index + 1;
            }
        }
        changes
    }

    fn put(&mut self, index: usize, content: Content) {
        self.sectors[index].volatile.push((self.latest, content));
        self.dirty.insert(index);
    }

    fn allocate(&mut self, range: Range<usize>) -> Result<(), Full> {
        let sectors = &mut self.sectors[range];
        let needed = sectors.iter().filter(|sector| !sector.is_allocated).count();
        if needed > self.allocated_max.saturating_sub(self.allocated) {
            return Err(Full);
        }
        self.allocated += needed;
        sectors.iter_mut().for_each(|sector| sector.is_allocated = true);
        Ok(())
    }

    fn count_allocated(&mut self) {
        for sector in &mut self.sectors {
            sector.is_allocated = sector.durable.is_some();
        }
        self.allocated = self.sectors.iter().filter(|sector| sector.is_allocated).count();
    }
}

impl Sector {
    fn visible(&self) -> &Content {
        self.volatile.last().map_or(&self.durable, |(_, content)| content)
    }

    fn sync(&mut self, last: Change, lost_up_to: Change) {
        let is_made_durable = |(change, _): &(Change, Content)| (lost_up_to + 1..=last).contains(change);
        if let Some(at) = self.volatile.iter().rposition(is_made_durable) {
            self.durable = self.volatile.drain(..=at).next_back().expect("it was found").1;
        }
    }
}

fn sectors_of(offset: usize, len: usize) -> Range<usize> {
    offset / SECTOR_BYTES..(offset + len).div_ceil(SECTOR_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sector(medium: &Medium, index: usize) -> u8 {
        medium.read(index * SECTOR_BYTES, 1)[0]
    }

    fn write(medium: &mut Medium, first: usize, count: usize, byte: u8) -> Change {
        let data = vec![byte; count * SECTOR_BYTES];
        medium.write(first * SECTOR_BYTES, &data).unwrap()
    }

    /// What may be in the sectors after a power cut, by trying many seeds.
    fn outcomes(build: impl Fn() -> Medium, sectors: usize) -> BTreeSet<Vec<u8>> {
        let outcome = |seed| {
            let mut medium = build();
            medium.forget(seed);
            (0..sectors).map(|index| sector(&medium, index)).collect()
        };
        (0..2000).map(outcome).collect()
    }

    #[test]
    fn synced_data_survives_every_power_cut() {
        let build = || {
            let mut medium = Medium::new(4096);
            let last = write(&mut medium, 0, 2, 1);
            medium.sync(last);
            medium
        };
        assert_eq!(outcomes(build, 2), BTreeSet::from([vec![1, 1]]));
    }

    #[test]
    fn volatile_write_is_kept_torn_or_dropped() {
        let build = || {
            let mut medium = Medium::new(4096);
            write(&mut medium, 0, 2, 1);
            medium
        };
        assert_eq!(
            outcomes(build, 2),
            BTreeSet::from([vec![0, 0], vec![0, 1], vec![1, 0], vec![1, 1]])
        );
    }

    #[test]
    fn later_write_may_be_kept_where_an_earlier_one_is_dropped_but_does_not_go_back() {
        let build = || {
            let mut medium = Medium::new(4096);
            write(&mut medium, 0, 1, 1);
            write(&mut medium, 1, 1, 2);
            write(&mut medium, 0, 1, 3);
            medium
        };
        let outcomes = outcomes(build, 2);
        assert!(outcomes.contains(&vec![0, 2]), "reordered");
        assert!(outcomes.contains(&vec![1, 0]), "the middle of the three is lost");
        assert_eq!(outcomes.len(), 6);
    }

    #[test]
    fn write_during_a_sync_is_not_made_durable_by_it() {
        let build = || {
            let mut medium = Medium::new(4096);
            let last = write(&mut medium, 0, 1, 1);
            write(&mut medium, 0, 1, 2);
            medium.sync(last);
            medium
        };
        assert_eq!(outcomes(build, 1), BTreeSet::from([vec![1], vec![2]]));
    }

    #[test]
    fn after_a_failed_sync_the_next_one_succeeds_and_saves_only_what_came_later() {
        let build = || {
            let mut medium = Medium::new(4096);
            let last = write(&mut medium, 0, 1, 1);
            medium.lose(last);
            let last = write(&mut medium, 1, 1, 2);
            medium.sync(last);
            assert_eq!(sector(&medium, 0), 1, "it is still read");
            medium
        };
        assert_eq!(outcomes(build, 2), BTreeSet::from([vec![0, 2], vec![1, 2]]));
    }

    #[test]
    fn durable_write_makes_its_own_range_durable_alone() {
        let build = || {
            let mut medium = Medium::new(4096);
            write(&mut medium, 0, 1, 1);
            write(&mut medium, 1, 1, 2);
            medium.sync_range(SECTOR_BYTES, SECTOR_BYTES);
            medium
        };
        assert_eq!(outcomes(build, 2), BTreeSet::from([vec![0, 2], vec![1, 2]]));
    }

    #[test]
    fn holes_and_zeroes_are_volatile_too() {
        for as_hole in [true, false] {
            let build = || {
                let mut medium = Medium::new(4096);
                let last = write(&mut medium, 0, 1, 1);
                medium.sync(last);
                medium.zero(0, SECTOR_BYTES, as_hole).unwrap();
                medium
            };
            assert_eq!(outcomes(build, 1), BTreeSet::from([vec![0], vec![1]]));
        }
    }

    #[test]
    fn full_medium_refuses_what_needs_room_and_a_hole_gives_some_back() {
        let mut medium = Medium::new(4096);
        medium.set_room(Some(2 * SECTOR_BYTES));
        write(&mut medium, 0, 2, 1);
        assert_eq!(medium.write(1024, &[1; 512]), Err(Full));
        assert_eq!(medium.zero(1024, 512, false), Err(Full));
        write(&mut medium, 0, 2, 2);
        medium.zero(0, 512, true).unwrap();
        assert_eq!(medium.allocated_bytes(), SECTOR_BYTES);
        write(&mut medium, 2, 1, 3);
    }

    #[test]
    fn write_that_is_no_whole_sectors_leaves_the_rest_of_them() {
        let mut medium = Medium::new(4096);
        medium.write(500, &[7; 24]).unwrap();
        assert_eq!(medium.read(499, 26), [&[0][..], &[7; 24], &[0]].concat());
    }
}
