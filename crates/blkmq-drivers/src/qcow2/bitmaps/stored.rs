//! The bitmaps of an image in its file: read when the image is first used, marked as in use before the first change, and
//! written when nobody changes the disk any more. All of a new state is in new clusters, and durable, before the header
//! names it; nothing names it while the header changes. So at each moment the file has bitmaps that are right, or ones
//! that say themselves that they are not, or none.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::check;
use super::super::header::{AUTOCLEAR_BITMAPS, Header};
use super::super::tables::Tables;
use super::super::transfer;
use super::directory::{self, AUTO, DIRTY, Entry, IN_USE};
use super::{Bitmap, Bitmaps, MEMORY_MAX, NAME_MAX, header};
use crate::file::FileDisk;

/// What the file has of bitmaps.
#[derive(Debug, Default)]
pub(super) struct Stored {
    kept: Vec<Kept>,
    /// Where the directory is, in bytes.
    directory: Range<u64>,
}

/// A bitmap in the file.
#[derive(Clone, Debug)]
struct Kept {
    entry: Entry,
    /// The clusters that its table and its bits have, by number.
    clusters: Vec<Range<u64>>,
    /// Its bits are known: they were read, or it is new.
    is_known: bool,
}

/// Returns whether a header says that there are bitmaps, and that they are right.
pub(in super::super) fn are_named(header: &Header) -> bool {
    header.autoclear & AUTOCLEAR_BITMAPS != 0
}

/// The names of the bitmaps of an image that can be used, or, if another daemon uses them, that may be. Nothing else of them
/// is looked at.
pub(in super::super) fn names(disk: &FileDisk, header: &Header, are_used: bool) -> Vec<String> {
    if !are_named(header) {
        return Vec::new();
    }
    let entries = read_directory(disk, header).map_or_else(|_| Vec::new(), |(entries, _)| entries);
    let usable = entries
        .into_iter()
        .filter(|entry| entry.is_known() && (are_used || !entry.is_in_use()));
    usable
        .filter_map(|entry| String::from_utf8(entry.name).ok())
        .collect()
}

/// The clusters of the file that bitmaps have, with the directory's: in bytes.
pub(in super::super) fn clusters(disk: &FileDisk, header: &Header) -> Result<Vec<Range<u64>>, String> {
    let (entries, directory) = read_directory(disk, header)?;
    let (mut all, mut room) = (vec![directory], TABLES_MAX);
    for entry in &entries {
        let table = read_table(disk, header, entry, &mut room)?;
        all.extend(ranges(header, entry, &table));
    }
    Ok(all)
}

impl Bitmaps {
    /// Reads the bitmaps of an image. Blocks.
    ///
    /// # Errors
    /// Why none of them can be used: they are not to be kept then.
    pub(in super::super) fn load(&self, disk: &FileDisk, header: &Header) -> Result<(), String> {
        let (entries, directory) = read_directory(disk, header)?;
        let (mut kept, mut all) = (Vec::new(), Vec::new());
        all.push(directory.start..directory.end.next_multiple_of(header.cluster()));
        let (mut tables, mut room) = (Vec::new(), TABLES_MAX);
        for entry in entries {
            let table = read_table(disk, header, &entry, &mut room)?;
            let own = ranges(header, &entry, &table);
            all.extend_from_slice(&own);
            let number =
                |range: &Range<u64>| range.start >> header.cluster_bits..range.end >> header.cluster_bits;
            kept.push(Kept {
                entry,
                clusters: own.iter().map(number).collect(),
                is_known: false,
            });
            tables.push(table);
        }
        check::tables_beside(disk, header, &all).map_err(|error| error.to_string())?;
        let (mut list, mut memory) = (Vec::new(), 0);
        for (kept, table) in kept.iter_mut().zip(&tables) {
            let Some(bitmap) = of_entry(&kept.entry, header, &mut memory) else {
                let name = String::from_utf8_lossy(&kept.entry.name);
                tracing::warn!(
                    "image {:?}: its bitmap {name:?} is not used: it was not stored by its last writer, or is of an unknown kind",
                    disk.path()
                );
                continue;
            };
            read_bits(disk, header, table, &bitmap).map_err(|error| error.to_string())?;
            kept.is_known = true;
            list.push(Arc::new(bitmap));
        }
        let has_any = kept.iter().any(Kept::has_to_be_marked);
        *self.stored() = Stored { kept, directory };
        self.change(|old| *old = list);
        self.is_idle.store(has_any, Ordering::SeqCst);
        Ok(())
    }

