//! The settings of a disk on an NBD server, parsed from its keys. `disk` turns the result into a disk.

use std::time::Duration;

use blkmq_host::value::{self, ConfigError};
use blkmq_nbd::uri::{Address, Uri, UriError};
use blkmq_tls::{Client, ClientFiles, FileError};

/// A disk on an NBD server. `docs/drivers/nbd.md` has every key's default, unit and trade-off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdConfig {
    /// The URI as it was given, for messages.
    pub text: String,
    /// The server and its export.
    pub uri: Uri,
    /// Connections, 1 to 64; more than one only if the server reports that a flush on one covers
    /// all. Default: one per hardware context.
    pub connections: Option<u16>,
    /// How long a request may wait for its reply before its connection is given up; zero for the
    /// queue's own limit. Default 0.
    pub timeout: Duration,
    /// How long requests are held, to be sent again, while there is no connection; zero to fail them at once. Default 0.
    pub reconnect: Duration,
    /// How long one attempt to connect, with its handshake, may take; 1 ms to 1 min. Default 5 s.
    pub connect_timeout: Duration,
    /// TLS files; only with `nbds://`.
    pub tls: ClientFiles,
    /// The server's name in its certificate. Default: the host of the URI; `localhost` for a unix
    /// socket.
    pub tls_hostname: Option<String>,
    /// Whether the medium rotates. Default: as the server reports.
    pub rotational: Option<bool>,
    /// Refuse writes.
    pub read_only: bool,
}

impl NbdConfig {
    /// The disk that a URI names, with defaults for everything else.
    ///
    /// # Errors
    /// `Refused`, with the fault in the URI.
    pub fn new(uri: &str) -> Result<Self, ConfigError> {
        let parsed: Uri = uri.parse().map_err(|error: UriError| ConfigError::Refused {
            key: "nbd".to_owned(),
            value: uri.to_owned(),
            why: error.to_string(),
        })?;
        let said = parsed.tls.clone().unwrap_or_default();
        let directory = said.certificates.as_deref();
        Ok(Self {
            text: uri.to_owned(),
            tls: directory.map(ClientFiles::in_directory).unwrap_or_default(),
            tls_hostname: said.hostname,
            uri: parsed,
            connections: None,
            timeout: Duration::ZERO,
            reconnect: Duration::ZERO,
            connect_timeout: CONNECT_TIMEOUT,
            rotational: None,
            read_only: false,
        })
    }

    /// Sets one key from its text form.
    ///
    /// # Errors
    /// `UnknownKey`, or `BadValue` with what is allowed.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        match key {
            "connections" => {
                let allowed = 1..=u64::from(CONNECTIONS_MAX);
                self.connections = Some(value::whole(key, value, allowed, CONNECTIONS)?);
            }
            "timeout" => self.timeout = time(key, value)?,
            "reconnect" => self.reconnect = time(key, value)?,
            "connect_timeout" => {
                let limit = time(key, value)?;
                if !(Duration::from_millis(1)..=Duration::from_secs(60)).contains(&limit) {
                    return value::bad(key, value, "a time from 1ms to 60s");
                }
                self.connect_timeout = limit;
            }
            "tls_certificates" => self.tls = ClientFiles::in_directory(value.as_ref()),
            "tls_ca" => self.tls.ca = Some(value.into()),
            "tls_certificate" => self.tls.certificate = Some(value.into()),
            "tls_key" => self.tls.key = Some(value.into()),
            "tls_hostname" => self.tls_hostname = Some(value.to_owned()),
            "rotational" => self.rotational = Some(value::switch(key, value)?),
            _ => {
                return Err(ConfigError::UnknownKey {
                    driver: "nbd",
                    key: key.to_owned(),
                    known: "nbd, connections, timeout, reconnect, connect_timeout, rotational, tls_certificates, tls_ca, \
                            tls_certificate, tls_key, tls_hostname",
                });
            }
        }
        let is_tls = key.starts_with("tls_");
        if is_tls && self.uri.tls.is_none() {
            return value::bad(key, value, "only with an URI of TLS, nbds:// or nbds+unix://");
        }
        Ok(())
    }

    /// What connections need for TLS, as the files are now; `None` without TLS. Blocks for as long
    /// as the filesystem takes.
    ///
    /// # Errors
    /// A file cannot be used, with the reason.
    pub(super) fn tls(&self) -> Result<Option<Client>, FileError> {
        if self.uri.tls.is_none() {
            return Ok(None);
        }
        let host = match (&self.tls_hostname, &self.uri.address) {
            (Some(name), _) => name,
            (None, Address::Tcp { host, .. }) => host,
            (None, Address::Unix(_)) => "localhost",
        };
        Client::load(&self.tls, host).map(Some)
    }
}

/// A time; a plain number counts seconds.
fn time(key: &str, value: &str) -> Result<Duration, ConfigError> {
    let seconds = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    let text = if seconds {
        format!("{value}s")
    } else {
        value.to_owned()
    };
    match value::time(key, &text) {
        Ok(nanos) => Ok(Duration::from_nanos(nanos.0)),
        Err(_) => value::bad(
            key,
            value,
            "seconds, or a time of at most a day such as 500ms or 30s",
        ),
    }
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Most connections of one disk.
pub(super) const CONNECTIONS_MAX: u16 = 64;
const CONNECTIONS: &str = "a whole number from 1 to 64";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_taken_and_wrong_values_answered_with_what_is_allowed() {
        let mut config = NbdConfig::new("nbd+unix:///x?socket=s").unwrap();
        for (key, value) in [
            ("connections", "4"),
            ("timeout", "2500ms"),
            ("reconnect", "30"),
            ("connect_timeout", "1s"),
            ("rotational", "on"),
        ] {
            config.set(key, value).unwrap();
        }
        assert_eq!((config.connections, config.rotational), (Some(4), Some(true)));
        assert_eq!(
            (config.timeout.as_millis(), config.reconnect.as_secs()),
            (2500, 30)
        );
        let error = |key, value| config.clone().set(key, value).unwrap_err().to_string();
        assert!(error("connections", "0").contains("from 1 to 64"));
        assert!(error("reconnect", "soon").contains("seconds, or a time"));
        assert!(error("connect_timeout", "0").contains("1ms to 60s"));
        assert!(error("size", "1M").contains("the nbd driver has no such key"));
    }

    #[test]
    fn uri_that_is_none_is_refused_by_name() {
        let error = NbdConfig::new("nbd+vsock://x/").unwrap_err().to_string();
        assert!(
            error.starts_with("nbd=nbd+vsock://x/ rejected: nbd+vsock:// is not supported"),
            "{error}"
        );
        let mut plain = NbdConfig::new("nbd://x/").unwrap();
        let error = plain.set("tls_ca", "f").unwrap_err().to_string();
        assert!(error.contains("only with an URI of TLS"), "{error}");
        let error = NbdConfig::new("nbds://x/")
            .unwrap()
            .tls()
            .unwrap_err()
            .to_string();
        assert!(error.contains("set tls_ca"), "{error}");
    }
}
