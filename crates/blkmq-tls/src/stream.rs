//! A TLS stream: plain bytes become records, and records plain bytes. Records are received into one
//! buffer, where they are opened, and wait in another one until a socket takes them. Both buffers are
//! bounded. `handshake` has the library's handshake, and `records` the records after it.

use std::fmt;
use std::io::{self, IoSlice};
use std::ops::Range;

use rustls::Error;

use crate::handshake::Handshake;
use crate::outbox::Outbox;
use crate::records::{Content, HEADER, Records};

/// One TLS connection without its socket. It is not shared between threads.
pub struct Stream {
    state: State,
    /// The bytes that were received and are still needed are in `input[start..end]`.
    input: Box<[u8]>,
    start: usize,
    end: usize,
    /// How many bytes of these the handshake has read, in whole records. It is 0 after the
    /// handshake.
    looked_at: usize,
    /// Plain bytes that were not taken, within `input[..start]`.
    plain: Range<usize>,
    out: Outbox,
    peer_names: Vec<String>,
    /// The peer has announced that it sends nothing more.
    has_ended: bool,
    /// Bytes of records that were read since the turn began, without the plain bytes in them.
    overhead: usize,
}

enum State {
    ShakingHands(Box<Handshake>),
    Ready(Box<Records>),
    /// The connection has failed: nothing more is opened or sealed.
    Failed,
}

/// The result of an attempt to open plain bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opened {
    /// So many bytes; there may be more.
    Bytes(usize),
    /// There are none before more is received.
    NeedMore,
    /// This turn has read as many records as one turn may.
    Enough,
    /// The peer has announced that it sends nothing more.
    End,
}

impl Stream {
    pub(crate) fn new(handshake: Handshake) -> Self {
        Self {
            state: State::ShakingHands(Box::new(handshake)),
            input: vec![0; INPUT_BYTES].into(),
            start: 0,
            end: 0,
            looked_at: 0,
            plain: 0..0,
            out: Outbox::default(),
            peer_names: Vec::new(),
            has_ended: false,
            overhead: 0,
        }
    }

    /// Begins a turn.
    pub fn begin_turn(&mut self) {
        self.overhead = 0;
    }

