//! A table of an image in memory: its bytes as the drive has them, and which parts of them have changed. `flush` takes
//! the changed parts and writes them.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use super::super::check;
use crate::file::FileDisk;

/// A table in memory.
#[derive(Debug)]
pub(super) struct Table {
    /// Where it is in the file, in bytes.
    pub(super) offset: u64,
    bytes: Box<[u8]>,
    /// The 64ths that have changed since they were taken, and those that were taken and are not on the drive for sure.
    dirty: u64,
    taken: u64,
    used: u64,
    /// Claims that will be entered into it.
    pub(super) pins: u32,
}

/// A changed part of a table: where it goes, and what it is.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) offset: u64,
    pub(super) bytes: Vec<u8>,
}

impl Table {
    /// A new table of zeroes, of which nothing is on the drive.
    pub(super) fn new(offset: u64, len: u64) -> Self {
        Self {
            offset,
            bytes: vec![0; len as usize].into(),
            dirty: u64::MAX,
            taken: 0,
            used: 0,
            pins: 0,
        }
    }

    /// Reads a table. What is behind the end of the file is zeroes.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn load(disk: &FileDisk, offset: u64, len: u64) -> io::Result<Self> {
        let mut table = Self::new(offset, len);
        check::read(disk, &mut table.bytes, offset)?;
        table.dirty = 0;
        Ok(table)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Its bytes in a range that is about to change.
    pub(super) fn change(&mut self, range: Range<usize>) -> &mut [u8] {
        let unit = self.unit();
        for part in range.start / unit..range.end.div_ceil(unit) {
            self.dirty |= 1 << part;
        }
        &mut self.bytes
    }

    /// The number of its entries of 8 bytes.
    pub(super) fn entries(&self) -> u64 {
        self.bytes.len() as u64 / 8
    }

    /// An entry of 8 bytes; 0 behind its end.
    pub(super) fn entry(&self, index: u64) -> u64 {
        let at = index as usize * 8;
        self.bytes.get(at..at + 8).map_or(0, |bytes| {
            u64::from_be_bytes(bytes.try_into().unwrap_or_default())
        })
    }

    /// Sets an entry that there is.
    pub(super) fn set_entry(&mut self, index: u64, entry: u64) {
        let at = index as usize * 8..index as usize * 8 + 8;
        self.change(at.clone())[at].copy_from_slice(&entry.to_be_bytes());
    }

    /// Returns whether it has something that may not be on the drive.
    pub(super) fn is_dirty(&self) -> bool {
        self.dirty | self.taken != 0
    }

    /// Appends copies of what has changed, in multiples of `align`, to be written. [`Table::end_writing`] follows.
    pub(super) fn take(&mut self, align: u64, parts: &mut Vec<Part>) {
        let (unit, align) = (self.unit(), align as usize);
        // Where the last part ends, which may have been widened.
        let mut done = 0;
        let mut unit_at = 0;
        while unit_at < UNITS {
            let changed = (self.dirty >> unit_at).trailing_ones();
            let (start, end) = (unit_at as usize * unit, (unit_at + changed) as usize * unit);
            unit_at += changed.max(1);
            let start = (start - start % align).max(done);
            let end = end.next_multiple_of(align).min(self.bytes.len());
            if changed == 0 || start >= end {
                continue;
            }
            let bytes = &self.bytes[start..end];
            match parts.last_mut() {
                Some(last) if done > 0 && start == done => last.bytes.extend_from_slice(bytes),
                _ => parts.push(Part {
                    offset: self.offset + start as u64,
                    bytes: bytes.to_vec(),
                }),
            }
            done = end;
        }
        self.taken |= self.dirty;
        self.dirty = 0;
    }

    /// What was taken is on the drive, or has to be written again.
    pub(super) fn end_writing(&mut self, is_there: bool) {
        if !is_there {
            self.dirty |= self.taken;
        }
        self.taken = 0;
    }

    /// Bytes of a part.
    fn unit(&self) -> usize {
        (self.bytes.len() / UNITS as usize).max(8)
    }
}

/// Tables in memory by their number. Those that have changed stay; of the others, those that were not used lately go.
#[derive(Debug)]
pub(super) struct Cache {
    tables: BTreeMap<u64, Table>,
    max: usize,
    clock: u64,
}

impl Cache {
    /// An empty cache of about `max` tables.
    pub(super) fn new(max: usize) -> Self {
        Self {
            tables: BTreeMap::new(),
            max,
            clock: 0,
        }
    }

    pub(super) fn get(&mut self, number: u64) -> Option<&mut Table> {
        self.clock += 1;
        let table = self.tables.get_mut(&number)?;
        table.used = self.clock;
        Some(table)
    }

    pub(super) fn insert(&mut self, number: u64, mut table: Table) -> &mut Table {
        if self.tables.len() >= self.max {
            let is_unchanged = |table: &Table| !table.is_dirty() && table.pins == 0;
            let unchanged = self.tables.iter().filter(|(_, table)| is_unchanged(table));
            let oldest = unchanged
                .min_by_key(|(_, table)| table.used)
                .map(|(number, _)| *number);
            oldest.and_then(|number| self.tables.remove(&number));
        }
        self.clock += 1;
        table.used = self.clock;
        self.tables.entry(number).insert_entry(table).into_mut()
    }

    pub(super) fn has(&self, number: u64) -> bool {
        self.tables.contains_key(&number)
    }

    pub(super) fn tables(&mut self) -> impl Iterator<Item = &mut Table> {
        self.tables.values_mut()
    }

    /// Returns whether it has grown since too many tables have changed.
    pub(super) fn is_full_of_changes(&self) -> bool {
        let changed = self.tables.values().filter(|table| table.is_dirty());
        self.tables.len() >= self.max && changed.count() >= self.max / 2
    }
}

/// Changes of a table are noted in so many parts.
const UNITS: u32 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_parts_are_taken_whole_once_and_again_if_they_were_not_written() {
        let mut table = Table::new(65536, 65536);
        let take = |table: &mut Table, align| {
            let mut parts = Vec::new();
            table.take(align, &mut parts);
            parts
                .iter()
                .map(|part| (part.offset - 65536, part.bytes.len()))
                .collect::<Vec<_>>()
        };
        assert_eq!(take(&mut table, 512), [(0, 65536)]);
        table.end_writing(true);
        assert!(!table.is_dirty());
        table.set_entry(0, 1);
        table.set_entry(1, 2);
        table.set_entry(600, 3);
        table.set_entry(8191, 4);
        assert_eq!(take(&mut table, 4096), [(0, 8192), (61440, 4096)]);
        assert!(table.is_dirty() && take(&mut table, 512).is_empty());
        table.end_writing(false);
        assert_eq!(take(&mut table, 512), [(0, 1024), (4096, 1024), (64512, 1024)]);
        assert_eq!((table.entry(600), table.entry(9000)), (3, 0));
    }

    #[test]
    fn cache_gives_up_the_oldest_unchanged_table() {
        let mut cache = Cache::new(2);
        for number in 0..3 {
            cache.insert(number, Table::new(0, 512));
        }
        assert!(cache.has(0) && cache.is_full_of_changes());
        for table in cache.tables() {
            table.take(512, &mut Vec::new());
            table.end_writing(true);
        }
        assert!(cache.get(0).is_some());
        cache.insert(4, Table::new(0, 512));
        assert!(cache.has(0) && !cache.has(1) && cache.has(2));
    }
}
