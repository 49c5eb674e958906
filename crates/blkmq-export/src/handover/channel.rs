//! The channel of a hand-over: messages and their descriptors over a unix socket, each with a time limit.
//! Used by threads that may block, never by a reactor. The other side is not trusted: each message is
//! bounded, and none carries descriptors that do not belong to it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, sendmsg,
    socket_with, sockopt,
};

use crate::common::Credentials;

use super::codec::{DecodeError, FDS_MAX, HEADER_BYTES, Message};

/// The connection to the other daemon.
#[derive(Debug)]
pub struct Channel {
    stream: UnixStream,
    /// Kept to reuse its memory.
    out: Vec<u8>,
    /// When all messages of the present step are to be through.
    end: Option<Instant>,
}

/// Why communication with the other daemon ended.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The other daemon has ended, or closed the connection.
    #[error("the other daemon has closed the connection")]
    Closed,
    /// The other daemon takes too long.
    #[error("the other daemon did not answer in time")]
    Late,
    /// The other daemon refuses, with its reason.
    #[error("the other daemon refuses: {0}")]
    Refused(String),
    /// The other daemon's bytes cannot be decoded.
    #[error("what the other daemon says cannot be understood: {0}")]
    Decode(DecodeError),
    /// The other daemon's message is out of order.
    #[error("the other daemon says what does not belong here: {0}")]
    Unexpected(&'static str),
    /// An error of the system.
    #[error("the connection to the other daemon failed: {0}")]
    Os(io::Error),
}

impl From<DecodeError> for ChannelError {
    fn from(error: DecodeError) -> Self {
        Self::Decode(error)
    }
}

