//! The files of a filesystem that forgets, and what becomes of requests for them. `front` passes the kernel's here.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, UNIX_EPOCH};

use fuser::{Errno, FileAttr, FileType, INodeNo};

use super::journal::{FileNumber, Journal, Step};
use super::{Arrived, Cache, Faults};
use crate::medium::{Forgotten, Full, Medium, SECTOR_BYTES};

#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    pub(super) closed: Condvar,
    /// The most bytes of a file.
    pub(super) bytes: u64,
    pub(super) cache: Cache,
}

#[derive(Debug)]
pub(super) struct State {
    files: BTreeMap<FileNumber, Medium>,
    /// The number of the next new file.
    next: FileNumber,
    pub(super) journal: Journal,
    pub(super) faults: Faults,
    pub(super) arrived: Arrived,
    /// How many times files are open.
    pub(super) open: u64,
    /// Power cuts so far: after each, the kernel knows the files by other nodes.
    cuts: u64,
    /// What reads and writes must be multiples of, in bytes.
    pub(super) block: u64,
}

impl Shared {
    /// One file of this name, of `bytes` zeroes.
    pub(super) fn new(name: &str, bytes: usize, cache: Cache) -> Self {
        let mut journal = Journal::default();
        journal.add(Step::Link(name.into(), 0));
        journal.add(Step::End(0, bytes as u64));
        journal.commit();
        Self {
            state: Mutex::new(State {
                files: BTreeMap::from([(0, Medium::new(bytes))]),
                next: 1,
                journal,
                faults: Faults::default(),
                arrived: Arrived::default(),
                open: 0,
                cuts: 0,
                block: 1,
            }),
            closed: Condvar::new(),
            bytes: bytes as u64,
            cache,
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the time that a request is to take; less, if it is set to less meanwhile. Nobody waits for the state.
    fn pause(&self) {
        let began = Instant::now();
        loop {
            let left = self.state().faults.delay.saturating_sub(began.elapsed());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(PAUSE_MAX));
        }
    }

    /// Makes an empty file of a name that nothing has.
    pub(super) fn create(&self, name: &OsStr) -> Result<INodeNo, Errno> {
        let mut state = self.state();
        if state.journal.find(name).is_some() {
            return Err(Errno::EEXIST);
        }
        let file = state.next;
        state.next += 1;
        state.files.insert(file, Medium::new(self.bytes as usize));
        state.journal.add(Step::Link(name.to_owned(), file));
        Ok(state.node(file))
    }

    pub(super) fn read(&self, node: INodeNo, offset: u64, bytes: u32) -> Result<Vec<u8>, Errno> {
        let state = self.state();
        state.refuse_part_of_block(offset, bytes.into())?;
        let file = state.file(node)?;
        let end = state.journal.end(file);
        let len = u64::from(bytes).min(end.saturating_sub(offset));
        Ok(state.files[&file].read(offset.min(end) as usize, len as usize))
    }

    pub(super) fn write(
        &self,
        node: INodeNo,
        offset: u64,
        data: &[u8],
        is_durable: bool,
    ) -> Result<(), Errno> {
        self.state().refuse_part_of_block(offset, data.len() as u64)?;
        let range = self.range(offset, data.len() as u64)?;
        self.pause();
        let mut state = self.state();
        let file = state.file(node)?;
        state.arrived.writes += 1;
        state.arrived.durable_writes += u64::from(is_durable);
        let written = state.medium(file).write(range.0, data);
        state.admit(written)?;
        let end = offset + data.len() as u64;
        if end > state.journal.end(file) {
            state.journal.add(Step::End(file, end));
        }
        if is_durable {
            state.medium(file).sync_range(range.0, data.len());
            state.journal.commit_of(file);
        }
        Ok(())
    }

    pub(super) fn zero(&self, node: INodeNo, offset: u64, len: u64, as_hole: bool) -> Result<(), Errno> {
        let (offset, len) = self.range(offset, len)?;
        if !offset.is_multiple_of(SECTOR_BYTES) || !len.is_multiple_of(SECTOR_BYTES) {
            return Err(Errno::EINVAL);
        }
        self.pause();
        let mut state = self.state();
        let file = state.file(node)?;
        match as_hole {
            true => state.arrived.punches += 1,
            false => state.arrived.zeroes += 1,
        }
        let zeroed = state.medium(file).zero(offset, len, as_hole);
        state.admit(zeroed)
    }

    /// Makes a file end elsewhere.
    pub(super) fn set_end(&self, node: INodeNo, end: u64) -> Result<(), Errno> {
        let end = self.range(0, end)?.1;
        let mut state = self.state();
        let file = state.file(node)?;
        let before = state.journal.end(file);
        if end as u64 == before {
            return Ok(());
        }
        if (end as u64) < before {
            state.medium(file).cut(end);
        }
        state.journal.add(Step::End(file, end as u64));
        Ok(())
    }

    pub(super) fn sync(&self, node: INodeNo) -> Result<(), Errno> {
        let mut state = self.state();
        let file = state.file(node)?;
        let last = state.medium(file).latest();
        drop(state);
        self.pause();
        let mut state = self.state();
        state.arrived.syncs += 1;
        let left = state.faults.failing_sync.as_mut().map(|left| {
            *left = left.saturating_sub(1);
            *left
        });
        if left == Some(0) {
            state.faults.failing_sync = None;
            state.arrived.failed_syncs += 1;
            state.medium(file).lose(last);
            return Err(Errno::EIO);
        }
        state.medium(file).sync(last);
        state.journal.commit_of(file);
        Ok(())
    }

    fn range(&self, offset: u64, len: u64) -> Result<(usize, usize), Errno> {
        match offset.checked_add(len) {
            Some(end) if end <= self.bytes => Ok((offset as usize, len as usize)),
            _ => Err(Errno::EFBIG),
        }
    }

    pub(super) fn attributes(&self, node: INodeNo) -> Result<FileAttr, Errno> {
        let state = self.state();
        let (kind, perm, size, blocks, nlink) = match node {
            INodeNo::ROOT => (FileType::Directory, 0o755, 0, 0, 2),
            node => {
                let file = state.file(node)?;
                let blocks = state.files[&file].allocated_bytes() as u64 / 512;
                let end = state.journal.end(file);
                (
                    FileType::RegularFile,
                    0o600,
                    end,
                    blocks,
                    state.journal.links(file),
                )
            }
        };
        Ok(FileAttr {
            ino: node,
            size,
            blocks,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

impl State {
    /// What the kernel knows a file by.
    pub(super) fn node(&self, file: FileNumber) -> INodeNo {
        INodeNo(FIRST_NODE + self.cuts * FILES_MAX + file)
    }

    /// The file of a node that is not of before a power cut.
    pub(super) fn file(&self, node: INodeNo) -> Result<FileNumber, Errno> {
        let first = self.node(0).0;
        let file = node.0.checked_sub(first);
        file.filter(|file| self.files.contains_key(file))
            .ok_or(Errno::ESTALE)
    }

    /// All that the kernel may know.
    pub(super) fn nodes(&self) -> Vec<INodeNo> {
        self.files.keys().map(|file| self.node(*file)).collect()
    }

    pub(super) fn allocated_bytes(&self) -> usize {
        self.files.values().map(Medium::allocated_bytes).sum()
    }

    pub(super) fn forget(&mut self, seed: u64) -> Forgotten {
        debug_assert_eq!(self.open, 0, "a file is open");
        // New nodes: a computer that has just started knows of no failed write-back that nobody was told of.
        self.cuts += 1;
        self.journal.forget(seed);
        let journal = &self.journal;
        self.files.retain(|file, _| journal.links(*file) > 0);
        let mut all = Forgotten::default();
        for (file, medium) in &mut self.files {
            let forgotten = medium.forget(seed.wrapping_add(*file));
            medium.cut(journal.end(*file) as usize);
            // What is cut off is so for good.
            medium.sync(medium.latest());
            all.changes += forgotten.changes;
            all.dropped += forgotten.dropped;
            all.torn += forgotten.torn;
        }
        all
    }

    /// The content of a file that is there.
    fn medium(&mut self, file: FileNumber) -> &mut Medium {
        let all = self.allocated_bytes();
        let room = self.faults.room;
        let medium = self.files.get_mut(&file).expect("it was found");
        medium.set_room(room.map(|room| medium.allocated_bytes() + room.saturating_sub(all)));
        medium
    }

    pub(super) fn refuse_part_of_block(&self, offset: u64, len: u64) -> Result<(), Errno> {
        match offset.is_multiple_of(self.block) && len.is_multiple_of(self.block) {
            true => Ok(()),
            false => Err(Errno::EINVAL),
        }
    }

    fn admit<T>(&mut self, outcome: Result<T, Full>) -> Result<(), Errno> {
        outcome.map(drop).map_err(|Full| {
            self.arrived.refused += 1;
            Errno::ENOSPC
        })
    }
}

const FIRST_NODE: u64 = 2;
/// How often a request that takes its time looks whether it still has to.
const PAUSE_MAX: Duration = Duration::from_millis(10);
/// Of one mount, for all time: more than there is memory for.
const FILES_MAX: u64 = 1 << 32;
