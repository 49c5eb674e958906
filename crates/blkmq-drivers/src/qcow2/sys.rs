//! The library's way to the files of an image, whose interface is `unsafe`, and clients' memory on the threads
//! that work for an image. `image` calls the library; `order` decides what is durable before what.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blkmq_core::bio::Lent;
use imago::format::drivers::FormatDriverInstance;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;
use imago::storage::{PreallocateMode, Storage};
use rustix::fs::FallocateFlags;
use rustix::io::ReadWriteFlags;

use super::order::Order;
use crate::file::FileDisk;

/// A file of an image as the library sees it.
#[derive(Debug)]
pub(super) struct LibraryFile {
    disk: Arc<FileDisk>,
    role: Role,
    helper: CommonStorageHelper,
}

/// What the library writes to a file.
#[derive(Clone, Debug)]
pub(super) enum Role {
    /// Nothing: it belongs to a base.
    Base,
    /// The header and the tables.
    Tables(Arc<Order>),
    /// Data of clusters in the image's own file.
    Data(Arc<Order>),
    /// Data of clusters in a file beside it, each at its place on the disk.
    DataBeside(Arc<Order>),
}

impl LibraryFile {
    pub(super) fn new(disk: Arc<FileDisk>, role: Role) -> Self {
        Self {
            disk,
            role,
            helper: CommonStorageHelper::default(),
        }
    }

    pub(super) fn disk(&self) -> &Arc<FileDisk> {
        &self.disk
    }

    fn write_all(
        &self,
        mut slices: &mut [IoSlice<'_>],
        mut offset: u64,
        flags: ReadWriteFlags,
    ) -> io::Result<()> {
        while !slices.is_empty() {
            let few = slices.len().min(SLICES_MAX);
            let written = match rustix::io::pwritev2(self.disk.handle(), &slices[..few], offset, flags) {
                Err(rustix::io::Errno::INTR) => continue,
                written => written?,
            };
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            offset += written as u64;
            IoSlice::advance_slices(&mut slices, written);
        }
        Ok(())
    }

    /// Zeroes a range, and frees it where that can be done.
    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        let mode = match self.disk.is_block_device() {
            true => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
            false => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        };
        rustix::fs::fallocate(self.disk.handle(), mode, offset, len).map_err(|error| match error {
            rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS => io::ErrorKind::Unsupported.into(),
            error => error.into(),
        })
    }
}

impl fmt::Display for LibraryFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.disk.path())
    }
}

impl Storage for LibraryFile {
    fn mem_align(&self) -> usize {
        self.disk.direct().map_or(1, |needs| needs.memory as usize)
    }

    fn req_align(&self) -> usize {
        self.disk.range() as usize
    }

    fn size(&self) -> io::Result<u64> {
        self.disk.end()
    }

    fn get_filename(&self) -> Option<PathBuf> {
        Some(self.disk.path().to_owned())
    }

    /// The library opens nothing by itself.
    fn resolve_relative_path<P: AsRef<Path>>(&self, _relative: P) -> io::Result<PathBuf> {
        Err(io::ErrorKind::Unsupported.into())
    }

    unsafe fn pure_readv(&self, bufv: IoVectorMut<'_>, mut offset: u64) -> io::Result<()> {
        let mut all = bufv.into_inner();
        let mut slices = &mut all[..];
        while !slices.is_empty() {
            let few = slices.len().min(SLICES_MAX);
            let read = match rustix::io::preadv(self.disk.handle(), &mut slices[..few], offset) {
                Err(rustix::io::Errno::INTR) => continue,
                read => read?,
            };
            if read == 0 {
                // The end of the file: what is behind it reads as zeroes.
                slices.iter_mut().for_each(|slice| slice.fill(0));
                return Ok(());
            }
            offset += read as u64;
            IoSliceMut::advance_slices(&mut slices, read);
        }
        Ok(())
    }

    unsafe fn pure_writev(&self, bufv: IoVector<'_>, offset: u64) -> io::Result<()> {
        let range = offset..offset.saturating_add(bufv.len());
        let mut all = bufv.into_inner();
        match &self.role {
            Role::Base => Err(io::ErrorKind::PermissionDenied.into()),
            Role::Tables(order) => {
                order.before_tables()?;
                order.note_written(range.clone());
                let copy = all.clone();
                let bytes = || copy.iter().flat_map(|slice| slice.iter().copied()).collect();
                order.write_tables(&self.disk, &range, bytes, || {
                    self.write_all(&mut all, offset, ReadWriteFlags::DSYNC)
                })
            }
            Role::Data(order) => {
                order.note_written(range);
                let written = self.write_all(&mut all, offset, ReadWriteFlags::empty());
                order.note_data();
                written
            }
            Role::DataBeside(order) => {
                let written = self.write_all(&mut all, offset, ReadWriteFlags::empty());
                order.note_data();
                written
            }
        }
    }

    unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        match &self.role {
            Role::Base => Err(io::ErrorKind::PermissionDenied.into()),
            Role::Data(order) if order.is_fresh(offset..offset + length) => Ok(()),
            Role::Tables(order) | Role::Data(order) | Role::DataBeside(order) => {
                order.note_data();
                self.zero(offset, length)
            }
        }
    }

    unsafe fn pure_discard(&self, offset: u64, length: u64) -> io::Result<()> {
        match &self.role {
            Role::Base | Role::Tables(_) => Ok(()),
            Role::Data(_) | Role::DataBeside(_) => self.zero(offset, length),
        }
    }

    /// Nothing is held back here.
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        match self.role {
            Role::Base => Ok(()),
            _ => self.disk.sync(),
        }
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.helper
    }

    fn resize(&self, new_size: u64, _mode: PreallocateMode) -> io::Result<()> {
        match self.role {
            Role::DataBeside(_) if !self.disk.is_block_device() && self.disk.end()? < new_size => {
                self.disk.set_end(new_size)
            }
            _ => Ok(()),
        }
    }
}

/// Frees a range of clusters, which reads as zeroes then. Returns what was freed.
///
/// The caller has made sure that nobody uses their old places: they are forgotten in the map, and those who had
/// looked before have ended.
pub(super) fn discard_to_zero(
    image: &dyn FormatDriverInstance<Storage = LibraryFile>,
    offset: u64,
    len: u64,
) -> io::Result<(u64, u64)> {
    // SAFETY: the library asks that places looked up before are not used any more, which the caller promises.
    unsafe { image.discard_to_zero_unsafe(offset, len) }
}

/// The same, where what is below shows then: of an image without a base.
pub(super) fn discard_to_nothing(
    image: &dyn FormatDriverInstance<Storage = LibraryFile>,
    offset: u64,
    len: u64,
) -> io::Result<(u64, u64)> {
    // SAFETY: as above.
    unsafe { image.discard_to_backing_unsafe(offset, len) }
}

/// Copies the memory of a write under way, from its byte `skip` on, into a buffer.
pub(super) fn gather(pieces: &[Lent], skip: u64, into: &mut [u8]) {
    copy(pieces, skip, into.len(), |piece, at, len| {
        let target = into[at..at + len].as_mut_ptr();
        // SAFETY: the lender keeps the piece readable until its write has ended, which is after this; the buffer has
        // `len` bytes from `at` on, and is ours alone.
        unsafe { std::ptr::copy_nonoverlapping(piece.start().as_ptr(), target, len) };
    });
}

/// Copies a buffer into the memory of a read under way, from its byte `skip` on.
pub(super) fn scatter(pieces: &[Lent], skip: u64, from: &[u8]) {
    copy(pieces, skip, from.len(), |piece, at, len| {
        let source = from[at..at + len].as_ptr();
        // SAFETY: the lender keeps the piece writable until its read has ended, which is after this; the buffer has
        // `len` bytes from `at` on.
        unsafe { std::ptr::copy_nonoverlapping(source, piece.start().as_ptr(), len) };
    });
}

/// Zeroes a piece of memory of a read under way.
pub(super) fn zero(piece: Lent) {
    // SAFETY: the lender keeps the piece writable until its read has ended, which is after this.
    unsafe { std::ptr::write_bytes(piece.start().as_ptr(), 0, piece.len() as usize) };
}

fn copy(pieces: &[Lent], mut skip: u64, len: usize, mut each: impl FnMut(Lent, usize, usize)) {
    let mut at = 0;
    for piece in pieces {
        let skipped = skip.min(piece.len().into());
        skip -= skipped;
        let part = piece.part(skipped as u32, (len - at).min(u32::MAX as usize) as u32);
        if !part.is_empty() {
            each(part, at, part.len() as usize);
            at += part.len() as usize;
        }
    }
    debug_assert_eq!(at, len, "memory is shorter than its request");
}

/// The kernel takes so many pieces at once.
const SLICES_MAX: usize = 1024;
