//! The data and the holes of a file, as clients ask for them (`blkmq_host::device::Allocation`).

use std::io;
use std::ops::Range;

use blkmq_host::device::Extent;
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::FileDisk;

impl FileDisk {
    /// Appends the file's data and holes; see [`blkmq_host::device::Allocation`].
    pub(in crate::file) fn extents(
        &self,
        offset: u64,
        len: u64,
        max: usize,
        out: &mut Vec<Extent>,
    ) -> io::Result<()> {
        let end = offset.saturating_add(len).min(self.size());
        if offset >= end || max == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if self.is_block_device() {
            out.push(Extent::data(end - offset));
            return Ok(());
        }
        self.find_extents(offset..end, max, out)?;
        // What somebody has cut off is no hole.
        self.look_for_certain();
        match self.has_lost(end) {
            true => Err(io::ErrorKind::UnexpectedEof.into()),
            false => Ok(()),
        }
    }

    fn find_extents(&self, range: Range<u64>, max: usize, out: &mut Vec<Extent>) -> io::Result<()> {
        let Range { start: mut at, end } = range;
        for _ in 0..max {
            let data = self.next(SeekFrom::Data(at))?.min(end);
            let (extent, until) = if data > at {
                (Extent::hole(data - at), data)
            } else {
                let hole = self.next(SeekFrom::Hole(at))?.clamp(at + 1, end);
                (Extent::data(hole - at), hole)
            };
            out.push(extent);
            at = until;
            if at == end {
                break;
            }
        }
        Ok(())
    }

    /// Returns whether a byte of a file of an image is in a hole, or behind the end, and for how many bytes, at most `len`,
    /// that goes on. A filesystem that is not known to be local and true to its data is not asked: it may hang, or call a
    /// hole what was written a moment ago, and a hole is never copied.
    ///
    /// # Errors
    /// The system's.
    #[cfg(feature = "qcow2")]
    pub(crate) fn look_for_hole(&self, at: u64, len: u64) -> io::Result<(bool, u64)> {
        if self.is_block_device() || self.may_block {
            return Ok((false, len));
        }
        let find = |from, otherwise| match rustix::fs::seek(&self.file, from) {
            Err(Errno::NXIO) => Ok(otherwise),
            found => found,
        };
        let end = at + len;
        let data = find(SeekFrom::Data(at), end)?.min(end);
        if data > at {
            return Ok((true, data - at));
        }
        let hole = find(SeekFrom::Hole(at), end)?.clamp(at + 1, end);
        Ok((false, hole - at))
    }

    /// Returns where the file's next data or hole begins, or its end.
    fn next(&self, from: SeekFrom) -> io::Result<u64> {
        match rustix::fs::seek(&self.file, from) {
            Ok(at) => Ok(at),
            Err(Errno::NXIO) => Ok(self.size()),
            Err(error) => Err(error.into()),
        }
    }
}
