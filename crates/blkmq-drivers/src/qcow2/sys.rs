//! Clients' memory on the threads that work for an image.

use blkmq_core::bio::Lent;

/// Copies the memory of a write under way, from its byte `skip` on, into a buffer.
pub(super) fn gather(pieces: &[Lent], skip: u64, into: &mut [u8]) {
    copy(pieces, skip, into.len(), |piece, at, len| {
        let target = into[at..at + len].as_mut_ptr();
        // SAFETY: the lender keeps the piece readable until its write has ended, which is after this; the buffer has
        // `len` bytes from `at` on, and is ours alone.
        unsafe { std::ptr::copy_nonoverlapping(piece.start().as_ptr(), target, len) };
    });
}

/// Copies a buffer into the memory of a read under way, from its byte `skip` on.
pub(super) fn scatter(pieces: &[Lent], skip: u64, from: &[u8]) {
    copy(pieces, skip, from.len(), |piece, at, len| {
        let source = from[at..at + len].as_ptr();
        // SAFETY: the lender keeps the piece writable until its read has ended, which is after this; the buffer has
        // `len` bytes from `at` on.
        unsafe { std::ptr::copy_nonoverlapping(source, piece.start().as_ptr(), len) };
    });
}

/// Zeroes a piece of memory of a read under way.
pub(super) fn zero(piece: Lent) {
    // SAFETY: the lender keeps the piece writable until its read has ended, which is after this.
    unsafe { std::ptr::write_bytes(piece.start().as_ptr(), 0, piece.len() as usize) };
}

fn copy(pieces: &[Lent], mut skip: u64, len: usize, mut each: impl FnMut(Lent, usize, usize)) {
    let mut at = 0;
    for piece in pieces {
        let skipped = skip.min(piece.len().into());
        skip -= skipped;
        let part = piece.part(skipped as u32, (len - at).min(u32::MAX as usize) as u32);
        if !part.is_empty() {
            each(part, at, part.len() as usize);
            at += part.len() as usize;
        }
    }
    debug_assert_eq!(at, len, "memory is shorter than its request");
}
