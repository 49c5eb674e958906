//! The server's side of TLS: its certificate, and the clients that it accepts. TLS 1.3 is the only
//! version unless an address allows TLS 1.2. With either, nothing is renegotiated, and no session is resumed.

use std::sync::Arc;

use rustls::server::{NoServerSessionStorage, UnbufferedServerConnection, WebPkiClientVerifier};
use rustls::{ServerConfig, SupportedProtocolVersion, version};

use crate::files::{self, FileError};
use crate::handshake::Handshake;
use crate::provider;
use crate::settings::{Mode, Settings};
use crate::stream::Stream;

/// What the handshakes of an address have in common: the certificate, the key and the trusted
/// authorities, as the files were when they were loaded.
#[derive(Clone, Debug)]
pub struct Server {
    config: Arc<ServerConfig>,
    left_out: Vec<String>,
}

impl Server {
    /// Reads the files that the settings name. Returns `None` for settings without TLS. Blocks for
    /// as long as the filesystem takes.
    ///
    /// # Errors
    /// The file that cannot be used, and the reason.
    pub fn load(settings: &Settings) -> Result<Option<Self>, FileError> {
        let (Some(certificate), Some(key)) = (&settings.certificate, &settings.key) else {
            return Ok(None);
        };
        if settings.mode == Mode::Off {
            return Ok(None);
        }
        let chain = files::own_certificates(certificate)?;
        let secret = files::key(key)?;
        let kind = files::kind_of_key(&chain[0]);
        let builder = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(if settings.allow_tls12 { BOTH } else { NEWEST })
            .map_err(|error| files::content(certificate, error.to_string()))?;
        let mut left_out = Vec::new();
        let builder = match &settings.ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let authorities = files::authorities(path)?;
                left_out = authorities.left_out;
                let roots = Arc::new(authorities.store);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
                let verifier = verifier.map_err(|error| files::content(path, error.to_string()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config = builder
            .with_single_cert(chain, secret)
            .map_err(|error| files::pair(certificate, key, &kind, &error))?;
        // A connection lasts for days, so the resumption of a session would save too little to
        // justify a ticket.
        config.send_tls13_tickets = 0;
        config.ignore_client_order = true;
        // Without it the keys of TLS 1.2 do not depend on the whole handshake (RFC 7627).
        config.require_ems = true;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        // `records` needs the keys.
        config.enable_secret_extraction = true;
        Ok(Some(Self {
            config: Arc::new(config),
            left_out,
        }))
    }

    /// The authorities that were left out because they were not valid when they were loaded, and why.
    pub fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// Begins a handshake with a client. Returns `None` if the library rejects the settings, which
    /// `load` has ruled out.
    pub fn accept(&self) -> Option<Stream> {
        let connection = UnbufferedServerConnection::new(Arc::clone(&self.config)).ok()?;
        Some(Stream::new(Handshake::Server(connection)))
    }

    #[cfg(test)]
    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config)
    }
}

/// The versions of TLS.
const NEWEST: &[&SupportedProtocolVersion] = &[&version::TLS13];
const BOTH: &[&SupportedProtocolVersion] = &[&version::TLS13, &version::TLS12];
