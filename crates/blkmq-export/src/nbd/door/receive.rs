//! Decides where received bytes go: into a buffer of which the session takes messages, or, for the rest of a large write,
//! straight into the request's own buffer. Read by `connection`.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use super::sys::{Buffer, Region};

/// Received bytes that the session has not taken.
#[derive(Debug)]
pub(super) struct Receive {
    /// None if the system had no memory for it: such a connection is closed before it receives anything.
    bytes: Option<Buffer>,
    start: usize,
    end: usize,
}

/// What one call to the socket brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// So many bytes, as many as there was room for: there may be more.
    Full(usize),
    /// So many bytes, which was all there is now.
    Drained(usize),
    /// Nothing now.
    Nothing,
    /// The peer will send no more.
    End,
}

impl Receive {
    /// Makes a buffer that holds `bytes_min` at least. It is a mapping of its own, so that only what is used of it takes memory: the
    /// allocator hands out what others have used before, and clears all of it.
    pub(super) fn new(bytes_min: usize) -> Self {
        let bytes = bytes_min.max(BYTES);
        let region = Region::new(bytes).ok();
        Self {
            bytes: region.and_then(|region| region.take(bytes)),
            start: 0,
            end: 0,
        }
    }

    /// Says whether there is no memory to receive into.
    pub(super) fn is_missing(&self) -> bool {
        self.bytes.is_none()
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

    /// Moves as many waiting bytes as there are into `into`; says how many.
    pub(super) fn move_into(&mut self, into: &mut [u8]) -> usize {
        let bytes = into.len().min(self.end - self.start);
        into[..bytes].copy_from_slice(&self.waiting()[..bytes]);
        self.consume(bytes);
        bytes
    }

    /// Receives more behind what waits.
    ///
    /// # Errors
    /// What the socket says: the peer is gone.
    pub(super) fn fill(&mut self, socket: BorrowedFd<'_>) -> io::Result<Received> {
        let bytes = self.bytes.as_mut().map_or(&mut [][..], Buffer::bytes_mut);
        if bytes.len() - self.end < bytes.len() / 4 {
            bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let received = receive(socket, &mut bytes[self.end..])?;
        if let Received::Full(bytes) | Received::Drained(bytes) = received {
            self.end += bytes;
        }
        Ok(received)
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

/// Enough for a batch of 32 writes of 4 KiB.
const BYTES: usize = 144 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn bytes_come_out_as_they_went_in_across_the_end_of_the_buffer() {
        let (mut peer, socket) = UnixStream::pair().unwrap();
        let mut receive = Receive::new(0);
        let mut expected = 0u32;
        for round in 0..400u32 {
            let burst: Vec<u8> = (round * 250..(round + 1) * 250)
                .flat_map(u32::to_le_bytes)
                .collect();
            peer.write_all(&burst).unwrap();
            assert_eq!(receive.fill(socket.as_fd()).unwrap(), Received::Drained(1000));
            while receive.waiting().len() >= 4 + (round as usize % 7) {
                let word = receive.waiting()[..4].try_into().map(u32::from_le_bytes).unwrap();
                assert_eq!(word, expected);
                expected += 1;
                receive.consume(4);
            }
        }
        assert_eq!(receive.fill(socket.as_fd()).unwrap(), Received::Nothing);
        drop(peer);
        assert_eq!(receive.fill(socket.as_fd()).unwrap(), Received::End);
    }
}
