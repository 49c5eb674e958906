//! An image that no drive has: read and written by whoever has opened it, past the cached map, on the calling
//! thread. Commands on images and the fuzzer use it.

use std::io;
use std::ops::Range;

use blkmq_core::bio::{Flags, Op};
use blkmq_host::device::{BitmapInfo, Extent};

use super::disk::ImageDisk;
use super::zero;

impl ImageDisk {
    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.image.size()
    }

    /// Reads at a byte of the disk. Blocks.
    ///
    /// # Errors
    /// The system's, or the image is corrupt there; `InvalidInput` behind the end of the disk.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.check(offset, into.len() as u64)?;
        let tables = self.image.tables()?;
        self.image.read(&tables, offset, into)
    }

    /// Writes at a byte of the disk; the next [`ImageDisk::flush`] makes it durable. Blocks.
    ///
    /// # Errors
    /// As of [`ImageDisk::read`]; or the image is read-only.
    pub fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check(offset, data.len() as u64)?;
        let tables = self.image.tables()?;
        self.image.write(&tables, offset, data)
    }

    /// Zeroes a range of the disk, and gives the space of whole clusters back. Blocks.
    ///
    /// # Errors
    /// As of [`ImageDisk::write`].
    pub fn write_zeroes(&self, range: Range<u64>) -> io::Result<()> {
        self.check(range.start, range.end.saturating_sub(range.start))?;
        let tables = self.image.tables()?;
        zero::run(&self.image, &tables, Op::WriteZeroes, Flags::NONE, range)
    }

    /// Makes what was written durable. Blocks.
    ///
    /// # Errors
    /// The system's.
    pub fn flush(&self) -> io::Result<()> {
        self.image.flush()
    }

    /// Makes the disk larger. Returns its size in bytes. Blocks.
    ///
    /// # Errors
    /// The size is not allowed, or the system's.
    pub fn grow(&self, size: u64) -> io::Result<u64> {
        self.image.resize(Some(size))
    }

    /// What is where from `offset` on: at most `max` extents. Blocks.
    ///
    /// # Errors
    /// As of [`ImageDisk::read`].
    pub fn extents(&self, offset: u64, max: usize) -> io::Result<Vec<Extent>> {
        let mut extents = Vec::new();
        self.image.extents(offset, u64::MAX, max, &mut extents)?;
        Ok(extents)
    }

    /// Writes what is only in this process, and has bitmaps say that they are right. Blocks.
    pub fn close(&self) {
        self.image.close();
    }

    /// Adds a bitmap, in which all changes from now on are noted, in units of so many bytes. Blocks.
    ///
    /// # Errors
    /// The image cannot have it, there is one of that name, there is no room, or the system's.
    pub fn add_bitmap(&self, name: &str, granularity: Option<u64>) -> io::Result<()> {
        self.image.add_bitmap(name, granularity)
    }

    /// Removes a bitmap. Blocks.
    ///
    /// # Errors
    /// There is none of that name, or the system's.
    pub fn remove_bitmap(&self, name: &str) -> io::Result<()> {
        self.image.remove_bitmap(name)
    }

    /// The bitmaps. Blocks.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn bitmaps(&self) -> io::Result<Vec<BitmapInfo>> {
        self.image.bitmaps()
    }

    fn check(&self, offset: u64, len: u64) -> io::Result<()> {
        match offset.checked_add(len) {
            Some(end) if len > 0 && end <= self.size() => Ok(()),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}
