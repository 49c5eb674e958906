//! The rules of the multi-queue block layer, without an operating system: no clock, no threads, no system calls.
//!
//! Time and randomness are arguments; the next actions are returned as effects. The modules, in the order in
//! which a request meets them: [`bio`], [`queue`], [`local`], `sw_ctx`, `split`, `plug`, [`merge`],
//! [`request`], `gate` (in it [`sched`]), `hw_ctx`, `tag`, [`driver`], [`poll`]; beside that path: [`group`],
//! [`qos`], `flush`, [`stat`], [`trace`], `rerun`; above it: [`mapper`].
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]
#![forbid(unsafe_code)]

pub mod bio;
pub mod driver;
mod flush;
mod gate;
pub mod group;
mod hw_ctx;
pub mod ids;
pub mod limits;
pub mod local;
pub mod mapper;
pub mod merge;
mod plug;
pub mod poll;
pub mod qos;
pub mod queue;
pub mod request;
mod rerun;
pub mod sched;
mod split;
pub mod stat;
mod sw_ctx;
mod tag;
pub mod time;
pub mod trace;