    /// Takes the bits of bitmaps of the same disk in another image, for those that the file has, in use, by the same names.
    pub(in super::super) fn adopt(&self, others: &[Arc<Bitmap>]) {
        let mut stored = self.stored();
        let mut list = Vec::new();
        for kept in &mut stored.kept {
            let is_it = |bitmap: &&Arc<Bitmap>| bitmap.name.as_bytes() == kept.entry.name;
            if let Some(bitmap) = others.iter().find(is_it).filter(|_| kept.entry.is_in_use()) {
                kept.is_known = true;
                list.push(Arc::clone(bitmap));
            }
        }
        self.change(|own| *own = list);
    }

    /// Has the file say that its bitmaps are in use, if it does not. Blocks.
    ///
    /// # Errors
    /// The system's: the disk must not change then.
    pub(in super::super) fn mark(&self, tables: &Tables) -> io::Result<()> {
        let mut stored = self.stored();
        if !self.is_idle() {
            return Ok(());
        }
        let mut marked = stored.kept.clone();
        marked.iter_mut().for_each(Kept::mark);
        // Only flags change, each in a byte of its own, so half of it is a directory, too.
        let bytes = directory::bytes(marked.iter().map(|kept| &kept.entry));
        transfer::write(tables.disk(), stored.directory.start, &bytes)?;
        tables.disk().sync()?;
        stored.kept = marked;
        self.is_idle.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Writes the bits, and has the file say that they are right: the disk does not change any more, unless they are marked
    /// once more. Blocks.
    ///
    /// # Errors
    /// The system's. Then the file says that they are in use, or names none.
    pub(in super::super) fn store(&self, tables: &Tables) -> io::Result<()> {
        let mut stored = self.stored();
        if self.is_idle() || !stored.kept.iter().any(|kept| kept.is_known) {
            return Ok(());
        }
        let list = self.list();
        let (mut next, mut made) = (Vec::new(), Vec::new());
        let written = stored.kept.iter().try_for_each(|kept| {
            let bitmap = list
                .iter()
                .find(|bitmap| bitmap.name.as_bytes() == kept.entry.name);
            next.push(match bitmap.filter(|_| kept.is_known) {
                Some(bitmap) => write_bitmap(tables, bitmap, &kept.entry, &mut made)?,
                None => kept.clone(),
            });
            Ok(())
        });
        self.replace(tables, &mut stored, written.map(|()| next), made)
    }

    /// Adds a bitmap to the file that has no changes yet: as one in use, as those are that there are. Its bits are known as
    /// soon as it is in the list. Blocks.
    ///
    /// # Errors
    /// There is one of that name, there is no room, or the system's.
    pub(in super::super) fn add(&self, tables: &Tables, bitmap: &Bitmap) -> io::Result<()> {
        let mut stored = self.stored();
        let name = bitmap.name.as_bytes();
        if stored.kept.iter().any(|kept| kept.entry.name == name) {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "there is a bitmap of that name: remove it first",
            ));
        }
        if stored.kept.len() as u64 >= COUNT_MAX {
            return Err(io::Error::other(format!("it has {COUNT_MAX} bitmaps already")));
        }
        let entry = Entry {
            table_offset: 0,
            table_entries: 0,
            flags: 0,
            kind: DIRTY,
            granularity_bits: bitmap.granularity_bits as u8,
            name: name.to_vec(),
            extra: Vec::new(),
        };
        let (mut next, mut made) = (stored.kept.clone(), Vec::new());
        let written = write_bitmap(tables, bitmap, &entry, &mut made).map(|new| {
            next.push(new);
            next.iter_mut().for_each(Kept::mark);
            next
        });
        self.replace(tables, &mut stored, written, made)
    }

    /// Removes a bitmap from the file. Nobody has it in a list. Blocks.
    ///
    /// # Errors
    /// There is none of that name, or the system's.
    pub(in super::super) fn remove(&self, tables: &Tables, name: &str) -> io::Result<()> {
        let mut stored = self.stored();
        let is_it = |kept: &Kept| kept.entry.name == name.as_bytes();
        if !stored.kept.iter().any(is_it) {
            return Err(not_there());
        }
        let next = stored.kept.iter().filter(|kept| !is_it(kept)).cloned().collect();
        self.replace(tables, &mut stored, Ok(next), Vec::new())
    }

    /// Puts what is in new clusters into the place of what the file has. On an error before anything was changed, what was
    /// `made` is given back.
    fn replace(
        &self,
        tables: &Tables,
        stored: &mut Stored,
        next: io::Result<Vec<Kept>>,
        mut made: Vec<Range<u64>>,
    ) -> io::Result<()> {
        let begun = next.and_then(|next| {
            let bytes = directory::bytes(next.iter().map(|kept| &kept.entry));
            let directory = match next.is_empty() {
                true => 0..0,
                false => {
                    header::make(tables)?;
                    let clusters = tables.write_apart(&bytes)?;
                    made.push(clusters.clone());
                    let start = clusters.start * tables.cluster();
                    start..start + bytes.len() as u64
                }
            };
            // All of it is counted and durable.
            tables.flush()?;
            header::set_valid(tables, false)?;
            Ok(Stored {
                kept: next,
                directory,
            })
        });
        let next = match begun {
            Ok(next) => next,
            Err(error) => {
                tables.release(made);
                return Err(error);
            }
        };
        // From here on, the file names none until all is done.
        let named = match next.kept.len() as u32 {
            0 => header::remove(tables),
            count => {
                let Range { start, end } = next.directory;
                header::name(tables, count, start, end - start)
            }
        };
        if let Err(error) = named {
            self.forget(stored);
            return Err(error);
        }
        let valid = match next.kept.is_empty() {
            true => Ok(()),
            false => header::set_valid(tables, true),
        };
        let former = std::mem::replace(stored, next);
        // If the last step has failed, the file may say either, so it is to be marked as if it had not.
        let is_idle = stored.kept.iter().any(Kept::has_to_be_marked);
        self.is_idle.store(is_idle, Ordering::SeqCst);
        valid?;
        let cluster = tables.cluster();
        let mut left = Vec::new();
        left.push(former.directory.start / cluster..former.directory.end.div_ceil(cluster));
        let stays = |kept: &Kept| {
            let mut now = stored.kept.iter();
            now.any(|now| now.entry.name == kept.entry.name && now.clusters == kept.clusters)
        };
        let gone = former.kept.into_iter().filter(|kept| !stays(kept));
        left.extend(gone.flat_map(|kept| kept.clusters));
        tables.release(left);
        // They are free after this one. If it fails, they are lost, as after a crash.
        let _ = tables.flush();
        Ok(())
    }

    /// The file has none any more.
    fn forget(&self, stored: &mut Stored) {
        *stored = Stored::default();
        // Who has the list sets bits for nobody.
        self.change(Vec::clear);
        self.is_idle.store(false, Ordering::SeqCst);
    }
}

