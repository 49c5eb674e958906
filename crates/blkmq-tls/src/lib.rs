//! Decides what TLS is here: which files hold certificates and keys, who a peer is by its certificate, which peer may see what, and how
//! bytes become records. The NBD front door and the NBD driver use it; no socket is touched, no thread started.
//!
//! | part | decides |
//! |---|---|
//! | [`settings`] | what is asked of clients at an address, and which of its disks each of them may see |
//! | [`files`] | what PEM files must hold, and what is said of those that do not |
//! | [`names`] | what a peer is called by its certificate |
//! | [`server`], [`client`] | the two sides: certificates, who is trusted, TLS 1.3 alone |
//! | [`stream`] | plain bytes to records and back: buffers, and how much at a time |
//! | `handshake` | which records the library is shown until there are keys |
//! | `records` | how records are opened and sealed by these keys |
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

/// Where the arithmetic is done. AES with 128 bits first, which is as safe as need be and costs less than with 256.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = rustls::crypto::ring::default_provider();
    let is_last = |suite: &SupportedCipherSuite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256;
    provider.cipher_suites.sort_by_key(is_last);
    Arc::new(provider)
}
