//! Decides what a disk, a queue, a group and an export are to those who configure an engine: one
//! vocabulary for the daemon and the fio engine, parsed from flags and from TOML into a [`Config`],
//! which [`plan()`] turns into the queues of an engine.
//!
//! | part | decides |
//! |---|---|
//! | [`disk`] | what one disk lies on: a driver of the registry, or other disks |
//! | [`queue`] | a queue's settings |
//! | [`group`] | a group's weight, caps and latency target |
//! | [`export`] | where clients connect |
//! | `file` | the configuration file |
//! | [`Document`] | a configuration as it is written, to be changed by key and saved |
//! | [`mod@plan`] | which disks share a queue; opens them |
//! | [`diff`] | what changes from one configuration to another |
//! | `merge` | what a reload of the file means for a daemon that was changed since |
//! | [`same`] | whether a disk in another configuration is the one that clients use |
//! | [`live`] | how disks are added to a running engine, and removed from it |
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod config;
pub mod diff;
pub mod disk;
mod document;
pub mod export;
mod file;
pub mod group;
pub mod live;
mod mapped;
mod merge;
mod name;
mod paths;
pub mod plan;
pub mod queue;
pub mod same;
mod told;

pub use config::{Config, Control};
pub use disk::{DiskSpec, Source};
pub use document::{Document, Kind, read_text, typed};
pub use export::ExportSpec;
pub use group::GroupSpec;
pub use plan::{Plan, plan, plan_for_check, plan_with_all_groups};
pub use queue::{Polling, QueueSettings};
pub use told::{differing_keys, tell};
