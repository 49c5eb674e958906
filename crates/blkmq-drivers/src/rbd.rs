//! The rbd driver: a disk is an image of a pool in a Ceph cluster, used through librbd, which is loaded
//! when the first one is opened.
//!
//! [`RbdDisk::open`] opens an image over the cluster's one connection, and takes its lock;
//! [`RbdDevice`] joins the images of a pool on a queue. librbd's threads report completions, which
//! each hardware context finds in its mailbox.
//!
//! ```text
//!  issue ─► slot ─► rbd_aio_* ┄┄ librbd's threads ┄┄► callback ─► mailbox ─► event (one a batch) ─► ring ─► reap
//! ```
//!
//! Calls that may block (open, lock, size, block status, close) run on threads of their own, with a
//! limit: `calls`.

mod calls;
mod cluster;
mod config;
mod device;
mod driver;
mod error;
mod hctx;
mod image;
mod lock;
mod mailbox;
mod sys;

pub use config::RbdConfig;
pub use device::RbdDevice;
pub use driver::DRIVER;
pub use error::RbdError;
pub use image::RbdDisk;
