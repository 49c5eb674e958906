//! Access to memory of a front end: files that it hands over are mapped, and every access goes through a
//! checked window. The content may change at any time; so it is read once, by volatile or atomic loads, and
//! never borrowed.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use blkmq_core::bio::Lent;
use rustix::fs::fstat;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::descriptors::is_memory;
use super::fault::Registered;
use super::unmap::unmap;

/// Memory that is shared with a front end, until it is dropped.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
    /// The registration for faults: the file may be truncated at any time.
    registered: Option<Registered>,
    /// The file, from which another daemon maps it. Open as long as the mapping: the last close of
    /// a file frees its pages.
    file: Option<Arc<OwnedFd>>,
}

// SAFETY: the mapping is plain memory that belongs to no thread; all access goes through raw pointers.
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared reference gives out addresses alone.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a range of a file that the front end has handed over.
    ///
    /// # Errors
    /// The range is empty, unaligned or reaches beyond the file's end; or the system's error.
    pub fn of_file(file: impl AsFd, offset: u64, bytes: u64) -> io::Result<Self> {
        if !is_memory(&file) {
            let what = "it is no shared memory: give a memfd, or a file on tmpfs or hugetlbfs";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let end = offset.checked_add(bytes).filter(|_| bytes > 0);
        let stat = fstat(&file)?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let is_inside = end.is_some_and(|end| end <= size);
        let length = usize::try_from(bytes).ok().filter(|_| is_inside);
        let Some(length) = length else {
            let what = format!("a region of {bytes} bytes at {offset} of a file of {size} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        };
        if !offset.is_multiple_of(PAGE as u64) {
            let what = format!("a region at {offset} of its file, where no page begins");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let kept = file.as_fd().try_clone_to_owned()?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the place, so nothing that exists is replaced.
        let start = unsafe { mmap(ptr::null_mut(), length, access, MapFlags::SHARED, file, offset) }?;
        let first = start.expose_provenance();
        // A huge page is lost as a whole.
        let page = usize::try_from(stat.st_blksize).unwrap_or(0);
        let page = if page.is_power_of_two() {
            page.max(PAGE)
        } else {
            PAGE
        };
        Ok(Self {
            start: NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?,
            bytes: length,
            registered: Some(Registered::new(
                first..first + length.next_multiple_of(PAGE),
                page,
            )),
            file: Some(Arc::new(kept)),
        })
    }

    /// Maps memory of no file, for tests.
    ///
    /// # Errors
    /// The system's error.
    pub fn anonymous(bytes: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the place, so nothing that exists is replaced.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), bytes, access, MapFlags::PRIVATE) }?;
        Ok(Self {
            start: NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?,
            bytes,
            registered: None,
            file: None,
        })
    }

    /// The size of the mapping.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The file that is mapped.
    pub(super) fn file(&self) -> Option<&Arc<OwnedFd>> {
        self.file.as_ref()
    }

    /// Returns whether the front end has taken some of it away. Check again when
    /// [`fault::losses`](super::fault::losses) has changed.
    pub(super) fn is_lost(&self) -> bool {
        self.registered.as_ref().is_some_and(Registered::is_lost)
    }

    /// The address of a range, if the range lies inside.
    fn range(&self, at: usize, bytes: usize) -> Option<NonNull<u8>> {
        let is_inside = at.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        // SAFETY: `at` is at most the length of the mapping.
        is_inside.then(|| unsafe { self.start.add(at) })
    }

    /// Lends a range, if it lies inside. The caller keeps the mapping until the bio has ended:
    /// [`super::memory::Loans`] does.
    pub(super) fn lend(&self, at: usize, bytes: u32) -> Option<Lent> {
        let start = self.range(at, bytes as usize)?;
        // SAFETY: the range is mapped, readable and writable, and stays so while the mapping lives. That the guest may change it
        // meanwhile cannot be prevented; drivers only copy it or hand its address to the kernel, and so no reference sees the change.
        Some(unsafe { Lent::new(start, bytes) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // From now on the addresses may belong to another mapping.
        drop(self.registered.take());
        let is_of_file = self.file.is_some();
        let unused = Unused {
            start: self.start,
            bytes: self.bytes,
            _file: self.file.take(),
        };
        if is_of_file {
            unmap(unused);
        }
    }
}

/// Unused addresses. Dropping this unmaps the rest of them, and then closes the file.
#[derive(Debug)]
pub(super) struct Unused {
    start: NonNull<u8>,
    bytes: usize,
    _file: Option<Arc<OwnedFd>>,
}

// SAFETY: nobody else has these addresses, and they belong to no thread.
unsafe impl Send for Unused {}

impl Unused {
    /// No addresses, and an unused file.
    pub(super) fn file(fd: OwnedFd) -> Self {
        Self {
            start: NonNull::dangling(),
            bytes: 0,
            _file: Some(Arc::new(fd)),
        }
    }

    /// Unmaps a part, which takes a fraction of a millisecond. Returns whether more is left.
    pub(super) fn unmap_some(&mut self) -> bool {
        let bytes = self.bytes.min(UNMAPPED_AT_ONCE);
        if bytes == self.bytes {
            return false;
        }
        // SAFETY: it lies in what was a mapping, at whose beginning it is, and nothing points into it any more.
        if unsafe { munmap(self.start.as_ptr().cast(), bytes) }.is_err() {
            // Larger pages go as a whole.
            return false;
        }
        // SAFETY: `bytes` is less than what was mapped from `start` on.
        self.start = unsafe { self.start.add(bytes) };
        self.bytes -= bytes;
        true
    }
}

impl Drop for Unused {
    fn drop(&mut self) {
        // SAFETY: these addresses are the rest of what was mapped with this end, and nothing points into them any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// A checked range of a mapping, which it keeps alive. Places in it are offsets; an offset beyond
/// its end is a bug here.
#[derive(Clone, Debug)]
pub struct Window {
    /// Holds the memory that `start` points into.
    mapping: Arc<Mapping>,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is an address in memory that `mapping` keeps alive and that belongs to no thread.
unsafe impl Send for Window {}

impl Window {
    /// A range of a mapping, if it lies inside and is aligned as asked.
    pub fn new(mapping: &Arc<Mapping>, at: usize, bytes: usize, align: usize) -> Option<Self> {
        let start = mapping.range(at, bytes)?;
        start.addr().get().is_multiple_of(align).then(|| Self {
            mapping: Arc::clone(mapping),
            start,
            bytes,
        })
    }

    /// The size of the range.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns whether some of its mapping was taken away.
    pub(super) fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }

    /// Writes bytes, for tests.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        bytes
            .iter()
            .enumerate()
            .for_each(|(index, byte)| self.store(at + index, *byte));
    }

    #[inline]
    fn at(&self, at: usize, bytes: usize) -> NonNull<u8> {
        assert!(
            at + bytes <= self.bytes,
            "access to {at}+{bytes} of {} bytes",
            self.bytes
        );
        // SAFETY: `at` was just seen to lie inside.
        unsafe { self.start.add(at) }
    }

    /// Reads, once, a value that may have any bits.
    #[inline]
    pub(super) fn load<T: Plain>(&self, at: usize) -> T {
        let place = self.at(at, size_of::<T>()).cast::<Packed<T>>();
        // SAFETY: the place lies in mapped memory, and `T` may have any bits; packed, it has no alignment.
        let Packed(value) = unsafe { ptr::read_volatile(place.as_ptr()) };
        value
    }

    /// Writes a value.
    #[inline]
    pub(super) fn store<T: Plain>(&self, at: usize, value: T) {
        let place = self.at(at, size_of::<T>()).cast::<Packed<T>>();
        // SAFETY: the place lies in mapped memory that may be written; packed, the value has no alignment.
        unsafe { ptr::write_volatile(place.as_ptr(), Packed(value)) }
    }

    /// An index that both sides use.
    ///
    /// # Panics
    /// If it is not aligned.
    #[inline]
    fn index(&self, at: usize) -> &AtomicU16 {
        let place = self.at(at, 2).cast::<u16>();
        assert!(place.is_aligned(), "an index at an odd address");
        // SAFETY: the place is aligned, lies in memory that lives as long as `self`, and we use it by atomic accesses alone.
        unsafe { AtomicU16::from_ptr(place.as_ptr()) }
    }

    #[inline]
    pub(super) fn load_index(&self, at: usize) -> u16 {
        // Acquire: pairs with the other side's barrier between what the index publishes and the index.
        self.index(at).load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn store_index(&self, at: usize, value: u16) {
        // Release: the other side sees what was written before when it sees the index.
        self.index(at).store(value, Ordering::Release);
    }
}

/// A type for which any bits are valid.
pub(super) trait Plain: Copy {}
impl Plain for u8 {}
impl Plain for u16 {}
impl Plain for u32 {}
impl Plain for u64 {}
impl Plain for u128 {}

/// A value at any alignment: one access for the compiler, which it neither repeats nor leaves out.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Packed<T>(T);

/// Copies from lent memory. The other side may change that meanwhile, but not the copy.
pub(super) fn copy_from(piece: Lent, out: &mut [u8]) {
    let bytes = out.len().min(piece.len() as usize);
    // SAFETY: whoever lent the piece keeps it readable, and `out` is ours, at least as long and elsewhere.
    unsafe { ptr::copy_nonoverlapping(piece.start().as_ptr(), out.as_mut_ptr(), bytes) }
}

/// Copies to lent memory, as much as fits.
pub(super) fn copy_to(piece: Lent, from: &[u8]) {
    let bytes = from.len().min(piece.len() as usize);
    // SAFETY: whoever lent the piece keeps it writable, and `from` is ours and elsewhere.
    unsafe { ptr::copy_nonoverlapping(from.as_ptr(), piece.start().as_ptr(), bytes) }
}

/// A piece of no memory, for unused entries of a list.
pub(super) const fn nothing() -> Lent {
    // SAFETY: no byte of it is ever read or written.
    unsafe { Lent::new(NonNull::dangling(), 0) }
}

/// Bytes of the smallest page size.
const PAGE: usize = 4096;
/// Bytes that are unmapped in one step, usually a multiple of the page size: 0.1 ms.
const UNMAPPED_AT_ONCE: usize = 2 << 20;
