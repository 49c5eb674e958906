//! How the address of a socket is written: `unix:PATH`, `unix:@NAME`, `tcp:HOST:PORT`, `systemd` or `systemd:NAME`.
//! `socket` opens it, `place` finds what it takes.

use std::fmt;
use std::fs;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::path::PathBuf;
use std::str::FromStr;

use blkmq_host::value::ConfigError;

/// An address that is rejected: what is wrong and what is allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct AddressError(pub String);

impl From<ConfigError> for AddressError {
    fn from(error: ConfigError) -> Self {
        Self(error.to_string())
    }
}

/// Where clients connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// A unix socket without a path, in Linux' abstract namespace: it has a name alone, and no rights.
    Abstract(String),
    /// A TCP address. One of IPv6 is not that of IPv4 as well.
    Tcp(SocketAddr),
    /// A port of the loopback, of IPv4 and of IPv6 where the host has that.
    Localhost(u16),
    /// The sockets that systemd hands over: those of a name, or all.
    Systemd(Option<String>),
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if text == "systemd" {
            return Ok(Self::Systemd(None));
        }
        match text.split_once(':') {
            Some(("unix", path)) => unix(path),
            Some(("tcp", address)) => tcp(address),
            Some(("systemd", name)) if !name.is_empty() && !name.contains(':') => {
                Ok(Self::Systemd(Some(name.to_owned())))
            }
            _ => Err(AddressError(format!(
                "address {text:?} rejected: must be unix:PATH, tcp:HOST:PORT, systemd or systemd:NAME"
            ))),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Abstract(name) => write!(f, "unix:@{name}"),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
            Self::Localhost(port) => write!(f, "tcp:localhost:{port}"),
            Self::Systemd(None) => f.write_str("systemd"),
            Self::Systemd(Some(name)) => write!(f, "systemd:{name}"),
        }
    }
}

fn unix(path: &str) -> Result<Address, AddressError> {
    if path.is_empty() {
        let what = "address unix: rejected: the path is missing, as in unix:/run/blkmq/nbd.sock";
        return Err(AddressError(what.to_owned()));
    }
    if path == "@" {
        let what = "address unix:@ rejected: the name is missing, as in unix:@blkmq";
        return Err(AddressError(what.to_owned()));
    }
    if path.len() > UNIX_PATH_MAX {
        return Err(AddressError(format!(
            "address unix:{path} rejected: the path has {} bytes, a unix socket's may have {UNIX_PATH_MAX}; choose a shorter one",
            path.len()
        )));
    }
    Ok(match path.strip_prefix('@') {
        Some(name) => Address::Abstract(name.to_owned()),
        None => Address::Unix(path.into()),
    })
}

/// Parses `HOST:PORT` or `PORT`; a host is an IP address or `localhost`.
fn tcp(text: &str) -> Result<Address, AddressError> {
    let (host, port) = text.rsplit_once(':').unwrap_or(("127.0.0.1", text));
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let Ok(port) = port.parse::<u16>() else {
        return Err(AddressError(format!(
            "address tcp:{text} rejected: port {port:?} must be a number from 0 to 65535 (10809 is NBD's)"
        )));
    };
    if bare == "localhost" {
        return Ok(Address::Localhost(port));
    }
    let (ip, zone) = bare.split_once('%').unwrap_or((bare, ""));
    match (ip.parse::<IpAddr>().map(|ip| ip.to_canonical()), zone) {
        (Ok(ip), "") => Ok(Address::Tcp(SocketAddr::new(ip, port))),
        (Ok(IpAddr::V6(ip)), zone) if ip.is_unicast_link_local() => {
            let scope = scope_of(zone).ok_or_else(|| {
                AddressError(format!(
                    "address tcp:{text} rejected: this host has no interface {zone:?}"
                ))
            })?;
            Ok(Address::Tcp(SocketAddrV6::new(ip, port, 0, scope).into()))
        }
        (Ok(_), _) => Err(AddressError(format!(
            "address tcp:{text} rejected: only an address of a link (fe80::…) has an interface behind %"
        ))),
        (Err(_), _) => Err(AddressError(format!(
            "address tcp:{text} rejected: host {bare:?} must be an IP address or localhost"
        ))),
    }
}

/// The number of an interface, by its name or as it is written.
fn scope_of(zone: &str) -> Option<u32> {
    let is_name = !zone.contains('/') && zone != "..";
    let number = zone.parse().ok();
    number.or_else(|| {
        let found = fs::read_to_string(format!("/sys/class/net/{zone}/ifindex"));
        found.ok().filter(|_| is_name)?.trim().parse().ok()
    })
}

/// The longest path of a unix socket, in bytes.
const UNIX_PATH_MAX: usize = 107;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written_alike() {
        for text in [
            "unix:/run/a.sock",
            "tcp:127.0.0.1:10809",
            "tcp:[::1]:10809",
            "tcp:localhost:10809",
            "tcp:[fe80::1%1]:10809",
            "unix:@blkmq",
            "systemd",
            "systemd:nbd.socket",
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for (text, same) in [
            ("tcp:10809", "tcp:127.0.0.1:10809"),
            ("tcp:[::ffff:127.0.0.1]:1", "tcp:127.0.0.1:1"),
            ("tcp:[fe80::1%lo]:1", "tcp:[fe80::1%1]:1"),
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), same);
        }
    }

    #[test]
    fn bad_addresses_are_answered_with_what_is_allowed() {
        for (text, part) in [
            ("vm1.sock", "unix:PATH"),
            ("unix:", "path is missing"),
            ("tcp:127.0.0.1:99999", "0 to 65535"),
            ("tcp:nowhere:1", "IP address"),
            ("tcp:[fe80::1%nowhere0]:1", "no interface \"nowhere0\""),
            ("tcp:[::1%lo]:1", "only an address of a link"),
            ("unix:@", "name is missing"),
            ("systemd:", "systemd:NAME"),
            ("systemd:a:b", "systemd:NAME"),
            (&format!("unix:/{}", "x".repeat(200)), "107"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
