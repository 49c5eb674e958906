//! The file driver's use of the kernel beyond the type system: memory that the kernel accesses while a
//! request is under way, entries of the ring that name it, and locks of byte ranges. `slot`, `bounce` and
//! `lock` use it.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

use blkmq_core::bio::Lent;
use blkmq_host::ring::RingClient;
use io_uring::squeue;

/// A table with a row of `iovec`s for every slot, in one allocation that never moves.
pub(super) struct Vectors {
    table: Box<[libc::iovec]>,
}

impl Vectors {
    /// Makes a table of `len` entries.
    pub(super) fn new(len: usize) -> Self {
        let empty = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        Self {
            table: vec![empty; len].into(),
        }
    }

    /// Sets an entry.
    pub(super) fn set(&mut self, index: usize, piece: Lent) {
        self.table[index] = libc::iovec {
            iov_base: piece.start().as_ptr().cast(),
            iov_len: piece.len() as usize,
        };
    }

    /// Returns the address of a row's first entry, for an entry of the ring.
    pub(super) fn address(&self, row: &Range<usize>) -> *const libc::iovec {
        self.table[row.clone()].as_ptr()
    }

    /// Cuts off the first `moved` bytes of a row.
    pub(super) fn advance(&mut self, row: &mut Range<usize>, mut moved: usize) {
        while moved > 0 {
            let first = &mut self.table[row.start];
            if moved < first.iov_len {
                // SAFETY: `moved` is less than the length of the piece, so the result is inside it.
                first.iov_base = unsafe { first.iov_base.add(moved) };
                first.iov_len -= moved;
                return;
            }
            moved -= first.iov_len;
            row.start += 1;
        }
    }

    /// Copies a row's memory into `area`, which is as long.
    ///
    /// The request that the row was made from must be under way: a write.
    pub(super) fn gather(&self, row: Range<usize>, area: Lent) {
        let mut at = area.start();
        for piece in &self.table[row] {
            // SAFETY: the lender of the piece promised that it can be read until its write ends; the area is as long as
            // all pieces together, is ours, and is in no other request's hands.
            unsafe { std::ptr::copy_nonoverlapping(piece.iov_base.cast(), at.as_ptr(), piece.iov_len) };
            // SAFETY: the pieces together are as long as the area, so this stays inside or one past its end.
            at = unsafe { at.add(piece.iov_len) };
        }
    }

    /// Copies `area` into a row's memory, which is as long.
    ///
    /// The request that the row was made from must be under way: a read.
    pub(super) fn scatter(&self, row: Range<usize>, area: Lent) {
        let mut at = area.start();
        for piece in &self.table[row] {
            // SAFETY: the lender of the piece promised that it can be written until its read ends; the area is as long as
            // all pieces together, is ours, and the kernel has let go of it.
            unsafe { std::ptr::copy_nonoverlapping(at.as_ptr(), piece.iov_base.cast(), piece.iov_len) };
            // SAFETY: the pieces together are as long as the area, so this stays inside or one past its end.
            at = unsafe { at.add(piece.iov_len) };
        }
    }
}

/// Zeroes a part of an area that a request has: a read whose entry the kernel has completed.
pub(super) fn zero(area: Lent) {
    // SAFETY: the area is ours, as long as it says, and the kernel has let go of it.
    unsafe { std::ptr::write_bytes(area.start().as_ptr(), 0, area.len() as usize) };
}

/// Pushes an entry for a request under way. `user` names its slot.
#[inline]
pub(super) fn push(ring_client: &RingClient, entry: squeue::Entry, user: u64) {
    // SAFETY: entries name memory of a request, which its lender keeps valid until the request is reported as ended,
    // which happens after the entry's last completion; or rows of the table and areas of mappings, which the hardware
    // context keeps, and leaks if it is dropped with requests under way; or a mapping whose owner takes the completion first.
    unsafe { ring_client.push(entry, user) }
}

/// Reads into the memory of a request that is being issued. Returns whether it is full.
pub(super) fn read_all(file: &File, into: Lent, offset: u64) -> bool {
    let Ok(offset) = libc::off_t::try_from(offset) else {
        return false;
    };
    let (start, len) = (into.start().as_ptr(), into.len() as usize);
    // SAFETY: the lender keeps so many bytes valid, and leaves them to the driver, until the request is
    // reported as ended. Like a ring's read, this one makes no reference to them: they may be a guest's.
    let read = unsafe { libc::pread(file.as_raw_fd(), start.cast(), len, offset) };
    read.cast_unsigned() == len
}

/// The identity of the btrfs that a file lies on, whatever its subvolume is. Other filesystems may understand the
/// question otherwise.
pub(super) fn btrfs_id(file: &File) -> io::Result<[u8; 16]> {
    // `struct btrfs_ioctl_fs_info_args` of linux/btrfs.h: two numbers of 64 bits, then the identity.
    let mut answer = [0_u8; 1024];
    // SAFETY: the descriptor is open, and the kernel writes at most the 1024 bytes that the number of the ioctl names.
    if unsafe { libc::ioctl(file.as_raw_fd(), BTRFS_IOC_FS_INFO, answer.as_mut_ptr()) } == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(std::array::from_fn(|at| answer[16 + at]))
}

/// `_IOR(0x94, 31, struct btrfs_ioctl_fs_info_args)` of linux/btrfs.h.
const BTRFS_IOC_FS_INFO: libc::Ioctl = 0x8400_941f;

/// The kinds of locks on a range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ByteLock {
    #[cfg(feature = "qcow2")]
    None,
    Shared,
    Exclusive,
}

/// Locks `len` bytes (0: to the end, wherever it will be) for this open file description. Does not wait.
pub(super) fn lock_bytes(file: &File, lock: ByteLock, start: u64, len: u64) -> io::Result<()> {
    let mut wish = byte_lock(lock, start, len);
    // SAFETY: the descriptor is open, and F_OFD_SETLK reads one `flock`, which `wish` is.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut wish) };
    if answer == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Returns whether another open file description holds any lock on a range.
pub(super) fn is_locked(file: &File, start: u64, len: u64) -> io::Result<bool> {
    let mut wish = byte_lock(ByteLock::Exclusive, start, len);
    // SAFETY: the descriptor is open, and F_OFD_GETLK reads and writes one `flock`, which `wish` is.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut wish) };
    if answer == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(i32::from(wish.l_type) != libc::F_UNLCK)
}

fn byte_lock(lock: ByteLock, start: u64, len: u64) -> libc::flock {
    let kind = match lock {
        #[cfg(feature = "qcow2")]
        ByteLock::None => libc::F_UNLCK,
        ByteLock::Shared => libc::F_RDLCK,
        ByteLock::Exclusive => libc::F_WRLCK,
    };
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start as libc::off_t,
        l_len: len as libc::off_t,
        // The kernel demands 0 for locks of file descriptions.
        l_pid: 0,
    }
}
