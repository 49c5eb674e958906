//! Several reads that are given to the kernel at once, by Linux's asynchronous I/O, which goes to FUSE
//! directly where io_uring would use a thread for each read. No buffer is freed that the kernel may write to.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::null;

/// Reads of one file, each into a buffer of its own, and the kernel's context for them.
pub(super) struct Reads {
    /// None is read or moved here: they are the kernel's.
    buffers: Vec<Block>,
    controls: Vec<Control>,
    /// Addresses of the reads to submit.
    waiting: Vec<*mut Control>,
    ended: Vec<Ended>,
    context: libc::c_ulong,
    file: File,
}

/// A read that has ended, as `struct io_event` of `linux/aio_abi.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ended {
    /// Its number.
    pub(super) number: u64,
    control: u64,
    /// Bytes that were read, or an errno of Linux as a negative number.
    pub(super) result: i64,
    more: i64,
}

/// A read, as `struct iocb` of `linux/aio_abi.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Control {
    number: u64,
    key_and_flags: u64,
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}

/// What direct I/O wants.
#[repr(align(4096))]
#[derive(Clone)]
struct Block([u8; BLOCK_BYTES]);

const BLOCK_BYTES: usize = super::super::BLOCK_BYTES as usize;

impl Reads {
    /// Makes room for `depth` reads at a time.
    ///
    /// # Errors
    /// What the system says.
    pub(super) fn new(file: File, depth: usize) -> io::Result<Self> {
        let mut context: libc::c_ulong = 0;
        // SAFETY: `io_setup` takes a number and the address of a context that is zero, and writes to that alone.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, depth, &raw mut context) };
        check(made)?;
        Ok(Self {
            buffers: vec![Block([0; BLOCK_BYTES]); depth],
            controls: vec![Control::default(); depth],
            waiting: Vec::with_capacity(depth),
            ended: vec![Ended::default(); depth],
            context,
            file,
        })
    }

    /// Has a block read at `offset` when others are submitted, as the read of that number, which is not under way.
    pub(super) fn read(&mut self, number: usize, offset: u64) {
        self.controls[number] = Control {
            number: number as u64,
            opcode: PREAD,
            file: self.file.as_raw_fd() as u32,
            buffer: (&raw mut self.buffers[number].0) as u64,
            bytes: BLOCK_BYTES as u64,
            offset: offset as i64,
            ..Control::default()
        };
        self.waiting.push(&raw mut self.controls[number]);
    }

    /// Submits what is waiting.
    ///
    /// # Errors
    /// What the system says.
    pub(super) fn submit(&mut self) -> io::Result<()> {
        while !self.waiting.is_empty() {
            let (count, list) = (self.waiting.len(), self.waiting.as_mut_ptr());
            // SAFETY: `list` has `count` addresses of controls that live, each with a buffer of its length that lives until the
            // context is destroyed, and that nobody else touches.
            let taken = unsafe { libc::syscall(libc::SYS_io_submit, self.context, count, list) };
            let taken = check(taken)?;
            self.waiting.drain(..taken);
        }
        Ok(())
    }

    /// Waits until one has ended, and returns all that have.
    ///
    /// # Errors
    /// What the system says.
    pub(super) fn wait(&mut self) -> io::Result<&[Ended]> {
        let (context, max, into) = (self.context, self.ended.len(), self.ended.as_mut_ptr());
        let forever = null::<libc::timespec>();
        let count = loop {
            // SAFETY: `into` has room for `max` ends, and the time limit is none.
            let count =
                unsafe { libc::syscall(libc::SYS_io_getevents, context, 1_usize, max, into, forever) };
            match check(count) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                count => break count?,
            }
        };
        Ok(&self.ended[..count])
    }
}

impl Drop for Reads {
    fn drop(&mut self) {
        // SAFETY: the context was made in `new`; this waits until no read is under way, so the buffers can be freed afterwards.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

fn check(result: libc::c_long) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// `IOCB_CMD_PREAD`.
const PREAD: u16 = 0;
