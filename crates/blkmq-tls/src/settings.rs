//! The TLS settings of an address: whether clients use TLS, with which files, and which of the disks a
//! client may see by the names in its certificate.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Whether clients use TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// No client uses TLS.
    #[default]
    Off,
    /// Clients that ask for TLS use it.
    Allow,
    /// All clients use TLS.
    Require,
}

/// What clients of an address must present. The default is nothing, without TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Whether clients use TLS.
    pub mode: Mode,
    /// The server's certificate and the chain to its authority: a PEM file.
    pub certificate: Option<PathBuf>,
    /// The certificate's key: a PEM file.
    pub key: Option<PathBuf>,
    /// The authorities of clients' certificates: a PEM file. With it, every client must have a
    /// certificate.
    pub ca: Option<PathBuf>,
    /// The clients that may connect, by the names of their certificates. If it is empty, every
    /// client with a certificate of an authority may connect.
    pub clients: Vec<Allowed>,
    /// Clients that have TLS 1.2 at most may use it.
    pub allow_tls12: bool,
    /// Clients of other hosts may connect without TLS.
    pub allow_insecure: bool,
}

/// The settings without TLS, by which clients must present nothing.
pub static OFF: Settings = Settings {
    mode: Mode::Off,
    certificate: None,
    key: None,
    ca: None,
    clients: Vec::new(),
    allow_tls12: false,
    allow_insecure: false,
};

/// A client that may connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// A name of its certificate.
    pub name: String,
    /// The disks that it may see. `None` stands for all disks of the address.
    pub disks: Option<Vec<String>>,
}

impl Settings {
    /// Checks that the settings do not contradict each other.
    ///
    /// # Errors
    /// The first contradiction, and the setting that resolves it.
    pub fn check(&self) -> Result<(), SettingsError> {
        let wrong = |what: &str| Err(SettingsError(what.to_owned()));
        let has_files = self.certificate.is_some() || self.key.is_some() || self.ca.is_some();
        if self.mode == Mode::Off && (has_files || !self.clients.is_empty()) {
            return wrong("tls_… without TLS rejected: add tls = \"require\"");
        }
        if self.mode == Mode::Off && self.allow_tls12 {
            return wrong("allow_tls12 without TLS rejected: add tls = \"require\"");
        }
        if self.mode != Mode::Off && (self.certificate.is_none() || self.key.is_none()) {
            return wrong(
                "tls needs a certificate and its key: add tls_certificate and tls_key, each a PEM file",
            );
        }
        if !self.clients.is_empty() && (self.mode != Mode::Require || self.ca.is_none()) {
            return wrong(
                "tls_clients needs certificates of all clients: add tls = \"require\" and tls_ca, a PEM file with their authorities",
            );
        }
        Ok(())
    }

    /// Says whether all connections are encrypted and authenticated.
    pub fn is_secure(&self) -> bool {
        self.mode == Mode::Require
    }

    /// Says whether a client with these names may see the disk.
    pub fn may_see(&self, names: &[String], disk: &str) -> bool {
        let sees = |allowed: &Allowed| {
            let disks = allowed.disks.as_ref();
            disks.is_none_or(|disks| disks.iter().any(|name| name == disk))
        };
        let is_meant = |allowed: &&Allowed| names.iter().any(|name| name.eq_ignore_ascii_case(&allowed.name));
        self.clients.is_empty() || self.clients.iter().filter(is_meant).any(sees)
    }
}

impl FromStr for Mode {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        match text {
            "off" => Ok(Self::Off),
            "allow" => Ok(Self::Allow),
            "require" => Ok(Self::Require),
            _ => Err(SettingsError(format!(
                "tls={text} rejected: must be off, allow or require"
            ))),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Allow => "allow",
            Self::Require => "require",
        })
    }
}

impl FromStr for Allowed {
    type Err = SettingsError;

    /// Parses `NAME` or `NAME=DISK+DISK`.
    fn from_str(text: &str) -> Result<Self, SettingsError> {
        let (name, disks) = match text.rsplit_once('=') {
            Some((name, disks)) => (
                name,
                Some(disks.split('+').map(str::to_owned).collect::<Vec<_>>()),
            ),
            None => (text, None),
        };
        if name.is_empty() || disks.iter().flatten().any(String::is_empty) {
            return Err(SettingsError(format!(
                "tls_clients: {text:?} rejected: must be NAME, or NAME=DISK+DISK for some of the disks"
            )));
        }
        Ok(Self {
            name: name.to_owned(),
            disks,
        })
    }
}

/// A setting that is rejected: its defect, and the values that are allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SettingsError(pub String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_sees_what_any_of_its_names_may_see() {
        let settings = Settings {
            clients: vec![
                "a=x+y".parse().unwrap(),
                "b".parse().unwrap(),
                "A=z".parse().unwrap(),
            ],
            ..Settings::default()
        };
        let sees = |names: &[&str], disk| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            settings.may_see(&names, disk)
        };
        assert!(sees(&["a"], "x") && sees(&["q", "a"], "y") && sees(&["a"], "z"));
        assert!(!sees(&["a"], "w") && !sees(&["c"], "x") && !sees(&[], "x"));
        assert!(sees(&["B"], "w"));
        assert!(Settings::default().may_see(&[], "x"));
    }

    #[test]
    fn contradictions_are_answered_with_what_to_write() {
        let wrong = |settings: Settings| settings.check().unwrap_err().to_string();
        let file = || Some(PathBuf::from("x.pem"));
        let some = || Settings {
            mode: Mode::Require,
            certificate: file(),
            key: file(),
            ..Settings::default()
        };
        assert_eq!(some().check(), Ok(()));
        let off = Settings {
            mode: Mode::Off,
            ..some()
        };
        assert!(wrong(off).contains("add tls = \"require\""));
        let keyless = Settings { key: None, ..some() };
        assert!(wrong(keyless).contains("add tls_certificate and tls_key"));
        let clients = vec!["a".parse().unwrap()];
        assert!(wrong(Settings { clients, ..some() }).contains("tls_ca"));
        for text in ["", "=x", "a=", "a=x+"] {
            assert!(text.parse::<Allowed>().is_err(), "{text}");
        }
        assert!(
            "maybe"
                .parse::<Mode>()
                .unwrap_err()
                .to_string()
                .contains("off, allow or require")
        );
    }
}