impl Stored {
    /// The name, the granularity in bytes, and whether changes set bits, of each.
    pub(super) fn describe(&self) -> impl Iterator<Item = (String, u64, bool)> {
        self.kept.iter().map(|kept| {
            let name = String::from_utf8_lossy(&kept.entry.name).into_owned();
            let granularity = 1u64.checked_shl(kept.entry.granularity_bits.into()).unwrap_or(0);
            (name, granularity, kept.entry.is_auto())
        })
    }
}

impl Kept {
    /// Returns whether a change of the disk makes the file wrong about it.
    fn has_to_be_marked(&self) -> bool {
        (self.is_known || self.entry.is_auto()) && !self.entry.is_in_use()
    }

    fn mark(&mut self) {
        if self.has_to_be_marked() {
            self.entry.flags |= IN_USE;
        }
    }
}

/// Writes the bits of a bitmap and their table to new clusters, which `made` gets.
fn write_bitmap(
    tables: &Tables,
    bitmap: &Bitmap,
    entry: &Entry,
    made: &mut Vec<Range<u64>>,
) -> io::Result<Kept> {
    let cluster = tables.cluster();
    let (first, mut table) = (made.len(), Vec::new());
    for bits in bitmap.bytes().chunks(cluster as usize) {
        let is_all = |byte: u8| bits.iter().all(|other| *other == byte);
        let word = match (is_all(0), is_all(0xff) && bits.len() as u64 == cluster) {
            (true, _) => 0,
            (_, true) => ALL_SET,
            _ => {
                let clusters = tables.write_apart(bits)?;
                made.push(clusters.clone());
                clusters.start * cluster
            }
        };
        table.extend_from_slice(&word.to_be_bytes());
    }
    let clusters = tables.write_apart(&table)?;
    made.push(clusters.clone());
    Ok(Kept {
        entry: Entry {
            table_offset: clusters.start * cluster,
            table_entries: (table.len() / 8) as u32,
            flags: if bitmap.is_enabled { AUTO } else { 0 },
            ..entry.clone()
        },
        clusters: made[first..].to_vec(),
        is_known: true,
    })
}

