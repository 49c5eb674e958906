//! The log that dm-log-writes keeps of a disk: it is read entry by entry, and replayed on an image in
//! memory, which then holds what the disk held at that step.
//!
//! The format is the one of Linux's Documentation/admin-guide/device-mapper/log-writes.rst. All
//! numbers are little-endian:
//!
//! ```text
//!  sector 0         1                    …
//!  | super block | entry | its data | entry | its data | …
//!     magic, version, entries (u64), bytes of a sector (u32)
//!                 sector, sectors, flags, bytes (u64); of a mark the name follows in the same sector
//! ```
//!
//! A write is logged when a flush completes that began after the write had completed, a forced one
//! when it completes itself. So the log up to a flush holds what is durable in the worst case.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// The log's entries, one by one.
#[derive(Debug)]
pub struct WriteLog<R> {
    device: R,
    sector_bytes: u64,
    left: u64,
}

/// What the disk was told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Which order it is.
    pub kind: Kind,
    /// All that completed before it was sent is durable.
    pub is_flush: bool,
    /// Its own data is durable.
    pub is_forced: bool,
}

/// The kinds of entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Data from a byte on; none for a flush alone.
    Write {
        /// The first byte.
        offset: u64,
        /// What is written there.
        data: Vec<u8>,
    },
    /// A range that is zeroes afterwards.
    Discard {
        /// The first byte.
        offset: u64,
        /// How many bytes.
        bytes: u64,
    },
    /// A message that somebody has put into the log.
    Mark(String),
}

impl<R: Read + Seek> WriteLog<R> {
    /// Reads the super block.
    ///
    /// # Errors
    /// If it cannot be read, or is none.
    pub fn open(mut device: R) -> Result<Self> {
        let mut head = [0; 28];
        device
            .read_exact(&mut head)
            .context("reading the log's super block")?;
        let (magic, version) = (word(&head, 0), word(&head, 1));
        ensure!(
            magic == MAGIC,
            "the log begins with {magic:#x}, wanted {MAGIC:#x}"
        );
        ensure!(version == 1, "the log is of version {version}, wanted 1");
        let sector_bytes = u64::from(u32::from_le_bytes(head[24..].try_into().expect("four bytes")));
        ensure!(
            sector_bytes.is_power_of_two() && (512..=65536).contains(&sector_bytes),
            "the log has sectors of {sector_bytes} bytes"
        );
        device.seek(SeekFrom::Start(sector_bytes))?;
        Ok(Self {
            device,
            sector_bytes,
            left: word(&head, 2),
        })
    }

    /// Returns the next entry, nothing at the end.
    ///
    /// # Errors
    /// If the log cannot be read, or ends early.
    pub fn next_entry(&mut self) -> Result<Option<Entry>> {
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        let mut head = vec![0; self.sector_bytes as usize];
        self.device.read_exact(&mut head).context("reading an entry")?;
        let (sector, sectors, flags, bytes) =
            (word(&head, 0), word(&head, 1), word(&head, 2), word(&head, 3));
        ensure!(
            flags & !FLAGS == 0 && sectors < SECTORS_MAX,
            "an entry has the flags {flags:#x} and {sectors} sectors"
        );
        let offset = sector * self.sector_bytes;
        let kind = if flags & MARK != 0 {
            let name = head.get(HEAD_BYTES..HEAD_BYTES + bytes as usize);
            let name = name.with_context(|| format!("a mark of {bytes} bytes"))?;
            Kind::Mark(String::from_utf8_lossy(name).trim_end_matches('\0').to_owned())
        } else if flags & DISCARD != 0 {
            let bytes = sectors * self.sector_bytes;
            Kind::Discard { offset, bytes }
        } else {
            let mut data = vec![0; (sectors * self.sector_bytes) as usize];
            self.device
                .read_exact(&mut data)
                .context("reading an entry's data")?;
            Kind::Write { offset, data }
        };
        Ok(Some(Entry {
            kind,
            is_flush: flags & FLUSH != 0,
            is_forced: flags & FUA != 0,
        }))
    }
}

impl Entry {
    /// Says whether the disk may hold something else afterwards.
    pub fn changes_data(&self) -> bool {
        match &self.kind {
            Kind::Write { data, .. } => !data.is_empty(),
            Kind::Discard { .. } => true,
            Kind::Mark(_) => false,
        }
    }
}

/// What a disk holds. Blocks that are zeroes take no memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    blocks: BTreeMap<u64, Box<[u8; BLOCK_BYTES]>>,
}

impl Image {
    /// Reads all of a device.
    ///
    /// # Errors
    /// What reading says.
    pub fn read(device: &Path) -> Result<Self> {
        let file = File::open(device).with_context(|| format!("opening {}", device.display()))?;
        let mut input = BufReader::with_capacity(1 << 20, file);
        let mut image = Self::default();
        let mut block = Box::new([0; BLOCK_BYTES]);
        for index in 0.. {
            match input.read_exact(&mut block[..]) {
                Ok(()) if *block == [0; BLOCK_BYTES] => {}
                Ok(()) => drop(image.blocks.insert(index, block.clone())),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                Err(error) => return Err(error).with_context(|| format!("reading {}", device.display())),
            }
        }
        Ok(image)
    }

