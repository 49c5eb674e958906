//! A disk as a block device of this host: ublk, by which a process serves a block device.
//!
//! | part | decides |
//! |---|---|
//! | [`protocol`] | what a request means, and what is sent to the control device |
//! | `control` | commands to the control device, which block |
//! | `recover` | what exists of a device before it is served: nothing, or what another daemon has left |
//! | `create` | which disks can be devices, and how one is made |
//! | `added` | that a device whose start fails is deleted again |
//! | `device` | what the queues of one device share, and how it ends |
//! | `control_thread` | the thread that starts, recovers and removes it |
//! | `release` | when the kernel learns that it was left to the next daemon |
//! | `queue` | how one queue is served on its reactor |
//! | `slots` | where a request's data lies |
//! | [`saved`] | what another daemon needs to continue a device |

mod added;
mod control;
mod control_thread;
mod create;
mod device;
mod front_door;
pub mod protocol;
mod queue;
mod recover;
mod release;
pub mod saved;
mod slots;
mod sys;

pub use front_door::Ublk;
