//! What all end-to-end tests share: the testkit, the pattern of verified blocks, and certificates.

pub(crate) mod pattern;
pub(crate) mod pki;
pub(crate) mod user;

pub(crate) use blkmq_testkit::{Daemon, Scratch, daemon, nbd, tools};
