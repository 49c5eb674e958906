//! One connection to an NBD server: it passes requests and replies with few calls, and copies as few
//! bytes as it can.
//!
//! Headers of a batch and the memory of its writes are sent with one `sendmsg`. Replies are
//! received through a buffer, so that one call brings many of them; where reads are large the call
//! ends with the next header, and their data is received straight into its memory together with the
//! header that follows. Calls never block: the ring reports when to try again. This costs no more
//! than sending and receiving in the ring (`docs/design/0003`), and leaves no memory with the
//! kernel when a connection is given up. `hctx` owns the connections.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, RawFd};

use blkmq_nbd::codec::request::{Command, EXTENDED_BYTES, RequestHeader};
use blkmq_nbd::codec::{CommandFlags, HeaderStyle};
use blkmq_nbd::replies::{Fault, RECEIVE_BYTES_MIN, Replies};

use super::fences::Named;
#[cfg(test)]
use super::slots::State;
use super::slots::{OfConnection, Slots};
use super::sys::{self, Pieces};
use super::wire::{Received, Wire};

/// One connection in the transmission phase.
pub(super) struct Connection {
    wire: Wire,
    /// The session's name, if the server knows one.
    pub(super) session: Option<Named>,
    style: HeaderStyle,
    can_fua: bool,
    replies: Replies,
    /// Received bytes that were not decoded: `buffer[..filled]`.
    buffer: Box<[u8]>,
    filled: usize,
    /// Headers that are not sent, and before `sent`, some that are.
    headers: Vec<u8>,
    sent: usize,
    outgoing: VecDeque<Outgoing>,
    /// Bytes of the stream of requests: all that were pushed, and those of them that were sent. These
    /// the kernel has, or TLS has sealed them: both have copied them.
    stream_pushed: u64,
    stream_sent: u64,
    /// The socket takes no more; the ring will report when it does.
    pub(super) is_blocked: bool,
    /// There may be more to receive, and another turn has been asked for.
    pub(super) comes_again: bool,
    /// The server has closed its side: the end follows what is to be received, and no
    /// further poll reports it.
    is_closed: bool,
    /// Requests without their reply.
    pub(super) in_flight: u32,
    /// Reads among them, and their bytes.
    reads: u32,
    read_bytes: u64,
}

/// Bytes to be sent.
#[derive(Clone, Copy, Debug)]
enum Outgoing {
    /// This many bytes of the headers.
    Headers(usize),
    /// The data of a write, from `from` on.
    Data { slot: u32, from: u64, len: u64 },
}

