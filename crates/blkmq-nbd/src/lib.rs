//! The NBD protocol as bytes, for clients and servers; this crate opens no socket. The server's states
//! are in `blkmq-export`; the driver `nbd` and the load generators are clients.
//!
//! Bytes in, typed values and bytes out, no clock, no thread; the one system call draws the random names of [`identity`].
//! The protocol followed is the NBD project's `doc/proto.md`, with the extended headers of its `extension-ext-header` branch.
//!
//! | part | what it has |
//! |---|---|
//! | [`codec`] | the bytes of every message of both sides |
//! | [`client`] | the client's negotiation |
//! | [`identity`] | the names of this process: as a client, and as a server |
//! | [`replies`] | the effect of replies on a client's requests; [`cover`]: whether they are complete |
//! | [`uri`] | the names of a server and of one of its exports |
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod client;
pub mod codec;
pub mod cover;
pub mod identity;
pub mod replies;
pub mod uri;
