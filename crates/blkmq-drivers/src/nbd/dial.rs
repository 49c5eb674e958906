//! Makes a connection: socket, TLS, handshake, and a time limit for all. Blocks; `disk` calls it at
//! set-up, `reconnect` on its thread.

use std::io::{self, IoSlice, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use blkmq_nbd::client::{Agreed, Failure, Handshake, Progress, RECEIVE_BYTES_MIN, Wanted};
use blkmq_nbd::codec::HeaderStyle;
use blkmq_nbd::identity;
use blkmq_nbd::uri::Address;
use blkmq_tls::{Client, FileError, Opened};
use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::config::NbdConfig;
use super::fences::Named;

/// A connection that is ready for requests.
#[derive(Debug)]
pub(super) struct Dialed {
    pub(super) socket: OwnedFd,
    /// What is between the socket and plain bytes, if it is not nothing.
    pub(super) tls: Option<Box<blkmq_tls::Stream>>,
    pub(super) agreed: Agreed,
    /// The session's name, if the server has taken note of it.
    pub(super) session: Option<Named>,
}

/// Why no connection came about.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// Nobody is there.
    #[error("cannot connect to {address}: {error}")]
    Connect {
        /// Where to.
        address: String,
        /// What the system said.
        error: io::Error,
    },
    /// The server went away, or was silent for too long.
    #[error("the handshake with {address} failed: {error}")]
    Handshake {
        /// With whom.
        address: String,
        /// What the system said.
        error: io::Error,
    },
    /// A file of TLS cannot be used.
    #[error("TLS: {0}")]
    Files(#[from] FileError),
    /// The server does not want, or does not speak NBD.
    #[error("{address}: {failure}")]
    Refused {
        /// Who.
        address: String,
        /// Why.
        failure: Failure,
    },
}

/// Connects and negotiates within the time that the configuration gives for that.
///
/// # Errors
/// What stood in the way.
pub(super) fn dial(config: &NbdConfig, block_status: bool) -> Result<Dialed, DialError> {
    let (uri, limit) = (&config.uri, config.connect_timeout);
    let client = config.tls()?;
    let until = Instant::now() + limit;
    let address = uri.address.to_string();
    let connected = match &uri.address {
        Address::Unix(path) => connect_unix(path, limit).map(Socket::Unix),
        Address::Tcp { host, port } => connect_tcp(host, *port, until).map(Socket::Tcp),
    };
    let socket = connected.map_err(|error| DialError::Connect {
        address: address.clone(),
        error,
    })?;
    let mut line = Line {
        socket,
        tls: None,
        until,
    };
    let name = identity::next_session();
    let handshake = Handshake::new(Wanted {
        name: uri.export.clone(),
        style: HeaderStyle::Extended,
        block_status,
        session: name,
    });
    let agreed = match negotiate(&mut line, handshake, client.as_ref()) {
        Ok(Ok(agreed)) => agreed,
        Ok(Err(failure)) => return Err(DialError::Refused { address, failure }),
        Err(error) => return Err(DialError::Handshake { address, error }),
    };
    Ok(Dialed {
        socket: line.socket.into(),
        tls: line.tls,
        session: name.zip(agreed.instance).map(|(name, instance)| Named {
            number: name.number,
            instance,
        }),
        agreed,
    })
}

enum Socket {
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
    let address = match path.as_os_str().as_bytes().strip_prefix(b"@") {
        // A name in the abstract namespace.
        Some(name) => SocketAddrUnix::new_abstract_name(name)?,
        None => SocketAddrUnix::new(path)?,
    };
    rustix::net::connect(&socket, &address)?;
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

/// A socket, TLS once that is started, and when patience ends.
struct Line {
    socket: Socket,
    tls: Option<Box<blkmq_tls::Stream>>,
    until: Instant,
}

fn negotiate(
    line: &mut Line,
    mut handshake: Handshake,
    client: Option<&Client>,
) -> io::Result<Result<Agreed, Failure>> {
    if client.is_some() {
        handshake = handshake.with_tls();
    }
    let (mut input, mut filled, mut out) = (vec![0; RECEIVE_BYTES_MIN], 0, Vec::new());
    loop {
        filled += line.read(&mut input[filled..])?;
        let (taken, progress) = handshake.receive(&input[..filled], &mut out);
        input.copy_within(taken..filled, 0);
        filled -= taken;
        line.write_all(&out)?;
        out.clear();
        match progress {
            Progress::Failed(failure) => return Ok(Err(failure)),
            Progress::NeedMore if handshake.is_starting_tls() && filled == 0 => {
                line.start_tls(client)?;
                handshake.secured(&mut out);
                line.write_all(&out)?;
                out.clear();
            }
            Progress::NeedMore if handshake.is_starting_tls() => {
                return Err(io::Error::other("it goes on in the clear when TLS is to start"));
            }
            Progress::NeedMore => {}
            Progress::Agreed(agreed) if filled == 0 && !line.has_received() => return Ok(Ok(agreed)),
            Progress::Agreed(_) => {
                return Err(io::Error::other("it sends replies to what was not asked"));
            }
        }
    }
}

impl Line {
    /// Shakes hands as TLS does.
    fn start_tls(&mut self, client: Option<&Client>) -> io::Result<()> {
        let stream = client.and_then(Client::connect);
        let mut tls = Box::new(stream.ok_or_else(|| io::Error::other("TLS cannot be started"))?);
        loop {
            let shaken = tls.shake_hands();
            self.flush(&mut tls)?;
            shaken.map_err(|error| io::Error::other(format!("TLS: {}", blkmq_tls::explain(&error))))?;
            if !tls.is_shaking_hands() {
                self.tls = Some(tls);
                return Ok(());
            }
            let count = self.read_raw(tls.room())?;
            tls.received(count);
        }
    }

    /// Reads some bytes; at least one.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(mut tls) = self.tls.take() else {
            return self.read_raw(into);
        };
        let read = loop {
            tls.begin_turn();
            match tls
                .open(into)
                .map_err(|error| io::Error::other(format!("TLS: {error}")))?
            {
                Opened::Bytes(count) => break count,
                Opened::Enough => {}
                Opened::End => return Err(hung_up()),
                Opened::NeedMore => {
                    let count = self.read_raw(tls.room())?;
                    tls.received(count);
                }
            }
        };
        self.tls = Some(tls);
        Ok(read)
    }

    fn write_all(&mut self, from: &[u8]) -> io::Result<()> {
        let Some(mut tls) = self.tls.take() else {
            self.socket.set_limit(left(self.until)?)?;
            return self.socket.write_all(from);
        };
        let mut sealed = 0;
        while sealed < from.len() {
            let taken = tls.seal(&[IoSlice::new(&from[sealed..])]);
            sealed += taken.map_err(io::Error::other)?;
            self.flush(&mut tls)?;
        }
        self.tls = Some(tls);
        Ok(())
    }

    fn flush(&mut self, tls: &mut blkmq_tls::Stream) -> io::Result<()> {
        self.socket.set_limit(left(self.until)?)?;
        tls.send(|records| {
            self.socket.write_all(records)?;
            Ok(records.len())
        })
    }

    /// Reads some bytes as the socket has them; at least one.
    fn read_raw(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            self.socket.set_limit(left(self.until)?)?;
            return match self.socket.read(into) {
                Ok(0) => Err(hung_up()),
                Ok(count) => Ok(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    Err(io::ErrorKind::TimedOut.into())
                }
                Err(error) => Err(error),
            };
        }
    }

    /// Says whether something is there that nobody has looked at.
    fn has_received(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_received())
    }
}

fn hung_up() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "it has hung up")
}

impl Socket {
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

impl From<Socket> for OwnedFd {
    fn from(socket: Socket) -> Self {
        match socket {
            Socket::Unix(stream) => stream.into(),
            Socket::Tcp(stream) => stream.into(),
        }
    }
}

const KEEP_IDLE: Duration = Duration::from_secs(15);
const KEEP_INTERVAL: Duration = Duration::from_secs(5);
const KEEP_COUNT: u32 = 3;
