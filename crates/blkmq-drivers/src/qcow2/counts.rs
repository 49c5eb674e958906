//! The refcounts of tables, on the drive before anything there points to the tables. `sys` asks before it writes the
//! header or a table of pointers.
//!
//! The library enters a new table at once, and writes its refcount with the next flush: a crash between leaves a
//! table that is used and counted as free, which QEMU calls an error. So the refcount is set here, in the block that
//! the drive has, before the pointer is written. The library writes the same number later.
//!
//! ```text
//!  new L2 table ─► its refcount (here) ─► its entry in the L1 table          (each durable; so for all tables)
//! ```

use std::io;
use std::ops::Range;

use rustix::io::ReadWriteFlags;

use super::check::{self, L1_OFFSET, REFCOUNT_OFFSET};
use super::header::Header;
use crate::file::FileDisk;
use crate::mapping::Mapping;

/// Where the tables of pointers are, as the header on the drive says.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    cluster_bits: u32,
    refcount_order: u32,
    l1: Range<u64>,
    refcounts: Range<u64>,
}

impl Layout {
    pub(super) fn of(header: &Header) -> Self {
        let refcounts = u64::from(header.refcounts_clusters) << header.cluster_bits;
        Self {
            cluster_bits: header.cluster_bits,
            refcount_order: header.refcount_order,
            l1: header.l1_offset..header.l1_offset + u64::from(header.l1_entries) * 8,
            refcounts: header.refcounts_offset..header.refcounts_offset + refcounts,
        }
    }

    /// Returns whether a write of this range writes pointers.
    pub(super) fn concerns(&self, range: &Range<u64>) -> bool {
        let overlaps = |table: &Range<u64>| range.start < table.end && table.start < range.end;
        range.start < HEADER_BYTES || overlaps(&self.l1) || overlaps(&self.refcounts)
    }

    /// Makes durable that what `bytes`, about to be written at `offset`, newly point to is used. Returns where the
    /// tables are then.
    ///
    /// # Errors
    /// The system's: the pointers must not be written.
    pub(super) fn count_targets(&self, disk: &FileDisk, offset: u64, bytes: &[u8]) -> io::Result<Self> {
        let next = self.after(offset, bytes);
        if next.l1 != self.l1 {
            next.count_range(disk, &next.l1, None)?;
        }
        if next.refcounts != self.refcounts {
            next.count_range(disk, &next.refcounts, None)?;
        }
        for (table, mask) in [(&self.l1, L1_OFFSET), (&self.refcounts, REFCOUNT_OFFSET)] {
            let is_refcounts = mask == REFCOUNT_OFFSET;
            for (index, target) in changed(disk, table, offset, bytes, mask)? {
                // A block of refcounts that has its own has it already.
                let own = is_refcounts.then_some(index);
                next.count_range(disk, &(target..target + (1 << self.cluster_bits)), own)?;
            }
        }
        Ok(next)
    }

    /// Where the tables are once the bytes are written.
    fn after(&self, offset: u64, bytes: &[u8]) -> Self {
        let mut next = self.clone();
        if offset > 0 || bytes.len() < HEADER_BYTES as usize {
            return next;
        }
        let u32_at = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap_or_default());
        let u64_at = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
        next.l1 = u64_at(40)..u64_at(40).saturating_add(u64::from(u32_at(36)) * 8);
        let refcounts = u64::from(u32_at(56)) << self.cluster_bits;
        next.refcounts = u64_at(48)..u64_at(48).saturating_add(refcounts);
        next
    }

    fn count_range(&self, disk: &FileDisk, range: &Range<u64>, own: Option<u64>) -> io::Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let clusters = range.start >> self.cluster_bits..=(range.end - 1) >> self.cluster_bits;
        clusters
            .into_iter()
            .try_for_each(|cluster| self.count(disk, cluster, own))
    }

    /// Makes durable that a cluster is used, unless its refcount is in the block `own`.
    fn count(&self, disk: &FileDisk, cluster: u64, own: Option<u64>) -> io::Result<()> {
        let bits = 1u64 << self.refcount_order;
        let per_block = (8u64 << self.cluster_bits) / bits;
        let (number, index) = (cluster / per_block, cluster % per_block);
        let entry = self.refcounts.start + number * 8;
        if own == Some(number) || entry >= self.refcounts.end {
            return Ok(());
        }
        let mut pointer = [0; 8];
        check::read(disk, &mut pointer, entry)?;
        let block = u64::from_be_bytes(pointer) & REFCOUNT_OFFSET;
        if block == 0 {
            return Ok(());
        }
        let first = block + index * bits / 8;
        let align = u64::from(disk.range()).max(512);
        let (start, at) = (first - first % align, (first % align) as usize);
        let mut area = Mapping::new(align as usize)?;
        let mut sector = vec![0; align as usize];
        check::read(disk, &mut sector, start)?;
        let len = (bits as usize).div_ceil(8);
        let refcount = &mut sector[at..at + len];
        let shift = if bits < 8 { (index * bits % 8) as u32 } else { 0 };
        let mask = if bits < 8 {
            ((1u16 << bits) - 1) as u8
        } else {
            u8::MAX
        };
        if refcount.iter().any(|byte| (byte >> shift) & mask != 0) {
            return Ok(());
        }
        // The last byte of a number in network byte order.
        refcount[len - 1] |= 1 << shift;
        area.bytes_mut()[..sector.len()].copy_from_slice(&sector);
        let memory = &area.bytes_mut()[..sector.len()];
        let written = rustix::io::pwritev2(
            disk.handle(),
            &[io::IoSlice::new(memory)],
            start,
            ReadWriteFlags::DSYNC,
        )?;
        match written == sector.len() {
            true => Ok(()),
            false => Err(io::ErrorKind::WriteZero.into()),
        }
    }
}

/// The entries of a table that differ from what the drive has, and are not 0: their numbers and where they point.
fn changed(
    disk: &FileDisk,
    table: &Range<u64>,
    offset: u64,
    bytes: &[u8],
    mask: u64,
) -> io::Result<Vec<(u64, u64)>> {
    let (start, end) = (
        table.start.max(offset),
        table.end.min(offset + bytes.len() as u64),
    );
    if start >= end {
        return Ok(Vec::new());
    }
    let new = &bytes[(start - offset) as usize..(end - offset) as usize];
    let mut old = vec![0; new.len()];
    check::read(disk, &mut old, start)?;
    let first = (start - table.start) / 8;
    let entries = (first..).zip(new.chunks_exact(8).zip(old.chunks_exact(8)));
    let targets = entries
        .filter(|(_, (new, old))| new != old)
        .map(|(index, (new, _))| {
            let entry = u64::from_be_bytes(new.try_into().unwrap_or_default());
            (index, entry & mask)
        });
    Ok(targets.filter(|(_, target)| *target != 0).collect())
}

/// The part of the header that names tables.
const HEADER_BYTES: u64 = 60;
