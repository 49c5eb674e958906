//! The front doors, by which clients reach disks: one for each protocol, each behind a feature.
//!
//! | feature | door |
//! |---|---|
//! | `nbd` (default) | [`nbd`]: the network block device protocol, over unix sockets and TCP |
//! | `vhost-user` (default) | [`vhost_user`]: vhost-user-blk, for virtual machines |
//! | `fuse` (default) | [`fuse`]: a regular file that is the disk, on this host |
//! | `ublk` (default) | [`ublk`]: a block device of this host |
//!
//! [`front_door`] defines what a front door is and has the registry; [`stream`] makes one of a protocol of
//! bytes; [`keys`] are what a configuration says of one; [`common`] has the shared parts.
// A program that only reads configurations has the registry alone, without the doors that use the shared parts.
#![cfg_attr(
    not(all(feature = "nbd", feature = "vhost-user", feature = "fuse", feature = "ublk")),
    allow(dead_code, unused_imports)
)]
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod client_settings;
pub mod common;
pub mod front_door;
#[cfg(feature = "fuse")]
pub mod fuse;
pub mod handover;
pub mod keys;
#[cfg(feature = "nbd")]
pub mod nbd;
pub mod stream;
#[cfg(feature = "ublk")]
pub mod ublk;
#[cfg(feature = "vhost-user")]
pub mod vhost_user;
