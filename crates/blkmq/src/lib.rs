//! The command `blkmq`: one daemon per host that serves every tenant's disk and shares the drives between them.
//!
//! [`cli`] defines the command line; `blkmq_config` defines the meaning of flags and the
//! configuration file. [`serve`] runs the daemon, [`control`] answers queries and changes while it
//! runs, which [`ctl`] sends; [`iostat`] and `top` show its activity, from [`rates`], and [`trace`]
//! records the steps of each request; `demo` shows its purpose. Demo and top are features.
#![forbid(unsafe_code)]

pub mod addresses;
pub mod cli;
pub mod complete;
pub mod control;
pub mod ctl;
#[cfg(feature = "demo")]
pub mod demo;
mod help;
pub mod image;
pub mod iostat;
mod listen;
pub mod log;
mod metrics;
pub mod rates;
pub mod sandbox;
pub mod serve;
mod stdout;
#[cfg(feature = "top")]
pub mod top;
pub mod trace;
mod units;
