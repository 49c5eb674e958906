//! A look at the tables of an image before it is opened: that they lie inside the file, apart from each other, and
//! are counted as used. `header` has checked what needs no look at the file.
//!
//! What a hostile image gains otherwise is harm to itself alone, but a table that is also data, or that is free,
//! would be overwritten by the image's own writes.

use std::io;
use std::ops::Range;

use super::chain::system;
use super::error::ImageError;
use super::header::Header;
use crate::file::FileDisk;

/// Reads at `offset` until the buffer is full or the file ends. Returns how much there was.
pub(super) fn read(disk: &FileDisk, into: &mut [u8], offset: u64) -> io::Result<usize> {
    let align = u64::from(disk.range()).max(4096);
    let start = offset - offset % align;
    let skip = (offset - start) as usize;
    let len = (skip + into.len()).next_multiple_of(align as usize);
    let mut area = crate::mapping::Mapping::new(len.max(1))?;
    let mut done = 0;
    while done < len {
        match rustix::io::pread(disk.handle(), &mut area.bytes_mut()[done..], start + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if !done.is_multiple_of(align as usize) {
            // Only the end of the file is not aligned.
            break;
        }
    }
    let there = done.saturating_sub(skip).min(into.len());
    into[..there].copy_from_slice(&area.bytes_mut()[skip..skip + there]);
    Ok(there)
}

/// Checks the tables of an image.
///
/// # Errors
/// They contradict each other or the size of the file.
pub(super) fn tables(disk: &FileDisk, header: &Header) -> Result<(), ImageError> {
    tables_beside(disk, header, &[])
}

/// The same, and that whole clusters of `others` lie in the file, apart from tables and from each other, and are counted.
///
/// # Errors
/// As of [`tables`], or they do not.
pub(super) fn tables_beside(
    disk: &FileDisk,
    header: &Header,
    others: &[Range<u64>],
) -> Result<(), ImageError> {
    let tables = Tables {
        disk,
        header,
        end: disk
            .end()
            .map_err(|source| system(disk.path(), "measure it", source))?,
    };
    tables.check(others)
}

struct Tables<'a> {
    disk: &'a FileDisk,
    header: &'a Header,
    end: u64,
}

