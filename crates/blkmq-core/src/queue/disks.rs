//! The disks of a queue as its reactors know them; disks can be added and removed while the queue runs.
//! `crate::queue` checks bios against it.
//!
//! ```text
//!  disk comes: (freeze, fit_disks, LocalQueue::fit_disks on every reactor, thaw: if there is no room yet)
//!              ─► add_disk ─► LocalQueue::refresh_disks on every reactor ─► users
//!  disk goes:  no user has it any more ─► remove_disk ─► LocalQueue::refresh_disks on every reactor
//! ```

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use super::{Busy, ConfigError, DiskConfig, Queue, config, shares};
use crate::bio::{Bio, Data, Flags, Op, Submission};
use crate::ids::{DiskId, GroupId};

/// A disk, or the place for one. Relaxed throughout: a message tells reactors when to read it.
#[derive(Debug, Default)]
pub(crate) struct DiskSlot {
    base: AtomicU64,
    size: AtomicU64,
    /// 0 where there is no disk.
    logical_block: AtomicU32,
    is_read_only: AtomicBool,
}

/// One reactor's own copy of a disk: a request reads nothing that other threads write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalDisk {
    pub(crate) base: u64,
    pub(crate) size: u64,
    /// The bits of an address that lie inside a block; all bits if there is no disk.
    pub(crate) block_mask: u64,
    pub(crate) is_read_only: bool,
}

impl LocalDisk {
    pub(crate) fn is_there(&self) -> bool {
        self.block_mask != u64::MAX
    }
}

impl DiskSlot {
    fn base(&self) -> u64 {
        self.base.load(Ordering::Relaxed)
    }

    fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    fn is_there(&self) -> bool {
        self.logical_block.load(Ordering::Relaxed) != 0
    }

    fn local(&self, any_alignment: bool) -> LocalDisk {
        LocalDisk {
            base: self.base(),
            size: self.size(),
            block_mask: match any_alignment && self.is_there() {
                true => 0,
                false => u64::from(self.logical_block.load(Ordering::Relaxed)).wrapping_sub(1),
            },
            is_read_only: self.is_read_only.load(Ordering::Relaxed),
        }
    }

    pub(super) fn set(&self, disk: &DiskConfig) {
        self.base.store(disk.base, Ordering::Relaxed);
        self.size.store(disk.size, Ordering::Relaxed);
        self.is_read_only.store(disk.read_only, Ordering::Relaxed);
        self.logical_block.store(disk.logical_block, Ordering::Relaxed);
    }

    fn clear(&self) {
        self.logical_block.store(0, Ordering::Relaxed);
        self.size.store(0, Ordering::Relaxed);
    }
}

impl Queue {
    /// Says whether a bio, at `offset` of the disk, needs no further check: a valid read or write without
    /// modifiers that fits one request. All other bios go through [`Queue::check_bio`] and the steps after it.
    #[inline]
    pub(crate) fn is_plain(&self, bio: &Bio, offset: u64, disk: &LocalDisk) -> bool {
        // Not a `match`: four branches become a jump that is hard to predict.
        let one_piece = if let Data::Flat(piece) = &bio.data {
            u64::from(piece.len()) == bio.len
        } else {
            !matches!(bio.data, Data::List(_))
        };
        self.is_plain_io((bio.op, bio.flags), (offset, bio.len), one_piece, bio.group, disk)
    }

    /// The same of a bio that is still to be made.
    #[inline]
    pub(crate) fn will_be_plain(&self, new: &Submission, disk: &LocalDisk) -> bool {
        let one_piece = new.data.is_none_or(|piece| u64::from(piece.len()) == new.len);
        self.is_plain_io(
            (new.op, new.flags),
            (new.offset, new.len),
            one_piece,
            new.group,
            disk,
        )
    }

    #[inline(always)]
    fn is_plain_io(
        &self,
        (op, flags): (Op, Flags),
        (offset, len): (u64, u64),
        one_piece: bool,
        group: GroupId,
        disk: &LocalDisk,
    ) -> bool {
        let mask = disk.block_mask;
        let has_room = offset <= disk.size && len <= disk.size - offset;
        (op == Op::Read || op == Op::Write && !disk.is_read_only)
            && flags == Flags::NONE
            && (offset | len) & mask == 0
            && len.wrapping_sub(1) < self.plain_max
            && has_room
            && one_piece
            && self.group_states.is_surely_living(group)
    }

    /// The disks that bios may name now, by their ids.
    pub(crate) fn local_disks(&self) -> Vec<LocalDisk> {
        let fitted = self.disks.iter().take(self.fitted_disks());
        fitted.map(|disk| disk.local(self.limits.any_alignment)).collect()
    }

    /// How many disks there can be.
    pub fn disks_max(&self) -> usize {
        self.disks.len()
    }

