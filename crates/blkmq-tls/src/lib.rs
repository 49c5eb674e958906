//! TLS for NBD: the files with certificates and keys, the names that a certificate gives a peer, the
//! disks that a peer may see, and the change of bytes into records. The NBD front door and the NBD driver
//! use this crate. It touches no socket and starts no thread.
//!
//! | part | what it has |
//! |---|---|
//! | [`settings`] | what clients of an address must present, and which of its disks each of them may see |
//! | [`files`] | the contents that PEM files must have, and the errors for others |
//! | [`names`] | the names of a peer by its certificate |
//! | [`server`], [`client`] | the two sides: their certificates, whom they trust, and their versions |
//! | [`stream`] | the change of plain bytes into records and back: the buffers, and the limits of one turn |
//! | `handshake` | the records that the library gets until there are keys |
//! | `records` | what comes and goes after that; how records are opened and sealed with these keys |
//! | `words` | why a handshake failed, for people |
//! | `outbox` | where records wait for the socket |

pub mod client;
pub mod files;
mod handshake;
pub mod names;
mod outbox;
mod records;
pub mod server;
pub mod settings;
pub mod stream;
mod words;

pub use client::{Client, ClientFiles};
pub use files::FileError;
pub use server::Server;
pub use settings::{Mode, Settings};
pub use stream::{Opened, Stream};
pub use words::explain;

use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::{CipherSuite, SupportedCipherSuite};

/// The library's cryptography. AES with 128 bits comes first: it is safe enough and costs less than
/// AES with 256 bits. With TLS 1.2 it is ChaCha20: a key of AES may seal 16 million records, and that version has
/// no other one for the connection.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = rustls::crypto::ring::default_provider();
    let is_last = |suite: &SupportedCipherSuite| {
        !matches!(
            suite.suite(),
            CipherSuite::TLS13_AES_128_GCM_SHA256
                | CipherSuite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256
                | CipherSuite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256
        )
    };
    provider.cipher_suites.sort_by_key(is_last);
    Arc::new(provider)
}
