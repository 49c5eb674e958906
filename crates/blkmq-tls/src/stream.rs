//! Decides how plain bytes become records and records plain bytes. Records come in through a buffer of their own, and wait in the
//! library until a socket takes them; both are bounded. The arithmetic, the keys and the states are the library's.

use std::fmt;
use std::io::{self, BufRead, IoSlice, Read, Write};

use rustls::Connection;

use crate::names;

/// One TLS connection, apart from its socket. Not shared between threads.
pub struct Stream {
    tls: Connection,
    /// Records that were received and not looked at: `input[start..end]`.
    input: Box<[u8]>,
    start: usize,
    end: usize,
    /// The peer has said that it sends no more.
    has_ended: bool,
    /// Bytes of records that were looked at since the turn began, without those that were plain bytes.
    overhead: usize,
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
    pub(crate) fn new(mut tls: Connection) -> Self {
        tls.set_buffer_limit(Some(UNSENT_MAX));
        Self {
            tls,
            input: vec![0; INPUT_BYTES].into(),
            start: 0,
            end: 0,
            has_ended: false,
            overhead: 0,
        }
    }

    /// Begins a turn.
    pub fn begin_turn(&mut self) {
        self.overhead = 0;
    }

    /// Room for records, to receive into; empty while those that are there have to be looked at first.
    pub fn room(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
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
    pub fn shake_hands(&mut self) -> Result<(), rustls::Error> {
        while self.tls.is_handshaking() && self.start < self.end {
            self.feed()?;
        }
        Ok(())
    }

    /// Says whether the handshake is under way.
    pub fn is_shaking_hands(&self) -> bool {
        self.tls.is_handshaking()
    }

    /// What the peer is called by its certificate, which has been verified; nothing if it has none.
    pub fn peer_names(&self) -> Vec<String> {
        let chain = self.tls.peer_certificates().unwrap_or_default();
        chain.first().map(|first| names::of(first)).unwrap_or_default()
    }

    /// Moves plain bytes into `into`, which is not empty, as far as records are there.
    ///
    /// # Errors
    /// The peer does not keep to the protocol, or somebody has changed what it sent. What it is to be told waits to be sent.
    pub fn open(&mut self, into: &mut [u8]) -> Result<Opened, rustls::Error> {
        loop {
            match self.tls.reader().read(into) {
                Ok(0) => return Ok(Opened::End),
                Ok(bytes) => {
                    self.overhead = self.overhead.saturating_sub(bytes);
                    return Ok(Opened::Bytes(bytes));
                }
                Err(_) if self.start == self.end => {
                    return Ok(if self.has_ended {
                        Opened::End
                    } else {
                        Opened::NeedMore
                    });
                }
                Err(_) if self.overhead > OVERHEAD_MAX => return Ok(Opened::Enough),
                Err(_) => self.feed()?,
            }
        }
    }

    /// Says whether plain bytes, or records, are there that nobody has looked at.
    pub fn has_received(&mut self) -> bool {
        self.start < self.end || self.tls.reader().fill_buf().is_ok_and(|bytes| !bytes.is_empty())
    }

    /// Makes records of plain bytes. Returns how many it took: not all where too many records wait to be sent.
    pub fn seal(&mut self, pieces: &[IoSlice<'_>]) -> usize {
        // It fails only before the handshake, when nobody asks.
        self.tls.writer().write_vectored(pieces).unwrap_or(0)
    }

    /// Says whether records wait to be sent.
    pub fn has_unsent(&self) -> bool {
        self.tls.wants_write()
    }

    /// Sends records that wait, by a function that takes pieces and says how many bytes of them went out.
    ///
    /// # Errors
    /// What the function says; `WouldBlock` where records are left that the socket does not take now.
    pub fn send(&mut self, send: impl FnMut(&[IoSlice<'_>]) -> io::Result<usize>) -> io::Result<()> {
        let mut out = Out(send);
        while self.tls.wants_write() {
            self.tls.write_tls(&mut out)?;
        }
        Ok(())
    }

    /// Has the peer told that nothing more comes.
    pub fn close(&mut self) {
        self.tls.send_close_notify();
    }

    /// Has the library look at some of the records.
    fn feed(&mut self) -> Result<(), rustls::Error> {
        let mut records = &self.input[self.start..self.end];
        let before = records.len();
        // Reading from memory fails only where plain bytes are to be taken first, and those are gone.
        let fed = self.tls.read_tls(&mut records).unwrap_or(0);
        debug_assert_eq!(fed, before - records.len(), "bytes that the library took");
        if fed == 0 {
            return Err(rustls::Error::General("records are too long".to_owned()));
        }
        self.start += fed;
        self.overhead += fed;
        let state = self.tls.process_new_packets()?;
        self.has_ended |= state.peer_has_closed();
        Ok(())
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let waiting = self.end - self.start;
        write!(f, "Stream with {waiting} bytes that nobody has looked at")
    }
}

/// A socket, as the library sees it.
struct Out<F>(F);

impl<F: FnMut(&[IoSlice<'_>]) -> io::Result<usize>> Write for Out<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0(pieces)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
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
