//! Decides how a connection is made: socket, handshake, and a time limit for both. Blocks; `disk` calls it at set-up, `reconnect`
//! on its thread.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use blkmq_nbd::client::{Agreed, Failure, Handshake, Progress, RECEIVE_BYTES_MIN, Wanted};
use blkmq_nbd::codec::HeaderStyle;
use blkmq_nbd::codec::handshake::SessionName;
use blkmq_nbd::identity;
use blkmq_nbd::uri::{Address, Uri};
use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::fences::Named;

/// A connection that is ready for requests.
#[derive(Debug)]
pub(super) struct Dialed {
    pub(super) socket: OwnedFd,
    pub(super) agreed: Agreed,
    /// The session's name, if the server has taken note of it.
    pub(super) session: Option<Named>,
}

/// Why no connection came about.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// Nobody is there.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// Where to.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// The server went away, or was silent for too long.
    #[error("the handshake with {address} failed: {source}")]
    Handshake {
        /// With whom.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// The server does not want, or does not speak NBD.
    #[error("{address}: {failure}")]
    Refused {
        /// Who.
        address: String,
        /// Why.
        failure: Failure,
    },
}

/// Connects and negotiates within `limit`.
///
/// # Errors
/// What stood in the way.
pub(super) fn dial(uri: &Uri, block_status: bool, limit: Duration) -> Result<Dialed, DialError> {
    let until = Instant::now() + limit;
    let address = uri.address.to_string();
    let connected = match &uri.address {
        Address::Unix(path) => connect_unix(path, limit).map(Stream::Unix),
        Address::Tcp { host, port } => connect_tcp(host, *port, until).map(Stream::Tcp),
    };
    let mut stream = connected.map_err(|source| DialError::Connect {
        address: address.clone(),
        source,
    })?;
    let name = identity::next_session();
    let agreed = match negotiate(&mut stream, uri, block_status, name, until) {
        Ok(Ok(agreed)) => agreed,
        Ok(Err(failure)) => return Err(DialError::Refused { address, failure }),
        Err(source) => return Err(DialError::Handshake { address, source }),
    };
    Ok(Dialed {
        socket: stream.into(),
        session: name.zip(agreed.instance).map(|(name, instance)| Named {
            number: name.number,
            instance,
        }),
        agreed,
    })
}

enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

fn connect_unix(path: &Path, limit: Duration) -> io::Result<UnixStream> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // A server that accepts nobody would have us wait in its queue.
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(limit))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

fn connect_tcp(host: &str, port: u16, until: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left(until)?) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                // An idle connection to a host that is gone is noticed within half a minute.
                sockopt::set_socket_keepalive(&stream, true)?;
                sockopt::set_tcp_keepidle(&stream, KEEP_IDLE)?;
                sockopt::set_tcp_keepintvl(&stream, KEEP_INTERVAL)?;
                sockopt::set_tcp_keepcnt(&stream, KEEP_COUNT)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The time that is left.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(left)
}

fn negotiate(
    stream: &mut Stream,
    uri: &Uri,
    block_status: bool,
    session: Option<SessionName>,
    until: Instant,
) -> io::Result<Result<Agreed, Failure>> {
    let mut handshake = Handshake::new(Wanted {
        name: uri.export.clone(),
        style: HeaderStyle::Extended,
        block_status,
        session,
    });
    let (mut input, mut filled, mut out) = (vec![0; RECEIVE_BYTES_MIN], 0, Vec::new());
    loop {
        stream.set_limit(left(until)?)?;
        let count = match stream.read(&mut input[filled..]) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it has hung up")),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Err(error) => return Err(error),
        };
        filled += count;
        let (taken, progress) = handshake.receive(&input[..filled], &mut out);
        input.copy_within(taken..filled, 0);
        filled -= taken;
        stream.write_all(&out)?;
        out.clear();
        match progress {
            Progress::NeedMore => {}
            Progress::Failed(failure) => return Ok(Err(failure)),
            Progress::Agreed(agreed) if filled == 0 => return Ok(Ok(agreed)),
            Progress::Agreed(_) => {
                return Err(io::Error::other("it sends replies to what was not asked"));
            }
        }
    }
}

impl Stream {
    fn set_limit(&self, limit: Duration) -> io::Result<()> {
        match self {
            Self::Unix(stream) => {
                stream.set_read_timeout(Some(limit))?;
                stream.set_write_timeout(Some(limit))
            }
            Self::Tcp(stream) => {
                stream.set_read_timeout(Some(limit))?;
                stream.set_write_timeout(Some(limit))
            }
        }
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(into),
            Self::Tcp(stream) => stream.read(into),
        }
    }

    fn write_all(&mut self, from: &[u8]) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.write_all(from),
            Self::Tcp(stream) => stream.write_all(from),
        }
    }
}

impl From<Stream> for OwnedFd {
    fn from(stream: Stream) -> Self {
        match stream {
            Stream::Unix(stream) => stream.into(),
            Stream::Tcp(stream) => stream.into(),
        }
    }
}

const KEEP_IDLE: Duration = Duration::from_secs(15);
const KEEP_INTERVAL: Duration = Duration::from_secs(5);
const KEEP_COUNT: u32 = 3;