    /// How many disks, by their ids, the tables have room for.
    pub fn fitted_disks(&self) -> usize {
        self.fitted_disks.load(Ordering::Relaxed) as usize
    }

    /// Makes room in the tables of a frozen, drained queue for at least `disks` disks. Each reactor must then
    /// call [`LocalQueue::fit_disks`](crate::local::LocalQueue::fit_disks), while the queue is frozen and
    /// before one of these disks is added.
    ///
    /// # Errors
    /// [`Busy`] as for [`Queue::set_elevator`].
    ///
    /// # Panics
    /// If that is more than [`Queue::disks_max`].
    pub fn fit_disks(&self, disks: usize) -> Result<(), Busy> {
        assert!(disks <= self.disks_max(), "queue {}: {disks} disks", self.name);
        if !self.usage.is_frozen() || !self.is_drained() {
            return Err(Busy);
        }
        let Some(mut state) = self.gate.try_enter() else {
            return Err(Busy);
        };
        state.fold_reports(&self.stats);
        // Twice as many each time, so that a thousand additions freeze the queue ten times.
        let disks = disks.next_power_of_two().min(self.disks_max());
        state.shares = shares(self.tag_mode, self.elevator(), disks, self.requests_max());
        self.fitted_disks.store(disks as u32, Ordering::Relaxed);
        self.leave_gate(state);
        Ok(())
    }

    /// Adds a disk. Reactors know it after their next [`LocalQueue::refresh_disks`](crate::local::LocalQueue::refresh_disks).
    ///
    /// # Errors
    /// If a disk with this id exists, or the disk cannot be on this queue; the text says why.
    ///
    /// # Panics
    /// If the tables have no room for this id.
    pub fn add_disk(&self, id: DiskId, disk: &DiskConfig) -> Result<(), ConfigError> {
        assert!(id.index() < self.fitted_disks(), "queue {}: disk {id}", self.name);
        config::check_disk(&self.name, &self.limits, disk)?;
        let slot = &self.disks[id.index()];
        if slot.is_there() {
            return Err(ConfigError::new(
                &self.name,
                format!("there is a disk {id} already"),
            ));
        }
        slot.set(disk);
        Ok(())
    }

    /// Makes a disk larger; `end_of` returns the end of the range that a disk at a base uses. Reactors know it
    /// after their next [`LocalQueue::refresh_disks`](crate::local::LocalQueue::refresh_disks).
    ///
    /// # Errors
    /// If there is no room for so large a disk; the disk is unchanged then.
    pub fn grow_disk(
        &self,
        id: DiskId,
        size: u64,
        end_of: impl Fn(u64, u64) -> Option<u64>,
    ) -> Result<(), ConfigError> {
        let slot = &self.disks[id.index()];
        let base = slot.base();
        let others = self
            .disks
            .iter()
            .filter(|other| other.is_there() && other.base() > base);
        let follower = others.map(DiskSlot::base).min().unwrap_or(u64::MAX);
        let stays = end_of(base, size).is_some_and(|end| end <= follower);
        // Requests under way have positions by the old base: only the order of a few requests changes.
        let place = if stays {
            Some(base)
        } else {
            self.free_range(size, end_of)
        };
        let Some(base) = place else {
            return Err(ConfigError::new(
                &self.name,
                format!("disk {id}: there is no room for {size} bytes"),
            ));
        };
        slot.base.store(base, Ordering::Relaxed);
        slot.size.store(size, Ordering::Relaxed);
        Ok(())
    }

    /// Removes a disk that has no users. Bios for it are refused once reactors have refreshed their disks.
    pub fn remove_disk(&self, id: DiskId) {
        self.disks[id.index()].clear();
    }

    /// The first unused disk id, if there is room for one more disk.
    pub fn free_disk_id(&self) -> Option<DiskId> {
        let free = self.disks.iter().position(|slot| !slot.is_there());
        free.map(|id| DiskId(id as u32))
    }

    /// The first base for a disk of `size` bytes; `end_of` returns the end of the range that a disk at a base
    /// uses. None if there is no such range.
    pub fn free_range(&self, size: u64, end_of: impl Fn(u64, u64) -> Option<u64>) -> Option<u64> {
        let taken = self.disks.iter().filter(|slot| slot.is_there());
        let mut taken: Vec<(u64, u64)> = taken.map(|slot| (slot.base(), slot.size())).collect();
        taken.sort_unstable();
        let mut base = 0;
        for (start, taken_size) in taken {
            if end_of(base, size)? <= start {
                break;
            }
            base = end_of(start, taken_size)?;
        }
        end_of(base, size).map(|_| base)
    }

    /// The size of a disk, in bytes; 0 where there is none.
    pub fn disk_size(&self, id: DiskId) -> u64 {
        self.disks.get(id.index()).map_or(0, DiskSlot::size)
    }
}
