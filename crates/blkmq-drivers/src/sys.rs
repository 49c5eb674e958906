//! Access to lent memory: sinks (the buffers of a read) and sources (those of a write) that are made from
//! a request that the driver has and cannot outlive the visit. `null`, `ram` and the store use them.

use std::marker::PhantomData;
use std::ptr::NonNull;

use blkmq_core::bio::{Lent, Op};
use blkmq_core::request::Request;

/// Memory of a read request that is to be filled, from its start on.
pub struct Sink<'a> {
    at: NonNull<u8>,
    left: usize,
    request: PhantomData<&'a Request>,
}

/// Memory of a write request that is to be stored, from its start on.
pub struct Source<'a> {
    at: NonNull<u8>,
    left: usize,
    request: PhantomData<&'a Request>,
}

/// Visits the buffers of a read in order. The request must be one that the driver is being issued.
///
/// # Panics
/// The request is no read.
pub fn for_each_sink(rq: &Request, mut visit: impl FnMut(Sink<'_>)) {
    assert_eq!(rq.op(), Op::Read, "sinks of {rq:?}");
    for_each_lent(rq, |lent| {
        visit(Sink {
            at: lent.start(),
            left: lent.len() as usize,
            request: PhantomData,
        });
    });
}

/// Visits the buffers of a write in order. The request must be one that the driver is being issued.
///
/// # Panics
/// The request is no write.
pub fn for_each_source(rq: &Request, mut visit: impl FnMut(Source<'_>)) {
    assert_eq!(rq.op(), Op::Write, "sources of {rq:?}");
    for_each_lent(rq, |lent| {
        visit(Source {
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
    pub fn left(&self) -> usize {
        self.left
    }

    /// Fills the next bytes with a copy of `from`.
    ///
    /// # Panics
    /// If `from` is longer than what is left.
    pub fn put(&mut self, from: &[u8]) {
        let to = self.advance(from.len());
        // SAFETY: `advance` checked that so many bytes are left of a piece which, as its lender promised in
        // `Lent::new`, is valid for writes until the bio of a read ends and touched by nobody else, hence apart from `from`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len()) }
    }

    /// Fills the next bytes with zeroes.
    ///
    /// # Panics
    /// If `len` is more than what is left.
    pub fn put_zeroes(&mut self, len: usize) {
        let to = self.advance(len);
        // SAFETY: as in `put`: so many bytes are left of a piece that is valid for writes.
        unsafe { std::ptr::write_bytes(to.as_ptr(), 0, len) }
    }

    fn advance(&mut self, by: usize) -> NonNull<u8> {
        advance(&mut self.at, &mut self.left, by)
    }
}

impl Source<'_> {
    /// Bytes not taken yet.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Copies the next bytes out.
    ///
    /// # Panics
    /// If `to` is longer than what is left.
    pub fn take(&mut self, to: &mut [u8]) {
        let from = advance(&mut self.at, &mut self.left, to.len());
        // SAFETY: `advance` checked that so many bytes are left of a piece which, as its lender promised in
        // `Lent::new`, is valid for reads until the bio of a write ends; `to` is borrowed mutably, hence apart from it.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr(), to.len()) }
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
