//! Where the data of an image is: looked up in its tables, for the cached map, and for whoever asks for its extents.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use blkmq_host::device::Extent;

use super::super::layers::{self, Mapping};
use super::super::map::{Entry, FILE_MAX};
use super::super::tables::Tables;
use super::Image;

impl Image {
    /// Finds out where a range is, and what is around it, and enters that into the map.
    pub(super) fn look_up(&self, tables: &Tables, offset: u64, len: u64) -> io::Result<()> {
        let _gate = self.enter()?;
        let span = self.map.page_span();
        let start = offset - offset % span;
        let end = (offset + len).next_multiple_of(span).min(self.size());
        self.look_up_within(tables, start..end)
    }

    fn look_up_within(&self, tables: &Tables, range: Range<u64>) -> io::Result<()> {
        if self.tables.get().is_none() {
            // Of these tables nothing is kept.
            return Ok(());
        }
        let mut found = Vec::new();
        for _ in 0..LOOKS_MAX {
            let version = self.map.writer().version;
            found.clear();
            self.find(tables, range.clone(), &mut found)?;
            let mut writer = self.map.writer();
            if writer.version == version {
                for (granule, entry) in found {
                    self.map.set_entry(&mut writer, granule, entry);
                }
                return Ok(());
            }
        }
        // Others allocate all the time: the request is done without the map.
        Ok(())
    }

    /// Appends where the granules of a range are.
    fn find(&self, tables: &Tables, range: Range<u64>, found: &mut Vec<(u64, Entry)>) -> io::Result<()> {
        let bits = self.map.granule_bits();
        let mut at = range.start;
        while at < range.end {
            let (mapping, len) = self.mapping(tables, at, range.end - at)?;
            let (granule, entry) = (at >> bits, self.entry(&mapping));
            // The end of the disk may be inside the last granule.
            let whole = match at + len == range.end {
                true => (range.end.div_ceil(1 << bits)) - granule,
                false => len >> bits,
            };
            if whole == 0 {
                // Its parts lie apart.
                found.push((granule, Entry::Special));
                at = ((granule + 1) << bits).min(range.end);
                continue;
            }
            let entry_at = |number: u64| match entry {
                Entry::Data {
                    file,
                    host,
                    is_writable,
                } => Entry::Data {
                    file,
                    host: host + (number << bits),
                    is_writable: is_writable
                        && !self.is_protected(&((granule + number) << bits..(granule + number + 1) << bits)),
                },
                other => other,
            };
            found.extend((0..whole).map(|number| (granule + number, entry_at(number))));
            at = ((granule + whole) << bits).min(range.end);
        }
        Ok(())
    }

    /// Where a byte is, and for how long that goes on.
    pub(super) fn mapping<'a>(
        &'a self,
        tables: &'a Tables,
        at: u64,
        len: u64,
    ) -> io::Result<(Mapping<'a>, u64)> {
        layers::look_up(tables, self.base.as_ref(), at, len)
    }

    fn entry(&self, mapping: &Mapping<'_>) -> Entry {
        let Mapping::Data { file, host, is_own } = *mapping else {
            return match mapping {
                Mapping::Zero => Entry::Zero,
                _ => Entry::Special,
            };
        };
        let number = self.files.iter().position(|other| Arc::ptr_eq(other, file));
        match number.filter(|number| *number <= usize::from(FILE_MAX)) {
            Some(number) if host.is_multiple_of(512) => Entry::Data {
                file: number as u8,
                host,
                is_writable: is_own && !self.read_only && !self.is_idle(),
            },
            _ => Entry::Special,
        }
    }

    /// Appends what is where; see [`blkmq_host::device::Allocation`].
    pub(crate) fn extents(&self, offset: u64, len: u64, max: usize, out: &mut Vec<Extent>) -> io::Result<()> {
        let end = offset.saturating_add(len).min(self.size());
        if offset >= end || max == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if let Some(next) = self.next.get() {
            return next.extents(offset, len, max, out);
        }
        let tables = self.tables()?;
        let _gate = self.enter()?;
        let (mut at, first) = (offset, out.len());
        while at < end {
            let (mapping, len) = self.mapping(&tables, at, end - at)?;
            let (is_zero, len) = mapping.reads_as_zeroes(len.clamp(1, end - at))?;
            let extent = match is_zero {
                true => Extent::hole(len),
                false => Extent::data(len),
            };
            let is_full = out.len() - first == max;
            match out[first..].last_mut() {
                Some(last) if (last.hole, last.zero) == (extent.hole, extent.zero) => last.len += len,
                _ if is_full => break,
                _ => out.push(extent),
            }
            at += len;
        }
        Ok(())
    }
}

/// How often a look-up begins again because others allocate.
const LOOKS_MAX: u32 = 4;
