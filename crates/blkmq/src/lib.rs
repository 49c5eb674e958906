//! The command `blkmq`: one daemon per host that serves every tenant's disk and shares the drives between them.
//!
//! [`cli`] is what can be typed; [`config`] is what flags and the configuration file say, [`plan`] turns it into queues and
//! drives, [`serve`] runs the daemon, [`demo`] shows it. A library so that its parsers can be fuzzed.
#![forbid(unsafe_code)]

pub mod cli;
pub mod config;
pub mod demo;
pub mod log;
pub mod plan;
pub mod serve;