impl Tables<'_> {
    fn check(&self, others: &[Range<u64>]) -> Result<(), ImageError> {
        let header = self.header;
        let end = self.end.next_multiple_of(header.cluster());
        if let Some(outside) = others.iter().find(|range| range.end > end) {
            return Err(self.problem(format!("byte {} is not inside the file", outside.start)));
        }
        let l1 = self.table("L1 table", header.l1_offset, u64::from(header.l1_entries) * 8)?;
        let refcounts = u64::from(header.refcounts_clusters) * header.cluster();
        let counts = self.table("refcount table", header.refcounts_offset, refcounts)?;
        let blocks = self.entries(&counts, refcounts, REFCOUNT_OFFSET, "refcount block")?;
        let l2 = self.entries(&l1, u64::from(header.l1_entries) * 8, L1_OFFSET, "L2 table")?;
        let clusters = |of: &[(u64, u64)]| {
            of.iter()
                .map(|(_, offset)| *offset..*offset + header.cluster())
                .collect::<Vec<_>>()
        };
        let first = 0..header.cluster();
        let named = [first, l1, counts].into_iter();
        let mut used: Vec<Range<u64>> = named.filter(|range| !range.is_empty()).collect();
        used.extend(clusters(&blocks));
        used.extend(clusters(&l2));
        used.extend_from_slice(others);
        used.sort_unstable_by_key(|range| range.start);
        if let Some(both) = used.windows(2).find(|two| two[0].end > two[1].start) {
            return Err(self.problem(format!("two of its tables overlap at byte {}", both[1].start)));
        }
        self.check_counted(&used, &blocks)
    }

    /// Returns the clusters of a table, which must be inside the file.
    fn table(&self, what: &str, offset: u64, len: u64) -> Result<Range<u64>, ImageError> {
        if len == 0 {
            return Ok(0..0);
        }
        match offset.checked_add(len) {
            Some(end) if end <= self.end => Ok(offset..end.next_multiple_of(self.header.cluster())),
            _ => Err(self.problem(format!(
                "its {what} at byte {offset} is not inside the file, which ends at {}",
                self.end
            ))),
        }
    }

    /// Reads a table of offsets of clusters: those that there are, with their index.
    fn entries(
        &self,
        table: &Range<u64>,
        len: u64,
        mask: u64,
        what: &str,
    ) -> Result<Vec<(u64, u64)>, ImageError> {
        let (mut found, mut chunk) = (Vec::new(), vec![0u8; CHUNK]);
        let mut at = 0;
        while at < len {
            let now = (len - at).min(CHUNK as u64) as usize;
            let read = read(self.disk, &mut chunk[..now], table.start + at);
            let read = read.map_err(|source| system(self.disk.path(), "read its tables", source))?;
            chunk[read..now].fill(0);
            for (number, entry) in (at / 8..).zip(chunk[..now].chunks_exact(8)) {
                let entry = u64::from_be_bytes(entry.try_into().unwrap_or_default());
                let offset = entry & mask;
                if offset == 0 {
                    continue;
                }
                let is_inside = offset.is_multiple_of(self.header.cluster()) && offset < self.end;
                if !is_inside {
                    return Err(self.problem(format!(
                        "its {what} {number} is at byte {offset}, where no cluster of the file is"
                    )));
                }
                found.push((number, offset));
            }
            at += now as u64;
        }
        Ok(found)
    }

    /// Checks that what is used has a refcount: what is free would be given to others.
    fn check_counted(&self, used: &[Range<u64>], blocks: &[(u64, u64)]) -> Result<(), ImageError> {
        let header = self.header;
        let per_block = (header.cluster() * 8) >> header.refcount_order;
        let mut chunk = Vec::new();
        let mut loaded = None;
        for cluster in used
            .iter()
            .flat_map(|range| range.start / header.cluster()..range.end / header.cluster())
        {
            let number = cluster / per_block;
            if loaded != Some(number) {
                chunk.clear();
                if let Ok(at) = blocks.binary_search_by_key(&number, |(number, _)| *number) {
                    chunk.resize(header.cluster() as usize, 0);
                    let read = read(self.disk, &mut chunk, blocks[at].1);
                    let read = read.map_err(|source| system(self.disk.path(), "read its tables", source))?;
                    chunk[read..].fill(0);
                }
                loaded = Some(number);
            }
            if !is_counted(&chunk, cluster % per_block, header.refcount_order) {
                let at = cluster * header.cluster();
                return Err(self.problem(format!("a table at byte {at} is not counted as used")));
            }
        }
        Ok(())
    }

    fn problem(&self, problem: String) -> ImageError {
        ImageError::Tables {
            path: self.disk.path().to_owned(),
            problem,
        }
    }
}

/// Returns whether a refcount of `1 << order` bits is not 0.
fn is_counted(block: &[u8], index: u64, order: u32) -> bool {
    let bits = 1u64 << order;
    let first = (index * bits / 8) as usize;
    let Some(bytes) = block.get(first..first + (bits as usize).div_ceil(8)) else {
        return false;
    };
    match bits {
        1..=4 => bytes[0] >> (index * bits % 8) & ((1 << bits) - 1) as u8 != 0,
        _ => bytes.iter().any(|byte| *byte != 0),
    }
}

/// Bits 9 to 55 of an entry of the L1 table.
pub(super) const L1_OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Bits 9 to 63 of an entry of the refcount table.
pub(super) const REFCOUNT_OFFSET: u64 = !0x1ff;
/// Tables are read in such pieces, in bytes.
const CHUNK: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_of_all_widths_are_found() {
        assert!(is_counted(&[0b0000_0100], 2, 0) && !is_counted(&[0b0000_0100], 3, 0));
        assert!(is_counted(&[0, 0x30], 3, 2) && !is_counted(&[0, 0x30], 2, 2));
        assert!(is_counted(&[0, 0, 0, 1], 1, 4) && !is_counted(&[0, 0, 0, 1], 0, 4));
        assert!(is_counted(&[0, 0, 0, 0, 0, 0, 0, 1], 0, 6));
        assert!(!is_counted(&[], 0, 4));
    }
}
