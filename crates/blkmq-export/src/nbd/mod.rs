//! Decides what travels between an NBD client and this server, as bytes and as states; opens no socket itself.
//! The socket layer feeds [`session::Session`] what it received and sends what the session wrote; requests go on to the disk.
//!
//! Everything here is sans-I/O: bytes in, typed events and bytes out, no clock, no thread, no system call. The protocol
//! followed is the NBD project's `doc/proto.md`, with the extended headers of its `extension-ext-header` branch.
//!
//! | part | holds |
//! |---|---|
//! | [`codec`] | every message of both sides as bytes |
//! | [`export`] | what a client may select: names, sizes, features |
//! | [`limits`] | every bound of a connection, with default, unit and trade-off |
//! | [`session`] | the server's states: negotiation, then requests and replies |
//! | [`client`] | the client's negotiation (load generator, driver) |

pub mod door;
pub mod export;
pub mod limits;
pub mod session;

pub use blkmq_host::nbd::{client, codec};
