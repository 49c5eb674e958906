//! Writes by threads: what is there is written, and what is not is allocated, filled and entered.

use std::io;
use std::ops::Range;

use super::super::layers::{self, Mapping};
use super::super::tables::{New, Place, Prepared, Tables};
use super::super::transfer::{self, Buffer};
use super::Image;

impl Image {
    /// Writes, whatever the map knows.
    pub(in crate::qcow2) fn write(&self, tables: &Tables, offset: u64, data: &[u8]) -> io::Result<()> {
        let range = offset..offset + data.len() as u64;
        if !self.files[usize::from(self.data_file())].is_odd(offset, data.len() as u64) {
            let _gate = self.enter()?;
            if !replaces(tables, &self.whole_clusters(&range))? {
                return self.write_data(tables, offset, data);
            }
        }
        self.alone(self.whole_clusters(&range), || {
            self.write_data(tables, offset, data)
        })
    }

    /// Writes, and allocates what is not there: first the data, then the entry of the table.
    pub(in crate::qcow2) fn write_data(&self, tables: &Tables, offset: u64, data: &[u8]) -> io::Result<()> {
        let range = offset..offset + data.len() as u64;
        self.track(tables, &range)?;
        self.note_change(&range);
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let left = &data[done..];
            let (known, host, now) = match tables.prepare(at, left.len() as u64)? {
                Prepared::There { host, len } => {
                    transfer::write(tables.data_file(), host, &left[..len as usize])?;
                    (at..at + len, host, len)
                }
                Prepared::New(new) => {
                    let now = (new.range().end - at).min(left.len() as u64);
                    self.write_new(tables, new, at, &left[..now as usize])?;
                    done += now as usize;
                    continue;
                }
            };
            self.enter_changed(known, host);
            done += now as usize;
        }
        Ok(())
    }

    /// Writes data to new clusters, and enters them.
    pub(super) fn write_new(&self, tables: &Tables, new: New<'_>, at: u64, data: &[u8]) -> io::Result<()> {
        let (range, host) = (new.range(), new.host());
        // All of it is in the image from now on.
        self.note_change(&range);
        self.fill(tables, &new, at, data)?;
        // Who looks up meanwhile finds the old place, where the same is, until this request ends.
        new.commit()?;
        self.enter_changed(range, host);
        Ok(())
    }

    fn enter_changed(&self, range: Range<u64>, host: u64) {
        let mut writer = self.map.writer();
        writer.version += 1;
        self.enter_in_map(&mut writer, range, host);
    }

    /// Returns whether a range reads as zeroes, as far as tables say, and for how many bytes at most `len` that holds.
    pub(in crate::qcow2) fn reads_as_zeroes(
        &self,
        tables: &Tables,
        at: u64,
        len: u64,
    ) -> io::Result<(bool, u64)> {
        let (mapping, known) = self.mapping(tables, at, len)?;
        Ok((matches!(mapping, Mapping::Zero), known))
    }

    /// Writes the content of new clusters: the data, and around it what was there before.
    fn fill(&self, tables: &Tables, new: &New<'_>, at: u64, data: &[u8]) -> io::Result<()> {
        let (range, file) = (new.range(), tables.data_file());
        let end = at + data.len() as u64;
        let host = |byte: u64| new.host() + (byte - range.start);
        let mut is_zero = false;
        if !self.has_beside {
            tables
                .space
                .reach(host(range.end).next_multiple_of(tables.cluster()))?;
            is_zero = tables.space.is_fresh(host(range.start)..host(range.end));
        }
        let (mut from, mut to) = (at, end);
        for part in [range.start..at, end..self.end_of_clusters(&range)] {
            if part.is_empty() {
                continue;
            }
            if !self.was_zero(tables, &part)? {
                (from, to) = (from.min(part.start), to.max(part.end));
            } else if !is_zero {
                transfer::zero(file, host(part.start), part.end - part.start)?;
            }
        }
        if !self.has_beside {
            tables.space.note_written(host(from)..host(to));
        }
        if (from, to) == (at, end) {
            return transfer::write(file, host(at), data);
        }
        let mut content = Buffer::new((to - from) as usize)?;
        let (head, rest) = content.split_at_mut((at - from) as usize);
        let (middle, tail) = rest.split_at_mut(data.len());
        self.read_old(tables, from, head)?;
        middle.copy_from_slice(data);
        self.read_old(tables, end, tail)?;
        transfer::write(file, host(from), &content)
    }

    /// Returns whether a part of new clusters was zeroes before, as far as tables say.
    fn was_zero(&self, tables: &Tables, part: &Range<u64>) -> io::Result<bool> {
        let mut at = part.start;
        while at < part.end {
            match self.reads_as_zeroes(tables, at, part.end - at)? {
                (true, known) => at += known.max(1),
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Reads a part of new clusters as it was: the tables know them where they were until they are entered.
    pub(super) fn read_old(&self, tables: &Tables, at: u64, into: &mut [u8]) -> io::Result<()> {
        layers::read_by(at, into, |at, len| self.mapping(tables, at, len))
    }
}

/// Returns whether a write would give up clusters of the image that others may be reading: those that a snapshot
/// inside the image shares.
fn replaces(tables: &Tables, range: &Range<u64>) -> io::Result<bool> {
    let mut at = range.start;
    while at < range.end {
        match tables.look_up(at, range.end - at)? {
            (Place::Data { is_own: false, .. }, _) => return Ok(true),
            (_, known) => at += known.max(1),
        }
    }
    Ok(false)
}
