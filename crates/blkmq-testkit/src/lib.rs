//! What tests and instruments share, written once and never shipped: a [`Daemon`] under test and clients of it
//! ([`nbd`], [`vhost_user`]), a [`debugger`], [`tools`] of other projects, seeded chance ([`Random`]), files
//! ([`Scratch`]), and the report of a [skipped](skip()) test.

pub mod daemon;
pub mod debugger;
mod latency;
pub mod nbd;
mod random;
mod scratch;
mod skip;
pub mod tools;
pub mod vhost_user;

pub use daemon::Daemon;
pub use latency::p99;
pub use random::Random;
pub use scratch::Scratch;
pub use skip::{LIST as SKIPS, skip, skip_of};
