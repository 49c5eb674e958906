//! The engine in the real world: reactors on io_uring, the clock, and the drivers that meet the operating
//! system.
//!
//! | folder | decides |
//! |---|---|
//! | [`engine`] | set-up, changes and the end: it starts reactors, lets a library user's thread [`attach`], is changed and watched through [`control`], and puts disks on disks ([`mapped`]) |
//! | `reactor` | what one thread does with one place to wait: run the queues, call doors ([`service`]), [`sleep`] or [`mod@wait`] |
//! | `uring` | how a thread's io_uring is shared among drivers and doors ([`ring`]) |
//! | [`driver`] | the drives there are; [`drive`] is what the engine needs of one |
//!
//! [`mod@plan`] turns configured disks into the queues that an engine is started with.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod clock;
pub mod drive;
pub mod driver;
pub mod engine;
pub mod error;
mod log_budget;
pub mod plan;
mod reactor;
mod uring;

pub use engine::attach::Attached;
pub use engine::control::Control;
pub use engine::disk::{Disk, QueueId};
pub use engine::{DiskEntry, Engine, EngineConfig, QueueSpec, attach, control, disk, group_spec, mapped};
pub use error::Error;
pub use log_budget::LogBudget;
pub use reactor::{runner, service, sleep, wait};
pub use uring::ring;
