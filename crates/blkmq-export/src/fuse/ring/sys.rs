//! The layout of FUSE's commands in a ring (`Documentation/filesystems/fuse/fuse-io-uring.rst`,
//! `linux/fuse.h` 7.42).

use std::os::fd::RawFd;

use blkmq_core::bio::Lent;
use io_uring::{opcode, squeue, types};

use crate::common::command_ring::CommandRing;

/// Makes the kernel put requests of a queue into this memory from here on, and complete the command
/// each time.
///
/// The memory's first page has the header, the rest the data. It belongs to the kernel until the
/// command ends.
pub(super) fn register(ring: &CommandRing, device: RawFd, queue: u16, memory: Lent, user: u64) {
    let start = memory.start().as_ptr().expose_provenance() as u64;
    let data_bytes = u64::from(memory.len()) - PAGE;
    let parts = [start, PAGE, start + PAGE, data_bytes];
    // Read when the command is issued, from memory that is the kernel's until then.
    let place = memory.start().as_ptr().wrapping_add(PARTS_AT);
    // SAFETY: the place is aligned, within the first page of what was lent, and behind what the kernel writes there.
    unsafe { place.cast::<[u64; 4]>().write(parts) };
    let command = command(queue, 0);
    let entry = opcode::UringCmd80::new(types::Fd(device), REGISTER).cmd(command);
    let mut entry = entry.addr(Some(start + PARTS_AT as u64)).build();
    let len = (&raw mut entry).cast::<u8>().wrapping_add(LEN_AT).cast::<u32>();
    // SAFETY: an entry is 128 bytes as the kernel has them, with its length there.
    unsafe { len.write(PARTS) };
    // SAFETY: the memory that the command names is lent to the kernel until it ends: nobody takes what is lent, or gives it back to
    // the system.
    unsafe { ring.push(entry.user_data(user)) };
}

/// Answers a request with the content of its memory, which belongs to the kernel from here on, and
/// asks for the next one.
pub(super) fn commit(ring: &CommandRing, device: RawFd, queue: u16, commit_id: u64, user: u64) {
    let entry = opcode::UringCmd80::new(types::Fd(device), COMMIT_AND_FETCH);
    let entry = entry.cmd(command(queue, commit_id)).build();
    // SAFETY: as in `register`, which was given the memory.
    unsafe { ring.push(entry.user_data(user)) };
}

/// The fields of a command beside its number: flags, the request that is answered, the queue.
fn command(queue: u16, commit_id: u64) -> [u8; 80] {
    let mut command = [0; 80];
    command[8..16].copy_from_slice(&commit_id.to_ne_bytes());
    command[16..18].copy_from_slice(&queue.to_ne_bytes());
    command
}

const REGISTER: u32 = 1;
const COMMIT_AND_FETCH: u32 = 2;
/// Memory is named in two parts, header and data.
const PARTS: u32 = 2;
const PARTS_AT: usize = 2048;
/// The offset of the length in an entry of a ring.
const LEN_AT: usize = 24;
const _: () = assert!(size_of::<squeue::Entry128>() == 128);
const PAGE: u64 = 4096;
