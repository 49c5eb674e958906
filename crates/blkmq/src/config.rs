//! Decides what a daemon is asked to serve: reads disks, queues, groups and exports from flags and from the configuration file
//! into one form. `plan` turns it into drives and queues; nothing here touches a file but the configuration's own.

mod disk;
mod export;
mod file;
pub mod group;
mod paths;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, bail};
use blkmq_core::poll::{DELAY_MAX_US, Policy, Wait};
use blkmq_core::sched::Kind;
use blkmq_export::nbd::limits::Limits;

pub use blkmq_host::group_spec::GroupSpec;
pub use disk::{DiskSpec, Source};
pub use export::ExportSpec;

/// What a daemon serves, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Threads that serve. Default: the number of processors, at most 4.
    pub reactors: Option<u16>,
    /// How long a shutdown waits for what is under way. Default 10 s.
    pub shutdown_limit: Duration,
    /// Bytes of payload that the connections of all NBD addresses may hold together. Default 1 GiB.
    pub nbd_memory: u64,
    /// Connections of all NBD addresses at a time. Default: as many as there may be descriptors for.
    pub nbd_connections: Option<u32>,
    /// From a client's connecting to its selection of a disk. Default 10 s.
    pub nbd_handshake_deadline: Duration,
    /// The disks, in order.
    pub disks: Vec<DiskSpec>,
    /// Queues that have settings of their own, by name.
    pub queues: BTreeMap<String, QueueSettings>,
    /// Groups that have settings of their own.
    pub groups: Vec<GroupSpec>,
    /// Where disks are served.
    pub exports: Vec<ExportSpec>,
    /// How threads wait. Default auto.
    pub wait: Wait,
}

/// A queue's settings; what is none is left at the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueSettings {
    /// The elevator.
    pub sched: Option<Kind>,
    /// Requests in flight for each hardware context.
    pub depth: Option<u32>,
    /// How long a request may be with the driver.
    pub timeout: Option<Duration>,
    /// Whether neighbouring bios are merged.
    pub merges: Option<bool>,
    /// How ends of requests are found.
    pub polling: Polling,
    /// Tunables of the elevator, by name.
    pub tunables: Vec<(String, u64)>,
}

/// The attributes of polling, as a queue's settings or a disk for its queue say them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Polling {
    /// Whether the drive is polled.
    pub io_poll: Option<bool>,
    /// How long to sleep for a request before looking.
    pub delay: Option<Policy>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            reactors: None,
            shutdown_limit: Duration::from_secs(10),
            nbd_memory: blkmq_export::common::BYTES_MAX,
            nbd_connections: None,
            nbd_handshake_deadline: Limits::default().handshake_deadline,
            disks: Vec::new(),
            queues: BTreeMap::new(),
            groups: Vec::new(),
            exports: Vec::new(),
            wait: Wait::default(),
        }
    }
}

impl Config {
    /// Reads a configuration file's text.
    ///
    /// # Errors
    /// What is wrong, with the table and the key.
    pub fn from_toml(text: &str) -> Result<Self> {
        file::parse(text)
    }

    /// Checks what one part says against the others.
    ///
    /// # Errors
    /// The first contradiction: no disk, two disks of a name, an export of a disk that is not there, settings for a queue
    /// that no disk is on.
    pub fn check(&self) -> Result<()> {
        if self.disks.is_empty() {
            bail!("no disk to serve: give --disk name=NAME,file=PATH, or a configuration with [disk.NAME]");
        }
        let mut names: Vec<&str> = self.disks.iter().map(|disk| disk.name.as_str()).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            bail!("disk {}: the name is used twice: give each disk its own", pair[0]);
        }
        for export in &self.exports {
            for disk in export.disks.iter().flatten() {
                if names.binary_search(&disk.as_str()).is_err() {
                    bail!(
                        "export {}: there is no disk {disk}: add [disk.{disk}] or take it out",
                        export.address
                    );
                }
            }
        }
        for name in self.queues.keys() {
            if !self.disks.iter().any(|disk| disk.queue.as_deref() == Some(name)) {
                bail!("queue {name}: no disk is on it: set queue = \"{name}\" in a disk, or take it out");
            }
        }
        Ok(())
    }
}

/// Checks the name of a disk or a queue: 1 to 128 letters, digits, dots, dashes and underscores.
fn check_name(what: &str, name: &str) -> Result<()> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if name.is_empty() || name.len() > 128 || !name.chars().all(is_plain) {
        bail!(
            "{what} name {name:?} rejected: must be 1 to 128 of letters, digits, dots, dashes and underscores"
        );
    }
    Ok(())
}

/// Reads a value of `io_poll_delay`.
fn poll_delay(text: &str) -> Result<Policy> {
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
fn elevator(name: &str) -> Result<Kind> {
    let Some(kind) = Kind::by_name(name) else {
        let known: Vec<&str> = Kind::ALL.iter().map(|kind| kind.name()).collect();
        bail!("sched={name} rejected: must be one of {}", known.join(", "));
    };
    Ok(kind)
}
