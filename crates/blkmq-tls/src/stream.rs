//! Decides how plain bytes become records and records plain bytes. Records come in through a buffer of their own, where they are opened,
//! and wait in another until a socket takes them; both are bounded. `handshake` is the library's, `records` what follows it.

use std::fmt;
use std::io::{self, IoSlice};
use std::ops::Range;

use rustls::Error;

use crate::handshake::Handshake;
use crate::outbox::Outbox;
use crate::records::{Content, HEADER, Records};

/// One TLS connection, apart from its socket. Not shared between threads.
pub struct Stream {
    state: State,
    /// What was received and is still needed: `input[start..end]`.
    input: Box<[u8]>,
    start: usize,
    end: usize,
    /// How much of that the handshake has looked at, in whole records; nothing after it.
    looked_at: usize,
    /// Plain bytes that nobody has taken, within `input[..start]`.
    plain: Range<usize>,
    out: Outbox,
    peer_names: Vec<String>,
    /// The peer has said that it sends no more.
    has_ended: bool,
    /// Bytes of records that were looked at since the turn began, without those that were plain bytes.
    overhead: usize,
}

enum State {
    ShakingHands(Box<Handshake>),
    Ready(Box<Records>),
    /// It cannot go on.
    Failed,
}

/// What came of looking for plain bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opened {
    /// So many; there may be more.
    Bytes(usize),
    /// None before more is received.
    NeedMore,
    /// This turn has looked at as many records as it should.
    Enough,
    /// The peer has said that it sends no more.
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

    /// Room for records, to receive into; may be empty while plain bytes are there that nobody has taken.
    pub fn room(&mut self) -> &mut [u8] {
        if self.plain.is_empty() && self.start > 0 {
            self.input.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.input[self.end..]
    }

    /// Takes note of so many bytes that were received into the room.
    pub fn received(&mut self, bytes: usize) {
        self.end += bytes;
        debug_assert!(
            self.end <= self.input.len(),
            "more received than there was room for"
        );
    }

    /// Looks at all that was received of a handshake. Costs up to some milliseconds: signatures are made and checked.
    ///
    /// # Errors
    /// Why the peer cannot be talked with. What it is to be told waits to be sent.
    pub fn shake_hands(&mut self) -> Result<(), Error> {
        let shaken = self.shake_hands_on();
        if shaken.is_err() {
            self.state = State::Failed;
        }
        shaken
    }

    /// Says whether the handshake is under way.
    pub fn is_shaking_hands(&self) -> bool {
        matches!(self.state, State::ShakingHands(_))
    }

    /// What the peer is called by its certificate, which has been verified; nothing if it has none.
    pub fn peer_names(&self) -> Vec<String> {
        self.peer_names.clone()
    }

    /// Moves plain bytes into `into`, which is not empty, as far as records are there.
    ///
    /// # Errors
    /// As those of `open_with`.
    pub fn open(&mut self, into: &mut [u8]) -> Result<Opened, Error> {
        self.open_with(|plain| {
            let count = plain.len().min(into.len());
            into[..count].copy_from_slice(&plain[..count]);
            count
        })
    }

    /// Shows plain bytes to `take`, which says how many of the first ones it has taken, as far as records are there.
    ///
    /// # Errors
    /// The peer does not keep to the protocol, or somebody has changed what it sent. What it is to be told waits to be sent.
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

    /// Says whether plain bytes, or records, are there that nobody has looked at.
    pub fn has_received(&self) -> bool {
        self.start < self.end || !self.plain.is_empty()
    }

    /// Makes records of plain bytes. Returns how many it took: not all where too many records wait to be sent.
    ///
    /// # Errors
    /// The handshake is not over, or has come to nothing.
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

    /// Makes records of `bytes` plain bytes, which `fill` copies: it is called again and again, and is to fill its room with the next
    /// ones. Returns how many it took, as `seal` does.
    ///
    /// # Errors
    /// As those of `seal`.
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

    /// Sends records that wait, by a function that says how many of the bytes went out.
    ///
    /// # Errors
    /// What the function says; `WouldBlock` where records are left that the socket does not take now.
    pub fn send(&mut self, mut send: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
        while self.has_unsent() {
            let sent = send(self.out.waiting())?;
            self.out.sent(sent);
        }
        Ok(())
    }

    /// Has the peer told that nothing more comes.
    pub fn close(&mut self) {
        if let State::Ready(records) = &mut self.state {
            records.close(&mut self.out);
        }
    }

    fn shake_hands_on(&mut self) -> Result<(), Error> {
        while let State::ShakingHands(handshake) = &mut self.state {
            let received = &mut self.input[self.start..self.end];
            let record = whole_record(&received[self.looked_at..]);
            // Of a record that is not all there, the library sees whether it can come to anything.
            let until = record.map_or(received.len(), |bytes| self.looked_at + bytes);
            let done_with = handshake.look_at(&mut received[..until], &mut self.out)?;
            self.start += done_with;
            self.looked_at += record.unwrap_or(0);
            // What it needs no more is behind what it has looked at.
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

    /// How long the next record is, if all of it is there.
    fn next_record(&mut self) -> Result<Option<usize>, Error> {
        let received = &self.input[self.start..self.end];
        match Records::length_of(received) {
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
            Ok(Content::Close) => self.has_ended = true,
            Err(error) => return Err(self.fail(error)),
        }
        self.start += bytes;
        self.overhead += bytes;
        if self.has_ended {
            // What follows a close is nothing (RFC 8446, section 6.1).
            self.start = self.end;
        }
        Ok(())
    }

    /// Nothing goes in or out any more, but word of why.
    fn fail(&mut self, error: Error) -> Error {
        if let State::Ready(records) = &mut self.state {
            records.tell_error(&error, &mut self.out);
        }
        self.state = State::Failed;
        error
    }
}

/// How long the record at the front is, if all of it is there.
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

/// Records that one call to the socket brings, in bytes: four of the longest, or some hundred small ones. More costs memory for each
/// connection.
const INPUT_BYTES: usize = 68 << 10;
/// Records that wait to be sent, in bytes: more means fewer calls for large reads, and memory where a client does not read.
const UNSENT_MAX: usize = 160 << 10;
/// What one turn looks at beyond plain bytes: about two thousand records without any, which take a millisecond. The longest record
/// fits in more than once.
const OVERHEAD_MAX: usize = 48 << 10;

#[cfg(test)]
mod tests;
