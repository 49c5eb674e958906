//! The transfer of bytes between a connection and its socket: straight to and from lent memory, as they
//! are or as TLS records. `connection` sends and receives by it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use blkmq_tls::{Opened, Stream};

use super::sys::{self, Pieces, Place};

/// A socket, and what is between it and plain bytes.
pub(super) struct Wire {
    socket: OwnedFd,
    tls: Option<Box<Stream>>,
}

/// What a call to receive brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// So many bytes; whether that was all there is now.
    Bytes(usize, bool),
    /// Nothing now.
    Nothing,
    /// Nothing yet, and there may be more.
    Again,
    /// The server sends no more.
    End,
}

impl Wire {
    pub(super) fn new(socket: OwnedFd, tls: Option<Box<Stream>>) -> Self {
        Self { socket, tls }
    }

    /// For the ring to watch.
    pub(super) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Says whether bytes that were taken are still to be sent.
    pub(super) fn has_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_unsent())
    }

    /// Sends pieces. Says how many bytes it took, and whether the socket takes no more now.
    ///
    /// # Errors
    /// What the kernel says of the connection.
    pub(super) fn send(&mut self, pieces: &Pieces<'_>) -> io::Result<(usize, bool)> {
        let Some(tls) = &mut self.tls else {
            return match sys::send(self.socket.as_fd(), pieces) {
                Ok(sent) => Ok((sent, sent < pieces.bytes())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok((0, true)),
                Err(error) => Err(error),
            };
        };
        if flush(&self.socket, tls)? {
            return Ok((0, true));
        }
        let mut from = Place::default();
        let bytes = pieces.bytes().min(SEALED_MAX);
        let taken = tls.seal_with(bytes, |room| sys::copy_from(pieces, &mut from, room));
        let taken = taken.map_err(|error| io::Error::other(format!("TLS: {error}")))?;
        Ok((taken, flush(&self.socket, tls)?))
    }

    /// Receives into pieces, which have room for something.
    ///
    /// # Errors
    /// What the kernel says of the connection, or that the server does not keep to TLS.
    pub(super) fn receive(&mut self, pieces: &mut Pieces<'_>) -> io::Result<Received> {
        let Some(tls) = &mut self.tls else {
            let offered = pieces.bytes();
            return match sys::receive(self.socket.as_fd(), pieces) {
                Ok(0) => Ok(Received::End),
                Ok(count) => Ok(Received::Bytes(count, count < offered)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Received::Nothing),
                Err(error) => Err(error),
            };
        };
        open(tls, &self.socket, pieces)
    }

    /// Begins a turn.
    pub(super) fn begin_turn(&mut self) {
        self.tls.iter_mut().for_each(|tls| tls.begin_turn());
    }
}

/// Opens records until the pieces are full or the socket has no more.
fn open(stream: &mut Stream, socket: &OwnedFd, pieces: &mut Pieces<'_>) -> io::Result<Received> {
    let (mut filled, mut to) = (0, Place::default());
    let room = pieces.bytes().min(OPENED_MAX);
    while filled < room {
        let opened = stream.open_with(|plain| {
            let count = plain.len().min(room - filled);
            sys::copy_to(&plain[..count], pieces, &mut to);
            count
        });
        match opened.map_err(|error| io::Error::other(format!("TLS: {error}")))? {
            Opened::Bytes(count) => filled += count,
            // The next call says so.
            Opened::Enough | Opened::End if filled > 0 => break,
            Opened::Enough => return Ok(Received::Again),
            Opened::End => return Ok(Received::End),
            Opened::NeedMore => match receive_records(stream, socket) {
                Ok(0) if filled > 0 => break,
                Ok(0) => return Ok(Received::End),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(match filled {
                        0 => Received::Nothing,
                        _ => Received::Bytes(filled, true),
                    });
                }
                Err(error) => return Err(error),
            },
        }
    }
    Ok(Received::Bytes(filled, false))
}

fn receive_records(stream: &mut Stream, socket: &OwnedFd) -> io::Result<usize> {
    let mut pieces = Pieces::new();
    pieces.push_room(stream.room());
    let count = sys::receive(socket.as_fd(), &mut pieces)?;
    stream.received(count);
    Ok(count)
}

/// Sends records that wait. Says whether the socket takes no more now.
fn flush(socket: &OwnedFd, stream: &mut Stream) -> io::Result<bool> {
    let sent = stream.send(|records| {
        let mut pieces = Pieces::new();
        pieces.push(records);
        sys::send(socket.as_fd(), &pieces)
    });
    match sent {
        Ok(()) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
        Err(error) => Err(error),
    }
}

/// Plain bytes that are sealed and sent at a time. With more the server waits while all requests of
/// a batch are sealed, and then the client while the server opens them.
const SEALED_MAX: usize = 64 << 10;
/// Bytes that are opened in one call at most. With 64 KiB, large reads had little more than half of the throughput.
const OPENED_MAX: usize = 256 << 10;
