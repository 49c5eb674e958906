//! Reads and writes of the files of an image by threads, in ranges of any size: with direct I/O, whole blocks of aligned
//! memory. `tables` has the places; requests that the map knows go by `hctx` instead.

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::ops::{Deref, DerefMut};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::file::{Alignment, FileDisk};
use crate::mapping::Mapping;

/// Memory for direct I/O, of the thread that uses it. It holds zeroes or old content.
#[derive(Debug)]
pub(super) struct Buffer {
    memory: Option<Mapping>,
    len: usize,
}

thread_local! {
    /// Memory that the thread has used before: mapping it anew costs a fault for each page.
    static SPARE: RefCell<[Option<Mapping>; SPARES]> = const { RefCell::new([const { None }; SPARES]) };
}

impl Buffer {
    /// Gets memory of `len` bytes.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn new(len: usize) -> io::Result<Self> {
        let take = |spares: &mut [Option<Mapping>; SPARES]| spares.iter_mut().find_map(Option::take);
        let spare = match len <= SPARE_BYTES {
            true => SPARE.with_borrow_mut(take),
            false => None,
        };
        let memory = match spare {
            Some(memory) => memory,
            None => Mapping::new(len.max(SPARE_BYTES))?,
        };
        Ok(Self {
            memory: Some(memory),
            len,
        })
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let memory = self.memory.as_ref().expect("it is there until the end");
        &memory.bytes()[..self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let memory = self.memory.as_mut().expect("it is there until the end");
        &mut memory.bytes_mut()[..self.len]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.len > SPARE_BYTES {
            return;
        }
        let memory = self.memory.take();
        let _ = SPARE.try_with(|spares| {
            let mut spares = spares.borrow_mut();
            if let Some(place) = spares.iter_mut().find(|spare| spare.is_none()) {
                *place = memory;
            }
        });
    }
}

/// Reads at a byte of a file. What is behind its end reads as zeroes.
///
/// # Errors
/// The system's.
pub(super) fn read(disk: &FileDisk, at: u64, into: &mut [u8]) -> io::Result<()> {
    let align = u64::from(disk.range());
    if !disk.is_direct() {
        return read_whole(disk, at, into);
    }
    let start = at - at % align;
    let skip = (at - start) as usize;
    let mut window = Buffer::new((skip + into.len()).next_multiple_of(align as usize))?;
    read_whole(disk, start, &mut window)?;
    into.copy_from_slice(&window[skip..skip + into.len()]);
    Ok(())
}

fn read_whole(disk: &FileDisk, mut at: u64, mut into: &mut [u8]) -> io::Result<()> {
    let align = u64::from(disk.range());
    while !into.is_empty() {
        let read = match rustix::io::pread(disk.handle(), &mut *into, at) {
            Err(Errno::INTR) => continue,
            read => read?,
        };
        at += read as u64;
        into = &mut into[read..];
        if read == 0 || !at.is_multiple_of(align) {
            // The end of the file.
            into.fill(0);
            break;
        }
    }
    Ok(())
}

/// Writes at a byte of a file: in direct I/O, whole blocks, whose rest is read before. No small request of a ring changes
/// these blocks meanwhile, and nobody writes to what is read.
///
/// # Errors
/// The system's.
pub(super) fn write(disk: &FileDisk, at: u64, bytes: &[u8]) -> io::Result<()> {
    let Some(needs) = disk.direct() else {
        return write_whole(disk, at, bytes);
    };
    let align = u64::from(needs.range);
    let blocks = at - at % align..(at + bytes.len() as u64).next_multiple_of(align);
    disk.write_in_turn(&blocks, || write_blocks(disk, needs, at, bytes))
}

fn write_blocks(disk: &FileDisk, needs: Alignment, at: u64, bytes: &[u8]) -> io::Result<()> {
    let align = u64::from(needs.range);
    let is_aligned = (at | bytes.len() as u64).is_multiple_of(align)
        && bytes.as_ptr().addr().is_multiple_of(needs.memory as usize);
    if is_aligned {
        return write_whole(disk, at, bytes);
    }
    let start = at - at % align;
    let skip = (at - start) as usize;
    let mut window = Buffer::new((skip + bytes.len()).next_multiple_of(align as usize))?;
    if skip > 0 || window.len() > bytes.len() {
        read_whole(disk, start, &mut window)?;
    }
    window[skip..skip + bytes.len()].copy_from_slice(bytes);
    write_whole(disk, start, &window)
}

fn write_whole(disk: &FileDisk, mut at: u64, bytes: &[u8]) -> io::Result<()> {
    let mut left = bytes;
    while !left.is_empty() {
        let written = match rustix::io::pwritev(disk.handle(), &[IoSlice::new(left)], at) {
            Err(Errno::INTR) => continue,
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            written => written?,
        };
        at += written as u64;
        left = &left[written..];
    }
    Ok(())
}

/// Zeroes a range of a file, and gives its space back where that can be done.
///
/// # Errors
/// The system's; `Unsupported` where the filesystem or the device cannot.
pub(super) fn zero_range(disk: &FileDisk, at: u64, len: u64) -> io::Result<()> {
    let mode = match disk.is_block_device() {
        true => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
        false => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
    };
    loop {
        return match rustix::fs::fallocate(disk.handle(), mode, at, len) {
            Err(Errno::INTR) => continue,
            // A block device takes whole blocks.
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Err(io::ErrorKind::Unsupported.into()),
            zeroed => Ok(zeroed?),
        };
    }
}

/// Zeroes a range of a file, by writing if there is no other way.
///
/// # Errors
/// The system's.
pub(super) fn zero(disk: &FileDisk, at: u64, len: u64) -> io::Result<()> {
    match zero_range(disk, at, len) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
        zeroed => return zeroed,
    }
    let mut done = 0;
    while done < len {
        let now = (len - done).min(SPARE_BYTES as u64);
        let mut zeroes = Buffer::new(now as usize)?;
        zeroes.fill(0);
        write(disk, at + done, &zeroes)?;
        done += now;
    }
    Ok(())
}

/// What a thread keeps, in bytes each: the largest transfer of a request, with a copy of what is around it and the blocks
/// of direct I/O that it is in.
const SPARE_BYTES: usize = 1 << 20;
const SPARES: usize = 3;
