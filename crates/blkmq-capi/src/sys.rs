//! The functions of `blkmq.h`, and the only `unsafe` of this crate: engines, disks, queues, and here what they share.

pub mod disk;
pub mod engine;
pub mod queue;

use std::ffi::{CStr, c_char, c_void};
use std::ptr::NonNull;

use blkmq_engine::{Bio, Buffer};

use crate::code::Code;
use crate::failure::{Failure, last, text_of};

/// What an I/O does.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Fills the data from the offset.
    Read = 0,
    /// Stores the data at the offset. Durable when a flush that was submitted after its end has ended.
    Write = 1,
    /// Makes all writes durable that have ended. Has no range.
    Flush = 2,
    /// Tells the disk that the content is no longer needed. Has no data.
    Discard = 3,
    /// Stores zeroes. Has no data.
    WriteZeroes = 4,
}

/// A flag: the write is durable when it has ended.
pub const FUA: u32 = 1;
/// A flag: nobody waits for this write; schedulers prefer others to it.
pub const BACKGROUND: u32 = 2;

/// One I/O. Offsets and lengths are bytes, multiples of the disk's block size.
#[repr(C)]
#[derive(Debug)]
pub struct Io {
    /// One of `blkmq_op`.
    pub op: u32,
    /// Flags, 0 for none.
    pub flags: u32,
    /// Where on the disk.
    pub offset: u64,
    /// How much, at most 1 GiB with data.
    pub len: u64,
    /// `len` bytes, for reads and writes. The library uses them until the I/O has ended: they must not be freed,
    /// changed or, in a read, looked at. Faster if they begin at a page.
    pub data: *mut c_void,
    /// The caller's own: it comes back with the end.
    pub user: *mut c_void,
}

/// The text of the calling thread's last call that failed: what, which value, what to do. Valid until this thread's
/// next failure. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn blkmq_error() -> *const c_char {
    last()
}

/// What a code means, in general; for ever valid. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn blkmq_code_text(code: i32) -> *const c_char {
    text_of(code).as_ptr()
}

/// The version of the library, such as `0.1.0`; for ever valid. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn blkmq_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Reads an I/O, whose data the library has from now on.
///
/// # Safety
/// Null, or an I/O as it is declared.
#[inline]
unsafe fn bio(io: *const Io) -> Result<Bio, Failure> {
    // SAFETY: by the caller's promise.
    let io = unsafe { io.as_ref() }.ok_or_else(|| null("io"))?;
    let bio = match io.op {
        op if op == Op::Read as u32 => Bio::read(io.offset, buffer(io)?),
        op if op == Op::Write as u32 => Bio::write(io.offset, buffer(io)?),
        op if op == Op::Flush as u32 => Bio::flush(),
        op if op == Op::Discard as u32 => Bio::discard(io.offset, io.len),
        op if op == Op::WriteZeroes as u32 => Bio::write_zeroes(io.offset, io.len),
        op => return Err(argument(format!("op {op} rejected: 0 to 4 are known"))),
    };
    with_flags(bio, io.flags)
}

#[inline]
fn with_flags(bio: Bio, flags: u32) -> Result<Bio, Failure> {
    match flags {
        0 => Ok(bio),
        FUA => Ok(bio.fua()),
        BACKGROUND => Ok(bio.in_background()),
        flags if flags == FUA | BACKGROUND => Ok(bio.fua().in_background()),
        flags => Err(argument(format!("flags {flags:#x} rejected: 0x3 are known"))),
    }
}

/// The data of an I/O.
#[inline]
fn buffer(io: &Io) -> Result<Buffer, Failure> {
    let len = usize::try_from(io.len).ok().filter(|len| *len <= Buffer::LEN_MAX);
    let too_long = || {
        argument(format!(
            "len {} rejected: at most {} with data",
            io.len,
            Buffer::LEN_MAX
        ))
    };
    let len = len.ok_or_else(too_long)?;
    match NonNull::new(io.data.cast::<u8>()) {
        // SAFETY: the I/O is as it is declared: `len` bytes that the library has until the I/O has ended. Every call
        // drops the buffer without another look at it when the I/O has ended.
        Some(start) => Ok(unsafe { Buffer::from_raw_parts(start, len) }),
        None if len == 0 => Ok(Buffer::default()),
        None => Err(null("data of an I/O with a length")),
    }
}

/// Reads a text.
///
/// # Safety
/// Null, or a text that ends with a zero and lives as long as the result is used.
unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<&'a str, Failure> {
    if text.is_null() {
        return Err(null(what));
    }
    // SAFETY: not null, so by the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str()
        .map_err(|error| argument(format!("{what} rejected: {error}")))
}

/// Reads a handle.
///
/// # Safety
/// Null, or a handle of this library that is not closed as long as the result is used.
#[inline]
unsafe fn handle<'a, T>(handle: *const T, what: &str) -> Result<&'a T, Failure> {
    // SAFETY: by the caller's promise.
    unsafe { handle.as_ref() }.ok_or_else(|| null(what))
}

/// Gives a new handle to the caller.
///
/// # Safety
/// Null, or a place for a handle.
unsafe fn put<T>(place: *mut *mut T, new: impl FnOnce() -> Result<T, Failure>) -> Result<i32, Failure> {
    if place.is_null() {
        return Err(null("the place for the result"));
    }
    // SAFETY: not null, so by the caller's promise. A call that fails leaves no handle.
    unsafe { place.write(std::ptr::null_mut()) };
    let new = Box::into_raw(Box::new(new()?));
    // SAFETY: as above.
    unsafe { place.write(new) };
    Ok(0)
}

fn argument(text: String) -> Failure {
    Failure::new(Code::Argument, text)
}

#[cold]
fn null(what: &str) -> Failure {
    argument(format!("{what} is null"))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A text of the library.
    pub(crate) fn text(text: *const c_char) -> String {
        // SAFETY: the tests give texts of the library, which end with a zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}
