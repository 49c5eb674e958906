//! The peer of a connection: its name in messages, and how the kernel watches the connection. Used by
//! `connection`.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::{getpeername, sockopt};

use super::credentials::Credentials;

/// Names the peer: by its address or, at a unix socket, by the process that connected.
pub(crate) fn peer(socket: &OwnedFd, is_tcp: bool) -> String {
    if !is_tcp {
        let peer = Credentials::of_peer(socket);
        return peer.map_or_else(|_| "an unknown process".to_owned(), |peer| peer.to_string());
    }
    let address = getpeername(socket).ok().flatten();
    address
        .and_then(|address| SocketAddr::try_from(address).ok())
        .map_or_else(|| "an unknown address".to_owned(), |address| address.to_string())
}

/// Makes the kernel probe a peer that is silent for long: nothing else reports a host that lost its
/// power or its route to here. An option that cannot be set keeps the system's value.
pub(crate) fn watch_for_a_silent_end(socket: &OwnedFd) {
    let _ = sockopt::set_tcp_keepidle(socket, KEEPALIVE_AFTER);
    let _ = sockopt::set_tcp_keepintvl(socket, KEEPALIVE_EVERY);
    let _ = sockopt::set_tcp_keepcnt(socket, KEEPALIVE_PROBES);
    let _ = sockopt::set_socket_keepalive(socket, true);
}

/// How long a TCP peer must be silent until the kernel probes it, how often the kernel probes, and
/// how many probes may fail before the connection is lost: two minutes in all.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(60);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 6;
