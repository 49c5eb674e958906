//! The refcounts of an image, and the clusters that are free. All of it changes in memory; `flush` writes it.

use std::io;
use std::ops::Range;

use super::super::check::REFCOUNT_OFFSET;
use super::super::header::{Header, REFCOUNTS_MAX};
use super::format::{Format, corrupt};
use super::table::{Cache, Table};
use crate::file::FileDisk;

/// The refcounts of an image.
#[derive(Debug)]
pub(super) struct Refcounts {
    format: Format,
    /// Where the blocks are.
    pub(super) table: Table,
    /// The table has a place that the header does not name yet.
    pub(super) has_moved: bool,
    pub(super) blocks: Cache,
    /// The number of the last block, plus one.
    spans: u64,
    /// No cluster before this one is free.
    first_free: u64,
    /// The first cluster that can never be there, of a block device.
    end: u64,
}

impl Refcounts {
    /// Of an image whose clusters may end at byte `end`.
    pub(super) fn load(disk: &FileDisk, header: &Header, format: Format, end: u64) -> io::Result<Self> {
        let len = u64::from(header.refcounts_clusters) << header.cluster_bits;
        let blocks_max = (CACHE_BYTES >> header.cluster_bits).clamp(8, 512);
        let table = Table::load(disk, header.refcounts_offset, len)?;
        let entries = (0..table.entries()).rev();
        let mut used = entries.skip_while(|index| table.entry(*index) & REFCOUNT_OFFSET == 0);
        let spans = used.next().map_or(0, |last| last + 1);
        Ok(Self {
            format,
            table,
            has_moved: false,
            blocks: Cache::new(blocks_max as usize),
            spans,
            first_free: 0,
            end: end.min(OFFSET_MAX) >> header.cluster_bits,
        })
    }

    /// Counts clusters that were free: at least one and at most `wanted`, one after the other. `unlinked` gets what is
    /// not needed any more.
    ///
    /// # Errors
    /// The system's, or there is no more room.
    pub(super) fn allocate(
        &mut self,
        disk: &FileDisk,
        wanted: u64,
        unlinked: &mut Vec<Range<u64>>,
    ) -> io::Result<Range<u64>> {
        match self.take_free(disk, 1, wanted)? {
            Some(run) => Ok(run),
            None => self.append(wanted, unlinked),
        }
    }

    /// The same, of exactly `count` clusters.
    pub(super) fn allocate_all(
        &mut self,
        disk: &FileDisk,
        count: u64,
        unlinked: &mut Vec<Range<u64>>,
    ) -> io::Result<Range<u64>> {
        match self.take_free(disk, count, count)? {
            Some(run) => Ok(run),
            None => self.append(count, unlinked),
        }
    }

    /// Counts the first `count` clusters that are free, if they are one after the other in a block in memory.
    pub(super) fn take_cached(&mut self, count: u64) -> Option<Range<u64>> {
        let (format, per_block) = (self.format, self.format.per_block());
        let number = self.first_free / per_block;
        let first = number * per_block;
        let block = self.blocks.get(number)?;
        let is_free = |index: &u64| format.refcount(block.bytes(), *index) == 0;
        let from = self.first_free - first;
        let Some(start) = (from..per_block).find(is_free) else {
            self.first_free = first + per_block;
            return None;
        };
        self.first_free = first + start;
        let found = self.first_free..self.first_free + count;
        if start + count > per_block || found.end > self.end || !(start..start + count).all(|at| is_free(&at))
        {
            return None;
        }
        (start..start + count).for_each(|index| set(format, block, index, 1));
        self.first_free = found.end;
        Some(found)
    }

    /// Takes the first run of at least `least` free clusters that blocks have.
    fn take_free(&mut self, disk: &FileDisk, least: u64, most: u64) -> io::Result<Option<Range<u64>>> {
        let (format, per_block, end) = (self.format, self.format.per_block(), self.end);
        let mut at = self.first_free;
        while at / per_block < self.spans {
            let number = at / per_block;
            let first = number * per_block;
            if let Some(block) = self.block(disk, number)?
                && let Some(run) = free_run(format, block.bytes(), at - first, least, most)
            {
                let found = first + run.start..end.min(first + run.end);
                if found.end < found.start + least {
                    return Err(no_room());
                }
                let counted = found.clone();
                counted.for_each(|cluster| set(format, block, cluster - first, 1));
                if least == 1 {
                    self.first_free = found.end;
                }
                return Ok(Some(found));
            }
            at = first + per_block;
            if least == 1 {
                self.first_free = at;
            }
        }
        Ok(None)
    }

