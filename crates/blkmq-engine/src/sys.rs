//! The loan of a buffer to the engine: the only `unsafe` of this crate. `loans` keeps the loans
//! of all bios under way.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use blkmq_core::bio::{self, Data, Lent};

use crate::buffer::Buffer;

/// A buffer that the engine uses. Only the bio that was made with it gets it back, when it has ended: a loan
/// that is dropped leaks the memory.
#[derive(Default)]
pub(crate) struct Loan(ManuallyDrop<Buffer>);

impl Loan {
    /// Lends a buffer to the one bio that gets this data.
    pub(crate) fn new(mut buffer: Buffer) -> (Self, Data) {
        let len = u32::try_from(buffer.len()).expect("buffers are shorter");
        let data = NonNull::new(buffer.as_mut_ptr()).filter(|_| len > 0);
        let loan = Self(ManuallyDrop::new(buffer));
        let Some(start) = data else {
            return (loan, Data::None);
        };
        // SAFETY: the bytes belong to the buffer, which is heap memory that does not move with it. From here on
        // nothing reads, changes or frees them: `loan` gives no access, a drop of it leaks them, and `end`
        // takes the bio as it ended.
        let lent = unsafe { Lent::new(start, len) };
        (loan, Data::Flat(lent))
    }

    /// Takes the buffer back from the bio, which has ended.
    ///
    /// # Panics
    /// If it is another buffer's bio.
    pub(crate) fn end(self, ended: bio::Bio) -> Buffer {
        let buffer = ManuallyDrop::into_inner(self.0);
        match ended.data {
            Data::Flat(lent) if lent.start().as_ptr().cast_const() == buffer.as_ptr() => buffer,
            Data::None if buffer.is_empty() => buffer,
            other => {
                // It may be in use.
                std::mem::forget(buffer);
                panic!("a bio ended with data that it was not submitted with: {other:?}")
            }
        }
    }
}
