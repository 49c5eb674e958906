//! An NBD URI: it names a server and one of its exports, in the form of the NBD project's `doc/uri.md`.
//! `blkmq-drivers` parses a disk's `nbd=` with it, and connects to that server. The crate `url` is not used:
//! an export may be called `..`, which `url` removes from a path, and names are bytes, not text.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::codec::STRING_BYTES_MAX;

/// An export of a server, as an NBD URI names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    /// Where the server listens.
    pub address: Address,
    /// The export's name; empty for the server's default.
    pub export: String,
    /// TLS of the connection; `None` for plain connections.
    pub tls: Option<Tls>,
}

/// The TLS parameters of an NBD URI.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// The directory of the certificates, as `tls-certificates`.
    pub certificates: Option<PathBuf>,
    /// The server's name in its certificate, as `tls-hostname`.
    pub hostname: Option<String>,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// At a unix socket.
    Unix(PathBuf),
    /// At a TCP port.
    Tcp {
        /// A name or an address, an IPv6 address without its brackets.
        host: String,
        /// The port.
        port: u16,
    },
}

/// Why a text is no NBD URI that this driver can use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UriError {
    /// The scheme is not one of NBD's.
    #[error("must begin with nbd://, nbds://, nbd+unix:// or nbds+unix://, as in {EXAMPLES}")]
    Scheme,
    /// The scheme is one that this driver does not support.
    #[error("{0} is not supported: use nbd:// or nbd+unix://, or nbds:// or nbds+unix:// with certificates")]
    Unsupported(String),
    /// A unix socket's URI names a host.
    #[error("names the host {0:?}, which a unix socket does not have: write nbd+unix:///EXPORT?socket=PATH")]
    HostOfSocket(String),
    /// A unix socket's URI has no path to it.
    #[error("says nothing of the socket: write nbd+unix:///EXPORT?socket=PATH")]
    NoSocket,
    /// A TCP URI has no host.
    #[error("names no host: write nbd://HOST/EXPORT")]
    NoHost,
    /// The text behind the colon is no port.
    #[error("port {0:?} rejected: must be from 1 to 65535")]
    Port(String),
    /// A part of it is not allowed there.
    #[error("{0}")]
    Malformed(&'static str),
}