    /// Takes clusters behind all that have a block, together with those of the blocks for them, and of a larger table if
    /// that is needed: each is counted by one of them.
    fn append(&mut self, wanted: u64, unlinked: &mut Vec<Range<u64>>) -> io::Result<Range<u64>> {
        let (format, per_block) = (self.format, self.format.per_block());
        let bits = format.cluster_bits;
        let span = self.spans;
        let start = span * per_block;
        let (mut blocks, mut table) = (0, 0);
        loop {
            let needed = (blocks + table + wanted).div_ceil(per_block);
            let bytes = (span + needed) * 8;
            let larger = match bytes > self.table.bytes().len() as u64 {
                true => (bytes + bytes / 2).div_ceil(format.cluster()),
                false => 0,
            };
            if (needed, larger) == (blocks, table) {
                break;
            }
            (blocks, table) = (needed, larger);
        }
        let end = start + blocks + table + wanted;
        if end > self.end {
            return Err(no_room());
        }
        if table << bits > REFCOUNTS_MAX.max(format.cluster()) {
            return Err(io::Error::other("the format has no room for more clusters"));
        }
        for number in 0..blocks {
            let mut block = Table::new((start + number) << bits, format.cluster());
            let first = (span + number) * per_block;
            let counted = start.max(first)..end.min(first + per_block);
            counted.for_each(|cluster| set(format, &mut block, cluster - first, 1));
            self.blocks.insert(span + number, block);
        }
        if table > 0 {
            let mut new = Table::new((start + blocks) << bits, table << bits);
            for index in 0..span {
                new.set_entry(index, self.table.entry(index));
            }
            let old = std::mem::replace(&mut self.table, new);
            let first = old.offset >> bits;
            unlinked.push(first..first + (old.bytes().len() as u64 >> bits));
            self.has_moved = true;
        }
        for number in 0..blocks {
            self.table.set_entry(span + number, (start + number) << bits);
        }
        self.spans = span + blocks;
        if self.first_free >= start {
            self.first_free = end;
        }
        Ok(end - wanted..end)
    }

    /// Counts one use less of a cluster, if that leaves others or if it is the `last`. Returns whether nobody uses it then,
    /// or would.
    pub(super) fn release(&mut self, disk: &FileDisk, cluster: u64, last: bool) -> io::Result<bool> {
        let (format, per_block) = (self.format, self.format.per_block());
        let index = cluster % per_block;
        let Some(block) = self.block(disk, cluster / per_block)? else {
            return Ok(false);
        };
        match format.refcount(block.bytes(), index) {
            0 => return Ok(false),
            1 if !last => return Ok(true),
            count => set(format, block, index, count - 1),
        }
        if last {
            self.first_free = self.first_free.min(cluster);
        }
        Ok(last)
    }

    fn block(&mut self, disk: &FileDisk, number: u64) -> io::Result<Option<&mut Table>> {
        let offset = self.table.entry(number) & REFCOUNT_OFFSET;
        if offset == 0 {
            return Ok(None);
        }
        if !offset.is_multiple_of(self.format.cluster()) {
            return Err(corrupt(format!("refcount block {number} is at byte {offset}")));
        }
        if !self.blocks.has(number) {
            let block = Table::load(disk, offset, self.format.cluster())?;
            self.blocks.insert(number, block);
        }
        Ok(self.blocks.get(number))
    }
}

fn set(format: Format, block: &mut Table, index: u64, count: u64) {
    let bytes = block.change(format.bytes_of_refcount(index));
    format.set_refcount(bytes, index, count);
}

/// The first run of free clusters from `from` on in a block, of at least `least` and at most `most`.
fn free_run(format: Format, block: &[u8], from: u64, least: u64, most: u64) -> Option<Range<u64>> {
    let mut start = from;
    for index in from..format.per_block() {
        let is_free = format.refcount(block, index) == 0;
        if is_free && index + 1 - start == most {
            return Some(start..index + 1);
        }
        if !is_free && index - start >= least {
            return Some(start..index);
        }
        if !is_free {
            start = index + 1;
        }
    }
    let end = format.per_block();
    (end.saturating_sub(start) >= least).then_some(start..end)
}

fn no_room() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOSPC)
}

/// Memory for blocks that have not changed, in bytes.
const CACHE_BYTES: u64 = 2 << 20;
/// Bits 9 to 55 of an entry.
const OFFSET_MAX: u64 = 1 << 56;
