//! The notification of systemd, if it asks for one (`NOTIFY_SOCKET`): that this process serves, and is the
//! service's main process.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// This process serves. Another one may have been the main one before.
pub(super) fn ready() {
    say(&format!("READY=1\nMAINPID={}\n", std::process::id()));
}

/// This process reads its configuration again; [`reloaded`] follows.
pub(super) fn reloading() {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let now_us = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
    say(&format!("RELOADING=1\nMONOTONIC_USEC={now_us}\n"));
}

/// The configuration was read again. Which process is the main one is not said: another one may be by
/// now.
pub(super) fn reloaded() {
    say("READY=1\n");
}

/// Every reactor takes orders.
pub(super) fn is_alive() {
    say("WATCHDOG=1\n");
}

/// Returns whether a service manager listens.
pub(super) fn is_asked_for() -> bool {
    std::env::var_os(SOCKET).is_some()
}

fn say(words: &str) {
    let Some(path) = std::env::var_os(SOCKET) else {
        return;
    };
    let told = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&path),
    };
    if let Err(error) = told.and_then(|address| send(&address, words)) {
        tracing::warn!("systemd was not told of this process: {error}");
    }
}

fn send(address: &SocketAddr, words: &str) -> io::Result<()> {
    UnixDatagram::unbound()?.send_to_addr(words.as_bytes(), address)?;
    Ok(())
}

const SOCKET: &str = "NOTIFY_SOCKET";
