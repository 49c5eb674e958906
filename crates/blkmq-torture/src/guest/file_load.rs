//! A load of programs on a filesystem, and what of it must be there after a crash: files, records and
//! blocks whose fsync, O_DSYNC write or fdatasync has returned. A mark is made behind each, and what was
//! synced must be there wherever its mark is seen.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::fmt;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use blkmq_testkit::Random;

use crate::history::content;
use crate::medium::SECTOR_BYTES;

/// Load on one filesystem, by several workers.
#[derive(Debug, Default)]
pub(crate) struct FileLoad {
    synced: Mutex<Vec<Synced>>,
    marks: AtomicU64,
    /// What fails from now on fails because the disk is gone.
    is_over: AtomicBool,
}

/// Something that must be there from a mark on.
#[derive(Clone, Debug)]
struct Synced {
    mark: u64,
    name: String,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    /// A whole file.
    File { sectors: usize, change: u64 },
    /// A file of at least so many sectors.
    Records { sectors: usize },
    /// A block that holds this change, or one that was begun later.
    Block { index: usize, change: u64 },
}

impl FileLoad {
    /// Returns how much was synced.
    pub(crate) fn count(&self) -> usize {
        self.synced().len()
    }

    /// Says that the disk goes away now.
    pub(crate) fn end(&self) {
        // Relaxed: whoever fails early by a hair has a broken run, not a wrong one.
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Works on the filesystem until the disk is gone. `mark` puts a mark where the writes below the
    /// filesystem are logged.
    ///
    /// # Errors
    /// If something fails while the disk is there.
    pub(crate) fn work(
        &self,
        dir: &Path,
        worker: u64,
        seed: u64,
        mark: &dyn Fn(&str) -> Result<()>,
    ) -> Result<()> {
        let mut work = Work {
            load: self,
            dir,
            worker,
            random: Random::new(seed ^ worker << 32),
            changes: 0,
            records: 0,
            mark,
        };
        match work.run() {
            Err(_) if self.is_over.load(Ordering::Relaxed) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Looks for everything whose mark is among those that were reached. Returns how much that is.
    ///
    /// # Errors
    /// What is missing.
    pub(crate) fn check(&self, dir: &Path, reached: &BTreeSet<u64>) -> Result<usize, String> {
        let synced = self.synced();
        let mut count = 0;
        for each in synced.iter().filter(|each| reached.contains(&each.mark)) {
            count += 1;
            each.check(dir)
                .map_err(|found| format!("{each} was synced before mark {}: {found}", each.mark))?;
        }
        Ok(count)
    }

    /// Notes that something was synced: the mark is made behind that.
    fn note_synced(&self, name: &str, what: What, mark: &dyn Fn(&str) -> Result<()>) -> Result<()> {
        let number = self.marks.fetch_add(1, Ordering::Relaxed) + 1;
        mark(&mark_name(number))?;
        self.synced().push(Synced {
            mark: number,
            name: name.to_owned(),
            what,
        });
        Ok(())
    }

    fn synced(&self) -> std::sync::MutexGuard<'_, Vec<Synced>> {
        self.synced.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the number of a mark, nothing if it is not one of the load's.
pub(crate) fn mark_number(name: &str) -> Option<u64> {
    name.strip_prefix(MARK)?.parse().ok()
}

fn mark_name(number: u64) -> String {
    format!("{MARK}{number}")
}

impl Synced {
    fn check(&self, dir: &Path) -> Result<(), String> {
        let found = fs::read(dir.join(&self.name)).map_err(|error| error.to_string())?;
        match self.what {
            What::File { sectors, .. } if found.len() != sectors * SECTOR_BYTES => {
                Err(format!("the file has {} bytes", found.len()))
            }
            What::File { sectors, change } => (0..sectors).try_for_each(|index| {
                let sector = sector(&found, index)?;
                is_equal(sector, &content(index, change), index)
            }),
            What::Records { sectors } => (0..sectors).try_for_each(|index| {
                let sector = sector(&found, index)?;
                is_equal(sector, &content(index, RECORD), index)
            }),
            What::Block { index, change } => (index * BLOCK_SECTORS..(index + 1) * BLOCK_SECTORS)
                .try_for_each(|index| {
                    let sector = sector(&found, index)?;
                    let later = u64::from_le_bytes(sector[16..24].try_into().expect("eight bytes"));
                    match later >= change {
                        true => is_equal(sector, &content(index, later), index),
                        false => Err(format!("sector {index} holds change {later}")),
                    }
                }),
        }
    }
}

impl fmt::Display for Synced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.what {
            What::File { sectors, .. } => write!(f, "file {} of {sectors} sectors", self.name),
            What::Records { sectors } => write!(f, "{sectors} records of {}", self.name),
            What::Block { index, change } => write!(f, "change {change} of block {index} of {}", self.name),
        }
    }
}

/// One worker, with files of its own.
struct Work<'a> {
    load: &'a FileLoad,
    dir: &'a Path,
    worker: u64,
    random: Random,
    changes: u64,
    records: usize,
    mark: &'a dyn Fn(&str) -> Result<()>,
}

impl Work<'_> {
    /// Goes on until something fails.
    fn run(&mut self) -> Result<Infallible> {
        let (table_name, log_name) = (format!("table{}", self.worker), format!("log{}", self.worker));
        let table = File::create(self.dir.join(&table_name))?;
        for index in 0..BLOCKS {
            let change = self.next_change();
            table.write_all_at(&block(index, change), (index * BLOCK_BYTES) as u64)?;
        }
        table.sync_all()?;
        self.sync_dir()?;
        let mut log = File::options()
            .create(true)
            .append(true)
            .custom_flags(libc::O_DSYNC)
            .open(self.dir.join(&log_name))?;
        log.sync_all()?;
        loop {
            match self.random.below(4) {
                0 => self.write_file(true)?,
                1 => self.append(&mut log, &log_name)?,
                2 => self.change_block(&table, &table_name)?,
                _ => self.write_file(false)?,
            }
        }
    }

