//! Decides how a monitoring system reads a daemon's counts: `/metrics` over HTTP, in OpenMetrics,
//! on a unix socket or the loopback. `server` has the clients, `http` parses their requests,
//! `collect` has the metrics. One thread; it waits for no reactor, and no reactor waits for it.
//! `docs/operate/metrics.md` is for users.

mod collect;
mod http;
mod server;

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Result, bail};
use blkmq_export::common::Address;

pub(crate) use server::Server;

/// Where metrics are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// Parses the address at which metrics are read.
///
/// # Errors
/// It is neither a unix socket's nor one of the loopback: metrics would show everybody the tenants'
/// activity.
pub(crate) fn place(address: &str) -> Result<Place> {
    match address.parse::<Address>() {
        Ok(Address::Unix(path)) => Ok(Place::Unix(path)),
        Ok(Address::Tcp(at)) if at.ip().is_loopback() => Ok(Place::Tcp(at)),
        _ => bail!(
            "metrics address {address:?} rejected: must be unix:PATH, or a port of the loopback, as in tcp:127.0.0.1:9464"
        ),
    }
}
