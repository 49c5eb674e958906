//! Decides how the address of a socket is written: `unix:PATH`, `tcp:HOST:PORT`, or `systemd`.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

/// An address that is rejected: what is wrong and what is allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct AddressError(pub String);

/// Where clients connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP address.
    Tcp(SocketAddr),
    /// The sockets that systemd hands over.
    Systemd,
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if text == "systemd" {
            return Ok(Self::Systemd);
        }
        match text.split_once(':') {
            Some(("unix", path)) => unix(path),
            Some(("tcp", address)) => tcp(address),
            _ => Err(AddressError(format!(
                "address {text:?} rejected: must be unix:PATH, tcp:HOST:PORT or systemd"
            ))),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
            Self::Systemd => f.write_str("systemd"),
        }
    }
}

fn unix(path: &str) -> Result<Address, AddressError> {
    if path.is_empty() {
        let what = "address unix: rejected: the path is missing, as in unix:/run/blkmq/nbd.sock";
        return Err(AddressError(what.to_owned()));
    }
    if path.len() > UNIX_PATH_MAX {
        return Err(AddressError(format!(
            "address unix:{path} rejected: the path has {} bytes, a unix socket's may have {UNIX_PATH_MAX}; choose a shorter one",
            path.len()
        )));
    }
    Ok(Address::Unix(path.into()))
}

/// Parses `HOST:PORT` or `PORT`; a host is an IP address or `localhost`.
fn tcp(text: &str) -> Result<Address, AddressError> {
    let (host, port) = text.rsplit_once(':').unwrap_or(("127.0.0.1", text));
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let ip = match bare {
        "localhost" => Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        _ => bare.parse::<IpAddr>(),
    };
    let Ok(ip) = ip else {
        return Err(AddressError(format!(
            "address tcp:{text} rejected: host {bare:?} must be an IP address or localhost"
        )));
    };
    let Ok(port) = port.parse::<u16>() else {
        return Err(AddressError(format!(
            "address tcp:{text} rejected: port {port:?} must be a number from 0 to 65535 (10809 is NBD's)"
        )));
    };
    Ok(Address::Tcp(SocketAddr::new(ip, port)))
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
            "systemd",
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!(
            "tcp:localhost:1".parse::<Address>().unwrap().to_string(),
            "tcp:127.0.0.1:1"
        );
        assert_eq!(
            "tcp:10809".parse::<Address>().unwrap().to_string(),
            "tcp:127.0.0.1:10809"
        );
    }

    #[test]
    fn bad_addresses_are_answered_with_what_is_allowed() {
        for (text, part) in [
            ("vm1.sock", "unix:PATH"),
            ("unix:", "path is missing"),
            ("tcp:127.0.0.1:99999", "0 to 65535"),
            ("tcp:nowhere:1", "IP address"),
            (&format!("unix:/{}", "x".repeat(200)), "107"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
