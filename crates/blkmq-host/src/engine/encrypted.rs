//! Encrypted disks: each lies on one other disk, mapped or not, from a first byte on. `control::encrypted` adds
//! them to a running engine, since their headers are read through it; `reactor::encrypt` has their bios on
//! each thread. What the cipher is, and where its key comes from, is its maker's affair.
//!
//! They are numbered behind the mapped disks of [`MAPPED`], from `FIRST` on: to everybody else they are
//! mapped disks.

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use blkmq_core::bio::{Bio, Flags, Op, Status};
use blkmq_core::ids::{DiskId, GroupId};
use blkmq_core::limits::Limits;

use crate::block_locks::{Announcements, BlockLocks};
use crate::device::{Allocation, Extent, Losses, State};
use crate::disk::{Disk, MAPPED, QueueId};
use crate::error::Error;

/// The cipher of a disk's sectors.
pub trait SectorCipher: Send + Sync {
    /// Encrypts whole sectors in place; `offset` is the first one's on the disk, in bytes.
    fn encrypt(&self, offset: u64, bytes: &mut [u8]);

    /// Decrypts whole sectors in place.
    fn decrypt(&self, offset: u64, bytes: &mut [u8]);

    /// Encrypts whole sectors from memory that others may change meanwhile. `into` is as long.
    fn encrypt_from(&self, offset: u64, from: &[Cell<u8>], into: &mut [u8]);

    /// Decrypts whole sectors in memory that others may change meanwhile.
    fn decrypt_shared(&self, offset: u64, bytes: &[Cell<u8>]);

    /// Wipes what this thread's calls have left on its stack, since they may have put parts of a key there. Called
    /// before the thread sleeps.
    fn wipe_stack(&self) {}
}

/// An encrypted disk that is to be added.
#[derive(Clone)]
pub struct EncryptedSpec {
    /// Its name, unique in the engine.
    pub name: String,
    /// A description, for people. May be empty.
    pub description: String,
    /// As of [`crate::DiskEntry`].
    pub serial: Option<String>,
    /// As of [`crate::DiskEntry`].
    pub export: Option<String>,
    /// The name of the disk below.
    pub below: String,
    /// Where its data are there. Without that, since its header cannot be used, the disk has no bytes, and stays
    /// locked: it keeps others from the disk below.
    pub data: Option<EncryptedData>,
    /// Whether writes are refused, though the disk below may allow them.
    pub read_only: bool,
    /// The block size that clients are told, in bytes. Default: the larger of a sector and the block below. What is smaller
    /// than a sector is read, changed and written in whole ones.
    pub block_size: Option<u32>,
    /// Whether discards pass: they show where there is data.
    pub discard: bool,
    /// Its group: it has the same number on all queues.
    pub group: GroupId,
    /// The path of that group.
    pub group_path: String,
    /// Its cipher. Without one the disk is locked: its bios fail until [`Control::unlock`](crate::Control::unlock).
    pub cipher: Option<Arc<dyn SectorCipher>>,
}

/// Where the data of an encrypted disk are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncryptedData {
    /// Where they begin on the disk below, in bytes.
    pub start: u64,
    /// Their bytes; none for all that follow.
    pub size: Option<u64>,
    /// Bytes of a sector: the least block size.
    pub sector: u32,
}

/// An encrypted disk, as all threads have it.
pub(crate) struct Encrypted {
    /// Queue and number of the disk below.
    pub(crate) below: (QueueId, DiskId),
    /// The queue whose groups' weights count for the time of its encryption: that of the disk below, or the first of them.
    pub(crate) groups_of: QueueId,
    /// Where its data begins there.
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) read_only: bool,
    pub(crate) limits: Limits,
    /// What is encrypted, read and written together, in bytes: a sector, or a block of the disk below.
    pub(crate) unit: u32,
    /// The sectors that small writes change.
    pub(crate) locks: BlockLocks,
    /// What the threads write to the encrypted disks of the engine.
    pub(crate) writers: Arc<Announcements>,
    cipher: OnceLock<Arc<dyn SectorCipher>>,
}

impl Encrypted {
    /// Gives it its cipher, for ever. Says whether it had none.
    pub(crate) fn unlock(&self, cipher: Arc<dyn SectorCipher>) -> bool {
        self.cipher.set(cipher).is_ok()
    }

    #[inline]
    pub(crate) fn cipher(&self) -> Option<&dyn SectorCipher> {
        self.cipher.get().map(|cipher| &**cipher)
    }

    /// The whole sectors in which a range lies.
    #[inline]
    pub(crate) fn sectors(&self, range: &Range<u64>) -> Range<u64> {
        let mask = u64::from(self.unit) - 1;
        range.start & !mask..(range.end + mask) & !mask
    }