    /// Does to the image what the disk was told.
    pub fn apply(&mut self, entry: &Entry) {
        match &entry.kind {
            Kind::Write { offset, data } => self.change(*offset, data.len() as u64, |at, part| {
                part.copy_from_slice(&data[at..at + part.len()]);
            }),
            Kind::Discard { offset, bytes } => self.change(*offset, *bytes, |_, part| part.fill(0)),
            Kind::Mark(_) => {}
        }
    }

    /// Writes the image to a device of zeroes.
    ///
    /// # Errors
    /// What writing says.
    pub fn write(&self, device: &Path) -> Result<()> {
        let mut file = File::options()
            .write(true)
            .open(device)
            .with_context(|| format!("opening {}", device.display()))?;
        for (index, block) in &self.blocks {
            file.seek(SeekFrom::Start(index * BLOCK_BYTES as u64))?;
            file.write_all(&block[..])?;
        }
        file.sync_all()
            .with_context(|| format!("writing to {}", device.display()))
    }

    /// Calls `change` with each piece of the range that lies in one block, and how far into the range
    /// it begins.
    fn change(&mut self, offset: u64, bytes: u64, mut change: impl FnMut(usize, &mut [u8])) {
        let (mut at, end) = (offset, offset + bytes);
        while at < end {
            let (index, from) = (at / BLOCK_BYTES as u64, at as usize % BLOCK_BYTES);
            let len = (BLOCK_BYTES - from).min((end - at) as usize);
            let block = self
                .blocks
                .entry(index)
                .or_insert_with(|| Box::new([0; BLOCK_BYTES]));
            change((at - offset) as usize, &mut block[from..from + len]);
            if **block == [0; BLOCK_BYTES] {
                self.blocks.remove(&index);
            }
            at += len as u64;
        }
    }
}

fn word(bytes: &[u8], index: usize) -> u64 {
    u64::from_le_bytes(bytes[index * 8..][..8].try_into().expect("eight bytes"))
}

const MAGIC: u64 = 0x006a_7366_7773_6872;
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;
/// The last one is metadata of a filesystem, which makes no difference here.
const FLAGS: u64 = FLUSH | FUA | DISCARD | MARK | 16;
const HEAD_BYTES: usize = 32;
/// No request is as long as that: a log that says so is none.
const SECTORS_MAX: u64 = 1 << 32;
const BLOCK_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// Writes a log as dm-log-writes does.
    fn log(entries: &[(u64, u64, u64, &[u8])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for word in [MAGIC, 1, entries.len() as u64] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(512_u32.to_le_bytes());
        bytes.resize(512, 0);
        for (sector, sectors, flags, data) in entries {
            let data_len = if flags & MARK != 0 { data.len() as u64 } else { 0 };
            for word in [*sector, *sectors, *flags, data_len] {
                bytes.extend(word.to_le_bytes());
            }
            if flags & MARK != 0 {
                bytes.extend(*data);
            }
            bytes.resize(bytes.len().next_multiple_of(512), 0);
            if flags & MARK == 0 {
                bytes.extend(*data);
            }
        }
        bytes
    }

    fn entries(bytes: Vec<u8>) -> Result<Vec<Entry>> {
        let mut log = WriteLog::open(Cursor::new(bytes))?;
        let mut entries = Vec::new();
        while let Some(entry) = log.next_entry()? {
            entries.push(entry);
        }
        Ok(entries)
    }

    #[test]
    fn log_is_read_in_its_order_and_replayed_up_to_each_entry() {
        let data = [7; 1024];
        let found = entries(log(&[
            (7, 2, 0, &data),
            (0, 0, FLUSH, &[]),
            (0, 0, MARK, b"m1"),
            (8, 1, DISCARD, &[]),
            (100, 1, FLUSH | FUA, &data[..512]),
        ]))
        .unwrap();
        assert_eq!(found.len(), 5);
        assert_eq!(
            found
                .iter()
                .map(|each| (each.is_flush, each.is_forced))
                .collect::<Vec<_>>(),
            [
                (false, false),
                (true, false),
                (false, false),
                (false, false),
                (true, true)
            ]
        );
        assert_eq!(found[2].kind, Kind::Mark("m1".to_owned()));
        let mut image = Image::default();
        let mut at = |index: u64, block: u64| {
            image.apply(&found[index as usize]);
            image.blocks.get(&block).map(|block| block.to_vec())
        };
        // Sector 7 is the last one of its block, sector 8 the first of the next.
        let first = at(0, 0).unwrap();
        assert_eq!((first[3583], first[3584], first[4095]), (0, 7, 7));
        assert_eq!(at(1, 1).unwrap()[..512], [7; 512]);
        assert_eq!(at(3, 1), None, "zeroes take no memory");
        assert_eq!(at(4, 0).unwrap()[4095], 7);
        assert_eq!(at(4, 12).unwrap()[2048..2560], [7; 512]);
    }

    #[test]
    fn log_that_is_none_or_ends_early_is_refused() {
        assert!(entries(vec![0; 4096]).is_err());
        let mut short = log(&[(0, 8, 0, &[1; 4096])]);
        short.truncate(2048);
        assert!(entries(short).is_err());
        assert!(entries(log(&[(0, 0, 64, &[])])).is_err());
        assert!(entries(log(&[(0, u64::MAX, 0, &[])])).is_err());
    }
}
