//! Decides how clients reach a disk: one front door for each protocol, each behind a feature.
//!
//! | feature | door |
//! |---|---|
//! | `nbd` (default) | [`nbd`]: the network block device protocol, over unix sockets and TCP |
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

#[cfg(feature = "nbd")]
pub mod nbd;
