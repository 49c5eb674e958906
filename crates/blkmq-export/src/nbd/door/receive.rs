//! The bytes that a connection receives, and where they go: into a buffer from which the session takes
//! messages or, for the rest of a large write, straight into the request's own buffer. It also limits the
//! bytes of one turn, so that a client that sends as fast as the server receives does not delay others on the
//! reactor. Used by `connection`.

use std::io;

use super::wire::{Received, Wire};
use crate::common::sys::{Buffer, Region};

/// Received bytes that the session has not taken.
#[derive(Debug)]
pub(super) struct Receive {
    /// `None` if the system had no memory: such a connection is closed before it receives anything.
    bytes: Option<Buffer>,
    start: usize,
    end: usize,
    /// Bytes that this turn may still take.
    left: usize,
    /// Bytes that another daemon received and did not take, the first byte last: they come before
    /// those of the socket.
    inherited: Vec<u8>,
}

impl Receive {
    /// Makes a buffer of at least `bytes_min`. It is a region of its own, of which only the used
    /// part takes memory.
    pub(super) fn new(bytes_min: usize) -> Self {
        let bytes = bytes_min.max(BYTES);
        let region = Region::new_blank(bytes).ok();
        Self {
            bytes: region.and_then(|region| region.take(bytes)),
            start: 0,
            end: 0,
            left: TURN_BYTES,
            inherited: Vec::new(),
        }
    }

    /// Puts bytes in front of those of the socket.
    pub(super) fn restore(&mut self, mut received: Vec<u8>) {
        received.reverse();
        self.inherited = received;
    }

    /// Appends all bytes that were received and not taken.
    pub(super) fn append_waiting_to(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.waiting());
        out.extend(self.inherited.iter().rev());
    }

    /// Returns whether all received bytes were taken.
    pub(super) fn is_empty(&self) -> bool {
        self.start == self.end && self.inherited.is_empty()
    }

    /// Returns whether there is no buffer to receive into.
    pub(super) fn is_missing(&self) -> bool {
        self.bytes.is_none()
    }

    /// Begins a turn.
    pub(super) fn begin_turn(&mut self) {
        self.left = TURN_BYTES;
    }

    /// The bytes that wait to be taken.
    pub(super) fn waiting(&self) -> &[u8] {
        let bytes = self.bytes.as_ref().map_or(&[][..], Buffer::bytes);
        &bytes[self.start..self.end]
    }

    /// Takes bytes off the front.
    pub(super) fn consume(&mut self, bytes: usize) {
        self.start += bytes;
        debug_assert!(self.start <= self.end, "more consumed than received");
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Moves as many waiting bytes as fit into `into`; returns how many.
    pub(super) fn move_into(&mut self, into: &mut [u8]) -> usize {
        let bytes = into.len().min(self.end - self.start);
        into[..bytes].copy_from_slice(&self.waiting()[..bytes]);
        self.consume(bytes);
        bytes
    }

    /// Receives more behind the bytes that wait.
    ///
    /// # Errors
    /// The error of the socket: the peer is gone.
    pub(super) fn fill(&mut self, wire: &mut Wire) -> io::Result<Received> {
        let bytes = self.bytes.as_mut().map_or(&mut [][..], Buffer::bytes_mut);
        if bytes.len() - self.end < bytes.len() / 4 {
            bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let received = take_of_turn(&mut self.left, &mut self.inherited, wire, &mut bytes[self.end..])?;
        if let Received::Full(bytes) | Received::Drained(bytes) = received {
            self.end += bytes;
        }
        Ok(received)
    }

    /// Receives past the buffer, which must be empty.
    ///
    /// # Errors
    /// The error of the socket: the peer is gone.
    pub(super) fn receive_into(&mut self, wire: &mut Wire, into: &mut [u8]) -> io::Result<Received> {
        take_of_turn(&mut self.left, &mut self.inherited, wire, into)
    }
}

/// Receives no more than the turn has left.
fn take_of_turn(
    left: &mut usize,
    inherited: &mut Vec<u8>,
    wire: &mut Wire,
    into: &mut [u8],
) -> io::Result<Received> {
    if *left == 0 {
        return Ok(Received::Enough);
    }
    let room = into.len().min(*left);
    let received = match inherited.is_empty() {
        true => wire.receive(&mut into[..room])?,
        false => take_inherited(inherited, &mut into[..room]),
    };
    if let Received::Full(bytes) | Received::Drained(bytes) = received {
        *left -= bytes;
    }
    Ok(received)
}

/// Takes bytes that another daemon received.
#[cold]
fn take_inherited(inherited: &mut Vec<u8>, into: &mut [u8]) -> Received {
    let bytes = into.len().min(inherited.len());
    let first = inherited.len() - bytes;
    into[..bytes]
        .iter_mut()
        .zip(inherited.drain(first..).rev())
        .for_each(|(to, from)| *to = from);
    if inherited.is_empty() {
        *inherited = Vec::new();
    }
    // There may be more, here or in the socket.
    Received::Full(bytes)
}

/// Enough for a batch of 32 writes of 4 KiB.
const BYTES: usize = 144 << 10;

/// Bytes that one connection receives in one turn of its reactor: 0.1 to 0.3 ms of copying. More
/// would cost fewer turns (a microsecond or two each) but delay the reactor's other clients.
const TURN_BYTES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    #[test]
    fn bytes_come_out_as_they_went_in_across_the_end_of_the_buffer() {
        let (mut peer, socket) = UnixStream::pair().unwrap();
        let mut wire = Wire::new(socket.into());
        let mut receive = Receive::new(0);
        let mut expected = 0u32;
        for round in 0..400u32 {
            receive.begin_turn();
            let burst: Vec<u8> = (round * 250..(round + 1) * 250)
                .flat_map(u32::to_le_bytes)
                .collect();
            peer.write_all(&burst).unwrap();
            assert_eq!(receive.fill(&mut wire).unwrap(), Received::Drained(1000));
            while receive.waiting().len() >= 4 + (round as usize % 7) {
                let word = receive.waiting()[..4].try_into().map(u32::from_le_bytes).unwrap();
                assert_eq!(word, expected);
                expected += 1;
                receive.consume(4);
            }
        }
        receive.begin_turn();
        assert_eq!(receive.fill(&mut wire).unwrap(), Received::Nothing);
        drop(peer);
        assert_eq!(receive.fill(&mut wire).unwrap(), Received::End);
    }

    #[test]
    fn one_turn_takes_a_bounded_part_of_what_a_client_sends_as_fast_as_it_is_received() {
        let (mut peer, socket) = UnixStream::pair().unwrap();
        let sender = std::thread::spawn(move || peer.write_all(&vec![7; 8 << 20]));
        let mut wire = Wire::new(socket.into());
        let mut receive = Receive::new(0);
        let (mut payload, mut all) = (vec![0; 4 << 20], 0);
        while all < 8 << 20 {
            receive.begin_turn();
            let mut turn = 0;
            // Alternately into the buffer and past it, as a client's writes do.
            for call in 0.. {
                let received = match call % 2 {
                    0 => receive.fill(&mut wire),
                    _ => receive.receive_into(&mut wire, &mut payload),
                };
                match received.unwrap() {
                    Received::Full(bytes) | Received::Drained(bytes) => turn += bytes,
                    Received::Nothing if all + turn < 8 << 20 => std::thread::yield_now(),
                    Received::Nothing | Received::Enough | Received::End => break,
                }
                receive.consume(receive.waiting().len());
            }
            assert!(turn <= TURN_BYTES, "{turn} bytes in one turn");
            all += turn;
        }
        sender.join().unwrap().unwrap();
    }
}