impl FromStr for Uri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        let (scheme, rest) = text.split_once("://").ok_or(UriError::Scheme)?;
        let rest = match rest.split_once('#') {
            Some(_) => return Err(UriError::Malformed("has a # in it: write it as %23")),
            None => rest,
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let query = Query::parse(query)?;
        let address = match scheme.to_ascii_lowercase().as_str() {
            "nbd" | "nbds" => tcp(authority)?,
            "nbd+unix" | "nbds+unix" if !authority.is_empty() => {
                return Err(UriError::HostOfSocket(authority.to_owned()));
            }
            "nbd+unix" | "nbds+unix" => unix(query.socket.ok_or(UriError::NoSocket)?)?,
            "nbd+vsock" | "nbds+vsock" => {
                return Err(UriError::Unsupported(format!("{scheme}://")));
            }
            _ => return Err(UriError::Scheme),
        };
        let is_secure = scheme.to_ascii_lowercase().starts_with("nbds");
        if !is_secure && (query.tls != Tls::default() || query.unknown_tls.is_some()) {
            return Err(UriError::Malformed(
                "has tls-… in the query, and is not of TLS: write nbds:// or nbds+unix://",
            ));
        }
        if let Some(key) = query.unknown_tls {
            return Err(UriError::Unsupported(key));
        }
        let tls = is_secure.then_some(query.tls);
        let export = String::from_utf8(decode(path)?);
        let export = export.map_err(|_| UriError::Malformed("has an export name that is not UTF-8"))?;
        if export.len() > STRING_BYTES_MAX || export.contains('\0') {
            return Err(UriError::Malformed(
                "has an export name that is longer than 4096 bytes or has a NUL in it",
            ));
        }
        Ok(Self { address, export, tls })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// The parameters of the query that are used. Others are ignored, as the specification demands.
#[derive(Default)]
struct Query {
    socket: Option<Vec<u8>>,
    tls: Tls,
    /// An unknown TLS parameter: ignoring it could mean trusting the wrong peer.
    unknown_tls: Option<String>,
}

impl Query {
    fn parse(text: &str) -> Result<Self, UriError> {
        let mut query = Self::default();
        for part in text.split(['&', ';']).filter(|part| !part.is_empty()) {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            if key == "socket" && query.socket.replace(decode(value)?).is_some() {
                return Err(UriError::Malformed("names two sockets"));
            }
            match key {
                "tls-certificates" => {
                    query.tls.certificates = Some(OsString::from_vec(decode(value)?).into())
                }
                "tls-hostname" => {
                    let name = String::from_utf8(decode(value)?);
                    let name =
                        name.map_err(|_| UriError::Malformed("has a tls-hostname that is not UTF-8"))?;
                    query.tls.hostname = Some(name);
                }
                _ if key.starts_with("tls-") => query.unknown_tls = Some(key.to_owned()),
                _ => {}
            }
        }
        Ok(query)
    }
}

fn unix(path: Vec<u8>) -> Result<Address, UriError> {
    if path.is_empty() || path.contains(&0) || path.len() > SOCKET_PATH_MAX {
        return Err(UriError::Malformed(
            "has a path to the socket that is empty, longer than 107 bytes or has a NUL in it",
        ));
    }
    Ok(Address::Unix(OsString::from_vec(path).into()))
}

fn tcp(authority: &str) -> Result<Address, UriError> {
    if authority.contains('@') {
        return Err(UriError::Malformed("names a user, which only TLS knows"));
    }
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest
                .split_once(']')
                .ok_or(UriError::Malformed("has a [ without its ]"))?;
            (host, port.strip_prefix(':').or(port.is_empty().then_some("")))
        }
        None => {
            let (host, port) = authority.split_once(':').unwrap_or((authority, ""));
            (host, Some(port))
        }
    };
    let port = port.ok_or(UriError::Malformed("has something between the ] and the port"))?;
    let host =
        String::from_utf8(decode(host)?).map_err(|_| UriError::Malformed("has a host that is not UTF-8"))?;
    if host.is_empty() || host.contains('\0') {
        return Err(UriError::NoHost);
    }
    let number = match port {
        "" => Some(PORT),
        digits if digits.bytes().all(|digit| digit.is_ascii_digit()) => {
            digits.parse().ok().filter(|&port| port > 0)
        }
        _ => None,
    };
    let port = number.ok_or_else(|| UriError::Port(port.to_owned()))?;
    Ok(Address::Tcp { host, port })
}

/// Decodes percent encoding.
fn decode(text: &str) -> Result<Vec<u8>, UriError> {
    let mut bytes = text.bytes();
    let mut decoded = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        let digit = |byte: Option<u8>| byte.and_then(|byte| char::from(byte).to_digit(16));
        decoded.push(match byte {
            b'%' => match (digit(bytes.next()), digit(bytes.next())) {
                (Some(high), Some(low)) => (high << 4 | low) as u8,
                _ => {
                    return Err(UriError::Malformed(
                        "has a % without two hexadecimal digits behind it",
                    ));
                }
            },
            byte => byte,
        });
    }
    Ok(decoded)
}

