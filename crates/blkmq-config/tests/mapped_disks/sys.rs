//! The memory that the test lends to bios.

use std::ptr::NonNull;

use blkmq_core::bio::Lent;

/// Lends a buffer; the test keeps it until the bio has ended and does not touch it meanwhile.
pub(crate) fn lend(bytes: &mut [u8]) -> Lent {
    let len = bytes.len() as u32;
    // SAFETY: the test waits for the end of every bio before it reads its buffer or drops it.
    unsafe { Lent::new(NonNull::from(bytes).cast(), len) }
}
