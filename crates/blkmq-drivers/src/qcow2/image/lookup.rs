//! Where the data of an image is: looked up in its tables, for the cached map, and for whoever asks for its extents.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use blkmq_host::device::Extent;
use imago::Mapping;

use super::super::map::{Entry, FILE_MAX};
use super::super::sys::LibraryFile;
use super::{Image, Library};

impl Image {
    /// Finds out where a range is, and what is around it, and enters that into the map.
    pub(super) fn look_up(&self, library: &Library, offset: u64, len: u64) -> io::Result<()> {
        let _gate = self.enter()?;
        let span = self.map.page_span();
        let start = offset - offset % span;
        let end = (offset + len).next_multiple_of(span).min(self.size());
        self.look_up_within(library, start..end)
    }

    fn look_up_within(&self, library: &Library, range: Range<u64>) -> io::Result<()> {
        let mut found = Vec::new();
        for _ in 0..LOOKS_MAX {
            let version = self.map.writer().version;
            found.clear();
            self.find(library, range.clone(), &mut found)?;
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
    fn find(&self, library: &Library, range: Range<u64>, found: &mut Vec<(u64, Entry)>) -> io::Result<()> {
        let bits = self.map.granule_bits();
        let mut at = range.start;
        while at < range.end {
            let (mapping, len) = library.image.get_mapping(at, range.end - at)?;
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
                    is_writable,
                },
                other => other,
            };
            found.extend((0..whole).map(|number| (granule + number, entry_at(number))));
            at = ((granule + whole) << bits).min(range.end);
        }
        Ok(())
    }

    fn entry(&self, mapping: &Mapping<'_, LibraryFile>) -> Entry {
        match mapping {
            Mapping::Raw {
                storage,
                offset,
                writable,
                ..
            } => {
                let number = self
                    .files
                    .iter()
                    .position(|file| Arc::ptr_eq(file, storage.disk()));
                let is_known = number.filter(|number| *number <= usize::from(FILE_MAX));
                match is_known {
                    Some(number) if offset.is_multiple_of(512) => Entry::Data {
                        file: number as u8,
                        host: *offset,
                        is_writable: *writable && !self.read_only,
                    },
                    _ => Entry::Special,
                }
            }
            Mapping::Zero { .. } | Mapping::Eof { .. } => Entry::Zero,
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
        let library = self.library()?;
        let _gate = self.enter()?;
        let (mut at, first) = (offset, out.len());
        while at < end {
            let (mapping, len) = library.image.get_mapping(at, end - at)?;
            let len = len.clamp(1, end - at);
            let extent = match mapping {
                Mapping::Zero { .. } | Mapping::Eof { .. } => Extent::hole(len),
                _ => Extent::data(len),
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
