//! The layout of ublk's commands in a ring, and the descriptors of a queue, which lie in memory of the
//! kernel.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::{self, NonNull};

use blkmq_core::bio::Lent;
use io_uring::{opcode, types};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::protocol::{COMMIT_AND_FETCH, DEPTH_MAX, DESCRIPTOR_BYTES, FETCH, control, request};
use crate::common::command_ring::CommandRing;

/// The descriptors of one queue.
#[derive(Debug)]
pub(super) struct Descriptors {
    start: NonNull<[u64; WORDS]>,
    count: usize,
}

// SAFETY: nothing of the mapping belongs to a thread, and it is read alone.
unsafe impl Send for Descriptors {}

impl Descriptors {
    /// Maps the `count` descriptors of a queue of a device.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn map(device: BorrowedFd<'_>, queue: u16, count: u16) -> io::Result<Self> {
        let count = usize::from(count);
        let offset = u64::from(queue) * mapped_bytes(DEPTH_MAX) as u64;
        // SAFETY: no address is asked for, so nothing that is mapped changes.
        let start = unsafe {
            mmap(
                ptr::null_mut(),
                mapped_bytes(count),
                ProtFlags::READ,
                MapFlags::SHARED | MapFlags::POPULATE,
                device,
                offset,
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, count })
    }

    /// The descriptor of a request that has not been answered: the kernel does not write to it
    /// meanwhile.
    ///
    /// # Panics
    /// The tag does not exist.
    pub(super) fn read(&self, tag: u16) -> [u8; DESCRIPTOR_BYTES] {
        assert!(
            usize::from(tag) < self.count,
            "descriptor {tag} of {}",
            self.count
        );
        // SAFETY: it is within the mapping.
        let place = unsafe { self.start.add(usize::from(tag)) };
        // SAFETY: it is mapped, readable and aligned; that it is volatile keeps it from being read before the ring has said that it is there.
        let words = unsafe { place.read_volatile() };
        let mut bytes = [0; DESCRIPTOR_BYTES];
        for (into, word) in bytes.chunks_exact_mut(8).zip(words) {
            into.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody reads it any more.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), mapped_bytes(self.count)) };
        debug_assert!(unmapped.is_ok(), "giving back what was mapped: {unmapped:?}");
    }
}

/// Makes the kernel put a request of a queue into this memory, and complete the command then.
pub(super) fn fetch(ring: &CommandRing, device: RawFd, (queue, tag): (u16, u16), memory: Lent) {
    push(ring, device, FETCH, request(queue, tag, 0, address(memory)), tag);
}

/// Ends a request with a number of bytes or a negative errno, with a read's data in its memory, and
/// asks for the next one.
pub(super) fn commit(ring: &CommandRing, device: RawFd, (queue, tag): (u16, u16), result: i32, memory: Lent) {
    let command = request(queue, tag, result, address(memory));
    push(ring, device, COMMIT_AND_FETCH, command, tag);
}

/// The address of memory, for the kernel.
pub(super) fn address(memory: Lent) -> u64 {
    memory.start().as_ptr().expose_provenance() as u64
}

fn push(ring: &CommandRing, device: RawFd, number: u32, command: [u8; 16], tag: u16) {
    let mut area = [0; 80];
    area[..command.len()].copy_from_slice(&command);
    let entry = opcode::UringCmd80::new(types::Fd(device), number)
        .cmd(area)
        .build();
    // SAFETY: the memory that the command names is lent to the kernel until it ends: nobody takes what is lent, or gives it back to the
    // system.
    unsafe { ring.push(entry.user_data(tag.into())) };
}

/// Sends a command to the control device, with memory whose first bytes are the path of a device.
/// Blocks until it is done. Returns the ring, and the device's answer.
///
/// # Errors
/// The ring's: the command may be under way, or still be sent by whoever enters the ring again. So the
/// ring is gone, and the memory stays lent.
pub(super) fn ask(
    ring: CommandRing,
    device: RawFd,
    number: u32,
    about: (u32, u64),
    memory: &mut Vec<u8>,
    path_bytes: u16,
) -> io::Result<(CommandRing, io::Result<()>)> {
    // Leaked if it is not known when the command ends.
    let mut lent = ManuallyDrop::new(std::mem::take(memory));
    let place = lent.as_mut_ptr().expose_provenance() as u64;
    let mut area = [0; 80];
    let command = control(about.0, about.1, (place, lent.len() as u16), path_bytes);
    area[..command.len()].copy_from_slice(&command);
    let entry = opcode::UringCmd80::new(types::Fd(device), number)
        .cmd(area)
        .build();
    // SAFETY: nobody touches the memory, or gives it back, before the command has ended.
    unsafe { ring.push(entry) };
    let mut ended = Vec::with_capacity(1);
    while ended.is_empty() {
        match ring.submit_and_wait() {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
            _ => ring.take(&mut ended),
        }
    }
    *memory = ManuallyDrop::into_inner(lent);
    let answer = match ended[0].result {
        0.. => Ok(()),
        errno => Err(io::Error::from_raw_os_error(-errno)),
    };
    Ok((ring, answer))
}

/// Bytes of `count` descriptors, in whole pages.
fn mapped_bytes(count: usize) -> usize {
    (count * DESCRIPTOR_BYTES).next_multiple_of(rustix::param::page_size())
}

const WORDS: usize = DESCRIPTOR_BYTES / 8;
