//! Decides how NBD uses TLS: which files hold certificates and keys, which names a certificate
//! gives a peer, which peer may see which disk, and how bytes become records. The NBD front door
//! and the NBD driver use this crate. It touches no socket and starts no thread.
//!
//! | part | decides |
//! |---|---|
//! | [`settings`] | what clients of an address must present, and which of its disks each of them may see |
//! | [`files`] | what PEM files must hold, and the errors for other contents |
//! | [`names`] | which names a peer has by its certificate |
//! | [`server`], [`client`] | the two sides: their certificates, whom they trust, and TLS 1.3 as the only version |
//! | [`stream`] | how plain bytes become records and records plain bytes: the buffers, and the limits of one turn |
//! | `handshake` | which records the library gets until there are keys |
//! | `records` | how records are opened and sealed with these keys |
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

pub use client::{Client, ClientFiles};
pub use files::FileError;
pub use server::Server;
pub use settings::{Mode, Settings};
pub use stream::{Opened, Stream};

use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::{CipherSuite, SupportedCipherSuite};

/// The library's cryptography. AES with 128 bits comes first: it is safe enough and costs less than
/// AES with 256 bits.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = rustls::crypto::ring::default_provider();
    let is_last = |suite: &SupportedCipherSuite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256;
    provider.cipher_suites.sort_by_key(is_last);
    Arc::new(provider)
}
