//! An image as a hardware context sees it: its files by their ids, and where the bytes of a request lie in them.

use std::ops::Range;
use std::sync::Arc;

use blkmq_core::bio::Op;
use blkmq_core::ids::DiskId;

use super::super::bitmaps;
use super::super::image::Image;
use super::super::map::Entry;
use crate::file::disks::Disks;
use crate::file::part::Part;

/// An image as a context needs it.
pub(super) struct View {
    pub(super) image: Arc<Image>,
    /// Its files as the context for files knows them, and where the part of each ends that may be read there.
    pub(super) files: Box<[(DiskId, u64)]>,
    /// Its bitmaps, and which version of them that is.
    bitmaps: bitmaps::List,
    version: u64,
}

/// A run of bytes of a request in one file, or of zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    /// First byte of the request.
    pub(super) at: u64,
    pub(super) len: u64,
    /// The number of the file in the image, and the byte there.
    pub(super) place: Option<(u8, u64)>,
}

/// What the map knows of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    All,
    Unknown,
    /// Where it is, the files cannot do it alone.
    Other,
}

impl View {
    pub(super) fn new(image: &Arc<Image>, disks: &Disks) -> Self {
        let own = image.own_files().count();
        let files = image.files().iter().enumerate().map(|(number, file)| {
            let id = disks.id_of(file).unwrap_or(DiskId(u32::MAX));
            // Files that grow are as long as their clusters; others may end in one.
            let end = match number >= own || file.is_read_only() {
                true => file.end().map_or(0, |end| end - end % READ_BLOCK),
                false => u64::MAX,
            };
            (id, end)
        });
        Self {
            image: Arc::clone(image),
            files: files.collect(),
            bitmaps: bitmaps::List::default(),
            version: 0,
        }
    }

    /// Notes in the bitmaps that a range is about to change, which is announced: others come when nothing is.
    #[inline]
    pub(super) fn track(&mut self, range: &Range<u64>) {
        let Some(tables) = self.image.writable_tables() else {
            return;
        };
        let version = tables.bitmaps.version();
        if version != self.version {
            self.bitmaps = tables.bitmaps.list();
            self.version = version;
        }
        bitmaps::set(&self.bitmaps, range);
    }

    /// Finds where the bytes of a read or write are.
    #[inline]
    pub(super) fn locate(&self, rq: &Part<'_>, extents: &mut Vec<Extent>) -> Found {
        let map = self.image.map();
        let bits = map.granule_bits();
        let mask = (1u64 << bits) - 1;
        let is_write = rq.op == Op::Write;
        extents.clear();
        let mut at = 0;
        while at < rq.len {
            let byte = rq.offset + at;
            let len = ((byte | mask) + 1 - byte).min(rq.len - at);
            let place = match map.get(byte >> bits) {
                Entry::Unknown => return Found::Unknown,
                Entry::Special => return Found::Other,
                Entry::Zero if is_write => return Found::Other,
                Entry::Zero => None,
                Entry::Data {
                    is_writable: false, ..
                } if is_write => return Found::Other,
                Entry::Data { file, host, .. } => {
                    let host = host + (byte & mask);
                    if host + len > self.files[usize::from(file)].1 {
                        return Found::Other;
                    }
                    Some((file, host))
                }
            };
            let is_full = extents.len() == EXTENTS_MAX;
            match extents.last_mut() {
                Some(last) if last.continues(place) => last.len += len,
                _ if is_full => return Found::Other,
                _ => extents.push(Extent { at, len, place }),
            }
            at += len;
        }
        Found::All
    }
}

impl Extent {
    fn continues(&self, next: Option<(u8, u64)>) -> bool {
        match (self.place, next) {
            (None, None) => true,
            (Some((file, host)), Some(next)) => (file, host + self.len) == next,
            _ => false,
        }
    }
}

/// Parts of one request: those of 1 MiB in clusters of 64 KiB that lie apart.
pub(super) const EXTENTS_MAX: usize = 17;
/// The end of a file that does not grow is read by the threads, in bytes.
const READ_BLOCK: u64 = 4096;
