//! Decides how drivers touch lent memory: through sinks (the buffers of a read) that are made from a request in the
//! driver's hands and cannot outlive the visit. `null` uses them.

use std::marker::PhantomData;
use std::ptr::NonNull;

use blkmq_core::bio::{Lent, Op};
use blkmq_core::request::Request;

/// Memory of a read request that is to be filled, from its start on.
pub(crate) struct Sink<'a> {
    at: NonNull<u8>,
    left: usize,
    request: PhantomData<&'a Request>,
}

/// Visits the buffers of a read in order. The request must be one that the driver is being issued.
///
/// # Panics
/// If the request is no read.
pub(crate) fn for_each_sink(rq: &Request, mut visit: impl FnMut(Sink<'_>)) {
    assert_eq!(rq.op(), Op::Read, "sinks of {rq:?}");
    for_each_lent(rq, |lent| {
        visit(Sink {
            at: lent.start(),
            left: lent.len() as usize,
            request: PhantomData,
        });
    });
}

#[inline]
fn for_each_lent(rq: &Request, mut visit: impl FnMut(Lent)) {
    match rq.single_piece() {
        Some(lent) => visit(lent),
        None => rq.for_each_piece(visit),
    }
}

impl Sink<'_> {
    /// Bytes not filled yet.
    pub(crate) fn left(&self) -> usize {
        self.left
    }

    /// Fills the next bytes with zeroes.
    ///
    /// # Panics
    /// If `len` is more than what is left.
    pub(crate) fn put_zeroes(&mut self, len: usize) {
        let to = self.advance(len);
        // SAFETY: `advance` checked that so many bytes are left of a piece which, as its lender promised in
        // `Lent::new`, is valid for writes until the bio of a read ends.
        unsafe { std::ptr::write_bytes(to.as_ptr(), 0, len) }
    }

    fn advance(&mut self, by: usize) -> NonNull<u8> {
        advance(&mut self.at, &mut self.left, by)
    }
}

/// Moves a cursor and returns where it was.
fn advance(at: &mut NonNull<u8>, left: &mut usize, by: usize) -> NonNull<u8> {
    assert!(by <= *left, "{by} bytes asked of a piece with {left} left");
    let before = *at;
    // SAFETY: `by` is at most what is left of the piece, so the result is inside it or one past its end.
    *at = unsafe { before.add(by) };
    *left -= by;
    before
}

/// Lends a test's memory.
#[cfg(test)]
pub(crate) fn lend_for_test(buffer: &mut [u8]) -> Lent {
    let start = NonNull::from(&mut *buffer).cast();
    // SAFETY: tests keep the buffer until the request that carries it has ended, and leave it alone meanwhile.
    unsafe { Lent::new(start, buffer.len() as u32) }
}