    /// Writes a new file. Half of those that are synced get their names last; the others are noise,
    /// for which nobody waits.
    fn write_file(&mut self, is_synced: bool) -> Result<()> {
        let change = self.next_change();
        let sectors = 1 + self.random.below(FILE_SECTORS_MAX) as usize;
        let data: Vec<u8> = (0..sectors).flat_map(|index| content(index, change)).collect();
        let name = format!("file{}-{change}", self.worker);
        if !is_synced {
            // Few, again and again: blocks become free and are used again.
            let noise = format!("noise{}-{}", self.worker, change % NOISE_FILES);
            match fs::remove_file(self.dir.join(&noise)) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
                _ => {}
            }
            return Ok(fs::write(self.dir.join(noise), data)?);
        }
        let is_renamed = self.random.below(2) == 0;
        let first_name = if is_renamed {
            format!("{name}.new")
        } else {
            name.clone()
        };
        let mut file = File::create(self.dir.join(&first_name))?;
        file.write_all(&data)?;
        file.sync_all()?;
        if is_renamed {
            fs::rename(self.dir.join(first_name), self.dir.join(&name))?;
            self.sync_dir()?;
        }
        self.load
            .note_synced(&name, What::File { sectors, change }, self.mark)
    }

    fn append(&mut self, log: &mut File, name: &str) -> Result<()> {
        let records = self.records + 1 + self.random.below(8) as usize;
        let data: Vec<u8> = (self.records..records)
            .flat_map(|index| content(index, RECORD))
            .collect();
        log.write_all(&data)?;
        self.records = records;
        self.load
            .note_synced(name, What::Records { sectors: records }, self.mark)
    }

    fn change_block(&mut self, table: &File, name: &str) -> Result<()> {
        let change = self.next_change();
        let index = self.random.below(BLOCKS as u64) as usize;
        table.write_all_at(&block(index, change), (index * BLOCK_BYTES) as u64)?;
        table.sync_data()?;
        self.load
            .note_synced(name, What::Block { index, change }, self.mark)
    }

    fn sync_dir(&self) -> Result<()> {
        Ok(File::open(self.dir)?.sync_all()?)
    }

    fn next_change(&mut self) -> u64 {
        self.changes += 1;
        self.changes
    }
}

fn block(index: usize, change: u64) -> Vec<u8> {
    (index * BLOCK_SECTORS..(index + 1) * BLOCK_SECTORS)
        .flat_map(|sector| content(sector, change))
        .collect()
}

fn sector(found: &[u8], index: usize) -> Result<&[u8], String> {
    found
        .get(index * SECTOR_BYTES..(index + 1) * SECTOR_BYTES)
        .ok_or_else(|| format!("sector {index} is missing, the file has {} bytes", found.len()))
}

fn is_equal(found: &[u8], wanted: &[u8], index: usize) -> Result<(), String> {
    match found == wanted {
        true => Ok(()),
        false => Err(format!("sector {index} holds {:02x?}…", &found[..24])),
    }
}

const MARK: &str = "m";
const BLOCK_BYTES: usize = 4096;
const BLOCK_SECTORS: usize = BLOCK_BYTES / SECTOR_BYTES;
/// Blocks of the file that is changed in place.
const BLOCKS: usize = 32;
const FILE_SECTORS_MAX: u64 = 128;
const NOISE_FILES: u64 = 4;
/// What the content of records is made of.
const RECORD: u64 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    /// A worker whose disk is gone after twenty marks; nothing of it is lost.
    fn work(dir: &Path) -> FileLoad {
        let load = FileLoad::default();
        let mark = |name: &str| {
            if mark_number(name) == Some(21) {
                load.end();
                anyhow::bail!("the disk is gone");
            }
            Ok(())
        };
        load.work(dir, 1, 1, &mark).unwrap();
        load
    }

    #[test]
    fn synced_files_are_expected_from_their_mark_on() {
        let dir = std::env::temp_dir().join(format!("blkmq-file-load-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let load = work(&dir);
        let all: BTreeSet<u64> = (1..=20).collect();
        assert_eq!(load.check(&dir, &all), Ok(20));
        let synced = load.synced().clone();
        for each in synced {
            let (path, mark) = (dir.join(&each.name), BTreeSet::from([each.mark]));
            let whole = fs::read(&path).unwrap();
            let at = match each.what {
                What::Block { index, .. } => index * BLOCK_BYTES,
                _ => 0,
            };
            let mut other = whole.clone();
            other[at + 100] ^= 1;
            for wrong in [&other[..], &whole[..at], &vec![0; whole.len()]] {
                fs::write(&path, wrong).unwrap();
                assert!(load.check(&dir, &mark).is_err(), "{each}");
            }
            fs::remove_file(&path).unwrap();
            assert!(load.check(&dir, &mark).is_err(), "{each}");
            assert_eq!(load.check(&dir, &BTreeSet::new()), Ok(0));
            fs::write(&path, whole).unwrap();
        }
        assert_eq!(load.check(&dir, &all), Ok(20));
        fs::remove_dir_all(dir).unwrap();
    }
}
