//! The memory of a request that librbd uses while the request is under way, and its completion callback.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::io;
use std::ptr;
use std::sync::Weak;

use blkmq_core::bio::Lent;
use blkmq_core::request::Request;

use super::{Handle, Library};
use crate::rbd::mailbox::{End, Mailbox};

/// What librbd uses of one request while the request is under way.
pub(in crate::rbd) struct Slot {
    number: u32,
    of: Weak<Mailbox>,
    /// The request's memory, if it is in several pieces.
    pieces: UnsafeCell<[libc::iovec; SEGMENTS_MAX]>,
}

// SAFETY: the pieces are written by the reactor alone, and only while no request of the slot is under way; else librbd reads
// them. The addresses in them are of memory that was lent for any thread.
unsafe impl Sync for Slot {}
// SAFETY: as above.
unsafe impl Send for Slot {}

/// Where a request's data is.
pub(super) enum Memory {
    None,
    Flat(Lent),
    List(*const libc::iovec, c_int),
}

impl Slot {
    pub(in crate::rbd) fn new(number: u32, of: Weak<Mailbox>) -> Self {
        let none = libc::iovec {
            iov_base: ptr::null_mut(),
            iov_len: 0,
        };
        Self {
            number,
            of,
            pieces: UnsafeCell::new([none; SEGMENTS_MAX]),
        }
    }

    #[inline]
    pub(super) fn memory(&self, rq: &Request) -> io::Result<Memory> {
        if !rq.op().has_data() {
            return Ok(Memory::None);
        }
        match rq.single_piece() {
            Some(piece) if u64::from(piece.len()) == rq.len() => Ok(Memory::Flat(piece)),
            Some(_) => Err(io::Error::from_raw_os_error(libc::EINVAL)),
            None => self.list(rq),
        }
    }

    fn list(&self, rq: &Request) -> io::Result<Memory> {
        let (mut count, mut len) = (0, 0);
        let first: *mut libc::iovec = self.pieces.get().cast();
        rq.for_each_piece(|piece| {
            if count < SEGMENTS_MAX {
                let vector = libc::iovec {
                    iov_base: piece.start().as_ptr().cast(),
                    iov_len: piece.len() as usize,
                };
                // SAFETY: `count` is less than the number of pieces there is room for.
                let place = unsafe { first.add(count) };
                // SAFETY: inside the slot's own array, which nobody reads: no request of the slot is under way.
                unsafe { place.write(vector) };
            }
            count += 1;
            len += u64::from(piece.len());
        });
        if count == 0 || count > SEGMENTS_MAX || len != rq.len() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        Ok(Memory::List(first, count as c_int))
    }
}

/// librbd's thread reports that a request has ended.
pub(super) unsafe extern "C" fn ended(completion: Handle, about: *mut c_void) {
    // SAFETY: as `completion` gave it: a slot of a mailbox that lives at least until the end is in it.
    let slot: &Slot = unsafe { &*about.cast::<Slot>() };
    // Kept during `put`: as soon as the completion is visible, the hardware context may be dropped.
    let Some(mailbox) = slot.of.upgrade() else {
        return;
    };
    let number = slot.number;
    // The library is loaded: it makes this call.
    if let Ok(library) = Library::get() {
        // SAFETY: the completion that has ended, which is released below and not before.
        let result = unsafe { (library.rbd_aio_get_return_value)(completion) };
        // SAFETY: nobody else has it.
        unsafe { (library.rbd_aio_release)(completion) };
        mailbox.put(End {
            slot: number,
            result: result as i64,
        });
    }
}

/// Most pieces of memory in one request: a row of each slot.
pub(in crate::rbd) const SEGMENTS_MAX: usize = 128;
