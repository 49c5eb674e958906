//! The engine in the real world: reactors on io_uring, the clock, and the drivers that meet the operating
//! system.
//!
//! [`engine`] is the way in: it starts reactors, lets a library user's thread [`attach`], puts doors
//! ([`service`]) on reactors, and is changed and watched through [`control`]; [`mod@plan`] turns configured
//! disks into its queues, [`mapped`] puts disks on disks. A reactor is one thread with one place to wait (`reactor_core`, [`ring`], [`mod@wait`],
//! [`sleep`], `wakeup`). [`drive`] is what the engine needs of a drive, [`driver`] those there are.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod attach;
pub mod clock;
pub mod control;
pub mod disk;
pub mod drive;
pub mod driver;
pub mod engine;
pub mod error;
pub mod groups;
mod log_budget;
pub mod mapped;
mod moved;
pub mod plan;
mod queues;
mod reactor;
mod reactor_core;
pub mod ring;
pub mod runner;
pub mod service;
mod shared;
pub mod sleep;
pub mod wait;
mod wakeup;

pub use attach::Attached;
pub use control::Control;
pub use disk::{Disk, QueueId};
pub use engine::{DiskEntry, Engine, EngineConfig, QueueSpec};
pub use error::Error;
pub use log_budget::LogBudget;