    /// Room for the caller to receive records into. It may be empty while there are plain bytes
    /// that were not taken.
    pub fn room(&mut self) -> &mut [u8] {
        if self.plain.is_empty() && self.start > 0 {
            self.input.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.input[self.end..]
    }

    /// Takes note that `bytes` bytes were received into the room.
    pub fn received(&mut self, bytes: usize) {
        self.end += bytes;
        debug_assert!(
            self.end <= self.input.len(),
            "more received than there was room for"
        );
    }

    /// Continues the handshake with all that was received. This takes up to a few milliseconds,
    /// because signatures are made and verified.
    ///
    /// # Errors
    /// The handshake has failed. An alert for the peer waits to be sent.
    pub fn shake_hands(&mut self) -> Result<(), Error> {
        let shaken = self.shake_hands_on();
        if shaken.is_err() {
            self.state = State::Failed;
        }
        shaken
    }

    /// Says whether the handshake is not over.
    pub fn is_shaking_hands(&self) -> bool {
        matches!(self.state, State::ShakingHands(_))
    }

    /// The peer's names by its verified certificate; empty if it has no certificate.
    pub fn peer_names(&self) -> Vec<String> {
        self.peer_names.clone()
    }

    /// Moves plain bytes into `into`, which is not empty, as far as records were received.
    ///
    /// # Errors
    /// The errors of `open_with`.
    pub fn open(&mut self, into: &mut [u8]) -> Result<Opened, Error> {
        self.open_with(|plain| {
            let count = plain.len().min(into.len());
            into[..count].copy_from_slice(&plain[..count]);
            count
        })
    }

    /// Passes plain bytes to `take`, as far as records were received. `take` returns how many of
    /// them it has taken, from the first one on.
    ///
    /// # Errors
    /// The peer violates the protocol, or a record was changed on its way: an alert for the peer
    /// waits to be sent. Or the handshake is not over, or the connection has failed before.
    pub fn open_with(&mut self, take: impl FnOnce(&[u8]) -> usize) -> Result<Opened, Error> {
        while self.plain.is_empty() {
            if self.has_ended {
                return Ok(Opened::End);
            }
            let Some(bytes) = self.next_record()? else {
                return Ok(Opened::NeedMore);
            };
            if self.overhead > OVERHEAD_MAX {
                return Ok(Opened::Enough);
            }
            self.open_record(bytes)?;
        }
        let taken = take(&self.input[self.plain.clone()]);
        self.plain.start += taken;
        debug_assert!(self.plain.start <= self.plain.end, "more taken than was there");
        self.overhead = self.overhead.saturating_sub(taken);
        Ok(Opened::Bytes(taken))
    }

    /// Says whether there are plain bytes that were not taken, or bytes that were received and not
    /// opened.
    pub fn has_received(&self) -> bool {
        self.start < self.end || !self.plain.is_empty()
    }

    /// Seals plain bytes in records. Returns how many bytes it has taken: not all if too many
    /// records wait to be sent.
    ///
    /// # Errors
    /// The handshake is not over, or the connection has failed or was closed.
    pub fn seal(&mut self, pieces: &[IoSlice<'_>]) -> Result<usize, Error> {
        let mut pieces = pieces.iter().map(|piece| &**piece);
        let mut piece = pieces.next().unwrap_or_default();
        let bytes = piece.len() + pieces.clone().map(<[u8]>::len).sum::<usize>();
        self.seal_with(bytes, |mut room| {
            while !room.is_empty() {
                while piece.is_empty() {
                    piece = pieces.next().unwrap_or_default();
                }
                let count = piece.len().min(room.len());
                let (now, later) = room.split_at_mut(count);
                now.copy_from_slice(&piece[..count]);
                (piece, room) = (&piece[count..], later);
            }
        })
    }

    /// Seals `bytes` plain bytes in records. `fill` is called for each record in turn, and has to
    /// fill its room with the next bytes. Returns how many bytes were taken, as `seal` does.
    ///
    /// # Errors
    /// The errors of `seal`.
    pub fn seal_with(&mut self, bytes: usize, fill: impl FnMut(&mut [u8])) -> Result<usize, Error> {
        let State::Ready(records) = &mut self.state else {
            return Err(Error::HandshakeNotComplete);
        };
        let bytes = bytes.min(UNSENT_MAX.saturating_sub(self.out.waiting().len()));
        let sealed = records.seal(bytes, fill, &mut self.out);
        if sealed.is_err() {
            self.state = State::Failed;
        }
        sealed.map(|()| bytes)
    }

    /// Says whether records wait to be sent.
    pub fn has_unsent(&self) -> bool {
        !self.out.waiting().is_empty()
    }

    /// Sends the records that wait by a function that returns how many of the bytes it has sent.
    ///
    /// # Errors
    /// The error of the function: `WouldBlock` if the socket does not take the remaining records
    /// now.
    pub fn send(&mut self, mut send: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
        while self.has_unsent() {
            let sent = send(self.out.waiting())?;
            self.out.sent(sent);
        }
        Ok(())
    }

    /// Announces to the peer that nothing more will be sent.
    pub fn close(&mut self) {
        if let State::Ready(records) = &mut self.state {
            records.close(&mut self.out);
        }
    }

    fn shake_hands_on(&mut self) -> Result<(), Error> {
        while let State::ShakingHands(handshake) = &mut self.state {
            let received = &mut self.input[self.start..self.end];
            let record = whole_record(&received[self.looked_at..]);
            // The library also gets a record that is not complete, because it can reject a record
            // by its first bytes.
            let until = record.map_or(received.len(), |bytes| self.looked_at + bytes);
            let done_with = handshake.look_at(&mut received[..until], &mut self.out)?;
            self.start += done_with;
            self.looked_at += record.unwrap_or(0);
            // The bytes that it no longer needs are among those that it has read.
            self.looked_at -= done_with;
            if handshake.is_over() {
                self.finish_handshake()?;
            } else if record.is_none() {
                let is_full = self.end - self.start == self.input.len();
                return match is_full {
                    true => Err(Error::General("records are too long".to_owned())),
                    false => Ok(()),
                };
            }
        }
        Ok(())
    }

    fn finish_handshake(&mut self) -> Result<(), Error> {
        debug_assert_eq!(self.looked_at, 0, "bytes of the handshake behind its end");
        if let State::ShakingHands(handshake) = std::mem::replace(&mut self.state, State::Failed) {
            let (records, names) = handshake.finish()?;
            self.state = State::Ready(Box::new(records));
            self.peer_names = names;
        }
        Ok(())
    }

    /// The length of the next record, if the record is complete.
    fn next_record(&mut self) -> Result<Option<usize>, Error> {
        let State::Ready(records) = &self.state else {
            return Err(Error::HandshakeNotComplete);
        };
        let received = &self.input[self.start..self.end];
        match records.length_of(received) {
            Ok(bytes) => Ok(bytes.filter(|&bytes| bytes <= received.len())),
            Err(error) => Err(self.fail(error)),
        }
    }

    fn open_record(&mut self, bytes: usize) -> Result<(), Error> {
        let State::Ready(records) = &mut self.state else {
            return Err(Error::HandshakeNotComplete);
        };
        let content = records.open(&mut self.input[self.start..self.start + bytes]);
        match content {
            Ok(Content::Data(range)) => self.plain = self.start + range.start..self.start + range.end,
            Ok(Content::Nothing) => {}
            Ok(Content::NewKey) => self.overhead += NEW_KEY_OVERHEAD,
            Ok(Content::Close) => self.has_ended = true,
            Err(error) => return Err(self.fail(error)),
        }
        self.start += bytes;
        self.overhead += bytes;
        if self.has_ended {
            // Bytes behind a close are ignored (RFC 8446, section 6.1).
            self.start = self.end;
        }
        Ok(())
    }

    /// Ends the connection: only an alert is sent.
    fn fail(&mut self, error: Error) -> Error {
        if let State::Ready(records) = &mut self.state {
            records.tell_error(&error, &mut self.out);
        }
        self.state = State::Failed;
        error
    }
}

/// The length of the record at the front, if the record is complete.
fn whole_record(received: &[u8]) -> Option<usize> {
    let &[_, _, _, high, low] = received.first_chunk::<HEADER>()?;
    let bytes = HEADER + usize::from(u16::from_be_bytes([high, low]));
    (bytes <= received.len()).then_some(bytes)
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let waiting = self.end - self.start;
        write!(f, "Stream with {waiting} bytes that nobody has looked at")
    }
}

/// The most bytes of records that one call to the socket receives: four of the longest records, or
/// some hundred small ones. A larger buffer costs memory for each connection.
const INPUT_BYTES: usize = 68 << 10;
/// The most bytes of records that wait to be sent. A higher limit means fewer calls for large
/// reads, and more memory for a client that does not read.
const UNSENT_MAX: usize = 160 << 10;
/// What a new key counts in a turn, in bytes of records. Its derivation takes up to 11 us
/// (SHA-384), as long as the opening of 100 small records. Without this, a turn of 1000 key updates
/// between single bytes took 11 ms.
const NEW_KEY_OVERHEAD: usize = 512;
/// The most bytes of records that one turn reads beyond plain bytes: about two thousand records
/// without data, which take a millisecond. The limit is larger than the longest record.
const OVERHEAD_MAX: usize = 48 << 10;

#[cfg(test)]
mod tests;
