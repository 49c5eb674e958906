//! The configuration of an engine: disks, queues, groups and exports in one vocabulary for the daemon and
//! the fio engine. It is parsed from flags and from TOML into a [`Config`], which [`plan()`] turns into
//! the queues of an engine.
//!
//! | part | what it has |
//! |---|---|
//! | [`disk`] | one disk, and what it lies on: a driver of the registry, or other disks |
//! | [`queue`] | the settings of a queue |
//! | [`group`] | the weight, caps and latency target of a group |
//! | [`export`] | the addresses at which clients connect |
//! | `control` | the control socket, and who may do what there |
//! | `metrics` | where metrics are read, and which |
//! | `file` | the configuration file |
//! | `line` | where in the file a fault is |
//! | [`Document`] | a configuration as it is written, to be changed by key and saved |
//! | [`mod@plan`] | the queues: which disks share one; it opens the disks |
//! | [`diff`] | the steps from one configuration to another |
//! | `merge` | the reload of the file by a daemon that was changed since |
//! | [`same`] | the test whether a disk in another configuration is the one that clients use |
//! | [`luks`] | encrypted disks: their keys, and their opening |
//! | [`live`] | adding disks to a running engine, and removing them |
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod config;
mod control;
mod describe;
pub mod diff;
pub mod disk;
mod document;
pub mod export;
mod file;
pub mod group;
mod line;
pub mod live;
pub mod luks;
mod mapped;
mod merge;
mod metrics;
mod name;
mod paths;
pub mod plan;
pub mod queue;
mod registries;
pub mod same;

pub use config::{Config, Sandbox};
pub use control::{Account, Control};
pub use describe::{describe, differing_keys};
pub use disk::{DiskSpec, Source};
pub use document::{Document, Kind, read_text, typed};
pub use export::ExportSpec;
pub use group::GroupSpec;
pub use metrics::{Detail, Metrics};
pub use plan::{Plan, plan, plan_for_check, plan_with_all_groups};
pub use queue::{Polling, QueueSettings};
pub use registries::Registries;
