//! The NBD front door: what travels between a client and this server, as bytes and as states. The socket
//! layer passes received bytes to [`session::Session`] and sends what the session wrote; requests go to the
//! disk.
//!
//! A session is sans-I/O: bytes in, typed events and bytes out, no clock, no thread, no system
//! call. The messages are defined in `blkmq_nbd`.
//!
//! | part | holds |
//! |---|---|
//! | [`export`] | what a client may select: names, sizes, features |
//! | [`saved`] | a connection that is handed over to another daemon |
//! | [`limits`] | every bound of a connection, with default, unit and trade-off |
//! | [`tls_files`] | what the TLS files of an address held when they were read |
//! | [`session`] | the server's states: negotiation, then requests and replies |

pub mod door;
pub mod export;
mod front_door;
pub mod limits;
pub mod saved;
pub mod session;
mod settings;
pub mod tls_files;

pub use front_door::Nbd;
