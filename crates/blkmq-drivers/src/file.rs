//! The file driver: disks in files and on block devices, through the reactor's io_uring.
//! [`FileDisk::open`] locks and probes one disk, [`FileDevice`] joins those that share a queue, and each
//! reactor has a hardware context that turns a request into one entry of its ring.

mod bounce;
mod config;
mod device;
mod disk;
pub(crate) mod disks;
mod driver;
mod error;
pub(crate) mod hctx;
mod lock;
mod mountinfo;
mod open;
pub(crate) mod part;
mod pieces;
mod place;
mod polled;
mod reopen;
mod slot;
mod syncs;
mod sys;
mod watch;

pub use config::{Direct, FileConfig};
pub use device::FileDevice;
pub use disk::{Alignment, Backing, FileDisk};
pub use driver::DRIVER;
pub use error::FileError;
#[cfg(feature = "qcow2")]
pub(crate) use lock::is_taking_over;
pub use lock::{
    begin_takeover, inherit as inherit_lock, release_unused as end_takeover, retake_all as retake_locks,
};
