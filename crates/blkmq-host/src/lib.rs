//! The engine in the real world: reactors on io_uring, the clock, and the interface of drives. The drives are
//! in `blkmq-drivers`; `blkmq-config` makes the queues of an engine from a configuration.
//!
//! | folder | what it has |
//! |---|---|
//! | [`engine`] | set-up, changes and the end: it starts reactors, lets a library user's thread [`attach`], is changed and watched through [`control`], and puts disks on disks ([`mapped`], [`encrypted`]) |
//! | `reactor` | one thread with one place to wait: it runs the queues, calls doors ([`service`]), and [`sleep`]s or [`mod@wait`]s |
//! | `uring` | a thread's io_uring, shared among drivers and doors ([`ring`]) |
//!
//! [`device`] is the interface that a drive implements, [`block_locks`] keeps small writes apart that change whole blocks, [`found`] opens what a configuration names, [`value`] defines how the values of keys are written, [`mod@counted`] how many there are of something.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod block_locks;
pub mod clock;
pub mod counted;
pub mod device;
pub mod disk;
pub mod engine;
pub mod error;
pub mod found;
pub mod group_paths;
mod log_budget;
pub mod process;
mod reactor;
mod register;
pub mod runner;
pub mod size_news;
pub mod threads;
mod uring;
pub mod value;

pub use disk::{Disk, QueueId};
pub use engine::attach::Attached;
pub use engine::control::Control;
pub use engine::{DiskEntry, Engine, EngineConfig, OnReactor, QueueSpec, attach, control, encrypted, mapped};
pub use error::Error;
pub use log_budget::LogBudget;
pub use reactor::{service, sleep, wait};
pub use uring::ring;