/// The port of NBD.
const PORT: u16 = 10809;
/// The kernel's limit, without the NUL at the end.
const SOCKET_PATH_MAX: usize = 107;
const EXAMPLES: &str = "nbd://host/export or nbd+unix:///export?socket=PATH";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn unix(path: &str, export: &str) -> Uri {
        Uri {
            address: Address::Unix(path.into()),
            export: export.into(),
            tls: None,
        }
    }

    fn tcp(host: &str, port: u16, export: &str) -> Uri {
        let host = host.to_owned();
        Uri {
            address: Address::Tcp { host, port },
            export: export.into(),
            tls: None,
        }
    }

    #[test]
    fn standards_forms_are_understood() {
        for (text, expected) in [
            ("nbd+unix:///?socket=/tmp/s", unix("/tmp/s", "")),
            ("nbd+unix:///vm1?socket=s.sock", unix("s.sock", "vm1")),
            ("NBD+UNIX://?socket=s", unix("s", "")),
            ("nbd+unix:///a%20b?x=y&socket=/tmp/%23", unix("/tmp/#", "a b")),
            ("nbd://example.com", tcp("example.com", 10809, "")),
            ("nbd://example.com/", tcp("example.com", 10809, "")),
            ("nbd://127.0.0.1:4711/a/b", tcp("127.0.0.1", 4711, "a/b")),
            ("nbd://[::1]:4711//x", tcp("::1", 4711, "/x")),
            ("nbd://[::1]", tcp("::1", 10809, "")),
        ] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn fault_in_a_uri_is_reported_with_what_to_write() {
        for (text, part) in [
            ("", "must begin with nbd://"),
            ("http://x/", "must begin with nbd://"),
            ("nbds://x/?tls-psk-file=f", "tls-psk-file is not supported"),
            (
                "nbds://x/?tls-verify-peer=false",
                "tls-verify-peer is not supported",
            ),
            ("nbd+vsock://2:10809/", "nbd+vsock:// is not supported"),
            ("nbd://x/?tls-certificates=d", "is not of TLS: write nbds://"),
            ("nbd+unix://host/?socket=s", "names the host \"host\""),
            ("nbd+unix:///x", "says nothing of the socket"),
            ("nbd+unix:///x?socket=", "path to the socket"),
            ("nbd+unix:///x?socket=a&socket=b", "two sockets"),
            ("nbd:///x", "names no host"),
            ("nbd://x:0/", "port \"0\" rejected: must be from 1 to 65535"),
            ("nbd://x:+1/", "port"),
            ("nbd://x:65536", "port"),
            ("nbd://[::1/", "without its ]"),
            ("nbd://[::1]x/", "between the ]"),
            ("nbd://me@x/", "names a user"),
            ("nbd://x/%f", "two hexadecimal digits"),
            ("nbd://x/%ff", "not UTF-8"),
            ("nbd://x/%00", "NUL"),
            ("nbd://x/#a", "%23"),
        ] {
            let error = text.parse::<Uri>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn uri_of_tls_names_certificates_and_the_server() {
        let text = "nbds+unix:///vm1?socket=s&tls-certificates=/etc/a%20b&tls-hostname=far.example";
        let tls = Tls {
            certificates: Some("/etc/a b".into()),
            hostname: Some("far.example".into()),
        };
        let expected = Uri {
            tls: Some(tls),
            ..unix("s", "vm1")
        };
        assert_eq!(text.parse(), Ok(expected));
        assert_eq!("nbds://h/".parse::<Uri>().unwrap().tls, Some(Tls::default()));
        assert_eq!("NBDS://h/".parse::<Uri>().unwrap().tls, Some(Tls::default()));
    }

    fn encode(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("%{byte:02x}")).collect()
    }

    proptest! {
        #[test]
        fn any_text_is_an_uri_or_an_error(text in ".{0,80}") {
            let _ = text.parse::<Uri>();
            let _ = format!("nbd+unix:///{text}").parse::<Uri>();
            let _ = format!("nbd://{text}").parse::<Uri>();
        }

        #[test]
        fn every_name_and_path_can_be_written(
            export in "[^\\x00]{0,40}", socket in prop::collection::vec(1..=255u8, 1..108), upper: bool,
        ) {
            let mut text = format!("nbd+unix:///{}?socket={}", encode(export.as_bytes()), encode(&socket));
            if upper {
                text = text.replace("%a", "%A");
            }
            let uri: Uri = text.parse().unwrap();
            prop_assert_eq!(uri.export, export);
            prop_assert_eq!(uri.address, Address::Unix(OsString::from_vec(socket).into()));
        }
    }
}
