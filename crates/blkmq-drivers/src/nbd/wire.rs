//! Decides how bytes pass between a connection and its socket: as they are, straight to and from lent memory, or as TLS records, by
//! way of a buffer. `connection` sends and receives by it.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use blkmq_tls::{Opened, Stream};

use super::sys::{self, Pieces};

/// A socket, and what is between it and plain bytes.
pub(super) struct Wire {
    socket: OwnedFd,
    tls: Option<Box<Tls>>,
}

struct Tls {
    stream: Stream,
    /// Plain bytes on their way to or from lent memory: others may change that while it is looked at.
    bounce: Box<[u8]>,
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
        let tls = tls.map(|stream| {
            Box::new(Tls {
                stream: *stream,
                bounce: vec![0; BOUNCE_BYTES].into(),
            })
        });
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
        self.tls.as_ref().is_some_and(|tls| tls.stream.has_unsent())
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
        if flush(&self.socket, &mut tls.stream)? {
            return Ok((0, true));
        }
        let count = sys::copy_from(pieces, &mut tls.bounce);
        let taken = match count {
            0 => 0,
            _ => tls.stream.seal(&[IoSlice::new(&tls.bounce[..count])]),
        };
        Ok((taken, flush(&self.socket, &mut tls.stream)?))
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
        let Tls { stream, bounce } = &mut **tls;
        let room = pieces.bytes().min(bounce.len());
        let received = open(stream, &self.socket, &mut bounce[..room])?;
        if let Received::Bytes(count, _) = received {
            sys::copy_to(&bounce[..count], pieces);
        }
        Ok(received)
    }

    /// Begins a turn.
    pub(super) fn begin_turn(&mut self) {
        self.tls.iter_mut().for_each(|tls| tls.stream.begin_turn());
    }
}

/// Opens records until `into` is full or the socket has no more.
fn open(stream: &mut Stream, socket: &OwnedFd, into: &mut [u8]) -> io::Result<Received> {
    let mut filled = 0;
    while filled < into.len() {
        let opened = stream.open(&mut into[filled..]);
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
    let sent = stream.send(|slices| {
        let mut pieces = Pieces::new();
        for slice in slices.iter().take(sys::PIECES_MAX) {
            pieces.push(slice);
        }
        sys::send(socket.as_fd(), &pieces)
    });
    match sent {
        Ok(()) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
        Err(error) => Err(error),
    }
}

/// Four of the longest records.
const BOUNCE_BYTES: usize = 64 << 10;