    /// Checks a submitter's bio.
    ///
    /// # Errors
    /// The status with which it must end.
    pub(crate) fn check(&self, bio: &Bio) -> Result<(), Status> {
        self.limits.check_bio(bio, self.size, self.read_only)?;
        if bio.op == Op::WriteZeroes && bio.flags.has(Flags::FAST_ONLY) {
            return Err(Status::NotSupported);
        }
        match self.cipher() {
            Some(_) => Ok(()),
            None => Err(Status::Io),
        }
    }
}

/// Says whether a disk is an encrypted one.
pub(crate) fn is_encrypted(disk: &Disk) -> bool {
    disk.queue == MAPPED && disk.id.0 >= FIRST
}

/// Finds the disk below, and checks that the data lie in it.
pub(super) fn make(
    spec: &EncryptedSpec,
    disks: &[Disk],
    writers: Arc<Announcements>,
    queues_of: impl FnOnce(&Disk) -> Vec<QueueId>,
) -> Result<(Disk, Arc<Encrypted>), Error> {
    let error = |why: String| Error::Disk(format!("disk {}: {why}", spec.name));
    let Some(below) = disks.iter().find(|disk| disk.name == spec.below) else {
        return Err(error(format!("there is no disk {} for it to lie on", spec.below)));
    };
    if let Some(user) = &below.used_by {
        return Err(error(format!(
            "disk {} is used by disk {user} already",
            below.name
        )));
    }
    let sector = spec.data.map_or(0, |data| data.sector);
    let unit = match below.limits.any_alignment {
        true => sector.max(LEAST_UNIT),
        false => sector.max(below.block_size),
    };
    let block = spec.block_size.unwrap_or(sector.max(below.block_size));
    let (start, size) = match spec.data {
        None => (0, 0),
        Some(data) => place(data, block.max(unit), below).map_err(error)?,
    };
    let limits = &below.limits;
    let discard_max = if spec.discard { limits.discard_max } else { 0 };
    let encrypted = Encrypted {
        below: (below.queue, below.id),
        groups_of: queues_of(below).first().copied().unwrap_or_default(),
        start,
        size,
        read_only: spec.read_only || below.read_only,
        limits: Limits {
            logical_block: block,
            any_alignment: true,
            physical_block: limits.physical_block.max(unit).max(block),
            // The bios below are split there.
            boundary: 0,
            discard_max: discard_max - discard_max % u64::from(unit.max(block)),
            // Zeroes are written, encrypted.
            zeroes_max: ZEROES_MAX,
            zeroes_are_written: true,
            ..limits.clone()
        },
        unit,
        locks: BlockLocks::default(),
        writers,
        cipher: OnceLock::new(),
    };
    if let Some(cipher) = &spec.cipher {
        encrypted.unlock(Arc::clone(cipher));
    }
    Ok((below.clone(), Arc::new(encrypted)))
}

/// The first byte of data on the disk below, and how many there are.
///
/// # Errors
/// Why there cannot be any, for people.
fn place(data: EncryptedData, block: u32, below: &Disk) -> Result<(u64, u64), String> {
    let start = data.start;
    let left = below.size.saturating_sub(start);
    let size = data.size.unwrap_or(left - left % u64::from(block));
    if !start.is_multiple_of(below.block_size.into()) {
        return Err(format!(
            "its data begin at byte {start} of disk {}, which is no multiple of that one's block size {}",
            below.name, below.block_size
        ));
    }
    if size == 0 || size > left || !size.is_multiple_of(block.into()) {
        return Err(format!(
            "its data, {size} bytes from byte {start} on, must be whole blocks of {block} bytes within the {} bytes of disk {}",
            below.size, below.name
        ));
    }
    Ok((start, size))
}

/// What is known of an encrypted disk beside its bios.
pub(super) struct EncryptedAllocation {
    pub(super) encrypted: Arc<Encrypted>,
    pub(super) below: Disk,
}

impl Allocation for EncryptedAllocation {
    /// Everything is data: even what nobody has written reads as something else than zeroes.
    fn extents(&self, _: DiskId, offset: u64, len: u64, max: usize, out: &mut Vec<Extent>) -> io::Result<()> {
        let size = self.encrypted.size;
        let end = offset.saturating_add(len).min(size);
        if offset >= end || max == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        out.push(Extent::data(end - offset));
        Ok(())
    }

    fn losses(&self, _: DiskId) -> Losses {
        self.below.losses()
    }

    fn mark_losses_seen(&self, _: DiskId) {
        self.below.mark_losses_seen();
    }

    fn state(&self, _: DiskId) -> State {
        match self.encrypted.cipher() {
            Some(_) => self.below.state(),
            None => self.below.state().max(State::Locked),
        }
    }
}

/// The first number of an encrypted disk on [`MAPPED`](crate::disk::MAPPED).
pub(crate) const FIRST: u32 = 1 << 31;
/// A disk without data has no sectors.
const LEAST_UNIT: u32 = 512;
/// Largest zeroing: it is written piece by piece.
const ZEROES_MAX: u64 = 32 << 20;
