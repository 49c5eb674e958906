//! Decides how addresses become sockets that listen, and how a client is told of them: unix paths, TCP, and the sockets
//! that systemd hands over.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use anyhow::{Context, Result, bail};
use blkmq_config::{Address, ExportSpec};
use blkmq_export::nbd::door::Socket;

/// Opens all addresses, in order.
///
/// # Errors
/// The first address that cannot be had, with the reason and what to do.
pub(super) fn open(exports: &[ExportSpec]) -> Result<Vec<(Socket, ExportSpec)>> {
    let mut sockets = Vec::new();
    for export in exports {
        match &export.address {
            Address::Unix(path) => sockets.push((unix(path)?, export.clone())),
            Address::Tcp(address) => sockets.push((tcp(*address)?, export.clone())),
            Address::Systemd => {
                for socket in inherited()? {
                    sockets.push((socket, export.clone()));
                }
            }
        }
    }
    Ok(sockets)
}

/// Writes the address of a disk as NBD clients take it.
pub(super) fn uri(socket: &Socket, disk: &str) -> String {
    match socket {
        Socket::Unix(listener, _) => {
            let address = listener.local_addr().ok();
            let path = address.as_ref().and_then(|address| address.as_pathname());
            let path = path.map_or_else(|| "?".to_owned(), |path| escape(&path.to_string_lossy()));
            format!("nbd+unix:///{disk}?socket={path}")
        }
        Socket::Tcp(listener) => {
            let address = listener
                .local_addr()
                .map_or_else(|_| "?".to_owned(), |address| address.to_string());
            format!("nbd://{address}/{disk}")
        }
    }
}

fn unix(path: &Path) -> Result<Socket> {
    let shown = path.display();
    remove_stale(path)?;
    let listener = UnixListener::bind(path).with_context(|| {
        format!("export unix:{shown}: cannot listen there: is the directory there, and may we write to it?")
    })?;
    listener.set_nonblocking(true)?;
    Ok(Socket::Unix(listener, Some(path.to_owned())))
}

/// Takes a socket away that nobody listens on any more, such as one that a killed daemon left.
fn remove_stale(path: &Path) -> Result<()> {
    let shown = path.display();
    let Ok(found) = std::fs::symlink_metadata(path) else {
        return Ok(());
    };
    if !found.file_type().is_socket() {
        bail!(
            "export unix:{shown}: there is something else than a socket: choose another path, or move it away"
        );
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).with_context(|| format!("export unix:{shown}: old socket stays"))
        }
        Ok(_) => bail!("export unix:{shown}: another server listens there: stop it, or choose another path"),
        Err(error) => bail!("export unix:{shown}: cannot tell whether the socket is in use: {error}"),
    }
}

fn tcp(address: SocketAddr) -> Result<Socket> {
    let listener = TcpListener::bind(address).with_context(|| {
        format!("export tcp:{address}: cannot listen there: another server may, or it is no address of this host; choose another")
    })?;
    if !address.ip().is_loopback() {
        tracing::warn!("export tcp:{address}: reachable from other machines without authentication");
    }
    listener.set_nonblocking(true)?;
    Ok(Socket::Tcp(listener))
}

/// Takes the sockets that systemd hands over (`LISTEN_FDS`).
fn inherited() -> Result<Vec<Socket>> {
    let mut handed = listenfd::ListenFd::from_env();
    if handed.len() == 0 {
        bail!(
            "export systemd: no socket was handed over: start this service from a .socket unit (LISTEN_FDS)"
        );
    }
    let mut sockets = Vec::new();
    for index in 0..handed.len() {
        let socket = match handed.take_unix_listener(index) {
            Ok(Some(listener)) => Socket::Unix(listener, None),
            _ => match handed.take_tcp_listener(index) {
                Ok(Some(listener)) => Socket::Tcp(listener),
                _ => bail!("export systemd: socket {index} is no listening unix or TCP stream socket"),
            },
        };
        match &socket {
            Socket::Unix(listener, _) => listener.set_nonblocking(true)?,
            Socket::Tcp(listener) => listener.set_nonblocking(true)?,
        }
        sockets.push(socket);
    }
    Ok(sockets)
}

/// Writes a path into the query of a URI.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' | b'~' => {
                escaped.push(byte.into())
            }
            _ => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
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

    #[test]
    fn a_uri_carries_odd_paths() {
        assert_eq!(escape("/run/a b&c.sock"), "/run/a%20b%26c.sock");
    }
}
