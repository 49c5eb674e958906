//! The metrics that a monitoring system reads: `/metrics` over HTTP, in OpenMetrics, on a unix socket, the
//! loopback or, if that is said, a network. `server` has the clients, `http` parses their requests, `collect`
//! has the metrics. One thread; it waits for no reactor, and no reactor waits for it.
//! `docs/operate/metrics.md` is for users.

mod collect;
mod http;
mod server;

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Result, bail};
use blkmq_export::common::{Address, loopbacks};

pub(crate) use server::Server;

/// Where metrics are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Unix(PathBuf),
    /// One address, or both loopbacks.
    Tcp(Vec<SocketAddr>),
}

/// Parses the address at which metrics are read. `allow_insecure` says that other hosts may reach it.
///
/// # Errors
/// It is another one than a unix socket's or a port's, or other hosts reach it and that is not said: metrics show
/// everybody the tenants' activity.
pub(crate) fn place(address: &str, allow_insecure: bool) -> Result<Place> {
    match address.parse::<Address>() {
        Ok(Address::Unix(path)) => Ok(Place::Unix(path)),
        Ok(Address::Tcp(at)) if at.ip().is_loopback() || allow_insecure => Ok(Place::Tcp(vec![at])),
        Ok(Address::Tcp(_)) => bail!(
            "metrics address {address:?} rejected: other hosts reach it, and whoever does sees what every tenant does: read \
             them at the loopback, or through a proxy that asks who reads; or, on a network of monitoring alone, say \
             allow_insecure = true in [metrics] (--metrics-insecure)"
        ),
        Ok(Address::Localhost(port)) => Ok(Place::Tcp(loopbacks(port).to_vec())),
        Ok(_) => bail!(
            "metrics address {address:?} rejected: must be unix:PATH or tcp:HOST:PORT, as in tcp:127.0.0.1:9464"
        ),
        Err(error) => bail!("metrics {error}"),
    }
}
