//! What an image file consists of, for operators: its header, its chain, and whether the refcounts of its clusters are
//! what its tables use. `blkmq image info` and `blkmq image check` print it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::bitmaps;
use super::chain::{self, system};
use super::check::{self, L1_OFFSET, REFCOUNT_OFFSET};
use super::error::ImageError;
use super::header::Header;
use super::rules::Rules;
use crate::driver::Purpose;
use crate::file::{Direct, FileConfig, FileDisk};

/// One image of a chain.
#[derive(Clone, Debug)]
pub struct Link {
    /// The file.
    pub path: PathBuf,
    /// Its header; `None` if it is raw.
    pub header: Option<Header>,
    /// Bytes that the filesystem has for it.
    pub allocated: u64,
    /// Where the file ends, in bytes.
    pub end: u64,
}

/// Looks at an image and all below it, without a lock: what is written meanwhile may be missed.
///
/// # Errors
/// One of them cannot be used.
pub fn look(path: &Path, directories: &[PathBuf]) -> Result<Vec<Link>, ImageError> {
    let mut links = Vec::new();
    let rules = Rules::new(path, directories, CHAIN_MAX)?;
    let mut next = Some((path.to_owned(), false));
    while let Some((path, is_raw)) = next.take() {
        let disk = open(&path)?;
        let meta = disk
            .handle()
            .metadata()
            .map_err(|source| system(&path, "inspect it", source))?;
        let header = if is_raw {
            None
        } else {
            Some(chain::read_header(&disk)?)
        };
        if let Some((header, name)) = header
            .as_ref()
            .and_then(|header| Some((header, header.backing.as_ref()?)))
            && links.len() < CHAIN_MAX
        {
            let is_raw = header.backing_format.as_deref() == Some("raw");
            next = Some((rules.resolve(&path, "backing file", name)?, is_raw));
        }
        let end = disk.end().map_err(|source| system(&path, "measure it", source))?;
        links.push(Link {
            path,
            header,
            allocated: std::os::unix::fs::MetadataExt::blocks(&meta) * 512,
            end,
        });
    }
    Ok(links)
}

/// What a check has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Clusters that are used more often than they are counted, or lie outside the file; and entries that say of what they
    /// point to that nobody else has it (COPIED) though its refcount is another one, or do not say so though it is 1: the
    /// image must not be written.
    pub errors: u64,
    /// Clusters that are counted more often than they are used: space that is lost until it is freed.
    pub leaks: u64,
    /// Clusters that are used.
    pub used: u64,
    /// Clusters of the disk that have data or are compressed.
    pub data: u64,
    /// Entries for zeroes.
    pub zeroes: u64,
}

/// Counts the uses of all clusters of an image and compares that with its refcounts. Takes a reader's lock.
///
/// # Errors
/// The image cannot be used, or its tables overlap.
pub fn check_refcounts(path: &Path) -> Result<Survey, ImageError> {
    let config = FileConfig {
        path: path.to_owned(),
        read_only: true,
        direct: Direct::Off,
        ..FileConfig::default()
    };
    count(&FileDisk::open_part(Purpose::Serve, &config)?)
}

/// The same of an open image.
pub(super) fn count(disk: &FileDisk) -> Result<Survey, ImageError> {
    let header = chain::read_header(disk)?;
    check::tables(disk, &header)?;
    let end = disk.end();
    let mut count = Count {
        disk,
        header: &header,
        end: end.map_err(|source| system(disk.path(), "measure it", source))?,
        uses: BTreeMap::new(),
        flags: BTreeMap::new(),
        survey: Survey::default(),
    };
    count.all()?;
    Ok(count.survey)
}

fn open(path: &Path) -> Result<FileDisk, ImageError> {
    let config = FileConfig {
        path: path.to_owned(),
        read_only: true,
        direct: Direct::Off,
        unlocked: true,
        ..FileConfig::default()
    };
    Ok(FileDisk::open_part(Purpose::Check, &config)?)
}

struct Count<'a> {
    disk: &'a FileDisk,
    header: &'a Header,
    end: u64,
    /// How often a cluster is used, by its number.
    uses: BTreeMap<u64, u64>,
    /// How many entries of the active tables point to a cluster that have the flag, and how many that do not.
    flags: BTreeMap<u64, [u64; 2]>,
    survey: Survey,
}

