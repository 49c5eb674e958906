//! The memory of a buffer, its loan to the engine, and the count of forks: the only `unsafe` of this crate. `loans`
//! keeps the loans of all bios under way.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{io, slice};

use blkmq_core::bio::{self, Data, Lent};

use crate::buffer::Buffer;

/// Bytes at one place: of its own, or lent by the caller of [`Buffer::from_raw_parts`]. 16 bytes, since each I/O
/// moves it several times.
pub(crate) struct RawBuffer {
    start: NonNull<u8>,
    len: u32,
    /// How far behind the start of its allocation it begins; [`NOT_OWN`] if it has none.
    lead: u16,
}

// SAFETY: it owns its bytes, or its maker has promised that nobody else accesses them; no thread is special.
unsafe impl Send for RawBuffer {}
// SAFETY: a shared reference to it reads bytes alone, which nobody changes while it exists.
unsafe impl Sync for RawBuffer {}

impl RawBuffer {
    /// Its own bytes, all 0, that begin at a page.
    pub(crate) fn zeroed(len: u32) -> Self {
        if len == 0 {
            return Self::default();
        }
        let layout = layout(len);
        // SAFETY: the layout's size is not 0.
        let allocated = unsafe { alloc_zeroed(layout) };
        let allocated = NonNull::new(allocated).unwrap_or_else(|| handle_alloc_error(layout));
        let lead = allocated.align_offset(PAGE);
        Self {
            // SAFETY: less than a page, by which the allocation is longer than `len`.
            start: unsafe { allocated.add(lead) },
            len,
            lead: u16::try_from(lead).expect("less than a page"),
        }
    }

    /// One whose parts were taken by [`RawBuffer::parts`].
    ///
    /// # Safety
    /// That one is never used or dropped again.
    #[inline]
    pub(crate) unsafe fn from_parts(start: NonNull<u8>, len: u32, lead: u16) -> Self {
        Self { start, len, lead }
    }

    /// What [`RawBuffer::from_parts`] needs.
    #[inline]
    pub(crate) fn parts(&self) -> (NonNull<u8>, u32, u16) {
        (self.start, self.len, self.lead)
    }

    #[inline]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    #[inline]
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes from `start` live as long as this does, by `zeroed` or by the promise to
        // `from_raw_parts`; only `bytes_mut` changes them, and it borrows this.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len as usize) }
    }

    #[inline]
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; this is borrowed exclusively, so nobody else has a reference.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len as usize) }
    }
}

impl Default for RawBuffer {
    fn default() -> Self {
        Self {
            start: NonNull::dangling(),
            len: 0,
            lead: NOT_OWN,
        }
    }
}

impl Drop for RawBuffer {
    #[inline]
    fn drop(&mut self) {
        if self.lead != NOT_OWN {
            // SAFETY: `zeroed` began so far behind the start of its allocation.
            let allocated = unsafe { self.start.sub(self.lead as usize) };
            // SAFETY: allocated by `zeroed` with this layout, and dropped once.
            unsafe { dealloc(allocated.as_ptr(), layout(self.len)) };
        }
    }
}

/// Of an allocation with room to begin at a page.
fn layout(len: u32) -> Layout {
    Layout::array::<u8>(len as usize + PAGE - 1).expect("a buffer is shorter")
}

impl Buffer {
    /// Uses memory of the caller's own, such as one of a foreign language; a drop does not free it. I/O on it is
    /// faster if it begins at a page.
    ///
    /// # Panics
    /// If `len` is more than [`Self::LEN_MAX`].
    ///
    /// # Safety
    /// `len` bytes from `start` are initialised memory, and nobody else accesses or frees them until the buffer is
    /// dropped outside of the engine: a buffer that an I/O has is in use until the I/O has ended.
    pub unsafe fn from_raw_parts(start: NonNull<u8>, len: usize) -> Self {
        let max = Self::LEN_MAX;
        assert!(len <= max, "a buffer of {len} bytes: at most {max} are possible");
        Self::from_raw_buffer(RawBuffer {
            start,
            len: len as u32,
            lead: NOT_OWN,
        })
    }
}

/// A buffer that the engine uses. Only the bio that was made with it gets it back, when it has ended: a loan
/// that is dropped leaks the memory.
#[derive(Default)]
pub(crate) struct Loan(ManuallyDrop<Buffer>);

impl Loan {
    /// Lends a buffer to the one bio that gets this data.
    #[inline]
    pub(crate) fn new(buffer: Buffer) -> (Self, Data) {
        let (start, len) = buffer.place();
        let loan = Self(ManuallyDrop::new(buffer));
        if len == 0 {
            return (loan, Data::None);
        }
        // SAFETY: the bytes belong to the buffer and do not move with it. From here on nothing reads, changes or
        // frees them: `loan` gives no access, a drop of it leaks them, and `end` takes the bio as it ended.
        let lent = unsafe { Lent::new(start, len) };
        (loan, Data::Flat(lent))
    }

    /// Takes the buffer back from the bio, which has ended.
    ///
    /// # Panics
    /// If it is another buffer's bio.
    #[inline]
    pub(crate) fn end(self, ended: bio::Bio) -> Buffer {
        let buffer = ManuallyDrop::into_inner(self.0);
        match ended.data {
            Data::Flat(lent) if lent.start() == buffer.place().0 => buffer,
            Data::None if buffer.is_empty() => buffer,
            other => {
                // It may be in use.
                std::mem::forget(buffer);
                panic!("a bio ended with data that it was not submitted with: {other:?}")
            }
        }
    }
}

/// How many forks lie between the engine's code as it was loaded and this process; changes in a fork's child alone.
#[inline]
pub(crate) fn forks() -> u32 {
    // The child of a fork has one thread, which has made this change itself.
    FORKS.load(Ordering::Relaxed)
}

/// Has forks counted from now on.
///
/// # Errors
/// The C library is out of memory.
pub(crate) fn count_forks() -> io::Result<()> {
    static ASKED: OnceLock<i32> = OnceLock::new();
    // SAFETY: the function does what is allowed in the child of a process with threads: it changes an atomic.
    let errno = *ASKED.get_or_init(|| unsafe { libc::pthread_atfork(None, None, Some(count_fork)) });
    if errno == 0 {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(errno))
    }
}

extern "C" fn count_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

static FORKS: AtomicU32 = AtomicU32::new(0);
pub(crate) const NOT_OWN: u16 = u16::MAX;
pub(crate) const PAGE: usize = 4096;
