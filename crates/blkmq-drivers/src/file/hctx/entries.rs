//! The entries of the ring for a file's requests: what the kernel is to do for a step of a slot.

use blkmq_core::bio::{Lent, Op};
use blkmq_host::ring::RingHandle;
use io_uring::types::{Fd, FsyncFlags, Timespec};
use io_uring::{opcode, squeue};

use super::FileHctx;
use crate::file::device::ZEROES_BYTES;
use crate::file::disk::FileDisk;
use crate::file::slot::{Memory, PAUSES_MAX, Slot, Step};

/// A file as the ring names it.
#[derive(Clone, Copy)]
pub(in crate::file) struct Target {
    fd: i32,
    flags: squeue::Flags,
    /// Bits that an address must not have set for direct I/O; 0 with the page cache.
    memory_mask: u64,
}

impl Target {
    /// No file.
    pub(super) const NONE: Self = Self {
        fd: -1,
        flags: squeue::Flags::empty(),
        memory_mask: 0,
    };

    pub(in crate::file) fn new(disk: &FileDisk, ring: &RingHandle) -> Self {
        let (fd, flags) = match ring.register_file(disk.fd()) {
            Ok(slot) => (slot as i32, squeue::Flags::FIXED_FILE),
            // More files than slots: unregistered files work, a little slower.
            Err(_) => (disk.fd(), squeue::Flags::empty()),
        };
        let flags = match disk.may_block {
            true => flags | squeue::Flags::ASYNC,
            false => flags,
        };
        Self {
            fd,
            flags,
            memory_mask: disk.direct().map_or(0, |needs| u64::from(needs.memory) - 1),
        }
    }

    /// Unregisters the file, if it was registered.
    pub(in crate::file) fn unregister(&self, ring: &RingHandle) {
        if self.flags.contains(squeue::Flags::FIXED_FILE) {
            ring.unregister_file(self.fd as u32);
        }
    }

    /// Returns whether the kernel can use memory at the address of a piece.
    pub(super) fn can_use(&self, piece: Lent) -> bool {
        piece.start().as_ptr().addr() as u64 & self.memory_mask == 0
    }
}

impl FileHctx {
    /// Makes the entry for a slot's step.
    pub(super) fn entry(&self, slot: &Slot, target: Target) -> squeue::Entry {
        let fd = Fd(target.fd);
        if slot.is_paused {
            return opcode::Timeout::new(&PAUSES[slot.pause()]).build();
        }
        let offset = slot.offset + slot.moved;
        let left = slot.len - slot.moved;
        let zeroing = |mode| {
            opcode::Fallocate::new(fd, slot.piece.len)
                .offset(offset)
                .mode(mode)
                .build()
        };
        let entry = match slot.step {
            Step::Fetch | Step::Transfer => self.transfer(slot, fd, offset),
            // Asked not to wait, a device that cannot promise that refuses a discard as if it knew none: those of the
            // device mapper do.
            Step::Discard => {
                return opcode::UringCmd16::new(fd, BLOCK_URING_CMD_DISCARD)
                    .addr(Some(offset))
                    .cmd(third_address(slot.piece.len))
                    .build()
                    .flags(target.flags | squeue::Flags::ASYNC);
            }
            Step::Punch => zeroing(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE),
            Step::ZeroRange => zeroing(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE),
            Step::WriteOut => {
                let piece = self.device.zeroes.lend(0..left.min(ZEROES_BYTES as u64) as usize);
                flat(Op::Write, fd, piece, offset, 0)
            }
            Step::Sync => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
            Step::AwaitSyncs => return opcode::Timeout::new(&AWAIT_SYNCS).build(),
            Step::Idle => unreachable!("an entry for an idle slot"),
        };
        entry.flags(target.flags)
    }

    fn transfer(&self, slot: &Slot, fd: Fd, offset: u64) -> squeue::Entry {
        let is_forced = slot.is_forced(self.disks.of(slot.disk));
        let rw_flags = if is_forced { libc::RWF_DSYNC } else { 0 };
        let ring_memory = self
            .ring_memory
            .as_ref()
            .expect("held until the context is dropped");
        match &slot.memory {
            Memory::Flat(piece) => {
                let rest = piece.part(slot.moved as u32, piece.len());
                flat(slot.op, fd, rest, offset, rw_flags)
            }
            Memory::Bounced(area, _) => {
                let rest = ring_memory.bounces.lend(*area, slot.moved..slot.step_end());
                match slot.step {
                    Step::Fetch => flat(Op::Read, fd, rest, offset, 0),
                    _ => flat(slot.op, fd, rest, offset, rw_flags),
                }
            }
            Memory::List(row) => {
                let (address, count) = (ring_memory.vectors.address(row), row.len() as u32);
                match slot.op {
                    Op::Read => opcode::Readv::new(fd, address, count).offset(offset).build(),
                    _ => opcode::Writev::new(fd, address, count)
                        .offset(offset)
                        .rw_flags(rw_flags)
                        .build(),
                }
            }
            Memory::None => unreachable!("a transfer without memory"),
        }
    }
}

fn flat(op: Op, fd: Fd, piece: Lent, offset: u64, rw_flags: i32) -> squeue::Entry {
    let (address, len) = (piece.start().as_ptr(), piece.len());
    match op {
        Op::Read => opcode::Read::new(fd, address, len).offset(offset).build(),
        _ => opcode::Write::new(fd, address, len)
            .offset(offset)
            .rw_flags(rw_flags)
            .build(),
    }
}

const fn pauses() -> [Timespec; PAUSES_MAX] {
    let mut all = [Timespec::new(); PAUSES_MAX];
    let mut at = 0;
    while at < PAUSES_MAX {
        all[at] = Timespec::new().nsec(1_000_000 << at);
        at += 1;
    }
    all
}

/// How long a sync waits before it checks again for those that overlapped it.
static AWAIT_SYNCS: Timespec = Timespec::new().nsec(100_000);
/// How long a step waits that the system had no resources for: 1 to 128 ms.
static PAUSES: [Timespec; PAUSES_MAX] = pauses();
/// Where the command for a block device has the length: `addr3`, in the entry's last 16 bytes.
fn third_address(len: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&len.to_ne_bytes());
    bytes
}

/// `BLOCK_URING_CMD_DISCARD` of linux/blkdev.h, since Linux 6.12: `addr` is where, and `addr3` how much.
const BLOCK_URING_CMD_DISCARD: u32 = 0x1200;
