//! The nbd driver's access to lent memory: the kernel scatters and gathers it within one call, or it is
//! copied. No call returns before the kernel is done with the memory, so a connection can be closed at
//! any time. `connection` and `slots` use it.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};

use blkmq_core::bio::Lent;

/// Pieces of memory for one system call.
pub(super) struct Pieces<'a> {
    list: [libc::iovec; PIECES_MAX],
    count: usize,
    bytes: usize,
    /// Bytes of this driver among them.
    ours: PhantomData<&'a mut [u8]>,
}

/// A place among pieces. The default: the start.
#[derive(Default)]
pub(super) struct Place {
    piece: usize,
    offset: usize,
}

impl Place {
    /// Where the next bytes are, and how many of at most `wanted` are there, which is not 0; moves behind them.
    ///
    /// # Panics
    /// If nothing is left.
    fn advance(&mut self, pieces: &Pieces<'_>, wanted: usize) -> (*mut u8, usize) {
        let list = &pieces.list[..pieces.count];
        while self.offset == list[self.piece].iov_len {
            (self.piece, self.offset) = (self.piece + 1, 0);
        }
        let piece = list[self.piece];
        let count = wanted.min(piece.iov_len - self.offset);
        let start = piece.iov_base.cast::<u8>().wrapping_add(self.offset);
        self.offset += count;
        (start, count)
    }
}

impl<'a> Pieces<'a> {
    pub(super) fn new() -> Self {
        let none = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        Self {
            list: [none; PIECES_MAX],
            count: 0,
            bytes: 0,
            ours: PhantomData,
        }
    }

    /// Bytes of all pieces.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn is_full(&self) -> bool {
        self.count == PIECES_MAX
    }

    /// Appends bytes to be sent.
    pub(super) fn push(&mut self, bytes: &'a [u8]) {
        self.add(bytes.as_ptr().cast_mut().cast(), bytes.len());
    }

    /// Appends room to receive into.
    pub(super) fn push_room(&mut self, room: &'a mut [u8]) {
        self.add(room.as_mut_ptr().cast(), room.len());
    }

    /// Appends memory of a request under way: of a write to send it, of a read to receive into it.
    pub(super) fn push_lent(&mut self, piece: Lent) {
        self.add(piece.start().as_ptr().cast(), piece.len() as usize);
    }

    fn add(&mut self, start: *mut libc::c_void, len: usize) {
        self.list[self.count] = libc::iovec {
            iov_base: start,
            iov_len: len,
        };
        self.count += 1;
        self.bytes += len;
    }
}

/// Sends pieces, as much as the socket takes now.
///
/// # Errors
/// `WouldBlock`, or the kernel's error for the connection.
pub(super) fn send(socket: BorrowedFd<'_>, pieces: &Pieces<'_>) -> io::Result<usize> {
    let message = header(pieces);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the header names `count` entries of the list, each of which is a slice that `pieces` borrows or memory of a
    // write under way, which its lender keeps readable until the write has ended; the kernel only reads, and is through
    // when the call returns.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Receives into pieces, what is there now; 0 at the end of the stream.
///
/// # Errors
/// `WouldBlock`, or what the kernel says of the connection.
pub(super) fn receive(socket: BorrowedFd<'_>, pieces: &mut Pieces<'_>) -> io::Result<usize> {
    let mut message = header(pieces);
    // SAFETY: the header names `count` entries of the list, each of which is room that `pieces` borrows mutably or memory
    // of a read under way, which its lender keeps writable, and touches not, until the read has ended; the kernel is
    // through when the call returns.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
    usize::try_from(received).map_err(|_| io::Error::last_os_error())
}

fn header(pieces: &Pieces<'_>) -> libc::msghdr {
    // SAFETY: a `msghdr` is numbers and pointers, for all of which zero is a value: no address, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.list.as_ptr().cast_mut();
    message.msg_iovlen = pieces.count as _;
    message
}

/// Copies the bytes of pieces from a place on, as many as there is room for, and moves the place behind them.
///
/// # Panics
/// If there are fewer.
pub(super) fn copy_from(pieces: &Pieces<'_>, from: &mut Place, mut into: &mut [u8]) {
    while !into.is_empty() {
        let (start, count) = from.advance(pieces, into.len());
        let (now, later) = into.split_at_mut(count);
        into = later;
        // SAFETY: `start` is in a slice that `pieces` borrows or in memory of a write under way, which its lender keeps readable, with
        // at least `count` bytes behind it; `now` has as many, and is apart from it, being borrowed mutably.
        unsafe { std::ptr::copy_nonoverlapping(start, now.as_mut_ptr(), count) };
    }
}

/// Copies bytes to pieces from a place on, and moves the place behind them.
///
/// # Panics
/// If there is not room for all.
pub(super) fn copy_to(mut from: &[u8], pieces: &mut Pieces<'_>, to: &mut Place) {
    while !from.is_empty() {
        let (start, count) = to.advance(pieces, from.len());
        let (now, later) = from.split_at(count);
        from = later;
        // SAFETY: `start` is in room that `pieces` borrows mutably or in memory of a read under way, which its lender keeps writable,
        // with at least `count` bytes behind it; it is apart from `now`, which is ours.
        unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), start, count) };
    }
}

/// Copies to memory of a read under way.
///
/// # Panics
/// The lengths differ.
#[inline]
pub(super) fn put(to: Lent, from: &[u8]) {
    assert_eq!(to.len() as usize, from.len(), "a copy of another length");
    // SAFETY: the lender keeps the memory writable until its read has ended, and nobody else touches it meanwhile, so it
    // is apart from `from`; the lengths agree.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.start().as_ptr(), from.len()) }
}

/// Fills memory of a read under way with zeroes.
pub(super) fn put_zeroes(to: Lent) {
    // SAFETY: as in `put`.
    unsafe { std::ptr::write_bytes(to.start().as_ptr(), 0, to.len() as usize) }
}

/// Dissolves a connection of TCP: the system drops what it has not sent. The address is the shortest that says so,
/// which is all that a filter of system calls can tell from a connection that is made.
pub(super) fn disconnect(socket: BorrowedFd<'_>) -> io::Result<()> {
    let family = libc::AF_UNSPEC as libc::sa_family_t;
    let (address, bytes) = (
        (&raw const family).cast(),
        size_of_val(&family) as libc::socklen_t,
    );
    // SAFETY: the call reads `bytes` bytes at the address, which are those of `family`, alive until it returns.
    let failed = unsafe { libc::connect(socket.as_raw_fd(), address, bytes) } < 0;
    if failed {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Pieces in one call: a request of many pieces and the buffer behind it.
pub(super) const PIECES_MAX: usize = super::slots::SEGMENTS_MAX + 1;