impl Channel {
    /// Connects to the daemon at a path, in at most `limit`: one that hangs accepts nobody.
    ///
    /// # Errors
    /// Nobody listens there, or nobody accepts in time; or as for [`Channel::new`].
    pub fn connect(path: &Path, limit: Duration) -> io::Result<Self> {
        let until = Instant::now() + limit;
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        loop {
            match connect(&socket, &address) {
                Ok(()) => return Self::new(socket.into()),
                // Its backlog is full.
                Err(Errno::AGAIN) if Instant::now() < until => thread::sleep(CONNECT_AGAIN),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Communicates over this connection, with a process of the same user.
    ///
    /// # Errors
    /// The process is another user's, or its user cannot be found out.
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        let peer = Credentials::of_peer(&stream)?;
        let ours = rustix::process::geteuid().as_raw();
        if peer.user != ours {
            return Err(io::Error::other(format!(
                "{peer} connects: this one is of user {ours}, and so must that be"
            )));
        }
        stream.set_nonblocking(false)?;
        // A session with much data should not take a hundred calls; the system decides how much it
        // grants.
        let _ = sockopt::set_socket_send_buffer_size(&stream, SOCKET_BUFFER);
        Ok(Self {
            stream,
            out: Vec::new(),
            end: None,
        })
    }

    /// Has all messages from now on be through after `limit`, until the next call: each may be in time, and all of them
    /// together too late.
    pub fn end_within(&mut self, limit: impl Into<Option<Duration>>) {
        self.end = limit.into().map(|limit| Instant::now() + limit);
    }

    /// When a message is to be through that may take `limit`.
    fn end_of_message(&self, limit: Duration) -> Instant {
        let own = Instant::now() + limit;
        self.end.map_or(own, |end| own.min(end))
    }

    /// Sends a message with its descriptors, in at most `limit`.
    ///
    /// # Errors
    /// The failure.
    ///
    /// # Panics
    /// The number of descriptors is not that of the message.
    pub fn send(
        &mut self,
        message: &Message,
        fds: &[BorrowedFd<'_>],
        limit: Duration,
    ) -> Result<(), ChannelError> {
        let (least, most) = message.fds();
        assert!((least..=most).contains(&fds.len()), "{} descriptors", fds.len());
        self.out.clear();
        message.write(&mut self.out);
        let until = self.end_of_message(limit);
        let (mut sent, mut unsent) = (0, fds);
        while sent < self.out.len() {
            self.stream
                .set_write_timeout(Some(left_of(until)?))
                .map_err(ChannelError::Os)?;
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_AT_ONCE))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            // Descriptors go with the first bytes: a byte for each time, the rest with the last one.
            let (now, later) = unsent.split_at(unsent.len().min(FDS_AT_ONCE));
            if !now.is_empty() {
                ancillary.push(SendAncillaryMessage::ScmRights(now));
            }
            let end = if later.is_empty() {
                self.out.len()
            } else {
                sent + 1
            };
            let bytes = [IoSlice::new(&self.out[sent..end])];
            match sendmsg(&self.stream, &bytes, &mut ancillary, SendFlags::NOSIGNAL) {
                Ok(bytes) => {
                    sent += bytes;
                    unsent = later;
                }
                Err(errno) => retry_or_fail(errno.into())?,
            }
        }
        Ok(())
    }

    /// Receives a message with its descriptors, in at most `limit`.
    ///
    /// # Errors
    /// The failure; `Refused` if the other daemon refuses.
    pub fn receive(&mut self, limit: Duration) -> Result<(Message, Vec<OwnedFd>), ChannelError> {
        let until = self.end_of_message(limit);
        let mut fds = Vec::new();
        let mut header = [0; HEADER_BYTES];
        self.fill(&mut header, &mut fds, until)?;
        let (kind, length) = Message::parse_header(header)?;
        let mut body = Vec::new();
        // Memory grows only with the bytes that have arrived.
        while body.len() < length {
            let at = body.len();
            body.resize(length.min(at + BODY_STEP), 0);
            self.fill(&mut body[at..], &mut fds, until)?;
        }
        let message = Message::parse(kind, &body)?;
        let (least, most) = message.fds();
        if !(least..=most).contains(&fds.len()) {
            return Err(ChannelError::Unexpected("a number of descriptors"));
        }
        match message {
            Message::Refused { reason } => Err(ChannelError::Refused(reason)),
            message => Ok((message, fds)),
        }
    }

    /// Waits until there is something to receive, for at most `limit` if there is one. Returns whether there is.
    ///
    /// # Errors
    /// The system's error.
    pub fn wait(&self, limit: Option<Duration>) -> Result<bool, ChannelError> {
        let until = limit.map(|limit| Instant::now() + limit);
        let mut poll = [rustix::event::PollFd::new(
            &self.stream,
            rustix::event::PollFlags::IN,
        )];
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| left.try_into().ok());
            match rustix::event::poll(&mut poll, left.as_ref()) {
                Ok(ready) => return Ok(ready > 0),
                Err(errno) => retry_or_fail(errno.into())?,
            }
        }
    }

    /// Lets the other daemon send nothing more: either a message was sent before, and is received after this, or
    /// its sender is told that it was not.
    ///
    /// # Errors
    /// The system's error.
    pub fn end_hearing(&self) -> Result<(), ChannelError> {
        let ended = self.stream.shutdown(std::net::Shutdown::Read);
        ended.map_err(ChannelError::Os)
    }

    /// The socket.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    fn fill(&self, into: &mut [u8], fds: &mut Vec<OwnedFd>, until: Instant) -> Result<(), ChannelError> {
        let mut filled = 0;
        while filled < into.len() {
            self.stream
                .set_read_timeout(Some(left_of(until)?))
                .map_err(ChannelError::Os)?;
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_AT_ONCE))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut rest = [IoSliceMut::new(&mut into[filled..])];
            let received = recvmsg(&self.stream, &mut rest, &mut ancillary, RecvFlags::CMSG_CLOEXEC);
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(more) = message {
                    fds.extend(more);
                }
            }
            match received {
                Ok(message) if message.flags.contains(ReturnFlags::CTRUNC) || fds.len() > FDS_MAX => {
                    return Err(ChannelError::Unexpected("more descriptors than a message has"));
                }
                Ok(message) if message.bytes == 0 => return Err(ChannelError::Closed),
                Ok(message) => filled += message.bytes,
                Err(errno) => retry_or_fail(errno.into())?,
            }
        }
        Ok(())
    }
}

/// The rest of the time, or an error if none is left.
fn left_of(until: Instant) -> Result<Duration, ChannelError> {
    match until.saturating_duration_since(Instant::now()) {
        // The system takes zero for no limit.
        Duration::ZERO => Err(ChannelError::Late),
        left => Ok(left.max(Duration::from_millis(1))),
    }
}

fn retry_or_fail(error: io::Error) -> Result<(), ChannelError> {
    match error.kind() {
        io::ErrorKind::Interrupted => Ok(()),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Err(ChannelError::Late),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Err(ChannelError::Closed),
        _ => Err(ChannelError::Os(error)),
    }
}

