//! The command `blkmq`: one daemon per host that serves every tenant's disk and shares the drives between them.
//!
//! [`cli`] is what can be typed; what flags and the configuration file say is up to `blkmq_config`. [`serve`] runs the daemon,
//! [`control`] lets it be asked and changed while it runs, which [`ctl`] does; [`iostat`] and `top` show what it does, from
//! [`rates`], and [`trace`] writes down what happens to each request; `demo` shows what it is for. Demo, bench and top are features.
#![forbid(unsafe_code)]

pub mod cli;
pub mod complete;
pub mod control;
pub mod ctl;
#[cfg(feature = "demo")]
pub mod demo;
pub mod iostat;
mod listen;
pub mod log;
mod metrics;
pub mod rates;
#[cfg(feature = "bench")]
pub mod replay;
pub mod serve;
mod stdout;
#[cfg(feature = "top")]
pub mod top;
pub mod trace;
mod units;
