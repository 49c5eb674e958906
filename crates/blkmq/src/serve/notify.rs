//! Tells systemd, if it wants to know (`NOTIFY_SOCKET`), that this process serves, and that it is the service's main one.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// This process serves. Another one may have been the main one before.
pub(super) fn ready() {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    let told = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&path),
    };
    if let Err(error) = told.and_then(|address| tell(&address)) {
        tracing::warn!("systemd was not told that this process serves: {error}");
    }
}

fn tell(address: &SocketAddr) -> io::Result<()> {
    let words = format!("READY=1\nMAINPID={}\n", std::process::id());
    UnixDatagram::unbound()?.send_to_addr(words.as_bytes(), address)?;
    Ok(())
}