/// How long to wait before another try to connect.
const CONNECT_AGAIN: Duration = Duration::from_millis(10);
/// Step by which memory for a body grows.
const BODY_STEP: usize = 1 << 20;
const SOCKET_BUFFER: usize = 4 << 20;
/// Descriptors that Linux takes in one call.
const FDS_AT_ONCE: usize = 253;
/// Each of these calls sends a byte of the header at least.
const _: () = assert!(FDS_MAX.div_ceil(FDS_AT_ONCE) <= HEADER_BYTES);

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::handover::codec::{Session, VERSION};

    const LIMIT: Duration = Duration::from_secs(5);

    fn pair() -> (Channel, UnixStream) {
        let (one, other) = UnixStream::pair().unwrap();
        (Channel::new(one).unwrap(), other)
    }

    #[test]
    fn session_of_many_bytes_comes_with_its_descriptors_and_the_next_message_without() {
        let (mut one, other) = pair();
        let mut other = Channel::new(other).unwrap();
        let session = Message::Session(Session {
            door: "nbd".to_owned(),
            address: "unix:/x".to_owned(),
            body: (0..9_000_000_u32).map(|at| at as u8).collect(),
        });
        let sent = session.clone();
        let sender = std::thread::spawn(move || {
            let file = std::fs::File::open("/dev/null").unwrap();
            one.send(&sent, &[file.as_fd(), file.as_fd()], LIMIT).unwrap();
            one.send(&Message::Ready, &[], LIMIT).unwrap();
        });
        let (received, fds) = other.receive(LIMIT).unwrap();
        assert!(received == session && fds.len() == 2);
        let (next, fds) = other.receive(LIMIT).unwrap();
        assert_eq!((next, fds.len()), (Message::Ready, 0));
        sender.join().unwrap();
        assert!(matches!(other.receive(LIMIT), Err(ChannelError::Closed)));
    }

    #[test]
    fn descriptors_of_a_session_that_the_system_does_not_take_at_once_arrive_in_order() {
        let (mut one, other) = pair();
        let mut other = Channel::new(other).unwrap();
        let session = |body| {
            Message::Session(Session {
                door: "vhost-user".to_owned(),
                address: "unix:/x".to_owned(),
                body,
            })
        };
        let sender = std::thread::spawn(move || {
            let files = ["/dev/null", "/dev/zero"].map(|path| std::fs::File::open(path).unwrap());
            // Every seventh is the other file.
            let fd = |at: usize| files[usize::from(at.is_multiple_of(7))].as_fd();
            for count in [253, 254, 712] {
                let fds: Vec<_> = (0..count).map(fd).collect();
                one.send(&session(vec![7; 100]), &fds, LIMIT).unwrap();
            }
        });
        let device = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_rdev;
        for count in [253, 254, 712] {
            let (_, fds) = other.receive(LIMIT).unwrap();
            assert_eq!(fds.len(), count);
            let (zero, null) = (device(&fds[0]), device(&fds[1]));
            for (at, fd) in fds.iter().enumerate() {
                let expected = if at.is_multiple_of(7) { zero } else { null };
                assert_eq!(device(fd), expected, "{at} of {count}");
            }
        }
        sender.join().unwrap();
    }

    #[test]
    fn messages_that_are_in_time_each_and_too_late_together_end_the_channel() {
        let (mut one, other) = pair();
        let mut other = Channel::new(other).unwrap();
        let sender = std::thread::spawn(move || {
            while one.send(&Message::Ready, &[], LIMIT).is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        other.end_within(Duration::from_millis(50));
        let start = Instant::now();
        let late = loop {
            match other.receive(LIMIT) {
                Ok((message, _)) => assert_eq!(message, Message::Ready),
                Err(error) => break error,
            }
            assert!(start.elapsed() < LIMIT, "no end");
        };
        assert!(matches!(late, ChannelError::Late), "{late}");
        drop(other);
        sender.join().unwrap();
    }

    #[test]
    fn daemon_that_accepts_nobody_is_not_waited_for_without_end() {
        let path = std::env::temp_dir().join(format!("blkmq-backlog-{}", std::process::id()));
        let listener = crate::common::listen_at(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let _first = UnixStream::connect(&path).unwrap();
        let full = Channel::connect(&path, Duration::from_millis(50)).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn garbage_silence_and_a_lack_of_descriptors_have_an_error_each() {
        let (mut channel, mut peer) = pair();
        peer.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        assert!(matches!(channel.receive(LIMIT), Err(ChannelError::Decode(_))));
        let (mut channel, _peer) = pair();
        let late = channel.receive(Duration::from_millis(20));
        assert!(matches!(late, Err(ChannelError::Late)));
        let (mut channel, mut peer) = pair();
        let mut bytes = Vec::new();
        Message::Lock.write(&mut bytes);
        peer.write_all(&bytes).unwrap();
        assert!(matches!(channel.receive(LIMIT), Err(ChannelError::Unexpected(_))));
        let (mut channel, peer) = pair();
        let mut sender = Channel::new(peer).unwrap();
        sender
            .send(&Message::Hello { version: VERSION }, &[], LIMIT)
            .unwrap();
        let reason = "no".to_owned();
        sender.send(&Message::Refused { reason }, &[], LIMIT).unwrap();
        assert!(channel.receive(LIMIT).is_ok());
        assert!(matches!(channel.receive(LIMIT), Err(ChannelError::Refused(why)) if why == "no"));
    }
}
