//! Maps the memory for keys. The parent and `xts` use it through safe types.

use std::io;
use std::mem::{MaybeUninit, align_of, size_of};
use std::ops::Deref;
use std::ptr::NonNull;

use zeroize::Zeroize;

/// Pages of this process alone: locked, not dumped, wiped when they are dropped.
pub(super) struct Pages {
    start: NonNull<u8>,
    len: usize,
}

impl Pages {
    /// Maps at least `len` bytes, which are zero.
    pub(super) fn new(len: usize) -> io::Result<Self> {
        let len = len.max(1).next_multiple_of(PAGE);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no memory of ours.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let pages = Self { start, len };
        // SAFETY: the range is the mapping of above; this advice changes only what a core dump contains.
        unsafe { libc::madvise(pages.start.as_ptr().cast(), len, libc::MADV_DONTDUMP) };
        // SAFETY: the range is the mapping of above; locking changes no byte.
        match unsafe { libc::mlock(pages.start.as_ptr().cast(), len) } {
            0 => Ok(pages),
            _ => Err(io::Error::last_os_error()),
        }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has `len` initialised bytes, lives as long as `self`, and is written through `&mut self` alone.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.bytes_mut().zeroize();
        // SAFETY: `start` and `len` are what mmap gave to `new`, and no reference outlives `self`.
        let unmapped = unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert_eq!(unmapped, 0, "munmap");
    }
}

// SAFETY: `Pages` owns its memory as a `Box<[u8]>` does; the address is valid in every thread.
unsafe impl Send for Pages {}
// SAFETY: shared references only read.
unsafe impl Sync for Pages {}

/// Overwrites the `BYTES` bytes of this thread's stack below the caller's frame.
#[inline(never)]
pub(crate) fn wipe_below<const BYTES: usize>() {
    let mut below = MaybeUninit::<[u8; BYTES]>::uninit();
    // SAFETY: it writes the bytes of the array.
    unsafe { below.as_mut_ptr().write_bytes(0, 1) };
    // The array is handed out, so the compiler keeps the writes.
    std::hint::black_box(&mut below);
}

/// Clears the vector registers of this thread, in which AES leaves parts of keys: a core has them, too.
pub(crate) fn clear_registers() {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has AVX-512, as the line above has found.
            unsafe { clear_upper_sixteen() };
        }
        if is_x86_feature_detected!("avx") {
            // SAFETY: the processor has AVX, as the line above has found.
            unsafe { clear_lower_sixteen() };
        }
    }
}

/// Clears the registers that all AVX has, whatever their length.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
fn clear_lower_sixteen() {
    std::arch::x86_64::_mm256_zeroall();
}

/// Clears those that AVX-512 adds.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn clear_upper_sixteen() {
    // SAFETY: the instructions change these registers alone, which are declared as changed.
    unsafe {
        std::arch::asm!(
            "vpxord zmm16, zmm16, zmm16",
            "vpxord zmm17, zmm17, zmm17",
            "vpxord zmm18, zmm18, zmm18",
            "vpxord zmm19, zmm19, zmm19",
            "vpxord zmm20, zmm20, zmm20",
            "vpxord zmm21, zmm21, zmm21",
            "vpxord zmm22, zmm22, zmm22",
            "vpxord zmm23, zmm23, zmm23",
            "vpxord zmm24, zmm24, zmm24",
            "vpxord zmm25, zmm25, zmm25",
            "vpxord zmm26, zmm26, zmm26",
            "vpxord zmm27, zmm27, zmm27",
            "vpxord zmm28, zmm28, zmm28",
            "vpxord zmm29, zmm29, zmm29",
            "vpxord zmm30, zmm30, zmm30",
            "vpxord zmm31, zmm31, zmm31",
            out("zmm16") _,
            out("zmm17") _,
            out("zmm18") _,
            out("zmm19") _,
            out("zmm20") _,
            out("zmm21") _,
            out("zmm22") _,
            out("zmm23") _,
            out("zmm24") _,
            out("zmm25") _,
            out("zmm26") _,
            out("zmm27") _,
            out("zmm28") _,
            out("zmm29") _,
            out("zmm30") _,
            out("zmm31") _,
            options(nomem, nostack, preserves_flags),
        );
    };
}

/// A value in memory for keys, as a key schedule.
pub struct Locked<T> {
    value: NonNull<T>,
    /// Dropped after the value.
    _pages: Pages,
}

impl<T> Locked<T> {
    /// Moves a value there. What the move leaves elsewhere is the caller's to wipe ([`super::wipe_stack`]).
    ///
    /// # Errors
    /// The system's error, if there is no memory that can be locked.
    pub fn new(value: T) -> io::Result<Self> {
        const { assert!(align_of::<T>() <= PAGE) }
        let mut pages = Pages::new(size_of::<T>())?;
        let place = NonNull::from(pages.bytes_mut()).cast::<T>();
        // SAFETY: the pages have room for a `T`, are aligned to a page, and nothing else is in them.
        unsafe { place.write(value) };
        Ok(Self {
            value: place,
            _pages: pages,
        })
    }
}

impl<T> Deref for Locked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: `new` has written a `T` there, which stays until the drop; nobody gets a `&mut` to it.
        unsafe { self.value.as_ref() }
    }
}

impl<T> Drop for Locked<T> {
    fn drop(&mut self) {
        // SAFETY: `new` has written a `T` there, which is dropped once, here; the pages are dropped after it.
        unsafe { self.value.drop_in_place() };
    }
}

// SAFETY: `Locked` owns its value as a `Box<T>` does.
unsafe impl<T: Send> Send for Locked<T> {}
// SAFETY: shared references give out shared references of the value.
unsafe impl<T: Sync> Sync for Locked<T> {}

/// The smallest page of Linux; larger ones are rounded up to by the kernel.
const PAGE: usize = 4096;
