//! The front door by which this host reaches a disk as a regular file: FUSE, the kernel's protocol for
//! filesystems that a process serves.
//!
//! | part | decides |
//! |---|---|
//! | [`protocol`] | what a request means, and an answer |
//! | `mount`, `dentry`, `mount_table`, `mount_probe`, `rights` | how a file becomes a disk, when it is a plain file again, who serves it, and who may mount |
//! | `visible` | whether a mount is seen by the host, or hidden in a namespace of the service |
//! | `filesystem` | what a mount shows, and how it ends |
//! | `requests` | what a request asks of the disk, and what is answered |
//! | `channel` | how `/dev/fuse` is served on its reactor |
//! | `ring` | the same for rings, where the kernel has FUSE over io_uring |
//! | `slots` | where a request's data lies |
//! | [`saved`] | what another daemon needs to continue a mount |

mod channel;
mod dentry;
mod filesystem;
mod front_door;
mod mount;
mod mount_probe;
mod mount_table;
pub mod protocol;
mod requests;
mod rights;
mod ring;
pub mod saved;
mod slots;
mod visible;

pub use front_door::Fuse;
pub use mount_probe::answer as answer_mount_probe;
