//! The same core in virtual time, with modelled CPUs and drives, on one OS thread: one seed, one
//! history.
//!
//! [`world`] runs a history of a [`setup`]: reactors (`reactor`) take turns on modelled CPUs
//! ([`cpu`]), clients ([`workload`]) submit, a control thread (`control`) interferes, a [`drive`]
//! with faults answers, and the [`oracle`] checks. A [`scenario`] fills in the setup; [`history`]
//! folds all facts into one digest; [`run`] runs it. A [`modelled_queue`] runs the bios of its
//! caller instead, on one drive.
#![forbid(unsafe_code)]

mod control;
pub mod cpu;
pub mod drive;
pub mod events;
pub mod history;
pub mod images;
pub mod mapped;
pub mod modelled_queue;
pub mod oracle;
pub mod paths;
mod reactor;
pub mod rng;
pub mod run;
pub mod scenario;
pub mod setup;
pub mod stage;
mod tenants;
pub mod workload;
pub mod world;
