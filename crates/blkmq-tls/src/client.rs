//! The client's side of TLS: its certificate, and the server that it trusts, which has a certificate for
//! the dialed name from an authority in the client's file. TLS 1.3 is the only version.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::client::{Resumption, UnbufferedClientConnection};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, version};

use crate::files::{self, FileError};
use crate::handshake::Handshake;
use crate::provider;
use crate::stream::Stream;

/// The files of a client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientFiles {
    /// The trusted authorities: a PEM file.
    pub ca: Option<PathBuf>,
    /// The client's certificate: a PEM file. `None` for servers that ask for no certificate.
    pub certificate: Option<PathBuf>,
    /// The key of the certificate: a PEM file.
    pub key: Option<PathBuf>,
}

impl ClientFiles {
    /// The files of a directory, by the names that other NBD clients use: `ca-cert.pem`, and, if
    /// they exist, `client-cert.pem` and `client-key.pem`.
    pub fn in_directory(directory: &std::path::Path) -> Self {
        let there = |name: &str| Some(directory.join(name)).filter(|path| path.exists());
        Self {
            ca: Some(directory.join("ca-cert.pem")),
            certificate: there("client-cert.pem"),
            key: there("client-key.pem"),
        }
    }
}

/// What the handshakes with a server have in common.
#[derive(Clone, Debug)]
pub struct Client {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    left_out: Vec<String>,
}

impl Client {
    /// Reads the files. The server must prove that it is `host`, a DNS name or an address. Blocks
    /// for as long as the filesystem takes.
    ///
    /// # Errors
    /// The file that cannot be used, and the reason; or the setting that is missing.
    pub fn load(paths: &ClientFiles, host: &str) -> Result<Self, FileError> {
        let Some(ca) = &paths.ca else {
            return Err(files::content(
                "TLS".as_ref(),
                "whom to trust is not said: set tls_ca, a PEM file, or tls_certificates, a directory with ca-cert.pem",
            ));
        };
        let wrong = |error: rustls::Error| files::content(ca, error.to_string());
        let authorities = files::authorities(ca)?;
        let builder = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&version::TLS13])
            .map_err(wrong)?
            .with_root_certificates(authorities.store);
        let mut config = match (&paths.certificate, &paths.key) {
            (Some(certificate), Some(key)) => {
                let chain = files::own_certificates(certificate)?;
                let kind = files::kind_of_key(&chain[0]);
                builder
                    .with_client_auth_cert(chain, files::key(key)?)
                    .map_err(|error| files::pair(certificate, key, &kind, &error))?
            }
            (None, None) => builder.with_no_client_auth(),
            (Some(path), None) | (None, Some(path)) => {
                return Err(files::content(
                    path,
                    "a certificate and its key belong together: set both of tls_certificate and tls_key, or none",
                ));
            }
        };
        config.resumption = Resumption::disabled();
        // `records` needs the keys.
        config.enable_secret_extraction = true;
        let name = ServerName::try_from(host.to_owned()).map_err(|_| {
            files::content(
                ca,
                format!("{host:?} is no name that a certificate can have: set tls_hostname to the server's"),
            )
        })?;
        Ok(Self {
            config: Arc::new(config),
            name,
            left_out: authorities.left_out,
        })
    }

    /// The authorities that were left out because they were not valid when they were loaded, and why.
    pub fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// Begins a handshake. Returns `None` if the library rejects the settings, which `load` has
    /// ruled out.
    pub fn connect(&self) -> Option<Stream> {
        let connection = UnbufferedClientConnection::new(Arc::clone(&self.config), self.name.clone());
        Some(Stream::new(Handshake::Client(connection.ok()?)))
    }
}
