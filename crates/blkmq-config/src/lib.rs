//! Decides what disks, queues and groups are as they are configured, and which queues of an engine they become ([`mod@plan`]).
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod plan;
