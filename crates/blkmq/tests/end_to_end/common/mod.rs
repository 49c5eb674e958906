//! What all end-to-end tests share: a daemon that is never left running, a scratch directory, tools, a small
//! NBD client.

pub(crate) mod daemon;
pub(crate) mod nbd;
pub(crate) mod pattern;
pub(crate) mod pki;
pub(crate) mod scratch;
pub(crate) mod tools;
pub(crate) mod user;

pub(crate) use daemon::Daemon;
pub(crate) use scratch::Scratch;
