//! Decides how addresses become sockets that listen: unix paths, TCP, and the sockets that systemd hands over.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use blkmq_host::device::FileId;
use rustix::net::{AddressFamily, sockopt};

use super::address::Address;
use super::descriptors::{listen_at, refuse};
use super::owned_path::{FreePath, OwnedPath};
use crate::handover::Handover;
use crate::handover::codec::Origin;

/// A socket that listens.
#[derive(Debug)]
pub enum Socket {
    /// A unix socket; the path, if it is ours, is removed when the door closes.
    Unix(UnixListener, Option<OwnedPath>),
    /// A TCP socket.
    Tcp(TcpListener),
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener, _) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

impl Socket {
    /// Its own address, as it is written.
    pub fn address(&self) -> String {
        match self {
            Self::Unix(..) => format!("unix:{}", self.path()),
            Self::Tcp(listener) => {
                let address = listener.local_addr();
                address.map_or_else(|_| "tcp:?".to_owned(), |address| format!("tcp:{address}"))
            }
        }
    }

    pub(crate) fn is_tcp(&self) -> bool {
        matches!(self, Self::Tcp(_))
    }

    /// Takes ownership of a socket that another daemon left, whose path had this identity: this daemon
    /// removes its path at the end. An older daemon does not tell the identity.
    pub fn own(&mut self, file: Option<FileId>) {
        let found = PathBuf::from(self.path());
        if let Self::Unix(_, path) = self {
            *path = match file {
                Some(file) => Some(OwnedPath::inherited(found, file)),
                None => OwnedPath::of(found).ok(),
            };
        }
    }

    /// Gives up ownership to another daemon: the path stays.
    pub fn disown(&mut self) {
        if let Self::Unix(_, path) = self
            && let Some(path) = path.take()
        {
            path.leave();
        }
    }

    /// The identity of its path, if that is ours.
    pub fn file(&self) -> Option<FileId> {
        match self {
            Self::Unix(_, path) => path.as_ref().map(OwnedPath::file),
            Self::Tcp(_) => None,
        }
    }

    /// A socket that another daemon has handed over; its path is not removed.
    ///
    /// # Errors
    /// The socket does not listen, or is of another kind.
    fn inherited(socket: OwnedFd) -> io::Result<Self> {
        if !sockopt::socket_acceptconn(&socket)? {
            return Err(io::Error::other("it does not listen"));
        }
        match sockopt::socket_domain(&socket)? {
            AddressFamily::UNIX => {
                // An earlier daemon may not have done this.
                refuse(&socket);
                Ok(Self::Unix(socket.into(), None))
            }
            AddressFamily::INET | AddressFamily::INET6 => Ok(Self::Tcp(socket.into())),
            other => Err(io::Error::other(format!("address family {}", other.as_raw()))),
        }
    }

    /// The path of a unix socket, `?` if it has none.
    pub(crate) fn path(&self) -> String {
        let address = match self {
            Self::Unix(listener, _) => listener.local_addr().ok(),
            Self::Tcp(_) => None,
        };
        let path = address.as_ref().and_then(|address| address.as_pathname());
        path.map_or_else(|| "?".to_owned(), |path| path.to_string_lossy().into_owned())
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            // Before the socket is closed.
            *path = None;
        }
    }
}

/// An address that cannot be listened at: what is wrong, and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct OpenError {
    what: String,
    source: Option<io::Error>,
}

impl OpenError {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        let what = what.into();
        Self { what, source: None }
    }

    /// The same with what it is about, such as the address, before it.
    #[must_use]
    pub fn of(self, name: &str) -> Self {
        Self {
            what: format!("{name}: {}", self.what),
            ..self
        }
    }

    pub(crate) fn with_source(self, source: io::Error) -> Self {
        Self {
            source: Some(source),
            ..self
        }
    }
}

