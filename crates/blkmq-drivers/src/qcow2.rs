//! The qcow2 driver: disks in images that grow, on bases that others share. The way of data is the file driver's, whose
//! queue images share with raw files.
//!
//! ```text
//!  request ─► hctx ─► map: known ─────────────────────────► file::hctx ─► ring       (on the reactor)
//!                      └── unknown, to be allocated, … ─► pool ─► image ─► tables, layers ─► transfer
//! ```
//!
//! [`ImageDisk::open`](disk::ImageDisk) opens the files of an image by `rules`; what cannot be served is refused by
//! `header` and `check`.

mod bitmaps;
mod chain;
mod check;
mod config;
mod convert;
mod create;
mod disk;
mod driver;
mod error;
mod guests;
mod hctx;
mod header;
mod image;
mod layers;
mod map;
mod offline;
mod pool;
mod replace;
mod rules;
mod space;
mod survey;
mod sys;
mod tables;
#[cfg(test)]
mod tests;
mod transfer;
mod zero;

pub use config::{BaseCache, Qcow2Config};
pub use convert::{Conversion, Copied};
pub use create::{BaseFormat, NewImage};
pub use disk::ImageDisk;
pub use driver::DRIVER;
pub use error::ImageError;
pub(crate) use guests::Guests;
pub(crate) use hctx::{ImageHctx, PARTS};
pub use header::{Compression, Header, HeaderError};
pub(crate) use image::{Image, commit, flatten};
pub(crate) use replace::{Change, replace};
pub use survey::{Link, Survey, check_refcounts, look};
