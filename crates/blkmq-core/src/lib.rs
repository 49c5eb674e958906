//! The rules of the multi-queue block layer, without an operating system: no clock, no threads, no system calls.
//!
//! Time and randomness are arguments; the next actions are returned as effects. The modules, in the order in
//! which a request meets them: [`bio`], [`queue`], [`local`], `sw_ctx`, `split`, `plug`, [`merge`],
//! [`request`], `gate` (in it `throttle`, [`sched`], `share`, `target`), `hw_ctx`, `tag`, `tag_share`,
//! [`driver`], [`poll`]; beside that path: [`group`], `flush`, [`stat`], [`trace`], `rerun`, `holding`, `lines`;
//! above it: [`mapper`].
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]
#![forbid(unsafe_code)]

pub mod bio;
pub mod driver;
mod flush;
mod gate;
pub mod group;
mod holding;
mod hw_ctx;
pub mod ids;
pub mod limits;
mod lines;
pub mod local;
pub mod mapper;
pub mod merge;
mod plug;
pub mod poll;
pub mod queue;
pub mod request;
mod rerun;
pub mod sched;
mod share;
mod split;
pub mod stat;
mod sw_ctx;
mod tag;
mod tag_share;
mod tag_wait_list;
mod target;
mod throttle;
pub mod time;
pub mod trace;