/// Opens an address: one socket, or as many as systemd hands over; or those that another daemon has handed over.
///
/// # Errors
/// The address cannot be opened.
pub fn open(address: &Address, handover: &Handover) -> Result<Vec<Socket>, OpenError> {
    let handed = handover.take_inherited(|name, origin| match address {
        Address::Systemd => origin == Origin::Systemd,
        // Any port: the system has chosen it.
        Address::Tcp(at) if at.port() == 0 => {
            let found = name
                .strip_prefix("tcp:")
                .and_then(|name| name.parse::<SocketAddr>().ok());
            found.is_some_and(|found| found.ip() == at.ip())
        }
        _ => name == address.to_string(),
    });
    if !handed.is_empty() {
        let socket = |(name, _, socket): (String, Origin, OwnedFd)| {
            Socket::inherited(socket).map_err(|error| failed(&name, "cannot be taken over", error))
        };
        return handed.into_iter().map(socket).collect();
    }
    match address {
        Address::Unix(path) => Ok(vec![unix(path)?]),
        Address::Tcp(address) => Ok(vec![tcp(*address)?]),
        Address::Systemd => {
            let sockets = inherited()?;
            let addresses = sockets.iter().map(Socket::address);
            addresses.for_each(|address| handover.note_systemd(address));
            Ok(sockets)
        }
    }
}

fn unix(path: &Path) -> Result<Socket, OpenError> {
    let free = FreePath::find(path).map_err(|error| error.of(&format!("export {}", at(path))))?;
    let listener = listen_at(path).map_err(|error| {
        let what = "cannot listen there: is the directory there, and may we write to it?";
        failed(&at(path), what, error)
    })?;
    let owned = free.own();
    let owned = owned.map_err(|error| failed(&at(path), "the socket is gone", error))?;
    Ok(Socket::Unix(listener, Some(owned)))
}

fn tcp(address: SocketAddr) -> Result<Socket, OpenError> {
    let listener = TcpListener::bind(address).map_err(|error| {
        let what =
            "cannot listen there: another server may, or it is no address of this host; choose another";
        failed(&format!("tcp:{address}"), what, error)
    })?;
    Ok(Socket::Tcp(listener))
}

/// Takes the sockets that systemd hands over (`LISTEN_FDS`).
fn inherited() -> Result<Vec<Socket>, OpenError> {
    let mut handed = listenfd::ListenFd::from_env();
    let count = handed.len();
    if count == 0 {
        let what = "no socket was handed over: start this service from a .socket unit (LISTEN_FDS)";
        return Err(refused("systemd", what));
    }
    let mut take = |index| match handed.take_unix_listener(index) {
        Ok(Some(listener)) => {
            refuse(&listener);
            Ok(Socket::Unix(listener, None))
        }
        _ => match handed.take_tcp_listener(index) {
            Ok(Some(listener)) => Ok(Socket::Tcp(listener)),
            _ => {
                let what = format!("socket {index} is no listening unix or TCP stream socket");
                Err(refused("systemd", &what))
            }
        },
    };
    (0..count).map(&mut take).collect()
}

fn at(path: &Path) -> String {
    format!("unix:{}", path.display())
}

fn refused(address: &str, what: &str) -> OpenError {
    OpenError::new(format!("export {address}: {what}"))
}

fn failed(address: &str, what: &str, source: io::Error) -> OpenError {
    OpenError {
        source: Some(source),
        ..refused(address, what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("blkmq-{name}-{}", std::process::id()))
    }

    #[test]
    fn a_socket_left_by_a_killed_daemon_is_taken_over_but_a_living_one_is_not() {
        let path = scratch("stale");
        drop(UnixListener::bind(&path).unwrap());
        let socket = unix(&path).unwrap();
        let error = unix(&path).map(drop).expect_err("in use").to_string();
        assert!(error.contains("another server listens there"), "{error}");
        drop(socket);
        assert!(!path.exists(), "removed when the door closes");
    }

    #[test]
    fn a_file_in_the_way_is_left_alone() {
        let path = scratch("file");
        std::fs::write(&path, "precious").unwrap();
        assert!(unix(&path).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        std::fs::remove_file(&path).unwrap();
    }
}
