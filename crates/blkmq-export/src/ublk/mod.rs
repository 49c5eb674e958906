//! Decides how this host reaches a disk as a block device of its own: ublk, by which the kernel has a block device served by a process.
//!
//! | part | decides |
//! |---|---|
//! | [`protocol`] | what a request says, and what the control device is told |
//! | `control` | commands to the control device, which block |
//! | `found` | what is there of a device before it is served: nothing, or what another daemon has left |
//! | `made` | which disks can be devices, and how one is made |
//! | `device` | what the queues of one device share, and how it ends |
//! | `keeper` | the thread that starts, recovers and removes it |
//! | `queue` | the life of one queue on its reactor |
//! | `slots` | where a request's data lies |
//! | [`saved`] | what another daemon has to know to go on with a device |

mod control;
mod device;
mod found;
mod front_door;
mod keeper;
mod made;
pub mod protocol;
mod queue;
pub mod saved;
mod slots;
mod sys;

pub use front_door::Ublk;
