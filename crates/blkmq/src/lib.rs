//! The command `blkmq`: one daemon per host that serves every tenant's disk and shares the drives between them.
//!
//! [`cli`] is what can be typed; what flags and the configuration file say is up to `blkmq_config`. [`serve`] runs the daemon,
//! [`control`] lets it be asked and changed while it runs, which [`ctl`] does, and [`trace`] writes down what happens to requests; `demo` shows it, a feature as `bench` is.
#![forbid(unsafe_code)]

pub mod cli;
pub mod complete;
pub mod control;
pub mod ctl;
#[cfg(feature = "demo")]
pub mod demo;
pub mod log;
mod metrics;
#[cfg(feature = "bench")]
pub mod replay;
pub mod serve;
pub mod trace;
