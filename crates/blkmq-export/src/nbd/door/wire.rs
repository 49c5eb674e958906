//! The bytes between a connection and its socket: as they are, or as TLS records. `receive` and `transmit`
//! see plain bytes in either case; `connection/secure` has TLS begin.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use blkmq_tls::{Opened, Stream};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

/// A socket, and what is between it and plain bytes.
#[derive(Debug)]
pub(super) struct Wire {
    socket: Arc<OwnedFd>,
    tls: Option<Box<Stream>>,
    /// The peer has been told that nothing more comes, or cannot be told.
    is_closed: bool,
}

/// What a call to send has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Out {
    /// Plain bytes that were taken.
    pub(super) taken: usize,
    /// Bytes that the socket took.
    pub(super) sent: usize,
    /// The socket takes no more now.
    pub(super) is_blocked: bool,
}

/// What one call to receive brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// So many bytes, as many as there was room for: there may be more.
    Full(usize),
    /// So many bytes, which was all there is now.
    Drained(usize),
    /// Nothing now.
    Nothing,
    /// This turn has had its part. There may be more.
    Enough,
    /// The peer will send no more.
    End,
}

impl Wire {
    /// Plain bytes are what the socket has.
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket: Arc::new(socket),
            tls: None,
            is_closed: false,
        }
    }

    pub(super) fn socket(&self) -> &Arc<OwnedFd> {
        &self.socket
    }

    /// From here on plain bytes are records' content.
    pub(super) fn secure(&mut self, tls: Box<Stream>) {
        self.tls = Some(tls);
    }

    /// Says whether it is TLS.
    pub(super) fn is_secure(&self) -> bool {
        self.tls.is_some()
    }

    /// Begins a turn.
    pub(super) fn begin_turn(&mut self) {
        self.tls.iter_mut().for_each(|tls| tls.begin_turn());
    }

    /// Says whether bytes that were taken are still to be sent.
    pub(super) fn has_unsent(&self) -> bool {
        self.tls
            .as_ref()
            .is_some_and(|tls| tls.has_unsent() && !self.is_closed)
    }

    /// Receives plain bytes, without waiting.
    ///
    /// # Errors
    /// What the socket says, or that the peer does not keep to TLS: the peer is gone.
    pub(super) fn receive(&mut self, into: &mut [u8]) -> io::Result<Received> {
        match &mut self.tls {
            None => receive(self.socket.as_fd(), into),
            Some(_) if into.is_empty() => Ok(Received::Full(0)),
            Some(tls) => match open(tls, self.socket.as_fd(), into) {
                Err(error) => {
                    self.say_why();
                    Err(error)
                }
                received => received,
            },
        }
    }

    /// Sends plain bytes, as many as the socket takes now, or fewer.
    ///
    /// # Errors
    /// What the socket says: the peer is gone.
    pub(super) fn send(&mut self, pieces: &[IoSlice<'_>]) -> Result<Out, Errno> {
        let Some(tls) = &mut self.tls else {
            let offered: usize = pieces.iter().map(|piece| piece.len()).sum();
            return match send(self.socket.as_fd(), pieces) {
                Ok(sent) => Ok(Out {
                    taken: sent,
                    sent,
                    is_blocked: sent < offered,
                }),
                Err(Errno::AGAIN) => Ok(Out {
                    is_blocked: true,
                    ..Out::default()
                }),
                Err(errno) => Err(errno),
            };
        };
        let mut out = flush(tls, self.socket.as_fd())?;
        if !out.is_blocked && !pieces.is_empty() {
            out.taken = tls.seal(pieces).map_err(|_| Errno::IO)?;
            let after = flush(tls, self.socket.as_fd())?;
            out.sent += after.sent;
            out.is_blocked = after.is_blocked;
        }
        Ok(out)
    }

    /// Tells the peer that nothing more comes, if it is there to hear it: what follows a cut is then known to be missing.
    pub(super) fn say_goodbye(&mut self) {
        if let (Some(tls), false) = (&mut self.tls, self.is_closed) {
            tls.close();
            self.say_why();
        }
    }

    /// Sends what waits, if it can be sent at once.
    fn say_why(&mut self) {
        self.is_closed = true;
        if let Some(tls) = &mut self.tls {
            let _ = flush(tls, self.socket.as_fd());
        }
    }
}

/// Receives what is there, without waiting.
///
/// # Errors
/// What the socket says: the peer is gone.
pub(super) fn receive(socket: BorrowedFd<'_>, into: &mut [u8]) -> io::Result<Received> {
    let room = into.len();
    loop {
        return match recv(socket, &mut *into, RecvFlags::DONTWAIT) {
            Ok((0, _)) if room > 0 => Ok(Received::End),
            Ok((bytes, _)) if bytes == room => Ok(Received::Full(bytes)),
            Ok((bytes, _)) => Ok(Received::Drained(bytes)),
            Err(Errno::AGAIN) => Ok(Received::Nothing),
            Err(Errno::INTR) => continue,
            Err(errno) => Err(errno.into()),
        };
    }
}

/// Opens records until `into` is full or the socket has no more.
fn open(tls: &mut Stream, socket: BorrowedFd<'_>, into: &mut [u8]) -> io::Result<Received> {
    let mut filled = 0;
    while filled < into.len() {
        match tls.open(&mut into[filled..]).map_err(io::Error::other)? {
            Opened::Bytes(bytes) => filled += bytes,
            Opened::Enough if filled == 0 => return Ok(Received::Enough),
            Opened::End if filled == 0 => return Ok(Received::End),
            // The next call says so.
            Opened::Enough | Opened::End => return Ok(Received::Full(filled)),
            Opened::NeedMore => match receive(socket, tls.room())? {
                Received::Full(bytes) | Received::Drained(bytes) => tls.received(bytes),
                Received::Nothing if filled > 0 => return Ok(Received::Drained(filled)),
                Received::End if filled > 0 => return Ok(Received::Full(filled)),
                other => return Ok(other),
            },
        }
    }
    Ok(Received::Full(filled))
}

/// Sends records that wait, as far as the socket takes them now.
pub(super) fn flush(tls: &mut Stream, socket: BorrowedFd<'_>) -> Result<Out, Errno> {
    let mut out = Out::default();
    let sent = tls.send(|records| {
        let sent = send(socket, &[IoSlice::new(records)])?;
        out.sent += sent;
        Ok(sent)
    });
    match sent {
        Ok(()) => Ok(out),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            out.is_blocked = true;
            Ok(out)
        }
        Err(error) => Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
    }
}

fn send(socket: BorrowedFd<'_>, pieces: &[IoSlice<'_>]) -> Result<usize, Errno> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, pieces, &mut SendAncillaryBuffer::default(), flags)
}