/// Why a connection cannot be used any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum Lost {
    /// The server has closed it.
    #[error("the server has closed it")]
    Closed,
    /// The system's error.
    #[error("{0}")]
    System(#[from] io::Error),
    /// The server violates the protocol.
    #[error("{0}")]
    Fault(#[from] Fault),
    /// The server reports that it is shutting down.
    #[error("the server is shutting down")]
    Leaving,
    /// A request got no answer.
    #[error("no answer in time")]
    Late,
    /// A mistake of ours: what waits to be sent has no bytes, and everything behind it would wait
    /// for ever.
    #[error("what waits to be sent has no bytes")]
    NothingToSend,
}

impl Connection {
    /// Makes one after the handshake, for at most `requests` requests.
    pub(super) fn new(wire: Wire, style: HeaderStyle, can_fua: bool, requests: usize) -> Self {
        Self {
            wire,
            session: None,
            style,
            can_fua,
            replies: Replies::new(style),
            buffer: vec![0; BUFFER_BYTES].into(),
            filled: 0,
            headers: Vec::with_capacity((requests + 1) * EXTENDED_BYTES),
            sent: 0,
            outgoing: VecDeque::with_capacity(2 * requests + 1),
            stream_pushed: 0,
            stream_sent: 0,
            is_blocked: false,
            comes_again: false,
            is_closed: false,
            in_flight: 0,
            reads: 0,
            read_bytes: 0,
        }
    }

    /// The descriptor for the ring to poll.
    pub(super) fn fd(&self) -> RawFd {
        self.wire.fd()
    }

    /// Takes note of what a poll for bytes has reported.
    #[inline]
    pub(super) fn note_poll(&mut self, events: i32) {
        self.is_closed |= events > 0 && events & CLOSED != 0;
    }

    /// Returns whether something waits to be sent.
    pub(super) fn has_unsent(&self) -> bool {
        !self.outgoing.is_empty() || self.wire.has_unsent()
    }

    /// Appends a request to those that wait to be sent.
    #[inline]
    pub(super) fn push(&mut self, slots: &mut Slots, number: u32) {
        let slot = slots.get_mut(number);
        self.in_flight += 1;
        if slot.read_bytes() > 0 {
            self.reads += 1;
            self.read_bytes += slot.read_bytes();
        }
        let mut header = slot.header(self.can_fua);
        let has_length_of_payload = self.style == HeaderStyle::Extended && slot.write_bytes() > 0;
        header.flags = header
            .flags
            .with_if(has_length_of_payload, CommandFlags::PAYLOAD_LEN);
        self.push_header(&header);
        if slot.write_bytes() > 0 {
            self.outgoing.push_back(Outgoing::Data {
                slot: number,
                from: 0,
                len: slot.write_bytes(),
            });
            self.stream_pushed += slot.write_bytes();
        }
        slot.stream_end = self.stream_pushed;
    }

    fn push_header(&mut self, header: &RequestHeader) {
        header.write(self.style, &mut self.headers);
        let bytes = self.style.request_bytes();
        self.stream_pushed += bytes as u64;
        match self.outgoing.back_mut() {
            Some(Outgoing::Headers(count)) => *count += bytes,
            _ => self.outgoing.push_back(Outgoing::Headers(bytes)),
        }
    }

    /// Sends what the socket takes.
    ///
    /// # Errors
    /// The connection is lost.
    pub(super) fn send(&mut self, slots: &Slots) -> Result<(), Lost> {
        self.is_blocked = false;
        while self.has_unsent() {
            let mut pieces = Pieces::new();
            let mut header_at = self.sent;
            for piece in &self.outgoing {
                if pieces.is_full() {
                    break;
                }
                match *piece {
                    Outgoing::Headers(bytes) => {
                        pieces.push(&self.headers[header_at..header_at + bytes]);
                        header_at += bytes;
                    }
                    Outgoing::Data { slot, from, len } => slots.gather(slot, from, len - from, &mut pieces),
                }
            }
            if pieces.bytes() == 0 && !self.wire.has_unsent() {
                return Err(Lost::NothingToSend);
            }
            match self.wire.send(&pieces) {
                Ok((taken, is_blocked)) => {
                    self.advance(taken);
                    self.is_blocked = is_blocked;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
            if self.is_blocked {
                break;
            }
        }
        // Where the socket is always full this is the only time: what stays is of requests under
        // way.
        self.headers.drain(..self.sent);
        self.sent = 0;
        Ok(())
    }

    fn advance(&mut self, mut sent: usize) {
        self.stream_sent += sent as u64;
        while sent > 0 {
            let piece = self.outgoing.front_mut().expect("no more is sent than waits");
            let (now, is_through) = match piece {
                Outgoing::Headers(bytes) => {
                    let now = sent.min(*bytes);
                    *bytes -= now;
                    self.sent += now;
                    (now, *bytes == 0)
                }
                Outgoing::Data { from, len, .. } => {
                    let now = (sent as u64).min(*len - *from);
                    *from += now;
                    (now as usize, from == len)
                }
            };
            sent -= now;
            if is_through {
                self.outgoing.pop_front();
            }
        }
    }

    /// Receives and handles replies that have arrived. Requests that ended are in `slots.ended`.
    /// Returns whether there may be more: the caller should report those first, since others can be
    /// sent in their place.
    ///
    /// # Errors
    /// The connection is lost; requests that ended before are still reported.
    pub(super) fn receive(&mut self, slots: &mut Slots, number: u16) -> Result<bool, Lost> {
        let mut is_leaving = false;
        self.wire.begin_turn();
        for _ in 0..CALLS_MAX {
            let (received, is_drained, direct) = match self.receive_once(slots) {
                Ok((Received::Bytes(count, is_drained), direct)) => (count, is_drained, direct),
                Ok((Received::Nothing, _)) => return Ok(false),
                Ok((Received::Again, _)) => return Ok(true),
                Ok((Received::End, _)) => return Err(Lost::Closed),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            let before = slots.ended.len();
            let mut book = OfConnection {
                slots,
                connection: number,
                sent: self.stream_sent,
                is_leaving: &mut is_leaving,
            };
            let straight = received.min(direct);
            self.replies.took(straight as u64, &mut book)?;
            self.filled += received - straight;
            let taken = self.replies.receive(&self.buffer[..self.filled], &mut book);
            self.count_ended(slots, before);
            let taken = taken?;
            self.buffer.copy_within(taken..self.filled, 0);
            self.filled -= taken;
            if is_leaving {
                return Err(Lost::Leaving);
            }
            if is_drained && !self.is_closed {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// One call. Returns what was received, and how many of the buffer's first bytes belong to
    /// data.
    #[inline]
    fn receive_once(&mut self, slots: &Slots) -> io::Result<(Received, usize)> {
        let mut pieces = Pieces::new();
        let mut window = self.window();
        let mut is_buffered = true;
        if let Some(data) = self.replies.pending()
            && self.filled == 0
            && slots.has_memory(data.request)
        {
            slots.gather(data.request, data.at, data.left, &mut pieces);
            is_buffered = pieces.bytes() as u64 == data.left;
        } else if self.replies.pending().is_some() {
            window = self.buffer.len();
        }
        let direct = pieces.bytes();
        if is_buffered {
            let end = self.buffer.len().min(self.filled + window);
            pieces.push_room(&mut self.buffer[self.filled..end]);
        }
        let received = self.wire.receive(&mut pieces)?;
        Ok((received, direct))
    }

    /// The number of bytes to receive through the buffer at once. Where reads are large, not much
    /// more than a header, so that their data is not copied twice.
    #[inline]
    fn window(&self) -> usize {
        if self.read_bytes >= u64::from(self.reads) * STRAIGHT_FROM && self.reads > 0 {
            WINDOW_BYTES
        } else {
            self.buffer.len()
        }
    }

    #[inline]
    fn count_ended(&mut self, slots: &Slots, before: usize) {
        for &number in &slots.ended[before..] {
            let bytes = slots.get(number).read_bytes();
            self.in_flight -= 1;
            if bytes > 0 {
                self.reads -= 1;
                self.read_bytes -= bytes;
            }
        }
    }

    /// Tells the server that no more requests come, if all earlier ones were sent.
    pub(super) fn say_goodbye(&mut self, slots: &Slots) {
        if self.has_unsent() {
            return;
        }
        self.push_header(&RequestHeader {
            cookie: 0,
            offset: 0,
            length: 0,
            command: Command::DISC,
            flags: CommandFlags::NONE,
        });
        // A server that is gone does not need it.
        let _ = self.send(slots);
    }

    /// Ends a connection that is given up. What the system has not sent by now must never arrive:
    /// its requests are repeated elsewhere, and their blocks may be written again before the
    /// network delivers it.
    pub(super) fn abandon(&self) {
        // TCP drops unsent bytes and resets the connection; after a close it would continue to send
        // for minutes. A unix socket refuses this, and has nothing unsent.
        let _ = sys::disconnect(self.wire.socket().as_fd());
        self.shut();
    }

    /// Ends the connection in both directions: the ring's poll keeps the socket open until the poll
    /// is cancelled.
    pub(super) fn shut(&self) {
        // It may be down already.
        let _ = rustix::net::shutdown(self.wire.socket(), rustix::net::Shutdown::Both);
    }

    /// Asserts that the counts agree with the table.
    #[cfg(test)]
    pub(super) fn check(&self, slots: &Slots, number: u16) {
        let mine = slots.iter().filter(|(_, slot)| slot.state == State::Sent(number));
        assert_eq!(
            mine.count(),
            self.in_flight as usize,
            "requests of connection {number}"
        );
    }
}

/// Events that are reported once, perhaps together with bytes: the server sends no more, or nothing arrives any more.
const CLOSED: i32 = (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) as i32;
/// Size of a connection's receive buffer. More brings more replies per call, but takes memory and
/// cache.
const BUFFER_BYTES: usize = 64 << 10;
/// Received behind data, or alone, where reads are large: a header, and a little more.
const WINDOW_BYTES: usize = 64;
/// Mean bytes of the reads under way from which on data is received straight into its memory.
const STRAIGHT_FROM: u64 = 8 << 10;
/// Most calls in one turn.
const CALLS_MAX: u32 = 16;

const _: () = assert!(BUFFER_BYTES >= 2 * RECEIVE_BYTES_MIN);

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use blkmq_core::bio::{Flags, Op};

    use super::*;
    use crate::testing::{cookie, lend, request, request_with};

    #[test]
    fn headers_that_are_sent_are_dropped_though_the_socket_is_always_full() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let mut slots = Slots::new(1);
        let mut memory = vec![7; 64 << 10];
        let write = request_with(Op::Write, Flags::NONE, 0, 0, &[lend(&mut memory)]);
        let slot = slots.fill(&write, cookie(0)).unwrap();
        let mut connection = Connection::new(Wire::new(near.into(), None), HeaderStyle::Extended, true, 1);
        while !connection.is_blocked {
            connection.push(&mut slots, slot);
            connection.send(&slots).unwrap();
        }
        for round in 0..100 {
            connection.push(&mut slots, slot);
            far.read_exact(&mut [0; EXTENDED_BYTES]).unwrap();
            far.read_exact(&mut vec![0; 64 << 10]).unwrap();
            connection.send(&slots).unwrap();
            assert!(connection.is_blocked && connection.has_unsent(), "round {round}");
            let unsent = connection.outgoing.len() * EXTENDED_BYTES;
            assert!(
                connection.headers.len() <= unsent,
                "{} bytes of headers, {unsent} may be unsent in round {round}",
                connection.headers.len()
            );
        }
    }

    #[test]
    fn bytes_that_wait_without_memory_are_a_fault_and_no_endless_loop() {
        let (near, _far) = UnixStream::pair().unwrap();
        let mut slots = Slots::new(1);
        let mut memory = vec![7; 1 << 20];
        let write = request_with(Op::Write, Flags::NONE, 0, 0, &[lend(&mut memory)]);
        let slot = slots.fill(&write, cookie(0)).unwrap();
        let mut connection = Connection::new(Wire::new(near.into(), None), HeaderStyle::Extended, true, 1);
        connection.push(&mut slots, slot);
        connection.send(&slots).unwrap();
        assert!(connection.is_blocked && connection.has_unsent());
        // As if the write had ended, and its tag were used again.
        slots.fill(&request(Op::Flush, 0, 0), cookie(0)).unwrap();
        assert!(matches!(connection.send(&slots), Err(Lost::NothingToSend)));
    }

    #[test]
    fn request_unsent_when_a_connection_is_given_up_never_arrives() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        let mut given = 0;
        let full = loop {
            match stream.write(&[7; 1 << 16]) {
                Ok(count) => given += count,
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), ErrorKind::WouldBlock);
        let connection = Connection::new(Wire::new(stream.into(), None), HeaderStyle::Extended, true, 1);
        connection.abandon();
        // Still open, as it is while the ring watches it.
        let (mut arrived, mut bytes) = (0, vec![0; 1 << 16]);
        let end = loop {
            match server.read(&mut bytes) {
                Ok(0) => panic!("all {given} bytes were sent, and the end"),
                Ok(count) => arrived += count,
                Err(error) => break error,
            }
        };
        assert_eq!(end.kind(), ErrorKind::ConnectionReset);
        assert!(arrived < given, "{arrived} of {given} bytes have arrived");
    }
}
