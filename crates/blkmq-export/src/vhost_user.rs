//! The front door by which virtual machines reach a disk: vhost-user-blk, virtio 1.2 block devices whose
//! virtqueues are served by this process.
//!
//! | part | decides |
//! |---|---|
//! | [`codec`] | what a message means |
//! | `connection`, `device` | what messages change at the disk: features, memory, rings that are set up |
//! | `queue` | how a virtqueue is served on its reactor |
//! | [`virtqueue`], [`ring`], `packed`, [`chain`] | what is next in a virtqueue, and whether its descriptors obey the rules |
//! | `request` | what a chain asks of the disk |
//! | [`saved`] | a front end that is handed over to another daemon |
//! | [`inflight`], `packed_inflight` | what is done again after this process was killed |
//! | [`memory`], [`sys`] | where the guest's memory is |
//! | `descriptors` | which descriptors a front end may send |
//! | `fault`, `unmap` | what happens when the guest's memory is taken away, and when it is given back |
//! | `signal` | how a front end is notified without waiting for it |

pub mod chain;
pub mod codec;
mod config_space;
mod connection;
mod descriptors;
mod device;
mod fault;
mod front_door;
pub mod inflight;
pub mod memory;
mod packed;
mod packed_inflight;
mod queue;
mod request;
pub mod ring;
pub mod saved;
mod signal;
pub mod sys;
mod unmap;
pub mod virtqueue;

pub use front_door::VhostUser;