impl Count<'_> {
    fn all(&mut self) -> Result<(), ImageError> {
        let header = self.header;
        self.count_use(0, header.cluster());
        let refcounts = u64::from(header.refcounts_clusters) * header.cluster();
        self.count_use(header.refcounts_offset, refcounts);
        let blocks = self.table(header.refcounts_offset, refcounts)?;
        for block in blocks
            .iter()
            .map(|entry| entry & REFCOUNT_OFFSET)
            .filter(|offset| *offset > 0)
        {
            self.count_use(block, header.cluster());
        }
        self.tree(header.l1_offset, header.l1_entries, true)?;
        self.snapshots()?;
        self.bitmaps();
        self.compare(&blocks)
    }

    /// Counts an L1 table and all below it.
    fn tree(&mut self, offset: u64, entries: u32, is_active: bool) -> Result<(), ImageError> {
        let len = u64::from(entries) * 8;
        self.count_use(offset, len);
        for l2 in self.table(offset, len)? {
            let offset = l2 & L1_OFFSET;
            if offset == 0 {
                continue;
            }
            self.count_use(offset, self.header.cluster());
            self.note_flag(l2, offset, is_active);
            let table = self.table(offset, self.header.cluster())?;
            let words = if self.header.has_subclusters { 2 } else { 1 };
            for entry in table.chunks_exact(words) {
                self.entry(entry[0], entry.get(1).copied(), is_active);
            }
        }
        Ok(())
    }

    /// Counts an entry of an L2 table, with what it says of `subclusters` if there are any.
    fn entry(&mut self, entry: u64, subclusters: Option<u64>, is_active: bool) {
        let cluster = self.header.cluster();
        if entry & COMPRESSED != 0 {
            let shift = 62 - (self.header.cluster_bits - 8);
            let offset = entry & ((1 << shift) - 1);
            let sectors = ((entry & (COMPRESSED - 1)) >> shift) + 1;
            // The first sector may begin before the data does.
            self.count_use(offset, sectors * 512 - offset % 512);
            self.survey.data += u64::from(is_active);
            // Several may be in one cluster, whose refcount says nothing of one of them.
            self.survey.errors += u64::from(is_active && entry & COPIED != 0);
            return;
        }
        let offset = entry & L1_OFFSET;
        let is_zero = match subclusters {
            Some(subclusters) => subclusters >> 32 == u64::from(u32::MAX),
            None => self.header.version >= 3 && entry & 1 != 0,
        };
        // The same place cannot be written, and read as zeroes.
        let is_both = subclusters
            .is_some_and(|subclusters| (subclusters >> 32) & subclusters & u64::from(u32::MAX) != 0);
        self.survey.errors += u64::from(is_active && is_both);
        if is_zero {
            self.survey.zeroes += u64::from(is_active);
        } else if offset != 0 || self.header.has_data_file && entry & COPIED != 0 {
            self.survey.data += u64::from(is_active);
        }
        if offset != 0 && !self.header.has_data_file {
            if !offset.is_multiple_of(cluster) {
                self.survey.errors += 1;
                return;
            }
            self.count_use(offset, cluster);
            self.note_flag(entry, offset, is_active);
        }
    }

    /// Notes whether an entry of an active table has the flag.
    fn note_flag(&mut self, entry: u64, offset: u64, is_active: bool) {
        if is_active {
            let flags = self.flags.entry(offset >> self.header.cluster_bits).or_default();
            flags[usize::from(entry & COPIED == 0)] += 1;
        }
    }

    /// Counts the tables of internal snapshots.
    fn snapshots(&mut self) -> Result<(), ImageError> {
        let mut at = self.header.snapshots_offset;
        let start = at;
        for _ in 0..self.header.snapshots {
            let mut head = [0; 40];
            self.read(&mut head, at)?;
            let u16_at = |at: usize| u64::from(u16::from_be_bytes([head[at], head[at + 1]]));
            let u32_at = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
            let l1 = u64::from_be_bytes(head[..8].try_into().unwrap_or_default());
            if u64::from(u32_at(8)) > super::header::L1_ENTRIES_MAX || at - start > SNAPSHOTS_MAX {
                self.survey.errors += 1;
                break;
            }
            self.tree(l1, u32_at(8), false)?;
            let len = 40 + u64::from(u32_at(36)) + u16_at(12) + u16_at(14);
            at += len.next_multiple_of(8);
        }
        if at > start {
            self.count_use(start, at - start);
        }
        Ok(())
    }

    /// Counts the tables and the bits of bitmaps, if those that it names are right.
    fn bitmaps(&mut self) {
        if !bitmaps::are_named(self.header) {
            return;
        }
        match bitmaps::clusters(self.disk, self.header) {
            Ok(all) => all
                .iter()
                .for_each(|range| self.count_use(range.start, range.end - range.start)),
            Err(_) => self.survey.errors += 1,
        }
    }

    fn compare(&mut self, blocks: &[u64]) -> Result<(), ImageError> {
        let header = self.header;
        let per_block = (header.cluster() * 8) >> header.refcount_order;
        let mut uses = std::mem::take(&mut self.uses);
        for (number, block) in (0..).zip(blocks) {
            let block = block & REFCOUNT_OFFSET;
            if block == 0 {
                continue;
            }
            let mut bytes = vec![0; header.cluster() as usize];
            self.read(&mut bytes, block)?;
            for index in 0..per_block {
                let counted = refcount(&bytes, index, header.refcount_order);
                let cluster = number * per_block + index;
                let used = uses.remove(&cluster).unwrap_or(0);
                let [with, without] = self.flags.remove(&cluster).unwrap_or_default();
                self.survey.errors += if counted == 1 { without } else { with };
                self.survey.used += u64::from(used > 0);
                self.survey.leaks += u64::from(counted > used);
                self.survey.errors += u64::from(counted < used);
            }
        }
        // What is left is used and has no refcount at all.
        self.survey.errors += uses.len() as u64;
        Ok(())
    }

    /// Counts one more use of the clusters of a range.
    fn count_use(&mut self, offset: u64, len: u64) {
        if len == 0 {
            return;
        }
        match offset.checked_add(len) {
            Some(end) if offset < self.end.next_multiple_of(self.header.cluster()) => {
                let bits = self.header.cluster_bits;
                for number in offset >> bits..=(end - 1) >> bits {
                    *self.uses.entry(number).or_default() += 1;
                }
            }
            _ => self.survey.errors += 1,
        }
    }

    fn table(&self, offset: u64, len: u64) -> Result<Vec<u64>, ImageError> {
        let mut bytes = vec![0; len as usize];
        self.read(&mut bytes, offset)?;
        let entries = bytes.chunks_exact(8);
        Ok(entries
            .map(|entry| u64::from_be_bytes(entry.try_into().unwrap_or_default()))
            .collect())
    }

    /// Reads; what is behind the end of the file is zeroes.
    fn read(&self, into: &mut [u8], offset: u64) -> Result<(), ImageError> {
        let read = check::read(self.disk, into, offset);
        read.map(drop)
            .map_err(|source| system(self.disk.path(), "read its tables", source))
    }
}

/// A refcount of `1 << order` bits.
fn refcount(block: &[u8], index: u64, order: u32) -> u64 {
    let bits = 1u64 << order;
    if bits < 8 {
        let byte = block[(index * bits / 8) as usize];
        return u64::from(byte) >> (index * bits % 8) & ((1 << bits) - 1);
    }
    let bytes = (bits / 8) as usize;
    let start = index as usize * bytes;
    block[start..start + bytes]
        .iter()
        .fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// Bit 62 of an entry: the cluster is compressed.
const COMPRESSED: u64 = 1 << 62;
/// Bit 63: its refcount is 1.
const COPIED: u64 = 1 << 63;
/// As of the format, in bytes.
const SNAPSHOTS_MAX: u64 = 1 << 30;
const CHAIN_MAX: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_of_all_widths_are_read() {
        assert_eq!(refcount(&[0b0000_0100], 2, 0), 1);
        assert_eq!(refcount(&[0, 0x30], 3, 2), 3);
        assert_eq!(refcount(&[7], 0, 3), 7);
        assert_eq!(refcount(&[0, 0, 1, 2], 1, 4), 0x102);
        assert_eq!(refcount(&[0, 0, 0, 0, 0, 0, 1, 0], 0, 6), 256);
    }
}
