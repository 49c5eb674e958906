//! The drivers: a folder and a cargo feature for each.
//!
//! | feature | driver |
//! |---|---|
//! | `null` | [`null`]: no medium; service times and faults on request |
//! | `ram` | [`ram`]: sparse memory of this process |
//! | `file` | [`mod@file`]: an image file or a block device, through the reactor's io_uring |
//! | `qcow2` | [`qcow2`]: a qcow2 image, whose data goes the way of files |
//! | `nbd` | [`nbd`]: an export of an NBD server |
//! | `multipath` | [`multipath`]: other drives that lead to the same disk |
//! | `rbd` | [`rbd`]: an image in a Ceph cluster |
//!
//! A driver consists of a configuration (keys and values), an open disk, a drive (the state that
//! its hardware contexts share) and, made on the reactor that owns it, a hardware context: the
//! `blkmq_core::driver::HctxDriver`. `blkmq_host::device` defines what the engine needs of a drive;
//! [`driver`] defines what the configuration of disks needs; [`registry`] lists the drivers.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

#[cfg(any(feature = "null", test))]
mod chance;
pub mod driver;
#[cfg(feature = "file")]
pub mod file;
#[cfg(feature = "nbd")]
mod health;
pub mod keys;
#[cfg(any(feature = "file", feature = "multipath"))]
mod mapping;
pub mod memory;
#[cfg(feature = "multipath")]
pub mod multipath;
#[cfg(feature = "nbd")]
pub mod nbd;
#[cfg(feature = "null")]
pub mod null;
#[cfg(feature = "qcow2")]
pub mod qcow2;
#[cfg(feature = "ram")]
pub mod ram;
#[cfg(feature = "rbd")]
pub mod rbd;
pub mod registry;
#[cfg(any(feature = "null", feature = "ram"))]
mod store;
mod sys;
#[cfg(test)]
mod testing;
#[cfg(all(test, feature = "null", feature = "ram", feature = "file"))]
mod through_core;
