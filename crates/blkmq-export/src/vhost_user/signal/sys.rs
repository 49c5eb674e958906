//! The calls of asynchronous I/O (`io_setup(2)`, `io_submit(2)`): one read at a time, of nothing, which is
//! complete when the call returns.

use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

/// A queue of asynchronous I/O that one thread uses.
pub(super) struct Context {
    /// The address that the kernel returned: of the completion ring, mapped into this process.
    ring: NonNull<Ring>,
}

/// The header of the completion ring that the kernel maps, as `io_getevents` of libaio reads it.
#[repr(C)]
struct Ring {
    id: u32,
    entries: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
}

/// One request, as in `linux/aio_abi.h` on little-endian machines.
#[repr(C)]
#[derive(Default)]
struct Request {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event: u32,
}

impl Context {
    /// Makes one, or `None` if the system has no asynchronous I/O, or another version of it.
    pub(super) fn new() -> Option<Self> {
        let mut address: libc::c_ulong = 0;
        // SAFETY: the kernel writes the address of a new context to `address`, which is 0 as it must be.
        if unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut address) } != 0 {
            return None;
        }
        let ring = NonNull::new(ptr::with_exposed_provenance_mut::<Ring>(
            usize::try_from(address).ok()?,
        ))?;
        let context = Self { ring };
        // SAFETY: the kernel has mapped at least a page there, which begins with these fields.
        let ring = unsafe { context.ring.as_ref() };
        (cfg!(target_endian = "little") && ring.magic == MAGIC && ring.entries > 1).then_some(context)
    }

    /// Reads nothing from a file, which adds to an eventfd. Returns whether the kernel accepted it.
    pub(super) fn read_nothing(&self, file: &OwnedFd, event: &OwnedFd) -> bool {
        let mut request = Request {
            opcode: READ,
            file: file.as_raw_fd().cast_unsigned(),
            flags: HAS_EVENT,
            event: event.as_raw_fd().cast_unsigned(),
            ..Request::default()
        };
        let mut list = [&raw mut request];
        // SAFETY: the context lives, the list has one valid request, and no buffer is used; the kernel is done with both when it
        // returns, as a read of nothing ends at once.
        let taken = unsafe { libc::syscall(libc::SYS_io_submit, self.id(), 1, list.as_mut_ptr()) };
        self.forget_completions();
        taken == 1
    }

    /// Makes room in the ring. Nobody else reads it.
    fn forget_completions(&self) {
        // SAFETY: the ring is mapped as long as the context lives; both fields are atomic, as the kernel changes the tail.
        let ring = unsafe { self.ring.as_ref() };
        // The kernel's release of the tail; the completions themselves are not read.
        let tail = ring.tail.load(Ordering::Acquire);
        ring.head.store(tail, Ordering::Release);
    }

    fn id(&self) -> libc::c_ulong {
        self.ring.as_ptr().expose_provenance() as libc::c_ulong
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is this one's, and nothing is under way.
        let _ = unsafe { libc::syscall(libc::SYS_io_destroy, self.id()) };
    }
}

/// `AIO_RING_MAGIC`.
const MAGIC: u32 = 0xa10a_10a1;
/// `IOCB_CMD_PREAD`.
const READ: u16 = 0;
/// `IOCB_FLAG_RESFD`.
const HAS_EVENT: u32 = 1;
