//! The rules of the multi-queue block layer, without an operating system: no clock, no threads, no system calls.
//!
//! Time and chance come in as arguments; what is to be done next goes out as effects. The modules, in
//! the order in which a request meets them: [`bio`], `queue`, `split`, `plug`, [`merge`], `sw_ctx`, `tag`,
//! [`request`], [`sched`], `gate`, `hw_ctx`, [`driver`], `complete`; beside the way: `flush`, `requeue`, `timeout`.
#![forbid(unsafe_code)]

pub mod bio;
pub mod driver;
pub mod ids;
pub mod limits;
pub mod merge;
pub mod request;
pub mod sched;
pub mod time;
