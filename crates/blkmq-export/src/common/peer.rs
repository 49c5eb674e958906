//! Decides how a client is named in messages, and how the kernel watches over its connection. Used by `connection`.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::{getpeername, sockopt};

/// Names who is at the other end: its address, or of a unix socket the process that connected.
pub(crate) fn peer(socket: &OwnedFd, is_tcp: bool) -> String {
    if !is_tcp {
        return match sockopt::socket_peercred(socket) {
            Ok(peer) => format!(
                "process {} of user {}",
                peer.pid.as_raw_nonzero(),
                peer.uid.as_raw()
            ),
            Err(_) => "an unknown process".to_owned(),
        };
    }
    let address = getpeername(socket).ok().flatten();
    address
        .and_then(|address| SocketAddr::try_from(address).ok())
        .map_or_else(|| "an unknown address".to_owned(), |address| address.to_string())
}

/// Has the kernel ask a peer that says nothing for long whether it is still there: of a host that lost its power or its way here,
/// nothing else tells. Whatever cannot be set is left at the system's.
pub(crate) fn watch_for_a_silent_end(socket: &OwnedFd) {
    let _ = sockopt::set_tcp_keepidle(socket, KEEPALIVE_AFTER);
    let _ = sockopt::set_tcp_keepintvl(socket, KEEPALIVE_EVERY);
    let _ = sockopt::set_tcp_keepcnt(socket, KEEPALIVE_PROBES);
    let _ = sockopt::set_socket_keepalive(socket, true);
}

/// After how long without a word from a TCP peer the kernel asks for one, how often, and how often in vain before the
/// connection is lost: two minutes in all.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(60);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 6;
