//! Decides how this host reaches a disk as a regular file: FUSE, the kernel's protocol for filesystems that a process serves.
//!
//! | part | decides |
//! |---|---|
//! | [`protocol`] | what a request says, and an answer |
//! | `mount`, `mount_table` | how a file becomes a disk, and when it is itself again |
//! | `filesystem` | what a mount shows, and how it ends |
//! | `channel` | the life of one way to it on its reactor, and what a request asks of the disk |
//! | `slots` | where a request's data lies |
//! | [`saved`] | what another daemon has to know to go on with a mount |

mod channel;
mod filesystem;
mod front_door;
mod mount;
mod mount_table;
pub mod protocol;
pub mod saved;
mod slots;
mod sys;

pub use front_door::Fuse;