/// Reads the directory. Returns where it is, too, in bytes.
fn read_directory(disk: &FileDisk, header: &Header) -> Result<(Vec<Entry>, Range<u64>), String> {
    let extension = header.bitmaps.ok_or("its header does not say where they are")?;
    let (offset, len) = (extension.directory_offset, extension.directory_len);
    let end = offset.checked_add(len).filter(|_| is_cluster(header, offset));
    let Some(end) = end.filter(|_| len <= DIRECTORY_MAX && u64::from(extension.count) <= COUNT_MAX) else {
        return Err(format!("their directory of {len} bytes at byte {offset} is none"));
    };
    let bytes = read(disk, offset, len)?;
    let entries = directory::parse(&bytes, extension.count);
    Ok((entries.ok_or("their directory is not sound")?, offset..end))
}

/// Reads the table of a bitmap: of at most `room` bytes, which become less.
fn read_table(disk: &FileDisk, header: &Header, entry: &Entry, room: &mut u64) -> Result<Vec<u64>, String> {
    let len = u64::from(entry.table_entries) * 8;
    if len > *room || len > 0 && !is_cluster(header, entry.table_offset) {
        return Err(format!(
            "a table of {len} bytes at byte {} is none",
            entry.table_offset
        ));
    }
    *room -= len;
    let bytes = read(disk, entry.table_offset, len)?;
    let words = bytes.chunks_exact(8);
    let words = words.map(|word| u64::from_be_bytes(word.try_into().unwrap_or_default()));
    let is_sound = |word: &u64| matches!(*word, 0 | ALL_SET) || is_cluster(header, *word);
    let words: Vec<u64> = words.collect();
    match words.iter().find(|word| !is_sound(word)) {
        Some(word) => Err(format!("an entry {word:#x} of a table is none")),
        None => Ok(words),
    }
}

/// The clusters of a bitmap's table and its bits, in bytes.
fn ranges(header: &Header, entry: &Entry, table: &[u64]) -> Vec<Range<u64>> {
    let cluster = header.cluster();
    let len = (u64::from(entry.table_entries) * 8).next_multiple_of(cluster);
    let own = entry.table_offset..entry.table_offset + len;
    let bits = table.iter().filter(|word| **word > ALL_SET);
    let bits = bits.map(|offset| *offset..*offset + cluster);
    bits.chain([own]).filter(|range| !range.is_empty()).collect()
}

/// Memory for the bits of a bitmap; `None` if they cannot be used. `memory` has what all of them need.
fn of_entry(entry: &Entry, header: &Header, memory: &mut u64) -> Option<Bitmap> {
    let name = String::from_utf8(entry.name.clone()).ok()?;
    if entry.is_in_use() || !entry.is_known() || name.len() > NAME_MAX {
        return None;
    }
    let bits = u32::from(entry.granularity_bits);
    let bytes = header.size.div_ceil(1 << bits).div_ceil(8);
    let needed = bytes.div_ceil(header.cluster());
    *memory += bytes;
    if u64::from(entry.table_entries) != needed || *memory > MEMORY_MAX {
        return None;
    }
    Some(Bitmap::new(name, bits, entry.is_auto(), header.size))
}

fn read_bits(disk: &FileDisk, header: &Header, table: &[u64], bitmap: &Bitmap) -> Result<(), String> {
    let cluster = header.cluster() as usize;
    let len = bitmap.bits().div_ceil(8) as usize;
    for (number, word) in table.iter().enumerate() {
        let at = number * cluster;
        let now = cluster.min(len.saturating_sub(at));
        match *word {
            0 => {}
            ALL_SET => bitmap.fill(at, &vec![0xff; now]),
            offset => bitmap.fill(at, &read(disk, offset, now as u64)?),
        }
    }
    Ok(())
}

/// Reads; all of it is in the file, as far as that was checked.
fn read(disk: &FileDisk, offset: u64, len: u64) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; len as usize];
    match check::read(disk, &mut bytes, offset) {
        Ok(_) => Ok(bytes),
        Err(error) => Err(error.to_string()),
    }
}

fn is_cluster(header: &Header, offset: u64) -> bool {
    offset > 0 && offset.is_multiple_of(header.cluster()) && offset < OFFSET_MAX
}

pub(in super::super) fn not_there() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "there is no bitmap of that name")
}

/// The entry of a table for bits that are all set, and take no space.
const ALL_SET: u64 = 1;
/// Offsets of clusters have 56 bits.
const OFFSET_MAX: u64 = 1 << 56;
/// Most bitmaps of an image.
const COUNT_MAX: u64 = 256;
/// The largest directory, in bytes, and the largest tables of all bitmaps together.
const DIRECTORY_MAX: u64 = 1 << 20;
const TABLES_MAX: u64 = 2 << 20;
