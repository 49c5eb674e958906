//! The settings of a queue: its elevator, its depth, and how completions of its requests are found.

use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use blkmq_core::poll::{DELAY_MAX_US, Policy};
use blkmq_core::sched::{self, ElevatorType};

/// A queue's settings; `None` means the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueSettings {
    /// The elevator. Default none.
    pub sched: Option<&'static ElevatorType>,
    /// Requests in flight at the drive, 1 to 65536: for files, and null disks with `shared_tags`, over all threads, else for each.
    /// Default 256 for files, 128 for ram and nbd, as many as the drive takes for null.
    pub depth: Option<u32>,
    /// How long a request may be with the driver. Default 30 s.
    pub timeout: Option<Duration>,
    /// Whether neighbouring bios are merged. Default true.
    pub merges: Option<bool>,
    /// How completions of requests are found.
    pub polling: Polling,
    /// Tunables of the elevator, by name.
    pub tunables: Vec<(String, u64)>,
}

/// The attributes of polling, as set by a queue or by a disk for its queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Polling {
    /// Whether the drive is polled. Default: as usual for the drive.
    pub io_poll: Option<bool>,
    /// How long to sleep for a request before polling. Default: as predicted.
    pub delay: Option<Policy>,
}

/// Parses a value of `io_poll_delay`.
pub(crate) fn poll_delay(text: &str) -> Result<Policy> {
    if text == "auto" {
        return Ok(Policy::Predicted);
    }
    if text == "cautious" {
        return Ok(Policy::Cautious);
    }
    let Some(policy) = text.parse().ok().and_then(Policy::from_delay) else {
        bail!(
            "io_poll_delay={text} rejected: must be -1 (look at once), 0 (sleep half of the mean), microseconds from 1 to \
             {DELAY_MAX_US}, auto (as predicted), or cautious (the same, where hardly a sleeper is late)"
        );
    };
    Ok(policy)
}

/// Finds an elevator by its name.
pub(crate) fn elevator(name: &str, elevators: &sched::Registry) -> Result<&'static ElevatorType> {
    let found = elevators.choose(name);
    found.map_err(|error| anyhow!("sched={name} rejected: {error}"))
}
