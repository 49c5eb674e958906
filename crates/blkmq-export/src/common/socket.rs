//! How addresses become sockets that listen: unix paths and names, and TCP; `systemd` has those that are handed over.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::path::Path;

use blkmq_host::device::FileId;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};

use super::address::Address;
use super::descriptors::{listen_at, refuse};
use super::owned_path::{FreePath, OwnedPath};
use super::systemd;
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

    fn port(&self) -> Option<u16> {
        match self {
            Self::Unix(..) => None,
            Self::Tcp(listener) => Some(listener.local_addr().ok()?.port()),
        }
    }

    pub(crate) fn is_tcp(&self) -> bool {
        matches!(self, Self::Tcp(_))
    }

    /// Takes ownership of a socket that another daemon left, whose path had this identity: this daemon
    /// removes its path at the end. An older daemon does not tell the identity.
    pub fn own(&mut self, file: Option<FileId>) {
        let Some(found) = self.address_of_unix() else {
            return;
        };
        // A name in the abstract namespace goes by itself.
        let Some(found) = found.as_pathname() else { return };
        let found = found.to_owned();
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

    /// The path of a unix socket or, after `@`, its name; `?` if it has none.
    pub(crate) fn path(&self) -> String {
        let address = self.address_of_unix();
        let path = address.as_ref().and_then(|address| address.as_pathname());
        let name = address.as_ref().and_then(|address| address.as_abstract_name());
        match (path, name) {
            (Some(path), _) => path.to_string_lossy().into_owned(),
            (None, Some(name)) => format!("@{}", String::from_utf8_lossy(name)),
            (None, None) => "?".to_owned(),
        }
    }

    fn address_of_unix(&self) -> Option<UnixAddr> {
        match self {
            Self::Unix(listener, _) => listener.local_addr().ok(),
            Self::Tcp(_) => None,
        }
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

    /// Returns whether the host has no such address.
    fn is_without_address(&self) -> bool {
        let known = self.source.as_ref().and_then(io::Error::raw_os_error);
        let none = [Errno::ADDRNOTAVAIL, Errno::AFNOSUPPORT];
        known.is_some_and(|known| none.iter().any(|errno| errno.raw_os_error() == known))
    }

    pub(crate) fn with_source(self, source: io::Error) -> Self {
        Self {
            source: Some(source),
            ..self
        }
    }
}

/// Opens an address: one socket, those of both loopbacks, or those that systemd hands over; or what another daemon has
/// handed over of them.
///
/// # Errors
/// The address cannot be opened.
pub fn open(address: &Address, handover: &Handover) -> Result<Vec<Socket>, OpenError> {
    if let Address::Localhost(port) = address {
        return localhost(*port, handover);
    }
    let handed = handover.take_inherited(|name, origin| match (address, origin) {
        (Address::Systemd(None), Origin::Systemd(_)) => true,
        (Address::Systemd(name), Origin::Systemd(of)) => name == of,
        (Address::Systemd(_), Origin::Daemon) => false,
        // Any port: the system has chosen it.
        (Address::Tcp(at), _) if at.port() == 0 => {
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
        Address::Abstract(name) => Ok(vec![abstract_socket(name)?]),
        Address::Tcp(address) => Ok(vec![tcp(*address)?]),
        Address::Localhost(_) => unreachable!("opened above"),
        Address::Systemd(name) => {
            let sockets = systemd::take(name.as_deref());
            let sockets = sockets.map_err(|error| error.of(&format!("export {address}")))?;
            for socket in &sockets {
                handover.note_systemd(socket.address(), name.clone());
            }
            Ok(sockets)
        }
    }
}

/// A port of the loopback, of IPv4 and of IPv6. If the system chooses it, it is the same of both.
pub fn loopbacks(port: u16) -> [SocketAddr; 2] {
    [
        (Ipv4Addr::LOCALHOST, port).into(),
        (Ipv6Addr::LOCALHOST, port).into(),
    ]
}

fn localhost(port: u16, handover: &Handover) -> Result<Vec<Socket>, OpenError> {
    let [four, _] = loopbacks(port);
    let mut sockets = open(&Address::Tcp(four), handover)?;
    let port = sockets.first().and_then(Socket::port).unwrap_or(port);
    let [_, six] = loopbacks(port);
    match open(&Address::Tcp(six), handover) {
        Ok(more) => sockets.extend(more),
        Err(error) if error.is_without_address() => {
            tracing::info!("export tcp:{six}: this host has no such loopback, and {four} alone is served");
        }
        Err(error) => return Err(error),
    }
    Ok(sockets)
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

fn abstract_socket(name: &str) -> Result<Socket, OpenError> {
    let listener = UnixAddr::from_abstract_name(name).and_then(|address| UnixListener::bind_addr(&address));
    let listener = listener.map_err(|error| {
        let what = "cannot listen there: another process may; choose another name";
        failed(&format!("unix:@{name}"), what, error)
    })?;
    refuse(&listener);
    Ok(Socket::Unix(listener, None))
}

fn tcp(address: SocketAddr) -> Result<Socket, OpenError> {
    let listener = listen_at_port(address).map_err(|error| {
        let what =
            "cannot listen there: another server may, or it is no address of this host; choose another";
        failed(&format!("tcp:{address}"), what, error)
    })?;
    Ok(Socket::Tcp(listener))
}

/// Listens at a TCP address. One of IPv6 leaves the port of IPv4 to others, whatever the system's default is.
///
/// # Errors
/// The system's error.
pub fn listen_at_port(address: SocketAddr) -> io::Result<TcpListener> {
    let family = if address.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Until the door that serves the address says how many clients may wait.
const BACKLOG: i32 = 128;

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
    fn socket_left_by_a_killed_daemon_is_taken_over_but_a_living_one_is_not() {
        let path = scratch("stale");
        drop(UnixListener::bind(&path).unwrap());
        let socket = unix(&path).unwrap();
        let error = unix(&path).map(drop).expect_err("in use").to_string();
        assert!(error.contains("another server listens there"), "{error}");
        drop(socket);
        assert!(!path.exists(), "removed when the door closes");
    }

    #[test]
    fn file_in_the_way_is_left_alone() {
        let path = scratch("file");
        std::fs::write(&path, "precious").unwrap();
        assert!(unix(&path).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        std::fs::remove_file(&path).unwrap();
    }
}
