//! The null driver: drives without a medium, the reference load of benches and the fault injector of
//! tests. A [`NullConfig`] makes a [`NullDevice`], which gives a hardware context to each reactor;
//! `blkmq_host::value` parses the values of its keys.

mod cache;
mod config;
mod device;
mod disk;
mod driver;
mod hctx;
mod service;

pub use crate::chance::Rate;
pub use config::{Completion, NullConfig};
pub use device::{NullDevice, NullError};
pub use driver::{DRIVER, NullDisk};
